"""Work beside the training: one thread, one result."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Ahead(Generic[Result]):
    """Runs `work` in a thread from now on. A process that ends does not wait for it."""

    def __init__(self, work: Callable[[], Result]):
        self._work = work
        self._results: list[Result] = []
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True, name="rollouts")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:  # raised where it is waited for
            self._errors.append(error)

    def result(self) -> Result:
        """What `work` returned, or raised; waits for it."""
        self._thread.join()
        if self._errors:
            raise self._errors[0]
        return self._results[0]
