"""Callbacks of a run."""
