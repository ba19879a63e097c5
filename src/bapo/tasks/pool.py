"""Worker processes that grade answers, started on demand, killed and replaced when they take too long."""

from __future__ import annotations

import atexit
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from typing import Any

START_TIMEOUT_S = 120.0
MAX_WORKERS = 4
CLOSED = "the workers were closed while they verified answers"
COMPARE = "bapo.tasks.compare"


class Worker:
    """One process of `bapo.tasks.worker`, in a session of its own, so that Ctrl-C is for the main process alone."""

    def __init__(self, module: str = COMPARE) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            number = theirs.fileno()
            self._command = [sys.executable, "-P", "-m", "bapo.tasks.worker", module, str(number), str(os.getpid())]
            self.process = subprocess.Popen(
                self._command,
                pass_fds=[number],
                env={**os.environ, "PYTHONHASHSEED": "0"},  # sympy's orders depend on it, and what some generators make
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Call it first. Raises RuntimeError if the worker cannot answer anything."""
        try:
            hello = self._receive(START_TIMEOUT_S)
        except (OSError, EOFError) as error:
            shown = " ".join(self._command)
            raise RuntimeError(f"answers cannot be verified: `{shown}` does not start ({type(error).__name__})") from error
        if "broken" in hello:
            raise RuntimeError(f"answers cannot be verified, {hello['broken']}")

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """The reply. Raises TimeoutError, or EOFError or another OSError for a dead worker; stop it after either."""
        self._connection.send_bytes(json.dumps(question).encode())
        return self._receive(question["timeout_s"])

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        if not self._connection.poll(timeout_s):
            raise TimeoutError
        reply: dict[str, Any] = json.loads(self._connection.recv_bytes())
        return reply

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._connection.close()


class WorkerPool:
    """Up to `size` workers for any number of threads. The reply says if a question took too long or ended its worker."""

    def __init__(self, size: int, module: str = COMPARE):
        self._size, self._module = size, module
        self._slots: queue.LifoQueue[Worker | None] = queue.LifoQueue()
        for _ in range(size):
            self._slots.put(None)
        self._workers: set[Worker] = set()
        self._lock = threading.Lock()
        self._closed = False

    def ask_all(self, questions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """A reply to each question, in order. Raises RuntimeError if no worker starts, or the pool is closed meanwhile."""
        if len(questions) < 2:
            return [self.ask(question) for question in questions]
        with ThreadPoolExecutor(min(self._size, len(questions))) as threads:
            try:
                return list(threads.map(self.ask, questions))
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """The reply of a free worker; waits for one, then for as long as the question may take."""
        worker, keep = self._slots.get(), None
        try:
            if worker is None or worker.process.poll() is not None:
                self._drop(worker)
                worker = self._start()
                worker.wait_until_ready()
            try:
                reply = worker.ask(question)
            except TimeoutError:
                reply = {"gave_up": f"not decided within {question['timeout_s']:g} s", "last": True}
            except (OSError, EOFError):
                reply = {"gave_up": "the worker died", "last": True}
            if self._closed:
                raise RuntimeError(CLOSED)
            if not reply.pop("last", False):
                keep = worker
            return reply
        finally:
            if keep is None:
                self._drop(worker)
            self._slots.put(keep)

    def _start(self) -> Worker:
        if not self._closed:
            worker = Worker(self._module)
            with self._lock:
                self._workers.add(worker)
            if not self._closed:
                return worker
            self._drop(worker)
        raise RuntimeError(CLOSED)

    def _drop(self, worker: Worker | None) -> None:
        if worker is not None:
            with self._lock:
                self._workers.discard(worker)
            worker.stop()

    def close(self) -> None:
        """Kills every worker; questions under way raise RuntimeError."""
        with self._lock:
            self._closed = True
            workers, self._workers = self._workers, set()
        for worker in workers:  # the thread that waits for one closes its connection
            worker.process.kill()
            worker.process.wait()


_pools: dict[str, WorkerPool] = {}
_pool_lock = threading.Lock()


def shared_pool(module: str = COMPARE) -> WorkerPool:
    """The pool of this process for workers of `module`. It starts nothing before the first question."""
    with _pool_lock:
        if module not in _pools:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            _pools[module] = WorkerPool(min(MAX_WORKERS, cores), module)
        return _pools[module]


def close_workers() -> None:
    """Ends the workers of this process, if there are any; the next question starts new ones."""
    with _pool_lock:
        pools = list(_pools.values())
        _pools.clear()
    for pool in pools:
        pool.close()


def _forget() -> None:
    global _pools, _pool_lock
    _pools, _pool_lock = {}, threading.Lock()


atexit.register(close_workers)
os.register_at_fork(after_in_child=_forget)  # the workers are the parent's
