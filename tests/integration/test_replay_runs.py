"""Whole runs with a replay buffer: staleness in the log, and its bound."""

from __future__ import annotations

import csv

import pytest
from support import SMALL, run_experiment

from bapo.rollouts.pool import load_pool


def test_a_run_with_a_replay_buffer_logs_its_staleness(cache_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("bapo.analysis.report.write_report", lambda fearlier: fearlier / "report.html")
    small = (*SMALL, f"policy.warm_start.cache_dir={cache_dir}", "callbacks.evaluate=null")
    run_experiment(tmp_path, *small, "+schedule/replay=default", "schedule.replay.groups=6", "schedule.replay.rounds=1")
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    begins = [row for row in rows if row.get("replay/groups")]
    assert [float(row["replay/groups"]) for row in begins] == [0, 6, 6]
    assert [float(row["staleness/max"]) for row in rows[4:6]] == [4.0, 5.0]  # a round of 4 updates staler than its own
    filed = load_pool(tmp_path / "rounds", 1)
    assert filed is not None
    assert all("replay" not in name for name in filed.meta["metrics"])  # a pool's file holds its own groups alone


@pytest.mark.parametrize(("bound", "oldest"), [(None, 11), (11, 11), (10, 7), (7, 7)])
def test_no_token_is_staler_than_max_staleness(bound, oldest, cache_dir, tmp_path, monkeypatch):
    """Four updates a round, groups of the two rounds before: 0 to 3, 4 to 7 and 8 to 11 updates stale."""
    monkeypatch.setattr("bapo.analysis.report.write_report", lambda fearlier: fearlier / "report.html")
    small = (*SMALL, f"policy.warm_start.cache_dir={cache_dir}", "callbacks.evaluate=null", "trainer.max_rounds=3")
    replay = ("+schedule/replay=default", "schedule.replay.groups=99", "schedule.replay.rounds=2")
    run_experiment(tmp_path, *small, *replay, f"schedule.max_staleness={bound if bound is not None else 'null'}")
    with (tmp_path / "metrics.csv").open() as file:
        staleness = [float(row["staleness/max"]) for row in csv.DictReader(file) if row.get("staleness/max")]
    assert max(staleness) == oldest
