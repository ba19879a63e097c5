"""A server in a session of its own, whose every process ends with it, and with the process that started it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bapo.engines.watchdog import is_alive, kill_session, members
from bapo.protocols import EngineError

TAIL_CHARACTERS = 3000  # of the log in an error message
GRACE_S = 10.0  # between SIGTERM and SIGKILL


class ServerProcess:
    """Starts `command`, as often as it is asked to, with its output in the file `log`. No message shows `secret`.

    Ctrl-C does not reach it. A guard beside it kills what is left of it as soon as its main process or this process is no more,
    be it by kill -9: vLLM's own worker processes would live on and keep the GPU.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, secret: str = ""):
        self.command = list(command)
        self.environment = dict(environment)
        self.log = log
        self.secret = secret
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._workers: list[Any] = []

    def start(self) -> None:
        assert self._process is None, "stop it first"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        watched = [os.pidfd_open(pid) for pid in (os.getpid(), self._process.pid)]
        guard = [sys.executable, "-m", "bapo.engines.watchdog", *map(str, [watched[0], self._process.pid, watched[1]])]
        try:
            self._guard = subprocess.Popen(guard, pass_fds=watched, start_new_session=True)
        finally:
            for descriptor in watched:
                os.close(descriptor)

    @property
    def pid(self) -> int:
        """Of the main process; it is the id of the session too."""
        assert self._process is not None
        return self._process.pid

    def died(self) -> bool:
        """Has its main process ended without `stop`, or since it was ready one of vLLM's workers?"""
        return self._process is not None and (self._process.poll() is not None or not all(map(is_alive, self._workers)))

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Returns when `ready()`. Raises EngineError, with the end of the log, if it ends before, or it takes longer."""
        begun = time.monotonic()
        while not ready():
            if self._process is None or self._process.poll() is not None:
                code = self._process and self._process.returncode
                raise EngineError(f"the vLLM server ended with exit code {code} before it was ready. {self.tail()}")
            if time.monotonic() - begun > timeout_s:
                late = f"rollout.engine.start_timeout_s is {timeout_s:g}, and the vLLM server was not ready by then"
                raise EngineError(f"{late}. {self.tail()}")
            time.sleep(0.3)
        self._workers = [p for p in members(self.pid) if p.name().startswith("VLLM::")]

    def tail(self) -> str:
        """The end of the log, for a message."""
        text = ""
        with suppress(OSError):
            text = self.log.read_text(errors="replace").strip()
        text = (text.replace(self.secret, "***") if self.secret else text)[-TAIL_CHARACTERS:]
        return f"The end of its log:\n{text}" if text else "Its log is empty."

    def stop(self) -> None:
        """SIGTERM to its main process, which ends the others; later SIGKILL to what is left. Safe to call again.

        Raises EngineError if one of them is still there.
        """
        if self._process is None:
            return
        session = self._process.pid
        self._process.terminate()
        deadline = time.monotonic() + GRACE_S
        while members(session) and time.monotonic() < deadline:
            self._process.poll()
            time.sleep(0.05)
        left = kill_session(session)
        for process in (self._process, self._guard):
            if process is not None and not left:
                process.wait()
        self._process, self._guard, self._workers = None, None, []
        if left:
            raise EngineError(f"processes of the vLLM server outlive SIGKILL: {', '.join(str(p.pid) for p in left)}")


def reserve_port() -> socket.socket:
    """A socket on a free port of 127.0.0.1. While it is open, that port is given to no connection and no other server.

    A server that sets SO_REUSEADDR, as vLLM does, can listen there all the same, now and after a restart.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held
