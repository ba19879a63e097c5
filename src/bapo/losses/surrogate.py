"""The clipped surrogate: importance ratio, the one rule for what is clipped, objective, loss and metrics.

Notation: r importance ratio, A advantage, P and N masses of the tokens with A > 0 and A < 0. Tensors are [B, T].
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from bapo.ops.masked import keep, masked_max, masked_sum
from bapo.types import ClipBounds, LossInputs, LossOutput

MAX_LOG_RATIO = 20.0
"""|log r| beyond this is clamped before exp: in float32 exp(88.8) is infinite, and the backward of an unused branch 0 * inf."""

Mass = Literal["gradient", "surrogate"]
"""What a token weighs in P or N: r|A| when it is not clipped, else 0; or the absolute value of its clipped objective."""


def importance_ratio(logprobs: Tensor, behaviour_logprobs: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """(r, log r) with r = exp(logprobs - behaviour_logprobs); 1 and 0 in masked slots, where the inputs may hold anything.

    log r is returned as it is, r is the exponential of log r clamped at +-MAX_LOG_RATIO: finite, and without gradient there.
    A NaN log-ratio (two probabilities of zero) stays NaN, so that the loss shows it.
    """
    log_ratio = keep(logprobs, response_mask) - keep(behaviour_logprobs, response_mask)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), log_ratio


def clip_counts(ratio: Tensor, advantages: Tensor, clip_lows: Tensor, clip_highs: Tensor) -> Tensor:
    """How many bounds clip each token, int32 [B, T]: the one rule for "is clipped", of the search and of the loss.

    A token with A > 0 is clipped by every bound of `clip_highs` below r, one with A < 0 by every bound of `clip_lows` above r;
    one with A = 0 by none, and so is a NaN. Both bound vectors ascend, [K_low] and [K_high], and are compared in r's precision.
    """
    lows, highs = clip_lows.to(ratio.dtype), clip_highs.to(ratio.dtype)
    by_high = _bounds_above(-ratio, -highs.flip(0))
    by_low = _bounds_above(ratio, lows)
    return torch.where(advantages > 0, by_high, torch.where(advantages < 0, by_low, 0))


def _bounds_above(values: Tensor, bounds: Tensor) -> Tensor:
    """How many of the ascending `bounds` are greater than each value; none is greater than NaN."""
    return len(bounds) - torch.bucketize(values.detach().contiguous(), bounds, right=True, out_int32=True)


def is_clipped(ratio: Tensor, advantages: Tensor, clip_low: Tensor, clip_high: Tensor) -> Tensor:
    """Does the objective of a token ignore its ratio at these 0-dim bounds? bool [B, T]."""
    return clip_counts(ratio, advantages, clip_low[None], clip_high[None]) > 0


def clipped_objective(ratio: Tensor, advantages: Tensor, clip_low: Tensor, clip_high: Tensor) -> Tensor:
    """min(r A, clip(r, clip_low, clip_high) A), [B, T]. Source: PPO, arXiv 1707.06347, Eq. 7, with bounds on r itself."""
    bound = torch.where(advantages > 0, clip_high.to(ratio.dtype), clip_low.to(ratio.dtype))
    return torch.where(is_clipped(ratio, advantages, clip_low, clip_high), bound * advantages, ratio * advantages)


def clipped_surrogate_loss(inputs: LossInputs, bounds: ClipBounds, denominator: Tensor, mass: Mass = "gradient") -> LossOutput:
    """-sum_t min(r_t A_t, clip(r_t, clip_low, clip_high) A_t) / denominator, over the trained tokens of one micro-batch.

    denominator: trained tokens of the whole update, 0-dim; an update without tokens has loss 0 and zero gradients.
    mass: what a token weighs in the metrics `bounds/positive_mass` and `bounds/negative_mass`.
    """
    ratio, log_ratio = importance_ratio(inputs.logprobs, inputs.behaviour_logprobs, inputs.response_mask)
    advantages = keep(inputs.advantages, inputs.response_mask)
    objective = clipped_objective(ratio, advantages, bounds.clip_low, bounds.clip_high)
    loss = -objective.sum() / denominator.clamp(min=1)
    metrics = _token_metrics(inputs, bounds, ratio, log_ratio, objective, mass)
    return LossOutput(loss, {"policy/loss": loss.detach().double(), **metrics})


@torch.no_grad()
def _token_metrics(
    inputs: LossInputs, bounds: ClipBounds, ratio: Tensor, log_ratio: Tensor, objective: Tensor, mass: Mass
) -> dict[str, Tensor]:
    """This micro-batch's part of each metric, float64, 0-dim: a token sum where the reduction is `token_mean`."""
    mask = inputs.response_mask
    advantages = keep(inputs.advantages, mask)
    positive, negative = advantages > 0, advantages < 0
    clipped = is_clipped(ratio, advantages, bounds.clip_low, bounds.clip_high)
    clamped_log_ratio = log_ratio.double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    gradient_mass = torch.where(clipped, 0, ratio.double() * advantages.double().abs())
    token_mass = gradient_mass if mass == "gradient" else objective.double().abs()

    def total(values: Tensor, where: Tensor = mask) -> Tensor:
        return masked_sum(values, where, torch.float64)

    return {
        "policy/approx_kl": total(clamped_log_ratio.expm1() - clamped_log_ratio),
        "policy/ratio_mean": total(ratio),
        "policy/ratio_max": masked_max(ratio, mask).double(),
        "policy/clip_frac": total(clipped),
        "policy/clip_frac_high": total(clipped & positive),
        "policy/clip_frac_low": total(clipped & negative),
        "policy/negative_token_frac": total(negative),
        "policy/log_ratio_clamped_frac": total(log_ratio.abs() > MAX_LOG_RATIO),
        "bounds/positive_mass": total(token_mass, positive),
        "bounds/negative_mass": total(token_mass, negative),
    }
