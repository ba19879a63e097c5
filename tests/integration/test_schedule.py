"""Staleness as a dial: the measured staleness is the configured one."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from support import REPOSITORY, SMALL, random_batch, run_experiment
from support.configs import parts_of

from bapo.engines.hf import HFEngine
from bapo.module import BapoModule
from bapo.protocols import EngineError
from bapo.rollouts.pool import load_meta
from bapo.rollouts.schedule import Schedule


def rows(folder: Path) -> list[dict[str, float]]:
    with (folder / "metrics.csv").open() as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


@pytest.fixture
def small(cache_dir, monkeypatch) -> tuple[str, ...]:
    monkeypatch.setattr("bapo.analysis.report.write_report", lambda folder: folder / "report.html")  # its pictures take longest
    return (*SMALL, f"policy.warm_start.cache_dir={cache_dir}", "callbacks.evaluate=null", "schedule.minibatches_per_epoch=2")


@pytest.mark.parametrize("epochs", [1, 2, 4])
@pytest.mark.parametrize("lag", [0, 1, 2, 4])
def test_the_measured_staleness_is_the_configured_one(lag, epochs, small, tmp_path):
    run_experiment(
        tmp_path, *small, f"schedule.lag={lag}", f"schedule.epochs_per_round={epochs}", f"trainer.max_rounds={lag + 2}"
    )
    updates = 2 * epochs
    trained = [row for row in rows(tmp_path) if "policy/loss" in row]
    assert len(trained) == updates * (lag + 2)
    for update, row in enumerate(trained):
        round_index, step = divmod(update, updates)
        stale = min(round_index, lag) * updates + step
        assert (row["staleness/mean"], row["staleness/max"]) == (stale, stale), update
        assert stale == Schedule(epochs, 2, lag).staleness(round_index)[step]
    versions = [load_meta(tmp_path / "rounds", n)["policy_version"] for n in range(lag + 2)]
    assert versions == [max(0, n - lag) * updates for n in range(lag + 2)]
    assert load_meta(tmp_path / "rounds", lag + 2) is None  # nothing is generated that will not be trained on


def test_on_policy_every_ratio_is_one(small, tmp_path):
    preset = OmegaConf.load(REPOSITORY / "conf" / "schedule" / "on_policy.yaml")
    sizes = [f"schedule.{key}={preset[key]}" for key in ("epochs_per_round", "minibatches_per_epoch", "lag")]
    run_experiment(tmp_path, *small, *sizes, "trainer.max_rounds=3")
    for row in rows(tmp_path):
        assert row["staleness/max"] == 0
        assert row["policy/ratio_max"] == pytest.approx(1, abs=1e-5)
        assert row["policy/clip_frac"] == 0


def test_a_resumed_run_with_a_lag_equals_an_uninterrupted_one(small, tmp_path, monkeypatch):
    lagging = (*small, "schedule.lag=2", "trainer.max_rounds=5")
    run_experiment(tmp_path / "whole", *lagging)
    log_row = BapoModule.log_row

    def stop_at_seven(self, row):
        log_row(self, row)
        if self.global_step == 7:
            raise KeyboardInterrupt

    monkeypatch.setattr(BapoModule, "log_row", stop_at_seven)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(tmp_path / "cut", *lagging, "callbacks.checkpoint.every_n_updates=3")
    monkeypatch.undo()
    run_experiment(tmp_path / "cut", f"resume={tmp_path / 'cut'}")
    assert (tmp_path / "cut" / "metrics.csv").read_text() == (tmp_path / "whole" / "metrics.csv").read_text()


def test_a_run_made_longer_warns_that_its_next_rounds_are_less_stale(small, tmp_path, caplog):
    lagging = (*small, "schedule.lag=1")
    run_experiment(tmp_path, *lagging, "trainer.max_rounds=2")
    run_experiment(tmp_path, f"resume={tmp_path}", "trainer.max_rounds=4")
    (warning,) = [r.getMessage() for r in caplog.records if "less stale" in r.getMessage()]
    assert all(part in warning for part in ("rounds 2 to 2", "update 8", "schedule.lag=1"))
    assert [load_meta(tmp_path / "rounds", n)["policy_version"] for n in range(4)] == [0, 0, 8, 8]


def test_a_negative_lag_is_refused():
    with pytest.raises(ValueError, match=r"schedule.lag is -1; it must be >= 0"):
        Schedule(lag=-1)


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize(
    "extra", [(), ("+rollout/partial=default", "rollout.partial.tokens_per_round=3", "rollout.max_attempts=6")]
)
def test_overlap_changes_nothing_but_the_time(lag, extra, small, tmp_path):
    """Evaluations and checkpoints come in between, where the run must wait for the engine."""
    common = [value for value in small if value != "callbacks.evaluate=null"]
    common += [f"schedule.lag={lag}", "trainer.max_rounds=4", "callbacks.checkpoint.every_n_updates=3", *extra]
    run_experiment(tmp_path / "in_turn", *common)
    run_experiment(tmp_path / "overlap", *common, "schedule.overlap=true")
    assert (tmp_path / "overlap" / "metrics.csv").read_text() == (tmp_path / "in_turn" / "metrics.csv").read_text()
    timing = (tmp_path / "overlap" / "timing.csv").read_text()
    assert "time/wait" in timing


@pytest.mark.slow
def test_overlap_on_two_ranks_changes_nothing_but_the_time(small, tmp_path):
    partial = ("+rollout/partial=default", "rollout.partial.tokens_per_round=3", "rollout.max_attempts=6")
    two = (*small, *partial, "trainer.devices=2", "trainer.strategy=ddp", "schedule.lag=1", "trainer.max_rounds=4")
    for folder, overlap in (("in_turn", "false"), ("overlap", "true")):
        command = [sys.executable, str(REPOSITORY / "train.py"), *two, f"schedule.overlap={overlap}"]
        done = subprocess.run(
            [*command, f"hydra.run.dir={tmp_path / folder}"],
            cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "overlap" / "metrics.csv").read_text() == (tmp_path / "in_turn" / "metrics.csv").read_text()
    assert "time/wait" in (tmp_path / "overlap" / "timing.csv").read_text()
    assert len([row for row in rows(tmp_path / "overlap") if "policy/loss" in row]) == 16


def test_a_resumed_run_with_overlap_equals_an_uninterrupted_one(small, tmp_path, monkeypatch):
    lagging = (*small, "schedule.lag=1", "schedule.overlap=true", "trainer.max_rounds=4")
    run_experiment(tmp_path / "whole", *lagging)
    log_row = BapoModule.log_row

    def stop_at_six(self, row):
        log_row(self, row)
        if self.global_step == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(BapoModule, "log_row", stop_at_six)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(tmp_path / "cut", *lagging, "callbacks.checkpoint.every_n_updates=5")
    monkeypatch.setattr(BapoModule, "log_row", log_row)
    run_experiment(tmp_path / "cut", f"resume={tmp_path / 'cut'}")
    assert (tmp_path / "cut" / "metrics.csv").read_text() == (tmp_path / "whole" / "metrics.csv").read_text()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (EngineError("the engine died"), "the engine died"),
        (KeyError("a bug"), "generating in the background failed: KeyError: 'a bug'"),
    ],
)
@pytest.mark.parametrize(("every", "saved"), [(1000, 4), (3, 3)])  # at the end of the round, or when a checkpoint is due
def test_a_failure_in_the_background_ends_the_run_with_a_checkpoint(error, message, every, saved, small, tmp_path, monkeypatch):
    generate, calls = HFEngine.generate, []

    def fails_at_last(self, requests, sampling):
        if threading.current_thread().name == "rollouts":
            raise error
        calls.append(len(requests))
        return generate(self, requests, sampling)

    monkeypatch.setattr(HFEngine, "generate", fails_at_last)
    lagging = (*small, "schedule.lag=1", "schedule.overlap=true", "trainer.max_rounds=3")
    with pytest.raises(EngineError, match=message):
        run_experiment(tmp_path, *lagging, f"callbacks.checkpoint.every_n_updates={every}")
    assert [path.name for path in (tmp_path / "checkpoints").glob("*.ckpt")] == [f"update={saved:06d}.ckpt"]
    assert len([row for row in rows(tmp_path) if "policy/loss" in row]) == saved
    monkeypatch.setattr(HFEngine, "generate", generate)
    run_experiment(tmp_path, f"resume={tmp_path}")
    assert len(rows(tmp_path)) >= 12


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_run_with_overlap(small, tmp_path):
    """The first waits for the background, the second does not; and no process ends under a thread that computes."""
    large = (
        "rollout.prompts_per_round=1024",
        "rollout.group_size=32",
        "schedule.minibatches_per_epoch=256",
        "task.train_size=400",
    )
    command = [
        sys.executable,
        str(REPOSITORY / "train.py"),
        *small,
        "threads=1",
        "schedule.lag=1",
        "schedule.overlap=true",
        *large,
    ]
    run = subprocess.Popen([*command, f"hydra.run.dir={tmp_path}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    end = time.monotonic() + 120
    while len(list((tmp_path / "updates").glob("*.npz"))) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    run.send_signal(signal.SIGINT)
    time.sleep(0.3)
    run.send_signal(signal.SIGINT)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 130, output[-3000:]
    assert "terminate called" not in output
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "interrupted"


def test_a_snapshot_gives_the_earlier_logprobs_and_leaves_the_policy_alone(small, tmp_path, monkeypatch):
    seen = {}
    log_row = BapoModule.log_row

    def look(self, row):
        log_row(self, row)
        if "policy/loss" not in row:
            return
        batch = random_batch(4)
        if self.global_step == 1:
            seen["then"], seen["logprobs"] = self.snapshot(), self.token_stats(batch).logprobs
        if self.global_step == 3:
            weights = {name: value.clone() for name, value in self.policy.named_parameters()}
            assert not torch.equal(self.token_stats(batch).logprobs, seen["logprobs"])
            assert torch.equal(seen["then"].token_stats(batch).logprobs, seen["logprobs"])
            assert seen["then"].version() == 1
            assert all(torch.equal(value, weights[name]) for name, value in self.policy.named_parameters())
            seen["done"] = True

    monkeypatch.setattr(BapoModule, "log_row", look)
    run_experiment(tmp_path, *small, "trainer.max_rounds=1")
    assert seen["done"]


@pytest.mark.parametrize(("lag", "bound", "least"), [(0, 2, 3), (2, 10, 11), (4, 18, 19)])
def test_a_bound_that_the_schedule_itself_breaks_is_refused(lag, bound, least):
    with pytest.raises(ValueError, match=rf"schedule.max_staleness is {bound}; it must be >= {least}"):
        Schedule(2, 2, lag, max_staleness=bound)
    assert Schedule(2, 2, lag, max_staleness=least).most_staleness == 0
    assert Schedule(2, 2, lag).most_staleness is None


@pytest.mark.parametrize(
    "extra", [("+schedule/replay=default",), ("+rollout/partial=default", "rollout.partial.tokens_per_round=3")]
)
@pytest.mark.parametrize(("lag", "least"), [(0, 7), (2, 15)])
def test_a_bound_that_leaves_out_every_earlier_group_is_refused(extra, lag, least, small):
    with pytest.raises(ValueError, match=rf"schedule.max_staleness is {least - 1}; with .* it must be >= {least}"):
        parts_of(*small, *extra, f"schedule.lag={lag}", f"schedule.max_staleness={least - 1}")
    parts_of(*small, *extra, f"schedule.lag={lag}", f"schedule.max_staleness={least}")
    parts_of(*small, f"schedule.lag={lag}", f"schedule.max_staleness={least - 4}")


def test_a_lag_that_no_round_will_have_is_warned_of(small, caplog):
    parts_of(*small, "schedule.lag=3", "trainer.max_rounds=3")
    assert all(part in caplog.text for part in ("schedule.lag is 3", "trainer.max_rounds 3", "no round trains on"))


def test_overlap_without_lag_is_refused():
    with pytest.raises(ValueError, match=r"schedule.overlap is True with schedule.lag 0"):
        Schedule(overlap=True)
