"""The search for clip bounds, read off a table: one pass over the tokens knows every candidate of Algorithm 1.

The positive mass P depends on clip_high alone and the negative mass N on clip_low alone, so K_high + K_low sums stand for every
candidate pair, search order and target, and the sums of micro-batches and ranks add up. Source: arXiv 2510.18927, Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bapo.losses.surrogate import MassRule, bounds_below, is_dual_clipped, ratio_and_advantages
from bapo.types import ClipBounds, LossInputs

SearchOrder = Literal["high_first", "low_first"]
"""The bound that moves first; the other one starts once it has reached the end of its range."""

Balance = Literal["share", "signed"]
"""The positive ratio that the target is compared with: P / (P + N); or P / |P - N|, Eq. 8 with its bars around a signed sum."""

BoundsScope = Literal["update", "micro_batch"]
"""One pair of bounds for the whole update; or for each micro-batch, as the authors' code does (for comparison only)."""

RATIO_TOLERANCE = 1e-12
"""Positive ratios nearer than this are equal: the order of a float64 sum must not decide a tie with the target."""

MAX_CANDIDATES = 10_000
"""Steps of one range: beyond that a table would cost more than the tokens."""


@dataclass(frozen=True)
class BoundRange:
    """The values of one clip bound, on the ratio itself: from `start` to `stop` in steps of `step`; start == stop pins it."""

    start: float
    stop: float
    step: float = 0.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.start) or not math.isfinite(self.stop):
            raise ValueError(f"start is {self.start} and stop is {self.stop}; both must be finite")
        if not self.start <= self.stop:
            raise ValueError(f"start is {self.start}; it must be <= stop, which is {self.stop}")
        least = (self.stop - self.start) / MAX_CANDIDATES
        if self.start < self.stop and not least <= self.step < math.inf:
            raise ValueError(f"step is {self.step}; it must be > 0 (and >= {least:g}) to go from {self.start} to {self.stop}")

    def __len__(self) -> int:
        """Number of candidates. The slack keeps rounding in the division from adding a step."""
        return 1 if self.start == self.stop else 1 + max(1, math.ceil((self.stop - self.start) / self.step - 1e-6))

    def candidates(self, device: torch.device | str = "cpu") -> Tensor:
        """Every value, ascending, float64 [K]. Counted in whole steps; the last may be shorter and ends on `stop` exactly."""
        steps = torch.arange(len(self), dtype=torch.float64, device=device)
        return torch.where(steps < len(self) - 1, self.start + self.step * steps, self.stop)


@dataclass(frozen=True)
class MassTable:
    """Every candidate and its mass, and the masses if every r were 1.

    clip_low, negative_mass: float64 [K_low]; clip_high, positive_mass: float64 [K_high]; *_at_one: 0-dim.
    """

    clip_low: Tensor
    clip_high: Tensor
    negative_mass: Tensor
    positive_mass: Tensor
    negative_at_one: Tensor
    positive_at_one: Tensor


@torch.no_grad()
def tally_masses(inputs: LossInputs, clip_low: BoundRange, clip_high: BoundRange, rule: MassRule) -> Tensor:
    """P at every clip_high, N at every clip_low, then P and N if every r were 1.

    float64 [K_high + K_low + 2], additive over micro-batches and ranks.
    """
    ratio, _, advantages = ratio_and_advantages(inputs)
    lows, highs = (bounds.candidates(ratio.device).to(ratio.dtype) for bounds in (clip_low, clip_high))

    # A bin per number of bounds that lie below r; the bins of the negative tokens follow those of the positive ones.
    size = len(lows) + len(highs) + 1
    bins = bounds_below(ratio, lows, highs).add_((advantages < 0).int(), alpha=size).flatten()
    at_one = rule.weigh(advantages.abs(), inputs)

    # The dual clip is the same at every candidate: these tokens are unclipped by every clip_low, at a ratio of their own.
    value = ratio
    if rule.dual_clip is not None:
        dual_value = rule.dual_clip if rule.mass == "surrogate" else 0.0
        value = torch.where(is_dual_clipped(ratio, advantages, rule.dual_clip), dual_value, ratio)

    def per_bin(masses: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of positive tokens up to each bin, and of negative ones from each bin on; float64 [size]."""
        sums = torch.zeros(2 * size, dtype=torch.float64, device=masses.device)
        positive, negative = sums.index_add_(0, bins, masses.double().flatten()).split(size)
        return positive.cumsum(0), negative.flip(0).cumsum(0).flip(0)

    positive, negative = per_bin(value * at_one)
    positive_at_one, negative_at_one = per_bin(at_one)
    # Not clipped: by the k-th of the highs, tokens with no more than k highs below r; by the k-th of the lows, more than k.
    positive_mass, negative_mass = positive[len(lows) : -1], negative[1 : len(lows) + 1]
    if rule.mass == "surrogate":  # a clipped token weighs its bound
        positive_mass = positive_mass + highs * (positive_at_one[-1] - positive_at_one[len(lows) : -1])
        negative_mass = negative_mass + lows * (negative_at_one[0] - negative_at_one[1 : len(lows) + 1])
    return torch.cat([positive_mass, negative_mass, positive_at_one[-1:], negative_at_one[:1]])


def mass_table(tally: Tensor, clip_low: BoundRange, clip_high: BoundRange) -> MassTable:
    """The table behind a summed tally of `tally_masses` with the same ranges."""
    sizes = [len(clip_high), len(clip_low), 2]
    assert tally.shape == (sum(sizes),), f"tally of shape {tuple(tally.shape)} does not fit the ranges"
    positive, negative, at_one = tally.split(sizes)
    lows, highs = clip_low.candidates(tally.device), clip_high.candidates(tally.device)
    return MassTable(lows, highs, negative, positive, negative_at_one=at_one[1], positive_at_one=at_one[0])


def positive_ratio(positive_mass: Tensor, negative_mass: Tensor, balance: Balance = "share") -> Tensor:
    """P / (P + N), or P / |P - N| if `balance` is signed; 1 without negative mass (with no mass at all too).

    The signed one is infinite at P = N and can exceed 1. Source: arXiv 2510.18927, Eq. 8.
    """
    whole = positive_mass + negative_mass if balance == "share" else (positive_mass - negative_mass).abs()
    return torch.where(negative_mass == 0, 1.0, positive_mass / whole)


def search_path(table: MassTable, order: SearchOrder) -> tuple[Tensor, Tensor]:
    """Indices into clip_low and clip_high of every candidate pair in the order of the search, int64 [K_low + K_high - 1]."""
    last_low, last_high = len(table.clip_low) - 1, len(table.clip_high) - 1
    step = torch.arange(last_low + last_high + 1, device=table.clip_low.device)
    if order == "high_first":
        return (step - last_high).clamp(min=0), step.clamp(max=last_high)
    return step.clamp(max=last_low), (step - last_low).clamp(min=0)


@torch.no_grad()
def clip_bounds(table: MassTable, target: Tensor, order: SearchOrder, balance: Balance = "share") -> ClipBounds:
    """First candidate on the search path whose positive ratio reaches `target`, else the last (Algorithm 1, lines 9-17).

    table: masses already summed over micro-batches and ranks. target: 0-dim. Nothing is read back to the host.
    The ratio in the bounds is the one that `balance` names; those in the metrics are shares, which are always finite.
    """
    low, high = search_path(table, order)
    positive, negative = table.positive_mass[high], table.negative_mass[low]
    ratios, shares = positive_ratio(positive, negative, balance), positive_ratio(positive, negative)
    met = ratios >= target - RATIO_TOLERANCE
    last = len(ratios) - 1
    misses_before_first_hit = (~met).long().cumprod(0).sum()
    chosen = misses_before_first_hit.clamp(max=last)
    return ClipBounds(
        clip_low=table.clip_low.take(low.take(chosen)),
        clip_high=table.clip_high.take(high.take(chosen)),
        positive_ratio=ratios.take(chosen),
        metrics={
            "bounds/positive_ratio": shares.take(chosen),
            "bounds/positive_ratio_start": shares[0],
            "bounds/positive_ratio_at_one": positive_ratio(table.positive_at_one, table.negative_at_one),
            "bounds/target": target,
            "bounds/target_met": met.any().double(),
            "bounds/saturated": (chosen == last).double(),
            "bounds/search_effective": ((shares - shares[0]).abs() > RATIO_TOLERANCE).any().double(),
        },
    )


def counterfactuals(
    table: MassTable, target: Tensor, order: SearchOrder, balance: Balance, targets: Sequence[float]
) -> dict[str, Tensor]:
    """`bounds/cf/<choice>/{clip_low,clip_high,positive_ratio}`: what another order, or `order` with another target, had chosen.

    The run's own choice is among them, so that the names do not depend on the options. No further pass over the tokens.
    """
    choices: dict[str, ClipBounds] = {
        "high_first": clip_bounds(table, target, "high_first", balance),
        "low_first": clip_bounds(table, target, "low_first", balance),
    }
    choices |= {f"target_{t:g}": clip_bounds(table, torch.full_like(target, t), order, balance) for t in targets}
    metrics: dict[str, Tensor] = {}
    for name, bounds in choices.items():
        metrics[f"bounds/cf/{name}/clip_low"] = bounds.clip_low
        metrics[f"bounds/cf/{name}/clip_high"] = bounds.clip_high
        metrics[f"bounds/cf/{name}/positive_ratio"] = bounds.metrics["bounds/positive_ratio"]
    return metrics
