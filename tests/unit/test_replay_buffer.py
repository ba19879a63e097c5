"""Groups that are trained on once more: whole, chosen by the seed, never too stale."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from support import random_batch

from bapo.rollouts.pool import Pool
from bapo.rollouts.replay_buffer import ReplayBuffer, joined
from bapo.types import Batch


def pool(round_index: int, groups: int = 4, size: int = 3, version: int | None = None) -> Pool:
    batch = random_batch(groups * size, seed=round_index, version=10 * round_index if version is None else version)
    rows = tuple((f"p{round_index}-{row // size}@0", row % size, row) for row in range(groups * size))
    meta = {"round": round_index, "policy_version": int(batch.policy_version.max()), "metrics": {"rollout/reward_mean": 0.5}}
    return Pool(batch, rows, meta)


def uids(pool: Pool) -> list[str]:
    return list(dict.fromkeys(uid for uid, _, _ in pool.rows))


def test_groups_come_whole_with_everything_they_had():
    own, earlier = pool(5), [pool(3), pool(4)]
    found = ReplayBuffer(groups=5, rounds=2).add(own, earlier, seed=1)
    assert uids(found)[:4] == uids(own)
    again = uids(found)[4:]
    assert len(again) == 5 == len(set(again))
    assert set(again) <= {*uids(earlier[0]), *uids(earlier[1])}
    assert found.meta["metrics"] == {"rollout/reward_mean": 0.5, "replay/groups": 5.0, "replay/row_frac": 15 / 27}
    known = {row: (old.batch, i) for old in (own, *earlier) for i, row in enumerate(old.rows)}
    for i, row in enumerate(found.rows):
        batch, at = known[row]
        width = int(batch.attention_mask[at].sum())
        for f in fields(Batch):
            here, there = getattr(found.batch, f.name)[i], getattr(batch, f.name)[at]
            assert torch.equal(here[:width], there[:width]) if here.dim() else here == there, f.name
        assert not found.batch.attention_mask[i, width:].any()
        assert (found.batch.policy_version[i, width:] == -1).all()


def test_the_choice_depends_on_seed_and_round_alone():
    own, earlier = pool(5), [pool(3, groups=20), pool(4, groups=20)]
    replay = ReplayBuffer(groups=8, rounds=2)
    assert replay.add(own, earlier, 1).rows == replay.add(own, earlier, 1).rows
    assert replay.add(own, earlier, 1).rows != replay.add(own, earlier, 2).rows
    other = replace(own, meta=own.meta | {"round": 6})
    assert replay.add(own, earlier, 1).rows != replay.add(other, earlier, 1).rows


def test_newest_first_takes_earlier_rounds_only_when_the_later_one_is_used_up():
    own, earlier = pool(5), [pool(3), pool(4)]
    newest = uids(ReplayBuffer(groups=6, rounds=2, order="newest").add(own, earlier, 1))[4:]
    assert sum(uid.startswith("p4") for uid in newest) == 4
    assert sum(uid.startswith("p3") for uid in newest) == 2
    assert len(ReplayBuffer(groups=99, rounds=2).add(own, earlier, 1).rows) == 36  # no more than there are


@pytest.mark.parametrize(("limit", "rounds"), [(None, {3, 4}), (20, {3, 4}), (19, {4}), (10, {4}), (9, set()), (0, set())])
def test_groups_that_are_too_stale_are_left_out(limit, rounds):
    own, earlier = pool(5), [pool(3), pool(4)]
    found = uids(ReplayBuffer(groups=99, rounds=2).add(own, earlier, 1, limit))[4:]
    assert {int(uid[1]) for uid in found} == rounds


def test_a_group_is_as_stale_as_its_stalest_token():
    own, mixed = pool(5), pool(4, groups=2)
    first = mixed.batch.response_mask[0].nonzero()[0]
    mixed.batch.policy_version[0, first] = 20
    found = uids(ReplayBuffer(groups=99).add(own, [mixed], 1, 10))[4:]
    assert found == ["p4-1@0"]


def test_the_staleness_of_a_round_is_that_of_its_policy_even_if_none_of_its_newest_tokens_are_trained_on():
    """A round whose responses were all begun by earlier policies, and finished with a span that is masked."""
    own, earlier = pool(5), [pool(4)]
    own.batch.policy_version[own.batch.response_mask] -= 10
    assert len(uids(ReplayBuffer(groups=99).add(own, earlier, 1, 10))) == 8
    assert len(uids(ReplayBuffer(groups=99).add(own, earlier, 1, 9))) == 4


def test_rounds_before_the_first_are_none():
    assert list(ReplayBuffer(groups=1, rounds=3).of(0)) == []
    assert list(ReplayBuffer(groups=1, rounds=3).of(2)) == [0, 1]
    assert list(ReplayBuffer(groups=1, rounds=3).of(7)) == [4, 5, 6]
    own = pool(0)
    assert ReplayBuffer(groups=4).add(own, [], 1).rows == own.rows


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 0}, r"schedule.replay.groups is 0; it must be >= 1"),
        ({"groups": 1, "rounds": 0}, r"schedule.replay.rounds is 0; it must be >= 1"),
        ({"groups": 1, "order": "old"}, r"schedule.replay.order is 'old'; it must be one of uniform, newest"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ReplayBuffer(**options)


def test_batches_of_different_widths_join():
    narrow, wide = random_batch(2, seed=1, longest=2), random_batch(2, seed=2, longest=9)
    both = joined([narrow, wide])
    assert torch.equal(both.select(torch.tensor([0, 1])).input_ids, narrow.select(torch.tensor([0, 1])).input_ids)
    assert torch.equal(both.lengths(), torch.cat([narrow.lengths(), wide.lengths()]))
