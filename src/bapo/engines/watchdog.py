"""Ends every process of an engine: when the trainer asks for it, and when the trainer ends, even by kill -9.

A program of its own for each engine, so it imports next to nothing. It knows the engine's processes by a mark in their
environment and notes them and their children as they start: vLLM overwrites its environment later, and orphans have no parent.
"""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

MARK_VARIABLE = "BAPO_ENGINE_MARK"
POLL_S = 0.25
KILL_S = 15.0


def is_alive(process: psutil.Process) -> bool:
    """Tell a process that runs from a zombie. A zombie with a living thread still holds its sockets and GPU memory."""
    try:
        return process.is_running() and (process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1)
    except psutil.NoSuchProcess:
        return False


def note_engine(known: set[psutil.Process], candidates: Iterable[psutil.Process], mark: str) -> None:
    """Add to `known` the candidates that have the mark or a known parent."""
    for process in candidates:
        with suppress(psutil.Error):
            # Python's resource tracker removes the shared memory that others leave, then ends by itself.
            if process in known or "multiprocessing.resource_tracker" in str(process.cmdline()):
                continue
            if process.parent() in known or process.environ().get(MARK_VARIABLE) == mark:
                known.add(process)


def main(trainer: int, pid: int, mark: str) -> int:
    """Kill the engine of process `pid`, whose pidfd is `trainer`, when that ends or on a byte of input. Returns the rest."""
    known: set[psutil.Process] = set()
    while not select.select([trainer, sys.stdin], [], [], POLL_S)[0]:
        with suppress(psutil.Error):
            note_engine(known, psutil.Process(pid).children(recursive=True), mark)
    deadline = time.monotonic() + KILL_S
    while True:  # again and again, for processes that have started since the last poll
        note_engine(known, psutil.process_iter(), mark)
        living = [process for process in known if is_alive(process)]
        if not living or time.monotonic() > deadline:
            return len(living)
        for process in living:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(min(1, main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
