"""The report of a run, written at its end."""

from __future__ import annotations

import logging
from pathlib import Path

import lightning as L

log = logging.getLogger(__name__)


class Report(L.Callback):
    """RUN/report.html and RUN/figures of a run that has ended; callbacks.report=null leaves them out."""

    def on_run_end(self, folder: Path) -> None:
        """Called by the fit, on rank 0, when status.json says how the run ended; a run without metrics has no report."""
        if not (folder / "metrics.csv").is_file():
            return
        from bapo.analysis.report import write_report  # matplotlib only now

        log.info("report: %s", write_report(folder))
