"""CISPO: the importance weight is clipped, the token's gradient never dropped. Source: arXiv 2506.13585, Eq. 4 and 5."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bapo.losses.surrogate import check_fixed_bounds, ratio_and_advantages
from bapo.losses.token_loss import constant_bounds, entropy_clip_metrics, token_loss
from bapo.ops.masked import keep, masked_sum
from bapo.protocols import Loss
from bapo.types import ClipBounds, LossInputs, LossOutput


@dataclass(frozen=True)
class CispoLoss(Loss):
    """REINFORCE with a clipped and detached weight: -sum_t sg(clip(r_t, clip_low, clip_high)) A_t log pi_t / denominator.

    A token is clipped when its weight is cut: r outside [clip_low, clip_high] and A != 0. `policy/clip_frac` counts these;
    `policy/clip_frac_high` and `_low` only those that PPO would clip too (A > 0 above, A < 0 below). Masses are the gradient's,
    clip(r) |A|. The loss's value estimates no return; only its gradient means something. clip_low 0 is no lower bound, as in
    the paper. Errors: ValueError unless 0 <= clip_low < 1 < clip_high.
    """

    clip_low: float
    clip_high: float

    def __post_init__(self) -> None:
        check_fixed_bounds(self.clip_low, self.clip_high, zero=True)

    def choose(self, tally: Tensor) -> ClipBounds:
        return constant_bounds(self.clip_low, self.clip_high, tally.device)

    def __call__(self, inputs: LossInputs, bounds: ClipBounds, denominator: Tensor) -> LossOutput:
        ratio, log_ratio, advantages = ratio_and_advantages(inputs)
        low, high = bounds.clip_low.to(ratio.dtype), bounds.clip_high.to(ratio.dtype)
        weight = ratio.detach().clamp(low, high)
        objective = weight * advantages * keep(inputs.logprobs, inputs.response_mask)
        output = token_loss(
            inputs, bounds, denominator, objective=objective, ratio=ratio, log_ratio=log_ratio,
            gradient=weight * advantages.abs(),
        )  # fmt: skip
        cut = ((ratio < low) | (ratio > high)) & (advantages != 0)
        metrics = output.metrics | entropy_clip_metrics(inputs, dropped=torch.zeros_like(cut))
        metrics["policy/clip_frac"] = masked_sum(cut, inputs.response_mask).double()
        return LossOutput(output.loss, metrics, output.ratio, cut)
