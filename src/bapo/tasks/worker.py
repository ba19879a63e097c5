"""A worker process of `bapo.tasks.pool` that answers questions and can be killed.

python -m bapo.tasks.worker MODULE FD PARENT: `MODULE.load()` returns the function that answers. Questions come over the
connection FD and replies go back, as JSON. The process ends when the connection does, or the process PARENT; the system ends it
when a question takes longer than its timeout_s.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

GRACE_S = 1.0
"""Seconds beyond its time in which the process that asked may stop a question."""

Reply = Callable[[dict[str, Any]], dict[str, Any]]
"""From a question to its reply; with "last" true the worker is replaced."""


def shorten(error: Exception) -> str:
    """Class and message of an error in one line of at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def limit_memory(megabytes: float | None) -> None:
    """Limit what the process may allocate beyond its present size; None: no limit. Linux only."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    soft = hard
    statm = Path("/proc/self/statm")
    if megabytes is not None and statm.exists():
        soft = int(statm.read_text().split()[0]) * resource.getpagesize() + int(megabytes * 2**20)
        soft = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def main(module: str, connection: Connection, parent: int) -> None:
    """Answers questions until the connection or the parent process ends."""
    logging.disable()
    try:
        reply: Reply = importlib.import_module(module).load()
    except Exception as error:
        connection.send_bytes(json.dumps({"broken": f"{module} does not work here: {type(error).__name__}: {error}"}).encode())
        return
    connection.send_bytes(b"{}")
    while os.getppid() == parent:  # a fork of the parent may hold the connection open
        if not connection.poll(1.0):
            continue
        question = json.loads(connection.recv_bytes())
        signal.setitimer(signal.ITIMER_REAL, question["timeout_s"] + GRACE_S)  # unhandled, so that it ends what Python cannot
        limit_memory(question["memory_mb"])
        answer = reply(question)
        limit_memory(None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    try:
        main(sys.argv[1], Connection(int(sys.argv[2])), int(sys.argv[3]))
    except (EOFError, OSError):
        sys.exit()
