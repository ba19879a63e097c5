"""The search for clip bounds, read off a table: one pass over the tokens knows every candidate of Algorithm 1.

The positive mass P depends on clip_high alone and the negative mass N on clip_low alone, so K_high + K_low sums stand for every
candidate pair, search order and target, and the sums of micro-batches and ranks add up. Source: arXiv 2510.18927, Algorithm 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bapo.losses.surrogate import Mass, clip_counts, importance_ratio
from bapo.ops.masked import keep
from bapo.types import ClipBounds, LossInputs

SearchOrder = Literal["high_first", "low_first"]
"""Which bound moves first; the other one starts once it has reached the end of its range."""

RATIO_TOLERANCE = 1e-12
"""Positive ratios nearer than this are equal: the order of a float64 sum must not decide a tie with the target."""


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
        if self.start < self.stop and not self.step > 0:
            raise ValueError(f"step is {self.step}; it must be > 0 to go from {self.start} to {self.stop}")

    def __len__(self) -> int:
        """Number of candidates. The slack keeps rounding in the division from adding a step."""
        return 1 if self.start == self.stop else 1 + max(1, math.ceil((self.stop - self.start) / self.step - 1e-6))

    def candidates(self, device: torch.device | str = "cpu") -> Tensor:
        """Every value, ascending, float64 [K]. Counted in whole steps; the last may be shorter and ends on `stop` exactly."""
        steps = torch.arange(len(self), dtype=torch.float64, device=device)
        return torch.where(steps < len(self) - 1, self.start + self.step * steps, self.stop)


@dataclass(frozen=True)
class MassTable:
    """Every candidate and its mass: clip_low, negative_mass float64 [K_low]; clip_high, positive_mass float64 [K_high]."""

    clip_low: Tensor
    clip_high: Tensor
    negative_mass: Tensor
    positive_mass: Tensor


@torch.no_grad()
def tally_masses(inputs: LossInputs, clip_low: BoundRange, clip_high: BoundRange, mass: Mass) -> Tensor:
    """P at every clip_high, then N at every clip_low: float64 [K_high + K_low], additive over micro-batches and ranks."""
    ratio, _ = importance_ratio(inputs.logprobs, inputs.behaviour_logprobs, inputs.response_mask)
    advantages = keep(inputs.advantages, inputs.response_mask)
    lows, highs = (bounds.candidates(ratio.device).to(ratio.dtype) for bounds in (clip_low, clip_high))

    # One bin per count of clipping bounds, 0..K; the bins of the negative tokens follow those of the positive ones.
    sizes = [len(highs) + 1, len(lows) + 1]
    counts = clip_counts(ratio, advantages, lows, highs)
    bins = torch.where(advantages < 0, counts + sizes[0], counts).flatten()
    weights = advantages.abs().double().flatten()

    def per_bin(values: Tensor) -> tuple[Tensor, Tensor]:
        positive, negative = weights.new_zeros(sum(sizes)).index_add_(0, bins, values).split(sizes)
        return positive, negative

    positive_value, negative_value = per_bin(ratio.double().flatten() * weights)
    positive_weight, negative_weight = per_bin(weights)
    positive = _mass_at(highs, positive_value, positive_weight, mass)
    negative = _mass_at(lows.flip(0), negative_value, negative_weight, mass).flip(0)
    return torch.cat([positive, negative])


def _mass_at(bounds: Tensor, value: Tensor, weight: Tensor, mass: Mass) -> Tensor:
    """Mass at each bound, [K], of one sign's tokens; `bounds` go from the tightest to the widest.

    value, weight: sums of r|A| and |A|, [K + 1]; bin c holds the tokens that the c tightest bounds clip.
    """
    unclipped = value.cumsum(0)[:-1]
    if mass == "gradient":
        return unclipped
    return unclipped + bounds * weight.flip(0).cumsum(0).flip(0)[1:]


def mass_table(tally: Tensor, clip_low: BoundRange, clip_high: BoundRange) -> MassTable:
    """The table behind a summed tally of `tally_masses` with the same ranges."""
    assert tally.shape == (len(clip_high) + len(clip_low),), f"tally of shape {tuple(tally.shape)} does not fit the ranges"
    positive, negative = tally.split([len(clip_high), len(clip_low)])
    return MassTable(clip_low.candidates(tally.device), clip_high.candidates(tally.device), negative, positive)


def positive_ratio(positive_mass: Tensor, negative_mass: Tensor) -> Tensor:
    """P / (P + N); 1 without negative mass (with no mass at all too). Source: arXiv 2510.18927, Eq. 8, as a share."""
    return torch.where(negative_mass == 0, 1.0, positive_mass / (positive_mass + negative_mass))


def search_path(table: MassTable, order: SearchOrder) -> tuple[Tensor, Tensor]:
    """Indices into clip_low and clip_high of every candidate pair in the order of the search, int64 [K_low + K_high - 1]."""
    last_low, last_high = len(table.clip_low) - 1, len(table.clip_high) - 1
    step = torch.arange(last_low + last_high + 1, device=table.clip_low.device)
    if order == "high_first":
        return (step - last_high).clamp(min=0), step.clamp(max=last_high)
    return step.clamp(max=last_low), (step - last_low).clamp(min=0)


@torch.no_grad()
def clip_bounds(table: MassTable, target: float, order: SearchOrder) -> ClipBounds:
    """First candidate on the search path whose positive ratio reaches `target`, else the last (Algorithm 1, lines 9-17).

    table: masses already summed over micro-batches and ranks. Nothing is read back to the host.
    """
    low, high = search_path(table, order)
    ratios = positive_ratio(table.positive_mass[high], table.negative_mass[low])
    met = ratios >= target - RATIO_TOLERANCE
    last = len(ratios) - 1
    misses_before_first_hit = (~met).long().cumprod(0).sum()
    chosen = misses_before_first_hit.clamp(max=last)
    return ClipBounds(
        clip_low=table.clip_low.take(low.take(chosen)),
        clip_high=table.clip_high.take(high.take(chosen)),
        positive_ratio=ratios.take(chosen),
        positive_ratio_start=ratios[0],
        target_met=met.any().double(),
        saturated=(chosen == last).double(),
        search_effective=((ratios - ratios[0]).abs() > RATIO_TOLERANCE).any().double(),
    )
