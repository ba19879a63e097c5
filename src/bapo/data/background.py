"""Work in the background: one daemon thread, one result."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from bapo.protocols import EngineError

log = logging.getLogger(__name__)

Result = TypeVar("Result")


def start(work: Callable[[], Result]) -> Future[Result]:
    """Runs `work` in a thread from now on. The thread does not keep a process alive, as an executor's would."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised where the result is taken
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="rollouts").start()
    return future


def result_of(future: Future[Result]) -> Result:
    """Waits for the work and returns its result. EngineError for what it raised, as the training meanwhile is whole."""
    try:
        return future.result()
    except EngineError:
        raise
    except Exception as error:
        log.error("generating in the background failed", exc_info=error)
        raise EngineError(f"generating in the background failed: {type(error).__name__}: {error}") from error
