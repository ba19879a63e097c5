"""The clipped surrogate with fixed bounds: PPO's and GRPO's (0.8, 1.2), DAPO's clip-higher (0.8, 1.28)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bapo.losses.surrogate import check_dual_clip, check_fixed_bounds
from bapo.losses.token_loss import clipped_surrogate_loss, constant_bounds
from bapo.protocols import Loss
from bapo.types import ClipBounds, LossInputs, LossOutput


@dataclass(frozen=True)
class FixedClipLoss(Loss):
    """-sum_t min(r_t A_t, clip(r_t, clip_low, clip_high) A_t) / denominator. Sources: arXiv 1707.06347, arXiv 2503.14476.

    The bounds are on the ratio itself. dual_clip: c > 1; for A < 0 the objective is not below c A (arXiv 1912.09729).
    Errors: ValueError unless 0 < clip_low < 1 < clip_high and 1 < dual_clip.
    """

    clip_low: float
    clip_high: float
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        check_fixed_bounds(self.clip_low, self.clip_high)
        check_dual_clip(self.dual_clip)

    def choose(self, tally: Tensor) -> ClipBounds:
        return constant_bounds(self.clip_low, self.clip_high, tally.device)

    def __call__(self, inputs: LossInputs, bounds: ClipBounds, denominator: Tensor) -> LossOutput:
        return clipped_surrogate_loss(inputs, bounds, denominator, dual_clip=self.dual_clip)
