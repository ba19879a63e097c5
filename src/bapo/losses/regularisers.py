"""Terms beside the policy loss: a bonus for entropy, a penalty for leaving a frozen reference policy. Tensors are [B, T]."""

from __future__ import annotations

import torch
from torch import Tensor

from bapo.losses.objective import KlEstimator
from bapo.losses.surrogate import MAX_LOG_RATIO
from bapo.ops.masked import keep, masked_sum
from bapo.types import LossOutput


def entropy_bonus(entropy: Tensor, response_mask: Tensor, scale: Tensor, denominator: Tensor, coefficient: float) -> Tensor:
    """-coefficient * sum(scale * entropy) / denominator over one micro-batch, 0-dim.

    entropy: nats, with a graph. scale: `Objective.scale`. denominator: as of the policy loss, 0-dim. Its metric is
    `policy/entropy`, which every update logs, with or without a bonus.
    """
    return -coefficient * _scaled_sum(entropy, response_mask, scale) / denominator.clamp(min=1)


def reference_kl(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    response_mask: Tensor,
    scale: Tensor,
    denominator: Tensor,
    coefficient: float,
    estimator: KlEstimator,
) -> LossOutput:
    """coefficient * sum(scale * kl_estimate) / denominator over one micro-batch, and `policy/reference_kl`.

    scale: `Objective.scale`. denominator: as of the policy loss, 0-dim.
    """
    estimate = kl_estimate(logprobs, reference_logprobs, response_mask, estimator)
    loss = coefficient * _scaled_sum(estimate, response_mask, scale) / denominator.clamp(min=1)
    return LossOutput(loss, {"policy/reference_kl": masked_sum(estimate.detach(), response_mask, torch.float64)})


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, response_mask: Tensor, estimator: KlEstimator) -> Tensor:
    """KL(policy || reference) from the sampled token alone, 0 in masked slots; d = logprobs - reference_logprobs within +-20.

    As values, for tokens that the policy itself drew: k1 = d is unbiased; k2 = d^2 / 2 is biased, with less variance;
    k3 = exp(-d) - 1 + d is unbiased and >= 0. As gradients they differ: that of k1 is the score alone, whose mean is 0, so it
    regularises nothing; that of k2, d * score, is in the mean the gradient of this KL; that of k3, (1 - exp(-d)) * score, is
    that of the reversed KL(reference || policy) and agrees with k2 only near d = 0. None is corrected for tokens of an older
    policy, and beyond the clamp there is no gradient. Source: Schulman, "Approximating KL divergence" (2020).
    """
    d = (keep(logprobs, response_mask) - keep(reference_logprobs, response_mask)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    return (-d).expm1() + d


def _scaled_sum(values: Tensor, response_mask: Tensor, scale: Tensor) -> Tensor:
    return (keep(values, response_mask) * keep(scale, response_mask)).sum()
