"""BAPO: clip bounds that adapt until positive tokens carry a target share of the update. Source: arXiv 2510.18927."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from bapo.losses.clip_bounds import (
    Balance,
    BoundRange,
    BoundsScope,
    MassTable,
    SearchOrder,
    clip_bounds,
    counterfactuals,
    mass_table,
    positive_ratio,
    tally_masses,
)
from bapo.losses.surrogate import Mass, MassRule, MassWeight, check_dual_clip
from bapo.losses.token_loss import clipped_surrogate_loss
from bapo.protocols import Loss
from bapo.types import ClipBounds, LossInputs, LossOutput, check_choices

TargetMode = Literal["absolute", "relative"]
"""Target of the search: a fixed positive ratio; or the one that the batch would have at r = 1, plus a margin."""

RELATIVE_TARGETS = (0.01, 0.99)
"""Limits of a relative target, so that a batch of one sign, or nearly so, ends as with an absolute target."""


@dataclass(frozen=True)
class BapoLoss(Loss):
    """-sum_t min(r_t A_t, clip(r_t, clip_low, clip_high) A_t) / denominator at the first bounds whose positive ratio >= target.

    target_positive_ratio: in (0, 1), of the ratio that `balance` names; not used where target_mode is relative.
    clip_low, clip_high: ranges of the bounds, on the ratio itself. search_order: the bound that moves first.
    mass, weight: see `MassRule`. balance: the ratio of P and N that is compared with the target.
    dual_clip: c > 1; for A < 0 the objective is not below c A. dual_clip_in_search: the masses apply it too.
    target_mode relative: the target is the share at r = 1 plus target_margin, within RELATIVE_TARGETS.
    bounds_scope: one pair of bounds for the update or for each micro-batch. counterfactuals: log the bounds that both orders
    and each of `counterfactual_targets` would have chosen.
    Errors: ValueError for a value out of its bounds or an unknown option.
    """

    target_positive_ratio: float
    clip_low: BoundRange
    clip_high: BoundRange
    search_order: SearchOrder = "high_first"
    mass: Mass = "gradient"
    weight: MassWeight = "none"
    balance: Balance = "share"
    dual_clip: float | None = None
    dual_clip_in_search: bool = True
    target_mode: TargetMode = "absolute"
    target_margin: float = 0.0
    bounds_scope: BoundsScope = "update"
    counterfactuals: bool = True
    counterfactual_targets: tuple[float, ...] = (0.3, 0.4, 0.5)
    adaptive = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "counterfactual_targets", tuple(self.counterfactual_targets))  # YAML has lists
        check_share("target_positive_ratio", self.target_positive_ratio)
        for target in self.counterfactual_targets:
            check_share("counterfactual_targets", target)
        if not self.clip_low.start > 0:
            raise ValueError(f"clip_low.start is {self.clip_low.start}; it must be > 0")
        if not self.clip_low.stop < 1:
            raise ValueError(f"clip_low.stop is {self.clip_low.stop}; it must be < 1, a bound on the ratio itself")
        if not self.clip_high.start > 1:
            raise ValueError(f"clip_high.start is {self.clip_high.start}; it must be > 1, a bound on the ratio itself")
        check_choices(self)
        check_dual_clip(self.dual_clip)
        if not -1 < self.target_margin < 1:
            raise ValueError(f"target_margin is {self.target_margin}; it must be in (-1, 1), a difference of shares")
        if self.target_margin and self.target_mode == "absolute":
            raise ValueError(f"target_margin is {self.target_margin}; it must be 0 unless target_mode is 'relative'")
        names = [f"{target:g}" for target in self.counterfactual_targets]
        if len(set(names)) < len(names):
            raise ValueError(
                f"counterfactual_targets is {self.counterfactual_targets}; each must have a name of its own: {names}"
            )
        if self.target_mode == "relative" and self.balance != "share":
            raise ValueError(f"balance is {self.balance!r}; it must be 'share' where target_mode is 'relative'")

    @property
    def mass_rule(self) -> MassRule:
        return MassRule(self.mass, self.weight, self.dual_clip if self.dual_clip_in_search else None)

    def tally(self, inputs: LossInputs) -> Tensor:
        """P at every clip_high, N at every clip_low, P and N at r = 1; float64 [K_high + K_low + 2]."""
        return tally_masses(inputs, self.clip_low, self.clip_high, self.mass_rule)

    def choose(self, tally: Tensor) -> ClipBounds:
        table = mass_table(tally, self.clip_low, self.clip_high)
        target = self._target(table)
        bounds = clip_bounds(table, target, self.search_order, self.balance)
        if not self.counterfactuals:
            return bounds
        others = counterfactuals(table, target, self.search_order, self.balance, self.counterfactual_targets)
        return replace(bounds, metrics={**bounds.metrics, **others})

    def _target(self, table: MassTable) -> Tensor:
        if self.target_mode == "absolute":
            return torch.full_like(table.positive_at_one, self.target_positive_ratio)
        share = positive_ratio(table.positive_at_one, table.negative_at_one)
        return (share + self.target_margin).clamp(*RELATIVE_TARGETS)

    def __call__(self, inputs: LossInputs, bounds: ClipBounds, denominator: Tensor) -> LossOutput:
        return clipped_surrogate_loss(inputs, bounds, denominator, self.mass_rule, self.dual_clip)


def check_share(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"{name} is {value}; it must be in (0, 1): a share, not P/N")
