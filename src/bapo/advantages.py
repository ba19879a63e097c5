"""Group-relative advantages: a response is judged against the other responses to its own prompt."""

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
        if not self.eps >= 0:
            raise ValueError(f"eps is {self.eps}; it must be >= 0")

    def __call__(self, rewards: Tensor, uids: Sequence[str]) -> Tensor:
        """Advantages of rewards [N] in groups named by `uids`, float32 [N]."""
        return group_advantages(rewards, uids, self.normalize_std, self.eps)


def group_advantages(rewards: Tensor, uids: Sequence[str], normalize_std: bool = True, eps: float = 0.0) -> Tensor:
    """Rewards centred within their group and divided by its sample std, float32 [N]; rows may come in any order.

    rewards: [N]; uids: the group of each row, by identity. A group of equal rewards, one of size 1 included, gets exactly 0.
    Sums are exact (math.fsum), so the order of the rows cannot change a bit. Errors: ValueError for a reward that is not
    finite or a length that differs.
    """
    values, groups = _groups(rewards, uids)
    advantages = [0.0] * len(values)
    for rows in groups:
        members = [values[row] for row in rows]
        if max(members) == min(members):  # asked of the rewards: their rounded mean need not equal them
            continue
        mean = math.fsum(members) / len(members)
        variance = math.fsum((value - mean) ** 2 for value in members) / (len(members) - 1)
        scale = math.sqrt(variance) + eps if normalize_std else 1.0
        for row in rows:
            advantages[row] = (values[row] - mean) / scale
    return torch.tensor(advantages, dtype=torch.float32, device=rewards.device)


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
