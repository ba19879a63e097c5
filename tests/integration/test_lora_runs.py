"""Runs that train an adapter: what is saved, resumed and sampled from."""

from __future__ import annotations

import csv
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import SMALL, run_experiment
from torch import Tensor

from bapo.module import BapoModule
from bapo.policy.lora import Lora
from bapo.training.resume import newest_checkpoint

LORA = ("+policy/lora=default", "policy.lora.r=4", "optimizer.lr=0.01")


@pytest.fixture(scope="module", autouse=True)
def no_report() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bapo.analysis.report.write_report", lambda folder: folder / "report.html")
        yield


@pytest.fixture(scope="module")
def small(cache_dir) -> tuple[str, ...]:
    return (*SMALL, *LORA, f"policy.warm_start.cache_dir={cache_dir}")


@pytest.fixture(scope="module")
def uninterrupted(small, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    run_experiment(folder, *small, "policy.lora.modules_to_save=[lm_head]")
    return folder


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def assert_plain(value: object) -> None:
    if isinstance(value, dict | list | tuple):
        for part in [*value, *(value.values() if isinstance(value, dict) else [])]:
            assert_plain(part)
    else:
        assert value is None or type(value) in (Tensor, str, int, float, bool), type(value)


def test_a_run_trains_its_adapter_and_samples_from_it(uninterrupted):
    checkpoint = torch.load(newest_checkpoint(uninterrupted), weights_only=True)
    moved = [value for name, value in checkpoint["state_dict"].items() if "lora_B" in name]
    assert len(moved) == 7
    assert all(value.norm() > 0 for value in moved)
    assert not any("base_layer" in name or "original_module" in name for name in checkpoint["state_dict"])
    assert_plain(checkpoint)
    rows = rows_of(uninterrupted)
    assert [int(row["trainer/global_step"]) for row in rows] == list(range(13))
    gaps = [float(row["mismatch/logp_abs_diff_max"]) for row in rows if row["mismatch/logp_abs_diff_max"]]
    assert len(gaps) == 3
    assert max(gaps) < 1e-4  # the engine's own model holds the merged weights, after 4 and 8 updates too
    assert max(float(row["policy/ratio_max"]) for row in rows[2:]) > 1.01


def test_a_resumed_run_equals_one_that_never_stopped(uninterrupted, small, tmp_path, monkeypatch):
    plain = BapoModule.log_row

    def log_row(self, row):
        plain(self, row)
        if self.global_step == 6 and "policy/loss" in row:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(BapoModule, "log_row", log_row)
    with pytest.raises(SystemExit):
        run_experiment(tmp_path, *small, "policy.lora.modules_to_save=[lm_head]")
    monkeypatch.undo()
    run_experiment(tmp_path, f"resume={tmp_path}")
    assert (tmp_path / "metrics.csv").read_bytes() == (uninterrupted / "metrics.csv").read_bytes()
    ours, theirs = (torch.load(newest_checkpoint(folder), weights_only=True) for folder in (tmp_path, uninterrupted))
    assert ours["base"] == theirs["base"]
    assert ours["state_dict"].keys() == theirs["state_dict"].keys()
    assert all(torch.equal(value, theirs["state_dict"][name]) for name, value in ours["state_dict"].items())


def test_a_run_over_bfloat16_with_checkpointing_and_a_reference(small, tmp_path, monkeypatch):
    seeds = []
    apply = Lora.apply
    monkeypatch.setattr(Lora, "apply", lambda self, model, seed: (seeds.append(seed), apply(self, model, seed)))
    run_experiment(
        tmp_path, *small, "seed=7", "policy.dtype=bfloat16", "policy.gradient_checkpointing=true", "objective.reference_kl=0.1",
        "trainer.max_rounds=1",
    )  # fmt: skip
    assert seeds == [7]
    rows = rows_of(tmp_path)
    assert float(rows[1]["policy/ratio_max"]) == pytest.approx(1.0, abs=1e-6)
    assert float(rows[1]["policy/reference_kl"]) == pytest.approx(0.0, abs=1e-6)
    assert float(rows[4]["policy/reference_kl"]) > 0
    saved = torch.load(newest_checkpoint(tmp_path), weights_only=True)["state_dict"]
    assert {value.dtype for value in saved.values()} == {torch.float32}
