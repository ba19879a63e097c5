"""From a config to a finished run: checks, run folder, fit, callbacks, loggers, warm start."""
