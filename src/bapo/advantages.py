"""Group-relative advantages: a response is compared with the other responses to its own prompt.

Each is computed over every group generated for a pool; groups of equal rewards leave the pool afterwards (`zero_variance`).
Rewards are [N], uids name the group of each row, advantages are float32 [N]. Sums are exact (math.fsum), so the order of the
rows cannot change a bit; a group of equal rewards, one of size 1 included, gets exactly 0.
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
        _check_eps(self.eps)

    def __call__(self, rewards: Tensor, uids: Sequence[str]) -> Tensor:
        return group_advantages(rewards, uids, self.normalize_std, self.eps)


@dataclass(frozen=True)
class LeaveOneOutAdvantage:
    """A_i = R_i - mean of the other rewards of its group = G / (G - 1) (R_i - mean(group)). Source: RLOO, arXiv 2402.14740."""

    def __call__(self, rewards: Tensor, uids: Sequence[str]) -> Tensor:
        groups = _groups(rewards, uids)
        sizes = {row: len(group) for group in groups for row in group}
        return _tensor({row: sizes[row] * c / (sizes[row] - 1) if c else 0.0 for row, c in _centred(groups).items()}, rewards)


@dataclass(frozen=True)
class BatchNormalizedAdvantage:
    """A_i = (R_i - mean(group)) / (std + eps), std of R - mean(group) over the N rewards of the whole pool, over N - 1.

    The pool's mean of R - mean(group) is 0 and not taken off again. Groups of equal rewards count in N and in the std, though
    they are not trained on. Source: REINFORCE++ with group baseline, arXiv 2501.03262. Errors: ValueError if eps < 0.
    """

    eps: float = 0.0

    def __post_init__(self) -> None:
        _check_eps(self.eps)

    def __call__(self, rewards: Tensor, uids: Sequence[str]) -> Tensor:
        centred = _centred(_groups(rewards, uids))
        squares = math.fsum(c**2 for c in centred.values())
        scale = math.sqrt(squares / (len(centred) - 1)) + self.eps if squares else 1.0
        return _tensor({row: c / scale for row, c in centred.items()}, rewards)


def group_advantages(rewards: Tensor, uids: Sequence[str], normalize_std: bool = True, eps: float = 0.0) -> Tensor:
    """Rewards centred within their group and divided by its sample std; rows may come in any order.

    Errors: ValueError for a reward that is not finite or a length that differs.
    """
    groups = _groups(rewards, uids)
    advantages = _centred(groups)
    for group in groups if normalize_std else ():
        squares = math.fsum(advantages[row] ** 2 for row in group)
        if squares:
            scale = math.sqrt(squares / (len(group) - 1)) + eps
            for row in group:
                advantages[row] /= scale
    return _tensor(advantages, rewards)


def zero_variance(rewards: Tensor, uids: Sequence[str]) -> Tensor:
    """Rows whose whole group has equal rewards, and so nothing to teach; bool [N]. A group of one is such a group."""
    equal = torch.zeros(len(uids), dtype=torch.bool, device=rewards.device)
    for group in _groups(rewards, uids):
        if len(set(group.values())) == 1:
            equal[list(group)] = True
    return equal


def _groups(rewards: Tensor, uids: Sequence[str]) -> list[dict[int, float]]:
    """Row number -> reward, in float64, of every group."""
    values: list[float] = rewards.double().tolist()
    if len(values) != len(uids):
        raise ValueError(f"uids has {len(uids)} entries for {len(values)} rewards; there must be one per reward")
    groups: dict[str, dict[int, float]] = {}
    for row, (value, uid) in enumerate(zip(values, uids, strict=True)):
        if not math.isfinite(value):
            raise ValueError(f"reward of row {row} (prompt {uid!r}) is {value}; it must be finite")
        groups.setdefault(uid, {})[row] = value
    return list(groups.values())


def _centred(groups: list[dict[int, float]]) -> dict[int, float]:
    """Row number -> reward less the exact mean of its group; exactly 0 in a group of equal rewards, whatever rounding says."""
    centred: dict[int, float] = {}
    for group in groups:
        mean = math.fsum(group.values()) / len(group)
        equal = len(set(group.values())) == 1
        centred |= {row: 0.0 if equal else value - mean for row, value in group.items()}
    return centred


def _tensor(advantages: dict[int, float], rewards: Tensor) -> Tensor:
    ordered = [advantages[row] for row in range(len(advantages))]
    return torch.tensor(ordered, dtype=torch.float32, device=rewards.device)


def _check_eps(eps: float) -> None:
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps is {eps}; it must be >= 0 and finite")
