"""DPPO: a trust region on probability, not on its ratio. Source: arXiv 2602.04879, Eq. 11-13, binary total variation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bapo.losses.surrogate import ratio_and_advantages
from bapo.losses.token_loss import constant_bounds, token_loss
from bapo.ops.masked import keep
from bapo.protocols import Loss
from bapo.types import ClipBounds, LossInputs, LossOutput


@dataclass(frozen=True)
class DppoLoss(Loss):
    """A token is masked once its probability has moved too far the way it is pushed: -sum_t M_t r_t A_t / denominator.

    M = 0 if A > 0 and p - mu > threshold, or A < 0 and mu - p > threshold, else 1, with the token's probability p now and mu
    under the behaviour policy. |p - mu| is the total variation between the two policies, seen as this token against all others:
    a rare token may change its ratio a lot, a likely one little. Masked is clipped; masses are the gradient's, M r |A|. There
    are no bounds on the ratio: 1 -+ threshold, which is logged, is where a token of mu = 1 is masked, the tightest case. mu is
    of `behaviour_logprobs`, computed by the trainer; the paper prefers the engine's own.
    Errors: ValueError unless 0 < threshold < 1.
    """

    threshold: float

    def __post_init__(self) -> None:
        if not 0 < self.threshold < 1:
            raise ValueError(f"threshold is {self.threshold}; it must be in (0, 1), a difference of two probabilities")

    def choose(self, tally: Tensor) -> ClipBounds:
        """1 -+ threshold; for the log only."""
        return constant_bounds(1 - self.threshold, 1 + self.threshold, tally.device)

    def __call__(self, inputs: LossInputs, bounds: ClipBounds, denominator: Tensor) -> LossOutput:
        ratio, log_ratio, advantages = ratio_and_advantages(inputs)
        with torch.no_grad():
            now, then = (keep(values, inputs.response_mask).exp() for values in (inputs.logprobs, inputs.behaviour_logprobs))
            masked = (now - then) * advantages.sign() > self.threshold
        objective = torch.where(masked, 0, ratio) * advantages
        return token_loss(inputs, bounds, denominator, objective=objective, ratio=ratio, log_ratio=log_ratio, clipped=masked)
