"""Staleness as a dial: the age that is measured is the age that was asked for. FAULTS 31."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from conftest import REPOSITORY, SMALL, run_experiment
from omegaconf import OmegaConf

from bapo.rollouts.pool import load_meta
from bapo.rollouts.schedule import Schedule


def rows(folder: Path) -> list[dict[str, float]]:
    with (folder / "metrics.csv").open() as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


@pytest.fixture
def small(cache_dir, monkeypatch) -> tuple[str, ...]:
    monkeypatch.setattr("bapo.run.write_report", lambda folder: folder / "report.html")  # its pictures take longest
    return (*SMALL, f"policy.warm_start.cache_dir={cache_dir}", "callbacks.evaluate=null", "schedule.minibatches_per_epoch=2")


@pytest.mark.parametrize("epochs", [1, 2, 4])
@pytest.mark.parametrize("lag", [0, 1, 2, 4])
def test_the_measured_age_is_the_one_asked_for(lag, epochs, small, tmp_path):
    run_experiment(
        tmp_path, *small, f"schedule.lag={lag}", f"schedule.epochs_per_round={epochs}", f"trainer.max_rounds={lag + 2}"
    )
    updates = 2 * epochs
    trained = [row for row in rows(tmp_path) if "policy/loss" in row]
    assert len(trained) == updates * (lag + 2)
    for update, row in enumerate(trained):
        round_index, step = divmod(update, updates)
        age = min(round_index, lag) * updates + step
        assert (row["staleness/mean"], row["staleness/max"]) == (age, age), update
        assert age == Schedule(epochs, 2, lag).ages(round_index)[step]
    versions = [load_meta(tmp_path / "rounds", n)["policy_version"] for n in range(lag + 2)]
    assert versions == [max(0, n - lag) * updates for n in range(lag + 2)]
    assert load_meta(tmp_path / "rounds", lag + 2) is None  # nothing is drawn that will not be trained on


def test_on_policy_every_ratio_is_one(small, tmp_path):
    preset = OmegaConf.load(REPOSITORY / "conf" / "schedule" / "on_policy.yaml")
    sizes = [f"schedule.{key}={preset[key]}" for key in ("epochs_per_round", "minibatches_per_epoch", "lag")]
    run_experiment(tmp_path, *small, *sizes, "trainer.max_rounds=3")
    for row in rows(tmp_path):
        assert row["staleness/max"] == 0
        assert row["policy/ratio_max"] == pytest.approx(1, abs=1e-5)
        assert row["policy/clip_frac"] == 0


def test_a_lagging_run_that_stops_goes_on_as_if_it_had_not(small, tmp_path, monkeypatch):
    lagging = (*small, "schedule.lag=2", "trainer.max_rounds=5")
    run_experiment(tmp_path / "whole", *lagging)
    from bapo.module import BapoModule

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


def test_a_run_made_longer_says_that_its_next_rounds_are_younger(small, tmp_path, caplog):
    lagging = (*small, "schedule.lag=1")
    run_experiment(tmp_path, *lagging, "trainer.max_rounds=2")
    run_experiment(tmp_path, f"resume={tmp_path}", "trainer.max_rounds=4")
    assert (
        "the run was made longer: rounds 2 to 2 are drawn after update 8, so they are younger than schedule.lag=1 asks"
        in caplog.text
    )
    assert [load_meta(tmp_path / "rounds", n)["policy_version"] for n in range(4)] == [0, 0, 8, 8]


def test_a_negative_lag_is_refused():
    with pytest.raises(ValueError, match=r"schedule.lag is -1; it must be >= 0"):
        Schedule(lag=-1)
