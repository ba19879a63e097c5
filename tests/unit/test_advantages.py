import math
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from bapo.advantages import (
    BatchNormalizedAdvantage,
    GroupRelativeAdvantage,
    LeaveOneOutAdvantage,
    group_advantages,
    zero_variance,
)

ESTIMATORS = [
    GroupRelativeAdvantage(),
    GroupRelativeAdvantage(normalize_std=False),
    LeaveOneOutAdvantage(),
    BatchNormalizedAdvantage(),
]
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS, ids=str)


def test_grpo_uses_the_sample_standard_deviation() -> None:
    assert group_advantages(torch.tensor([1.0, 0, 0, 0]), ["a"] * 4).tolist() == [1.5, -0.5, -0.5, -0.5]


def test_groups_are_made_by_identity_not_by_position() -> None:
    advantages = group_advantages(torch.tensor([1.0, 1, 0, 1]), ["a", "b", "a", "b"])
    assert torch.allclose(advantages, torch.tensor([math.sqrt(0.5), 0, -math.sqrt(0.5), 0]), atol=1e-7)


def test_without_std_only_the_mean_is_taken_off() -> None:
    advantages = GroupRelativeAdvantage(normalize_std=False)(torch.tensor([1.0, 0, 0, 0, 3, 1]), ["a"] * 4 + ["b"] * 2)
    assert advantages.tolist() == [0.75, -0.25, -0.25, -0.25, 1.0, -1.0]


def test_eps_is_added_to_the_standard_deviation() -> None:
    advantages = GroupRelativeAdvantage(eps=0.5)(torch.tensor([1.0, 0, 0, 0]), ["a"] * 4)
    assert advantages.tolist() == [0.75, -0.25, -0.25, -0.25]


def test_leave_one_out_by_hand() -> None:
    """Against the others: 1 - 0, then 0 - 1/3; 3 - 1; a group of one has no others."""
    advantages = LeaveOneOutAdvantage()(torch.tensor([1.0, 0, 3, 0, 0, 1, 7]), ["a", "a", "b", "a", "a", "b", "c"])
    assert advantages.tolist() == pytest.approx([1, -1 / 3, 2, -1 / 3, -1 / 3, -2, 0])


def test_batch_normalisation_by_hand() -> None:
    """Centred (.75, -.25 x 3), (1, -1), 0 and 0: squares sum to 2.75 over 8 - 1."""
    rewards, uids = torch.tensor([1.0, 0, 0, 0, 3, 1, 5, 5]), ["a"] * 4 + ["b"] * 2 + ["c"] * 2
    std = math.sqrt(2.75 / 7)
    expected = torch.tensor([0.75, -0.25, -0.25, -0.25, 1, -1, 0, 0])
    assert torch.allclose(BatchNormalizedAdvantage()(rewards, uids), expected / std)
    assert torch.allclose(BatchNormalizedAdvantage(eps=0.5)(rewards, uids), expected / (std + 0.5))


@every_estimator
@pytest.mark.parametrize("reward", [0.9, 0.1, 1 / 3, -0.7, 0.8444218515250481])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_equal_rewards_teach_exactly_nothing(estimator: GroupRelativeAdvantage, reward: float, size: int) -> None:
    """Alone, and beside a group that does teach. In float64 the sum of three times 0.84442185... over 3 is another number."""
    rewards, uids = torch.full((size,), reward, dtype=torch.float64), ["a"] * size
    assert torch.equal(estimator(rewards, uids), torch.zeros(size))
    assert zero_variance(rewards, uids).all()
    beside = estimator(torch.cat([rewards, torch.tensor([1.0, 0.0, 0.3])]), [*uids, "b", "b", "c"])
    assert torch.equal(beside[:size], torch.zeros(size))
    assert beside[size] == -beside[size + 1] > 0
    assert beside[-1] == 0


def test_nearly_equal_rewards_still_differ() -> None:
    rewards = torch.tensor([0.9, 0.9, torch.nextafter(torch.tensor(0.9), torch.tensor(1.0)).item()])
    assert not zero_variance(rewards, ["a"] * 3).any()
    assert torch.allclose(group_advantages(rewards, ["a"] * 3), torch.tensor([-1.0, -1.0, 2.0]) / math.sqrt(3), atol=1e-6)


def test_zero_variance_marks_whole_groups() -> None:
    rewards = torch.tensor([1.0, 1, 0, 1, 0, 1, 0, 1, 5])
    uids = ["mixed", "same", "mixed", "same", "mixed", "same", "mixed", "same", "alone"]
    assert zero_variance(rewards, uids).tolist() == [False, True, False, True, False, True, False, True, True]


groups = st.lists(st.tuples(st.sampled_from("abcd"), st.floats(-3, 3, width=32)), min_size=1, max_size=16)


@every_estimator
@given(groups, st.randoms(use_true_random=False))
def test_row_order_changes_nothing(estimator: GroupRelativeAdvantage, rows: list[tuple[str, float]], random) -> None:
    order = list(range(len(rows)))
    random.shuffle(order)
    rewards, uids = torch.tensor([reward for _, reward in rows]), [uid for uid, _ in rows]
    shuffled = estimator(rewards[order], [uids[i] for i in order])
    assert torch.equal(shuffled, estimator(rewards, uids)[order])


@given(groups)
def test_every_group_has_mean_zero_and_sample_std_one(rows: list[tuple[str, float]]) -> None:
    rewards, uids = torch.tensor([reward for _, reward in rows]), [uid for uid, _ in rows]
    advantages, equal = group_advantages(rewards, uids), zero_variance(rewards, uids)
    assert advantages.dtype == torch.float32
    for uid in set(uids):
        members = torch.tensor([u == uid for u in uids])
        if equal[members].all():
            assert torch.equal(advantages[members], torch.zeros(int(members.sum())))
        else:
            assert abs(advantages[members].mean().item()) < 1e-6
            assert advantages[members].std().item() == pytest.approx(1, abs=1e-5)


@given(groups)
def test_leave_one_out_is_the_distance_from_the_others(rows: list[tuple[str, float]]) -> None:
    rewards, uids = torch.tensor([reward for _, reward in rows]), [uid for uid, _ in rows]
    advantages = LeaveOneOutAdvantage()(rewards, uids)
    for row, (uid, reward) in enumerate(rows):
        others = [r for i, (u, r) in enumerate(rows) if u == uid and i != row]
        assert advantages[row].item() == pytest.approx(reward - sum(others) / len(others) if others else 0.0, abs=1e-5)


@given(groups)
def test_batch_normalisation_makes_the_pool_mean_zero_and_std_one(rows: list[tuple[str, float]]) -> None:
    rewards, uids = torch.tensor([reward for _, reward in rows]), [uid for uid, _ in rows]
    advantages = BatchNormalizedAdvantage()(rewards, uids)
    if not zero_variance(rewards, uids).all():
        assert abs(advantages.mean().item()) < 1e-5
        assert advantages.std().item() == pytest.approx(1, abs=1e-5)


def test_the_group_mean_is_exact() -> None:
    """Summed from left to right, 1e16 + 1 - 1e16 is 0."""
    rewards = torch.tensor([1e16, 1.0, -1e16], dtype=torch.float64)
    assert GroupRelativeAdvantage(normalize_std=False)(rewards, ["a"] * 3)[1].item() == pytest.approx(2 / 3, abs=1e-7)


def test_errors_name_the_row_and_the_field() -> None:
    with pytest.raises(ValueError, match=r"row 1 .*'b'.* is nan"):
        group_advantages(torch.tensor([1.0, math.nan]), ["a", "b"])
    with pytest.raises(ValueError, match="uids has 1 entries for 2 rewards"):
        zero_variance(torch.tensor([1.0, 0.0]), ["a"])
    for estimator in (GroupRelativeAdvantage, BatchNormalizedAdvantage):
        with pytest.raises(ValueError, match=r"eps is -0.1"):
            estimator(eps=-0.1)


@pytest.mark.parametrize(
    ("name", "estimator"), zip(("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"), ESTIMATORS, strict=True)
)
def test_the_files_of_conf_build_them(name: str, estimator: object) -> None:
    assert instantiate(OmegaConf.load(Path(__file__).parents[2] / "conf" / "advantage" / f"{name}.yaml")) == estimator
