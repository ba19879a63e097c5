"""Reward terms besides the task's own, in a run."""

from __future__ import annotations

import pytest
from support import SMALL, run_experiment


def test_a_run_with_two_terms_logs_each_and_trains_on_their_sum(cache_dir, tmp_path):
    small = (*SMALL, f"policy.warm_start.cache_dir={cache_dir}", "trainer.max_rounds=1")
    row = run_experiment(
        tmp_path, *small, "reward=[overlong,format]", "reward.format.pattern='[0-9]+'", "reward.format.reward=0.5"
    )
    parts = [row[f"rollout/reward/{name}"] for name in ("correctness", "overlong", "format")]
    assert parts[1] < 0 < parts[2] <= 0.5
    assert row["rollout/reward_mean"] == pytest.approx(sum(parts), abs=1e-6)
    assert row["eval/test/avg@1"] * 8 % 1 == 0  # correctness alone


def test_a_term_cannot_take_the_name_of_the_tasks_own_reward(cache_dir, tmp_path):
    term = ("+reward.correctness._target_=bapo.tasks.rewards.Format", "+reward.correctness.pattern=x")
    with pytest.raises(ValueError, match=r"reward.correctness is the task's own reward"):
        run_experiment(tmp_path, *SMALL, f"policy.warm_start.cache_dir={cache_dir}", *term)
