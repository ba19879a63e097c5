import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bapo.advantages import GroupRelativeAdvantage, group_advantages, zero_variance


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


@pytest.mark.parametrize("reward", [0.9, 0.1, 1 / 3, -0.7])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_equal_rewards_teach_exactly_nothing(reward: float, size: int) -> None:
    rewards, uids = torch.full((size,), reward), ["a"] * size
    assert torch.equal(group_advantages(rewards, uids), torch.zeros(size))
    assert zero_variance(rewards, uids).all()


def test_nearly_equal_rewards_still_differ() -> None:
    rewards = torch.tensor([0.9, 0.9, torch.nextafter(torch.tensor(0.9), torch.tensor(1.0)).item()])
    assert not zero_variance(rewards, ["a"] * 3).any()
    assert torch.allclose(group_advantages(rewards, ["a"] * 3), torch.tensor([-1.0, -1.0, 2.0]) / math.sqrt(3), atol=1e-6)


def test_zero_variance_marks_whole_groups() -> None:
    rewards = torch.tensor([1.0, 1, 0, 1, 0, 1, 0, 1, 5])
    uids = ["mixed", "same", "mixed", "same", "mixed", "same", "mixed", "same", "alone"]
    assert zero_variance(rewards, uids).tolist() == [False, True, False, True, False, True, False, True, True]


groups = st.lists(st.tuples(st.sampled_from("abcd"), st.floats(-3, 3, width=32)), min_size=1, max_size=16)


@given(groups, st.randoms(use_true_random=False))
def test_row_order_changes_nothing(rows: list[tuple[str, float]], random) -> None:
    order = list(range(len(rows)))
    random.shuffle(order)
    rewards, uids = torch.tensor([reward for _, reward in rows]), [uid for uid, _ in rows]
    shuffled = group_advantages(rewards[order], [uids[i] for i in order])
    assert torch.equal(shuffled, group_advantages(rewards, uids)[order])


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


def test_the_group_mean_is_exact() -> None:
    """Summed from left to right, 1e16 + 1 - 1e16 is 0."""
    rewards = torch.tensor([1e16, 1.0, -1e16], dtype=torch.float64)
    assert GroupRelativeAdvantage(normalize_std=False)(rewards, ["a"] * 3)[1].item() == pytest.approx(2 / 3, abs=1e-7)


def test_errors_name_the_row_and_the_field() -> None:
    with pytest.raises(ValueError, match=r"row 1 .*'b'.* is nan"):
        group_advantages(torch.tensor([1.0, math.nan]), ["a", "b"])
    with pytest.raises(ValueError, match="uids has 1 entries for 2 rewards"):
        zero_variance(torch.tensor([1.0, 0.0]), ["a"])
    with pytest.raises(ValueError, match=r"eps is -0.1"):
        GroupRelativeAdvantage(eps=-0.1)
