"""Work in the background: one thread, one result."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from bapo.protocols import EngineError

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Background(Generic[Result]):
    """Runs `work` in a thread from now on."""

    def __init__(self, work: Callable[[], Result]):
        self._work = work
        self._results: list[Result] = []
        self._errors: list[BaseException] = []
        self._ended = threading.Event()  # a join that Ctrl-C interrupts takes its thread for ended
        threading.Thread(target=self._run, daemon=True, name="rollouts").start()

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:  # raised where it is waited for
            self._errors.append(error)
        finally:
            self._ended.set()

    def result(self) -> Result:
        """Waits for `work` and returns its result. EngineError for what it raised, as the training meanwhile is whole."""
        self._ended.wait()
        for error in self._errors:
            if isinstance(error, EngineError) or not isinstance(error, Exception):
                raise error
            log.error("generating in the background failed", exc_info=error)
            raise EngineError(f"generating in the background failed: {type(error).__name__}: {error}") from error
        return self._results[0]

    def wait(self, seconds: float) -> None:
        """Until it has ended, well or badly, or so long."""
        self._ended.wait(seconds)
