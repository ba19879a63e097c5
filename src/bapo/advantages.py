"""Group-relative advantages: a response is judged against the other responses to its own prompt.

Each is computed over every group drawn for a pool; groups of equal rewards leave the pool afterwards (`zero_variance`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GroupRelativeAdvantage:
    """A_i = (R_i - mean(group)) / (std(group) + eps), std over G - 1; without the division if not `normalize_std`.

    Source: GRPO, arXiv 2402.03300; without std Dr.GRPO, arXiv 2503.20783. Errors: ValueError if eps < 0.
    """

    normalize_std: bool = True
    eps: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.eps < math.inf:
            raise ValueError(f"eps is {self.eps}; it must be >= 0 and finite")

    def __call__(self, rewards: Tensor, uids: Sequence[str]) -> Tensor:
        """Advantages of rewards [N] in groups named by `uids`, float32 [N]."""
        return group_advantages(rewards, uids, self.normalize_std, self.eps)


@dataclass(frozen=True)
class LeaveOneOutAdvantage:
    """A_i = R_i - mean of the other rewards of its group = G / (G - 1) (R_i - mean(group)). Source: RLOO, arXiv 2402.14740."""

    def __call__(self, rewards: Tensor, uids: Sequence[str]) -> Tensor:
        """Advantages of rewards [N] in groups named by `uids`, float32 [N]."""
        values, groups = _groups(rewards, uids)
        centred = _centred(values, groups)
        sizes = {row: len(rows) for rows in groups for row in rows}
        return _tensor([sizes[row] * c / (sizes[row] - 1) if c else 0.0 for row, c in enumerate(centred)], rewards)


@dataclass(frozen=True)
class BatchNormalizedAdvantage:
    """A_i = (R_i - mean(group)) / (std + eps), std of R - mean(group) over the N rewards of the whole pool, over N - 1.

    The pool's mean of R - mean(group) is 0 and not taken off again. Groups of equal rewards count in N and in the std, though
    they are not trained on. Source: REINFORCE++ with group baseline, arXiv 2501.03262. Errors: ValueError if eps < 0.
    """

    eps: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.eps < math.inf:
            raise ValueError(f"eps is {self.eps}; it must be >= 0 and finite")

    def __call__(self, rewards: Tensor, uids: Sequence[str]) -> Tensor:
        """Advantages of rewards [N] in groups named by `uids`, float32 [N]."""
        values, groups = _groups(rewards, uids)
        centred = _centred(values, groups)
        squares = math.fsum(c**2 for c in centred)
        scale = math.sqrt(squares / (len(centred) - 1)) + self.eps if squares else 1.0
        return _tensor([c / scale for c in centred], rewards)


def group_advantages(rewards: Tensor, uids: Sequence[str], normalize_std: bool = True, eps: float = 0.0) -> Tensor:
    """Rewards centred within their group and divided by its sample std, float32 [N]; rows may come in any order.

    rewards: [N]; uids: the group of each row, by identity. A group of equal rewards, one of size 1 included, gets exactly 0.
    Sums are exact (math.fsum), so the order of the rows cannot change a bit. Errors: ValueError for a reward that is not
    finite or a length that differs.
    """
    values, groups = _groups(rewards, uids)
    advantages = _centred(values, groups)
    for rows in groups if normalize_std else ():
        squares = math.fsum(advantages[row] ** 2 for row in rows)
        if squares:
            scale = math.sqrt(squares / (len(rows) - 1)) + eps
            for row in rows:
                advantages[row] /= scale
    return _tensor(advantages, rewards)


def zero_variance(rewards: Tensor, uids: Sequence[str]) -> Tensor:
    """Rows whose whole group has equal rewards, and so nothing to teach; bool [N]. A group of one is such a group."""
    values, groups = _groups(rewards, uids)
    equal = [False] * len(values)
    for rows in groups:
        if len({values[row] for row in rows}) == 1:
            for row in rows:
                equal[row] = True
    return torch.tensor(equal, dtype=torch.bool, device=rewards.device)


def _groups(rewards: Tensor, uids: Sequence[str]) -> tuple[list[float], list[list[int]]]:
    """Rewards as float64 numbers, and the row numbers of every group."""
    values: list[float] = rewards.double().tolist()
    if len(values) != len(uids):
        raise ValueError(f"uids has {len(uids)} entries for {len(values)} rewards; there must be one per reward")
    groups: dict[str, list[int]] = {}
    for row, (value, uid) in enumerate(zip(values, uids, strict=True)):
        if not math.isfinite(value):
            raise ValueError(f"reward of row {row} (prompt {uid!r}) is {value}; it must be finite")
        groups.setdefault(uid, []).append(row)
    return values, list(groups.values())


def _centred(values: list[float], groups: list[list[int]]) -> list[float]:
    """Every value less the exact mean of its group, in float64; exactly 0 in a group of equal values or of one."""
    centred = [0.0] * len(values)
    for rows in groups:
        members = [values[row] for row in rows]
        if max(members) == min(members):  # asked of the rewards: their rounded mean need not equal them
            continue
        mean = math.fsum(members) / len(members)
        for row in rows:
            centred[row] = values[row] - mean
    return centred


def _tensor(advantages: list[float], rewards: Tensor) -> Tensor:
    return torch.tensor(advantages, dtype=torch.float32, device=rewards.device)
