"""Weights on their way to an engine's processes: files in a private folder, or vLLM's own transfer between GPUs."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from bapo.files import digest
from bapo.types import Adapter

SHARED_MEMORY = Path("/dev/shm")
SHARD_BYTES = 2 << 30  # what is copied to host memory at a time


@contextmanager
def sync_folder(parent: str | None = None) -> Iterator[Path]:
    """Make a folder under `parent` (None: shared memory, if any) that only this user can enter; remove it after the block.

    Removes the folders of processes that have ended: after kill -9 a whole model may lie in memory.
    """
    root = Path(parent) if parent else SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    if not root.is_dir():
        raise ValueError(f"rollout.engine.sync_dir is {parent!r}; there is no such folder")
    # Several machines may share the folder. A digest of the host name, as the path of a socket must have < 108 characters.
    prefix = f"bapo-sync-{digest(socket.gethostname())}-"
    for leftover in root.glob("bapo-sync-*"):
        owner = re.fullmatch(rf"{prefix}(\d+)-\w+", leftover.name)
        with suppress(FileNotFoundError):  # another rank removes it too
            if owner and leftover.stat().st_uid == os.getuid() and not psutil.pid_exists(int(owner[1])):
                shutil.rmtree(leftover, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_weights(folder: Path, weights: Iterable[tuple[str, Tensor]], version: int, dtype: torch.dtype) -> Path:
    """Write every weight, floating ones cast to `dtype`, into a new folder in `folder`, in shards of about `SHARD_BYTES`.

    Raises OSError, before a shard is written, if there is no room for it.
    """
    target = Path(tempfile.mkdtemp(prefix=f"weights-{version}-", dir=folder))
    shard: dict[str, Tensor] = {}
    names: set[str] = set()
    size = 0
    for name, value in weights:
        assert name not in names, name
        names.add(name)
        shard[name] = value.detach().to("cpu", dtype if value.is_floating_point() else value.dtype).contiguous()
        size += shard[name].nbytes
        if size >= SHARD_BYTES:
            _write_shard(target, shard, size)
            shard, size = {}, 0
    if shard:
        _write_shard(target, shard, size)
    (target / "sync.json").write_text(json.dumps({"version": version, "tensors": len(names)}))  # last: the folder is complete
    return target


def _write_shard(target: Path, shard: dict[str, Tensor], size: int) -> None:
    free = shutil.disk_usage(target).free
    if free < size:
        raise OSError(
            f"rollout.engine.sync_dir: {target.parent.parent} has {free >> 20} MiB left, and {size >> 20} MiB of weights come "
            "next; name a folder with room (in a container, give it more shared memory)"
        )
    save_file(shard, target / f"{len(list(target.glob('*.safetensors'))):05d}.safetensors")


def read_header(source: Path) -> tuple[int, int]:
    """Return (version, number of tensors) of a folder of `write_weights`. Raises FileNotFoundError if it is incomplete."""
    header = json.loads((source / "sync.json").read_text())
    return header["version"], header["tensors"]


def read_weights(source: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a folder of `write_weights`, one at a time."""
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)


def save_adapter(folder: Path, adapter: Adapter) -> None:
    """Write the two files of a LoRA adapter under PEFT's names."""
    weights = {name: value.detach().cpu().contiguous() for name, value in adapter.weights.items()}
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(adapter.config, indent=2) + "\n")


class WeightTransfer:
    """vLLM's own weight transfer: `ipc` (trainer and engine on one GPU) or `nccl` (different GPUs of one machine).

    rpc: calls a method of every vLLM worker with keyword arguments. The first `send` sets up the connection. Needs a GPU.
    """

    def __init__(self, backend: str, workers: int, rpc: Callable[..., Any]):
        self.backend = backend
        self.world_size = 1 + workers
        self.rpc = rpc
        self._engine: Any = None
        self._source: Any = None

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Send every weight; names and shapes go first, so a merged LoRA policy is held in memory a second time."""
        tensors = list(weights)
        if self._engine is None:
            self._engine, self._source = self._connect(tensors)
        self._source.weights = tensors
        self._engine.send_weights()
        self._source.weights = []
        self.rpc("repack_heads")

    def _connect(self, tensors: list[tuple[str, Tensor]]) -> tuple[Any, Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        class PolicySource(WeightSource):
            weights = tensors

            def metadata(self) -> list[Any]:
                return [ParamMeta(name, value.dtype, tuple(value.shape)) for name, value in self.weights]

            def __iter__(self) -> Any:
                return iter(self.weights)

        source = PolicySource()
        info: Any = IPCTrainerInitInfo(rank=0, packed=True)
        if self.backend == "nccl":
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            info = NCCLTrainerInitInfo(rank=0, master_address="127.0.0.1", master_port=port, world_size=self.world_size)
        return WeightTransferTrainerFactory.trainer_init(info, client=TransferClient(self.rpc), source=source), source


class TransferClient:
    """The calls of vLLM's trainer side to the engine, made to its workers."""

    def __init__(self, rpc: Callable[..., Any]):
        self.rpc = rpc

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.rpc("init_weight_transfer_engine", init_info=init_info)

    def start_weight_update(self) -> None:
        self.rpc("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self.rpc("update_weights", update_info=update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.rpc("finish_weight_update")
