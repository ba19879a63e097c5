"""From a per-token objective to a loss with its metrics; shared by all losses."""

from __future__ import annotations

import torch
from torch import Tensor

from bapo.losses.surrogate import (
    MAX_LOG_RATIO,
    MassRule,
    clipped_objective,
    is_clipped,
    is_dual_clipped,
    ratio_and_advantages,
    token_weights,
)
from bapo.ops.masked import keep, masked_max, masked_sum
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
    mass: MassRule | None = None,
    dual_clip: float | None = None,
) -> LossOutput:
    """-sum_t w_t objective_t / denominator over one micro-batch, and its part of each metric. Tensors are [B, T].

    denominator: a count over the whole update, 0-dim; an update without tokens has loss 0 and zero gradients.
    clipped: bool, the loss's own rule; None: PPO's at `bounds` and `dual_clip`.
    gradient: |d objective / d log pi|, the mass of a token in `bounds/positive_mass` and `bounds/negative_mass`; None: the mass
    by the rule `mass`, whose default is r |A| unless the token is clipped.
    """
    kept = keep(objective, inputs.response_mask)
    if inputs.weights is not None:
        kept = kept * token_weights(inputs)
    loss = -kept.sum() / denominator.clamp(min=1)
    advantages = keep(inputs.advantages, inputs.response_mask)
    dual = is_dual_clipped(ratio, advantages, dual_clip)
    if clipped is None:
        clipped = is_clipped(ratio, advantages, bounds.clip_low, bounds.clip_high, dual_clip)
    with torch.no_grad():
        if gradient is None:
            masses = _masses(inputs, ratio, advantages, objective, clipped, dual, mass or MassRule(dual_clip=dual_clip))
        else:
            masses = gradient.double() * token_weights(inputs).double()
        metrics = _metrics(inputs, ratio, log_ratio, advantages, clipped, dual, masses)
    return LossOutput(loss, {"policy/loss": loss.detach().double(), **metrics}, ratio.detach(), clipped)


def clipped_surrogate_loss(
    inputs: LossInputs,
    bounds: ClipBounds,
    denominator: Tensor,
    mass: MassRule | None = None,
    dual_clip: float | None = None,
) -> LossOutput:
    """-sum_t w_t min(r_t A_t, clip(r_t, clip_low, clip_high) A_t) / denominator; dual_clip: c of `clipped_objective`."""
    ratio, log_ratio, advantages = ratio_and_advantages(inputs)
    objective = clipped_objective(ratio, advantages, bounds.clip_low, bounds.clip_high, dual_clip)
    return token_loss(
        inputs, bounds, denominator, objective=objective, ratio=ratio, log_ratio=log_ratio, mass=mass, dual_clip=dual_clip
    )


def constant_bounds(low: float, high: float, device: torch.device) -> ClipBounds:
    """Bounds that no tally moves; float64, 0-dim."""
    low_bound, high_bound = (torch.full((), value, dtype=torch.float64, device=device) for value in (low, high))
    return ClipBounds(low_bound, high_bound)


@torch.no_grad()
def entropy_clip_metrics(inputs: LossInputs, dropped: Tensor) -> dict[str, Tensor]:
    """Parts of Cov[log pi(y), A X] over trained tokens, X = 0 for `dropped` (bool [B, T]), else 1; float64, token sums.

    The entropy changes by about -lr times it in the update. Source: the Entropy-Clip Rule, arXiv 2510.18927, Eq. 6.
    """
    logprobs = keep(inputs.logprobs, inputs.response_mask).double()
    pushed = keep(inputs.advantages, inputs.response_mask & ~dropped).double()
    return {
        "policy/logprob_mean": logprobs.sum(),
        "policy/unclipped_advantage_mean": pushed.sum(),
        "policy/entropy_clip_cov": (logprobs * pushed).sum(),
    }


def _masses(
    inputs: LossInputs, ratio: Tensor, advantages: Tensor, objective: Tensor, clipped: Tensor, dual: Tensor, rule: MassRule
) -> Tensor:
    """Mass of every token in P or N under `rule`, float64 [B, T]."""
    if rule.dual_clip is None:  # the loss may clip these tokens; the masses do not
        clipped = clipped & ~dual
    unclipped = ratio.double() * advantages.double().abs()
    masses = torch.where(clipped, objective.double().abs() if rule.mass == "surrogate" else 0.0, unclipped)
    return rule.weigh(masses, inputs)


def _metrics(
    inputs: LossInputs, ratio: Tensor, log_ratio: Tensor, advantages: Tensor, clipped: Tensor, dual: Tensor, masses: Tensor
) -> dict[str, Tensor]:
    """Parts of the metrics that every loss logs: float64, 0-dim; a token sum if its reduction is `token_mean`."""
    positive, negative = advantages > 0, advantages < 0
    clamped = log_ratio.double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def total(values: Tensor, where: Tensor = inputs.response_mask) -> Tensor:
        return masked_sum(values, where, torch.float64)

    return {
        "policy/approx_kl": total(clamped.expm1() - clamped),
        "policy/ratio_mean": total(ratio),
        "policy/ratio_max": masked_max(ratio, inputs.response_mask).double(),
        "policy/clip_frac": total(clipped),
        "policy/clip_frac_high": total(clipped & positive),
        "policy/clip_frac_low": total(clipped & negative & ~dual),
        "policy/clip_frac_dual": total(dual),
        "policy/weight_mean": total(token_weights(inputs)),
        "policy/negative_token_frac": total(negative),
        "policy/log_ratio_clamped_frac": total(log_ratio.abs() > MAX_LOG_RATIO),
        "bounds/positive_mass": total(masses, positive),
        "bounds/negative_mass": total(masses, negative),
        **entropy_clip_metrics(inputs, clipped),
    }
