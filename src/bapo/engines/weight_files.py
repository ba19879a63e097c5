"""Weights on their way to an engine's own processes: safetensors in a private folder, by default in shared memory."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from bapo.types import Adapter

SHARED_MEMORY = Path("/dev/shm")
SHARD_BYTES = 2 << 30  # what is copied to host memory at a time


def open_sync_folder(parent: str | None = None) -> Path:
    """A new folder under `parent` (None: shared memory where there is such a thing) that this user alone can enter.

    Takes away what processes that are no more have left there: after kill -9 a whole model may lie in memory.
    """
    root = Path(parent) if parent else SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    if not root.is_dir():
        raise ValueError(f"rollout.engine.sync_dir is {parent!r}; there is no such folder")
    here = f"bapo-sync-{socket.gethostname()}-"  # the folder may be one that several machines share
    for left in root.glob("bapo-sync-*"):
        owner = re.fullmatch(rf"{re.escape(here)}(\d+)-\w+", left.name)
        with suppress(FileNotFoundError):  # another rank is at it too
            if owner and left.stat().st_uid == os.getuid() and not _alive(int(owner[1])):
                shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{here}{os.getpid()}-", dir=root))


@contextmanager
def sync_folder(parent: str | None) -> Iterator[Path]:
    """A folder of `open_sync_folder`, taken away at the end of the block."""
    folder = open_sync_folder(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def write_weights(folder: Path, weights: Iterable[tuple[str, Tensor]], version: int, dtype: torch.dtype) -> Path:
    """A new folder in `folder` with every weight, floating ones cast to `dtype`, in shards of about `SHARD_BYTES`.

    Raises OSError, before a shard is written, where there is no room for it.
    """
    target = Path(tempfile.mkdtemp(prefix=f"weights-{version}-", dir=folder))
    shard: dict[str, Tensor] = {}
    names: set[str] = set()
    size = 0
    for name, value in weights:
        assert name not in names, name
        names.add(name)
        given = value.detach()
        shard[name] = given.to("cpu", dtype if given.is_floating_point() else given.dtype).contiguous()
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
    """(version, number of tensors) of a folder of `write_weights`. Raises FileNotFoundError for one that is incomplete."""
    header = json.loads((source / "sync.json").read_text())
    return header["version"], header["tensors"]


def read_weights(source: Path) -> Iterator[tuple[str, Tensor]]:
    """The weights of a folder of `write_weights`, one at a time."""
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)


def write_adapter(folder: Path, adapter: Adapter, version: int) -> Path:
    """A new folder in `folder` with a LoRA adapter as PEFT saves it."""
    target = Path(tempfile.mkdtemp(prefix=f"adapter-{version}-", dir=folder))
    save_adapter(target, adapter)
    return target


def save_adapter(folder: Path, adapter: Adapter) -> None:
    """The two files of an adapter, by PEFT's names."""
    weights = {name: value.detach().cpu().contiguous() for name, value in adapter.weights.items()}
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(adapter.config, indent=2) + "\n")
