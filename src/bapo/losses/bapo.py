"""BAPO: clip bounds that adapt until positive tokens carry a target share of the update. Source: arXiv 2510.18927."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from torch import Tensor

from bapo.losses.clip_bounds import BoundRange, SearchOrder, clip_bounds, mass_table, tally_masses
from bapo.losses.surrogate import Mass, clipped_surrogate_loss
from bapo.types import ClipBounds, LossInputs, LossOutput


@dataclass(frozen=True)
class BapoLoss:
    """-sum_t min(r_t A_t, clip(r_t, clip_low, clip_high) A_t) / denominator at the first bounds with P / (P + N) >= target.

    target_positive_ratio: a share in (0, 1). clip_low, clip_high: ranges of the bounds, on the ratio itself.
    search_order: the bound that moves first. mass: what a token weighs in P and N.
    Errors: ValueError for a value out of its bounds or an unknown option.
    """

    target_positive_ratio: float
    clip_low: BoundRange
    clip_high: BoundRange
    search_order: SearchOrder = "high_first"
    mass: Mass = "gradient"
    adaptive = True

    def __post_init__(self) -> None:
        if not 0 < self.target_positive_ratio < 1:
            raise ValueError(f"target_positive_ratio is {self.target_positive_ratio}; it must be in (0, 1): a share, not P/N")
        if not self.clip_low.start > 0:
            raise ValueError(f"clip_low.start is {self.clip_low.start}; it must be > 0")
        if not self.clip_low.stop < 1:
            raise ValueError(f"clip_low.stop is {self.clip_low.stop}; it must be < 1, a bound on the ratio itself")
        if not self.clip_high.start > 1:
            raise ValueError(f"clip_high.start is {self.clip_high.start}; it must be > 1, a bound on the ratio itself")
        if self.search_order not in get_args(SearchOrder):
            raise ValueError(f"search_order is {self.search_order!r}; it must be one of {', '.join(get_args(SearchOrder))}")
        if self.mass not in get_args(Mass):
            raise ValueError(f"mass is {self.mass!r}; it must be one of {', '.join(get_args(Mass))}")

    def tally(self, inputs: LossInputs) -> Tensor:
        """P at every clip_high, then N at every clip_low; float64 [K_high + K_low]."""
        return tally_masses(inputs, self.clip_low, self.clip_high, self.mass)

    def choose(self, tally: Tensor) -> ClipBounds:
        """The bounds of this update from the tally summed over micro-batches and ranks."""
        return clip_bounds(mass_table(tally, self.clip_low, self.clip_high), self.target_positive_ratio, self.search_order)

    def __call__(self, inputs: LossInputs, bounds: ClipBounds, denominator: Tensor) -> LossOutput:
        """Loss and metrics of one micro-batch; `denominator` counts the trained tokens of the whole update."""
        return clipped_surrogate_loss(inputs, bounds, denominator, self.mass)
