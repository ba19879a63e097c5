"""The processes of a vLLM engine: their start, their end, and the watchdog that ends them when the trainer cannot."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import torch

from bapo.engines.options import VLLMOptions
from bapo.engines.watchdog import MARK_VARIABLE
from bapo.protocols import EngineError

TAIL_CHARACTERS = 3000  # of the log in an error message
GRACE_S = 10.0  # between SIGTERM and SIGKILL


class Watchdog:
    """Starts `bapo.engines.watchdog` for this process. What is started with `environment` set belongs to the engine."""

    def __init__(self) -> None:
        mark, trainer = secrets.token_hex(8), os.pidfd_open(os.getpid())
        self.environment = {MARK_VARIABLE: mark}
        command = [sys.executable, "-m", "bapo.engines.watchdog", str(trainer), str(os.getpid()), mark]
        try:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[trainer], start_new_session=True)
        finally:
            os.close(trainer)

    def kill(self) -> None:
        """Kill every process of the engine; return when they are gone. Idempotent. Raises EngineError if some may be left."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError, ValueError):  # it has ended
            self.process.stdin.write(b"!")
            self.process.stdin.close()
        if code := self.process.wait():
            raise EngineError(f"processes of the rollout engine may be left: its watchdog ended with code {code}")


@contextmanager
def local_llm(options: VLLMOptions, arguments: Mapping[str, Any]) -> Iterator[tuple[Any, Watchdog]]:
    """Start vLLM's `LLM` in processes that end with the block. A rank's engine uses the rank's own GPUs.

    Ctrl-C in a terminal reaches every process of the run; the engine ignores it, as the trainer finishes its update first.
    """
    gpus = None
    if torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        first = int(os.environ.get("LOCAL_RANK", 0)) * options.tensor_parallel_size
        gpus = ",".join(visible.split(",")[first : first + options.tensor_parallel_size])
    watchdog, llm, before = Watchdog(), None, dict(os.environ)
    resource_tracker.ensure_running()  # Python's own; to start it later would undo the mask
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        try:
            _set_environment(options.environment(gpus, watchdog.environment))
            from vllm import LLM  # here, as it reads the environment; it takes seconds, and is not installed everywhere

            llm = LLM(**arguments, disable_log_stats=True, use_tqdm_on_load=False)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            _set_environment(before)
        if options.weight_sync == "ipc":  # handles on GPU memory go through the pipe to the engine's own process
            os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        yield llm, watchdog
    finally:
        if llm is not None:
            with suppress(Exception):  # the engine may be dead
                llm.llm_engine.engine_core.shutdown()
        watchdog.kill()


def _set_environment(values: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(values)


class ServerProcess:
    """Runs `command` with its output in the file `log`. Ctrl-C in a terminal does not reach it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path):
        self.log = log
        self.watchdog = Watchdog()
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                env={**environment, **self.watchdog.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Return when `ready()`. Raises EngineError, with the end of the log, if it ends before or takes longer."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            if (code := self.process.poll()) is not None:
                raise EngineError(f"the vLLM server ended with exit code {code} before it was ready. {self.tail()}")
            if time.monotonic() > deadline:
                late = f"rollout.engine.start_timeout_s is {timeout_s:g}, and the vLLM server was not ready by then"
                raise EngineError(f"{late}. {self.tail()}")
            time.sleep(0.3)

    def tail(self) -> str:
        """Return the end of the log for a message."""
        text = ""
        with suppress(OSError):
            text = self.log.read_text(errors="replace").strip()[-TAIL_CHARACTERS:]
        return f"The end of its log:\n{text}" if text else "Its log is empty."

    def stop(self) -> None:
        """Send SIGTERM to the main process, which ends the others; kill what is left after `GRACE_S`. Idempotent."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_S)
        self.watchdog.kill()
        self.process.wait()
