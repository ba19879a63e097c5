"""Ctrl-C and kill -TERM end a run after the update in progress; `RunCheckpoint` saves it."""

from __future__ import annotations

import logging
import signal
from types import FrameType
from typing import Any

import lightning as L

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopOnSignal(L.Callback):
    """The first signal asks for a stop after the update in progress; a second Ctrl-C stops at once, as Python does.

    `received` is the signal that ended the run, else None.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        log.warning("stopping after the update in progress; Ctrl-C again stops at once")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        # Ranks hear a signal at different times; they stop together or the others wait for ever.
        if trainer.world_size > 1:
            asked = trainer.strategy.reduce_boolean_decision(self.received is not None, all=False)
            self.received = self.received or (signal.SIGTERM if asked else None)
        if self.received is not None:
            trainer.should_stop = True

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
