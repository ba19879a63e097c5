"""The report of a run, written at its end."""

from __future__ import annotations

import logging
from pathlib import Path

import lightning as L

log = logging.getLogger(__name__)


class Report(L.Callback):
    """RUN/report.html and RUN/figures of a run that has ended; callbacks.report=null leaves them out."""

    def write(self, folder: Path) -> None:
        """Does nothing for a run without a row of metrics."""
        if not (folder / "metrics.csv").is_file():
            return
        from bapo.analysis.report import write_report  # matplotlib only now

        log.info("report: %s", write_report(folder))
