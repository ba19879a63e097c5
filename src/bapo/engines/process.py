"""The processes in which vLLM's `LLM` runs the model: how they start, and that they end."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from typing import Any

import psutil
import torch

from bapo.engines.options import VLLMOptions
from bapo.engines.watchdog import MARK_VARIABLE, is_resource_tracker


@contextmanager
def _environment(options: VLLMOptions) -> Iterator[None]:
    """The environment and signal mask that the engine's processes inherit.

    A rank's engine uses the rank's own GPUs. Ctrl-C in a terminal reaches every process of the run; the engine's must not hear
    it, as the trainer finishes its update first and ends them itself.
    """
    before = dict(os.environ)
    os.environ.update(options.environment())
    if torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        first = int(os.environ.get("LOCAL_RANK", 0)) * options.tensor_parallel_size
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[first : first + options.tensor_parallel_size])
    resource_tracker.ensure_running()  # Python's own; to start it later would undo the mask
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def started(options: VLLMOptions, arguments: Mapping[str, Any]) -> Iterator[tuple[Any, list[Any]]]:
    """vLLM's `LLM` and its processes, which end with the block.

    A guard beside them kills them when this process is no more, be it by kill -9.
    """
    mark, owner = secrets.token_hex(8), os.pidfd_open(os.getpid())
    command = [sys.executable, "-m", "bapo.engines.watchdog", str(owner), MARK_VARIABLE, mark, str(os.getpid())]
    guard = subprocess.Popen(command, pass_fds=[owner], start_new_session=True)
    os.close(owner)
    before = _children()  # the guard among them
    patience_s, processes = 0.0, None
    try:
        with _environment(options):
            from vllm import LLM  # here, as it reads the environment; it takes seconds, and is not installed everywhere

            os.environ[MARK_VARIABLE] = mark
            llm = LLM(**arguments, disable_log_stats=True, use_tqdm_on_load=False)
        processes = [p for p in _children() if p not in before]
        patience_s = 10.0  # they will have been asked to end
        if options.weight_sync == "ipc":  # handles on GPU memory go through the pipe to the engine's own process
            os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        yield llm, processes
    finally:
        # Of a start that failed: whatever it has begun. Later this process may have other children.
        _end([p for p in _children() if p not in before] if processes is None else processes, patience_s)
        guard.kill()
        guard.wait()


def _children() -> list[Any]:
    """All processes below this one, but for resource trackers."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if not is_resource_tracker(process):
                found.append(process)
    return found


def _end(processes: Sequence[Any], patience_s: float) -> None:
    """Waits for processes that have been asked to end, then kills what is left."""
    _, alive = psutil.wait_procs(processes, timeout=patience_s)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=10)
