"""Ends a session of processes whole. As a program of its own, it does so when another process is no more, be it by kill -9.

Imports next to nothing, as it runs beside every server.
"""

from __future__ import annotations

import os
import select
import sys
import time
from contextlib import suppress
from typing import Any

import psutil

MARK_VARIABLE = "BAPO_ENGINE_MARK"


def members(session: int) -> list[Any]:
    """The living processes of a session, as psutil has them."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == session and is_alive(process):
                found.append(process)
    return found


def is_alive(process: Any) -> bool:
    """Is it there, and more than the entry of one that has ended? While a thread of it lives, its sockets are open."""
    try:
        return process.is_running() and (process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1)
    except psutil.NoSuchProcess:
        return False


def is_resource_tracker(process: Any) -> bool:
    """Is it Python's own, which takes away the shared memory that others leave, and ends when they have?"""
    return "multiprocessing.resource_tracker" in str(process.cmdline())


def kill_session(session: int, timeout_s: float = 10.0) -> list[Any]:
    """Kills every process of a session, those too that it starts meanwhile. Returns what is left after `timeout_s`.

    Resource trackers are killed if they have not ended by half of `timeout_s`.
    """
    begun = time.monotonic()
    while (left := members(session)) and time.monotonic() < begun + timeout_s:
        for process in left:
            with suppress(psutil.NoSuchProcess):
                if time.monotonic() > begun + timeout_s / 2 or not is_resource_tracker(process):
                    process.kill()
        time.sleep(0.02)
    return left


def kill_marked_after(owner: int, pid: int, mark: str) -> None:
    """When the process `pid` ends, whose pidfd is `owner`, kills what came of it with `MARK_VARIABLE` set to `mark`.

    They are noted as they begin: vLLM writes their titles over their environment, and orphans have no parent to be known by.
    """
    marked: set[Any] = set()
    while not select.select([owner], [], [], 0.5)[0]:
        with suppress(psutil.Error):
            for process in psutil.Process(pid).children(recursive=True):
                with suppress(psutil.Error):
                    if process.environ().get(MARK_VARIABLE) == mark or process.parent() in marked:
                        marked.add(process)
    for process in marked:
        with suppress(psutil.Error):
            if not is_resource_tracker(process):
                process.kill()


def main(owner: int, what: str, of: str, pid: str = "") -> None:
    """owner: a pidfd. When it ends, or `of`, the pidfd of a server, so does every process of a session, or with a mark."""
    if what == MARK_VARIABLE:
        kill_marked_after(owner, int(pid), of)
    else:
        select.select([owner, int(of)], [], [])
        kill_session(int(what))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
