"""Terms added to the policy loss: a bonus for entropy, a penalty for leaving a frozen reference policy. Tensors are [B, T]."""

from __future__ import annotations

import torch
from torch import Tensor

from bapo.losses.objective import KlEstimator, Objective
from bapo.losses.surrogate import MAX_LOG_RATIO
from bapo.ops.masked import keep, masked_sum
from bapo.types import Batch, LossOutput, TokenStats


def regularised(
    output: LossOutput, stats: TokenStats, batch: Batch, objective: Objective, denominator: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy loss plus the objective's regularisers, and the metrics of all, for one micro-batch.

    loss - entropy_bonus sum(s H) / denominator + reference_kl sum(s KL) / denominator, s = `Objective.scale`.
    stats: the policy's, with a graph, also of the entropy if there is a bonus. denominator: as of the policy loss, 0-dim.
    """
    loss, metrics, mask = output.loss, output.metrics, batch.response_mask
    scale, count = objective.scale(mask), denominator.clamp(min=1)
    if objective.entropy_bonus:
        loss = loss - objective.entropy_bonus * (keep(stats.entropy, mask) * scale).sum() / count
    if objective.reference_kl:
        estimate = kl_estimate(stats.logprobs, batch.reference_logprobs, mask, objective.kl_estimator)
        loss = loss + objective.reference_kl * (estimate * scale).sum() / count
        metrics = metrics | {"policy/reference_kl": masked_sum(estimate.detach(), mask, torch.float64)}
    return loss, metrics


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, response_mask: Tensor, estimator: KlEstimator) -> Tensor:
    """KL(policy || reference) from the sampled token alone, 0 in masked slots; d = logprobs - reference_logprobs within +-20.

    Values, for tokens that the policy itself sampled: k1 = d is unbiased; k2 = d^2 / 2 is biased, with less variance;
    k3 = exp(-d) - 1 + d is unbiased and >= 0. Gradients, with g = grad log pi: k1's is g, whose mean is 0, so it regularises
    nothing; k2's is d g, in the mean the gradient of this KL; k3's is (1 - exp(-d)) g, that of the reversed KL(reference ||
    policy), and agrees with k2's only near d = 0. None is corrected for off-policy tokens, and beyond the clamp there is no
    gradient. Source: Schulman, "Approximating KL divergence" (2020).
    """
    d = (keep(logprobs, response_mask) - keep(reference_logprobs, response_mask)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    return (-d).expm1() + d
