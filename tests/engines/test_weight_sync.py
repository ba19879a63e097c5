"""Weights in files and adapters in folders, without an engine."""

import json
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from bapo.engines import weight_sync
from bapo.engines.weight_sync import (
    TransferClient,
    WeightTransfer,
    read_header,
    read_weights,
    save_adapter,
    sync_folder,
    write_weights,
)
from bapo.files import digest
from bapo.types import Adapter


def test_weights_go_through_files_in_shards_bit_by_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_sync, "SHARD_BYTES", 64)
    given = {f"w{i}": torch.randn(3, 4, generator=torch.Generator().manual_seed(i)) for i in range(5)}
    before = {name: value.clone() for name, value in given.items()}
    source = write_weights(tmp_path, given.items(), 11, torch.float32)
    assert len(list(source.glob("*.safetensors"))) == 3  # two of 48 bytes are beyond 64
    assert read_header(source) == (11, 5)
    read = dict(read_weights(source))
    assert read.keys() == given.keys()
    assert all(torch.equal(read[name], before[name]) and torch.equal(given[name], before[name]) for name in given)
    assert oct(source.stat().st_mode & 0o777) == "0o700"


def test_floating_weights_are_cast_and_others_are_not(tmp_path):
    source = write_weights(tmp_path, [("w", torch.tensor([-10.3])), ("n", torch.tensor([300]))], 0, torch.bfloat16)
    read = dict(read_weights(source))
    assert read["w"].dtype == torch.bfloat16
    assert read["w"].item() == -10.3125
    assert read["n"].item() == 300


def test_an_unfinished_folder_is_not_taken(tmp_path):
    source = write_weights(tmp_path, [("w", torch.ones(1))], 0, torch.float32)
    (source / "sync.json").unlink()
    with pytest.raises(FileNotFoundError):
        read_header(source)


def test_too_little_room_is_said_before_anything_is_written(tmp_path, monkeypatch):
    usage = SimpleNamespace(free=1 << 20)
    monkeypatch.setattr(weight_sync.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"rollout.engine.sync_dir: .* has 1 MiB left, and 8 MiB of weights come next"):
        write_weights(tmp_path, [("w", torch.zeros(2 << 20))], 0, torch.float32)


def test_leftovers_of_dead_processes_are_taken_away_and_others_are_not(tmp_path):
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    dead, here = int(done.stdout), f"bapo-sync-{digest(socket.gethostname())}"
    kept = {f"{here}-{os.getpid()}-mine", f"bapo-sync-elsewhere-{dead}-theirs", "bapo-sync-notes"}
    for name in (*kept, f"{here}-{dead}-dead"):
        (tmp_path / name).mkdir()
    with sync_folder(str(tmp_path)) as new:
        assert {path.name for path in tmp_path.iterdir()} == {*kept, new.name}
        assert oct(new.stat().st_mode & 0o777) == "0o700"
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_an_adapter_folder_is_what_peft_saves(tmp_path):
    adapter = Adapter({"r": 2, "peft_type": "LORA"}, {"base_model.model.q.lora_A.weight": torch.arange(4.0).reshape(2, 2)})
    save_adapter(tmp_path, adapter)
    assert json.loads((tmp_path / "adapter_config.json").read_text()) == adapter.config
    (found,) = load_file(tmp_path / "adapter_model.safetensors").items()
    assert found[0] == "base_model.model.q.lora_A.weight"
    assert found[1].tolist() == [[0, 1], [2, 3]]


def test_a_transfer_asks_the_workers_by_name():
    calls = []
    client = TransferClient(lambda method, **kwargs: calls.append((method, kwargs)))
    client.init_weight_transfer_engine({"a": 1})
    client.start_weight_update()
    client.update_weights({"names": []})
    client.finish_weight_update()
    assert calls == [
        ("init_weight_transfer_engine", {"init_info": {"a": 1}}), ("start_weight_update", {}),
        ("update_weights", {"update_info": {"names": []}}), ("finish_weight_update", {}),
    ]  # fmt: skip


def test_a_transfer_counts_trainer_and_workers():
    assert WeightTransfer("nccl", 2, print).world_size == 3
