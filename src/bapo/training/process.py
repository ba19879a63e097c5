"""The process of a run: quiet libraries, an end on a signal, and ranks that find the run's folder."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from bapo.training.run_folder import CHILD_RUN_DIR


def hush() -> None:
    """Keeps off the screen what libraries say about things that are intended here."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    # It suggests at every save that the file hold weights alone, which could not be resumed.
    logging.getLogger("lightning.pytorch.trainer.connectors.checkpoint_connector").setLevel(logging.WARNING)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every request
    for message in (
        ".*module.*in eval mode at the start of training",  # dropout is off for good, so the mode says nothing
        "Using ModelCheckpoint with manual optimization",  # the state after an update is the state wanted
        ".*sync_dist=True.*",  # every rank logs the same numbers, reduced already
        ".*LeafSpec.*is deprecated",
        ".*does not have many workers",  # mini-batches are in memory
        ".*Checkpoint directory .* exists and is not empty",  # as it must be for a resumed run
    ):
        warnings.filterwarnings("ignore", message=message)


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Before and after the updates, where `StopOnSignal` is not at work, kill -TERM ends the run as Ctrl-C does."""

    def handle(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def known_to_children(folder: Path) -> Iterator[None]:
    """Lightning starts further ranks by this process's command line: they must find this folder, and run this job alone."""
    hydra, argv, environment = HydraConfig.get(), sys.argv, dict(os.environ)
    os.environ[CHILD_RUN_DIR] = str(folder)
    if hydra.mode == RunMode.MULTIRUN:
        sys.argv = [argv[0], *hydra.overrides.task]
    try:
        yield
    finally:
        sys.argv = argv
        import torch

        # Lightning leaves its ranks' addresses behind; the next job of a sweep would take itself for one of them.
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)
