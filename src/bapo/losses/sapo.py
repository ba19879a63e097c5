"""SAPO: a smooth gate instead of a clip. Source: arXiv 2511.20347."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bapo.losses.surrogate import ratio_and_advantages
from bapo.losses.token_loss import constant_bounds, token_loss
from bapo.protocols import Loss
from bapo.types import ClipBounds, LossInputs, LossOutput

HALF_OPEN = math.log(3 + 2 * math.sqrt(2))
"""|x| at which 4 sigmoid(x) (1 - sigmoid(x)) is 1/2."""


@dataclass(frozen=True)
class SapoLoss(Loss):
    """Gradients fade as r leaves 1: -sum_t f_t(r_t) A_t / denominator, f(r) = 4 / tau * sigmoid(tau (r - 1)).

    tau is tau_pos for A > 0, else tau_neg. The gradient on log pi is g r A with the gate g = 4 sigmoid (1 - sigmoid) of
    tau (r - 1), which is 1 at r = 1: there it is REINFORCE's. Nothing is clipped outright. The bounds that are logged, beyond
    which a token counts as clipped (A > 0 above clip_high, A < 0 below clip_low), are where the gate is half open:
    1 + 1.763 / tau_pos and max(0, 1 - 1.763 / tau_neg). Masses are the gradient's, g r |A|.
    Errors: ValueError unless both tau are > 0 and finite.
    """

    tau_pos: float = 1.0
    tau_neg: float = 1.05

    def __post_init__(self) -> None:
        for name in ("tau_pos", "tau_neg"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be > 0 and finite")

    def choose(self, tally: Tensor) -> ClipBounds:
        """The ratios at which the gate is half open."""
        return constant_bounds(max(0.0, 1 - HALF_OPEN / self.tau_neg), 1 + HALF_OPEN / self.tau_pos, tally.device)

    def __call__(self, inputs: LossInputs, bounds: ClipBounds, denominator: Tensor) -> LossOutput:
        ratio, log_ratio, advantages = ratio_and_advantages(inputs)
        tau = torch.full_like(advantages, self.tau_neg).masked_fill(advantages > 0, self.tau_pos)
        gate = (tau * (ratio - 1)).sigmoid()
        return token_loss(
            inputs, bounds, denominator, objective=4 / tau * gate * advantages, ratio=ratio, log_ratio=log_ratio,
            gradient=4 * gate * (1 - gate) * ratio * advantages.abs(),
        )  # fmt: skip
