"""What losses other than BAPO share: a per-token objective becomes a loss with its metrics; bounds that no tally moves."""

from __future__ import annotations

import torch
from torch import Tensor

from bapo.losses.surrogate import is_clipped, token_metrics, token_weights, weighted_loss
from bapo.ops.masked import keep, masked_sum
from bapo.types import ClipBounds, LossInputs, LossOutput


def token_loss(
    inputs: LossInputs,
    bounds: ClipBounds,
    denominator: Tensor,
    *,
    objective: Tensor,
    ratio: Tensor,
    log_ratio: Tensor,
    clipped: Tensor | None = None,
    gradient: Tensor | None = None,
) -> LossOutput:
    """-sum_t w_t objective_t / denominator over one micro-batch, and its part of each metric. Tensors are [B, T].

    clipped: bool, the loss's own notion; None: PPO's at `bounds`. gradient: |d objective / d log pi|, what a token weighs in
    `bounds/positive_mass` and `bounds/negative_mass`; None: ratio |A| unless it is clipped. denominator: see `weighted_loss`.
    """
    loss = weighted_loss(objective, inputs, denominator)
    metrics = {"policy/loss": loss.detach().double()}
    advantages = keep(inputs.advantages, inputs.response_mask)
    if clipped is None:
        clipped = is_clipped(ratio, advantages, bounds.clip_low, bounds.clip_high)
    metrics |= token_metrics(inputs, bounds, ratio, log_ratio, objective, clipped=clipped)
    if gradient is not None:
        masses = gradient.detach().double() * token_weights(inputs).double()
        metrics["bounds/positive_mass"] = masked_sum(masses, advantages > 0)
        metrics["bounds/negative_mass"] = masked_sum(masses, advantages < 0)
    return LossOutput(loss, metrics, ratio.detach(), clipped)


def constant_bounds(low: float, high: float, device: torch.device) -> ClipBounds:
    """Bounds that no tally moves; float64, 0-dim."""
    low_bound, high_bound = (torch.full((), value, dtype=torch.float64, device=device) for value in (low, high))
    return ClipBounds(low_bound, high_bound)
