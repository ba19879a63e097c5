"""The clipped surrogate: importance ratio, the one rule for what is clipped, objective, loss and metrics.

Notation: r importance ratio, A advantage, w a token's weight, c the dual clip, P and N masses of the tokens with A > 0 and with
A < 0. Tensors are [B, T].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bapo.ops.masked import keep, masked_max, masked_sum
from bapo.types import ClipBounds, LossInputs, LossOutput

MAX_LOG_RATIO = 20.0
"""|log r| beyond this is clamped before exp: in float32 exp(88.8) is infinite, and the backward of an unused branch 0 * inf."""

Mass = Literal["gradient", "surrogate"]
"""What a token weighs in P or N: r|A| when it is not clipped, else 0; or the absolute value of its clipped objective."""

MassWeight = Literal["none", "behaviour_prob"]
"""What a mass is multiplied by: nothing; or the probability under the behaviour policy, as arXiv 2510.18927 prints Eq. 8."""


@dataclass(frozen=True)
class MassRule:
    """What a token weighs in P and N. dual_clip: c if the masses know the dual clip; None if only the loss does, or nobody."""

    mass: Mass = "gradient"
    weight: MassWeight = "none"
    dual_clip: float | None = None

    def weigh(self, masses: Tensor, inputs: LossInputs) -> Tensor:
        """`masses` [B, T] times the token's weight and, if so weighted, its behaviour probability."""
        if inputs.weights is not None:
            masses = masses * token_weights(inputs).to(masses.dtype)
        if self.weight == "behaviour_prob":
            masses = masses * keep(inputs.behaviour_logprobs, inputs.response_mask).to(masses.dtype).exp()
        return masses


def importance_ratio(logprobs: Tensor, behaviour_logprobs: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """(r, log r) with r = exp(logprobs - behaviour_logprobs); 1 and 0 in masked slots, where the inputs may hold anything.

    log r is returned as it is, r is the exponential of log r clamped at +-MAX_LOG_RATIO: finite, and without gradient there.
    An infinite log-ratio (a probability of zero) is NaN as one of two zeros is, so that the loss shows it.
    """
    log_ratio = keep(finite_or_nan(logprobs - behaviour_logprobs), response_mask)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), log_ratio


def finite_or_nan(values: Tensor) -> Tensor:
    """`values` with NaN for an infinity, which a clamp would make an ordinary number of."""
    return torch.where(values.isinf(), math.nan, values)


def token_weights(inputs: LossInputs) -> Tensor:
    """w, in the precision of the log-probs: 1 without weights, 0 in masked slots."""
    mask = inputs.response_mask
    return mask.to(inputs.logprobs.dtype) if inputs.weights is None else keep(inputs.weights, mask).to(inputs.logprobs.dtype)


def clip_counts(ratio: Tensor, advantages: Tensor, clip_lows: Tensor, clip_highs: Tensor) -> Tensor:
    """How many bounds clip each token, int32 [B, T]: the one rule for "is clipped", of the search and of the loss.

    A token with A > 0 is clipped by every bound of `clip_highs` below r, one with A < 0 by every bound of `clip_lows` above r;
    one with A = 0 by none, and so is a NaN. Both bound vectors ascend, [K_low] and [K_high], and are compared in r's precision.
    """
    below = bounds_below(ratio, clip_lows, clip_highs)
    counts = torch.where(advantages < 0, len(clip_lows) - below, below - len(clip_lows)).clamp_(min=0)
    return torch.where((advantages != 0) & ~ratio.isnan(), counts, 0)


def bounds_below(ratio: Tensor, clip_lows: Tensor, clip_highs: Tensor) -> Tensor:
    """How many bounds of both ranges lie below r, int32 [B, T]; for `clip_lows` r itself counts as above it.

    With one look-up for both signs: "low <= r" is "the number just below low < r".
    """
    lows, highs = clip_lows.to(ratio.dtype), clip_highs.to(ratio.dtype)
    bounds = torch.cat([torch.nextafter(lows, torch.full_like(lows, -math.inf)), highs])
    return torch.bucketize(ratio.detach().contiguous(), bounds, out_int32=True)


def is_dual_clipped(ratio: Tensor, advantages: Tensor, dual_clip: float | None) -> Tensor:
    """A < 0 and r > c, bool [B, T]; no clip_low < 1 clips such a token. Source: dual-clip PPO, arXiv 1912.09729, Eq. 5."""
    if dual_clip is None:
        return torch.zeros_like(ratio, dtype=torch.bool)
    return (advantages < 0) & (ratio > dual_clip)


def check_dual_clip(dual_clip: float | None) -> None:
    """ValueError unless it is None or 1 < c < infinity."""
    if dual_clip is not None and not 1 < dual_clip < math.inf:
        raise ValueError(f"dual_clip is {dual_clip}; it must be > 1 and finite, or null for none")


def is_clipped(
    ratio: Tensor, advantages: Tensor, clip_low: Tensor, clip_high: Tensor, dual_clip: float | None = None
) -> Tensor:
    """Does the objective of a token ignore its ratio at these 0-dim bounds and this dual clip? bool [B, T]."""
    by_bounds = clip_counts(ratio, advantages, clip_low[None], clip_high[None]) > 0
    return by_bounds if dual_clip is None else by_bounds | is_dual_clipped(ratio, advantages, dual_clip)


def clipped_objective(
    ratio: Tensor, advantages: Tensor, clip_low: Tensor, clip_high: Tensor, dual_clip: float | None = None
) -> Tensor:
    """min(r A, clip(r, clip_low, clip_high) A), and not below c A where A < 0 with a dual clip; [B, T].

    Sources: PPO, arXiv 1707.06347, Eq. 7, with bounds on r itself; dual clip, arXiv 1912.09729, Eq. 5.
    """
    bound = torch.where(advantages > 0, clip_high.to(ratio.dtype), clip_low.to(ratio.dtype))
    if dual_clip is not None:
        bound = torch.where(is_dual_clipped(ratio, advantages, dual_clip), dual_clip, bound)
    clipped = is_clipped(ratio, advantages, clip_low, clip_high, dual_clip)
    return torch.where(clipped, bound * advantages, ratio * advantages)


def weighted_loss(objective: Tensor, inputs: LossInputs, denominator: Tensor) -> Tensor:
    """-sum_t w_t objective_t / denominator, 0-dim, over the trained tokens of a micro-batch.

    denominator: a count over the whole update, 0-dim; an update without tokens has loss 0 and zero gradients.
    """
    objective = keep(objective, inputs.response_mask)
    if inputs.weights is not None:
        objective = objective * token_weights(inputs)
    return -objective.sum() / denominator.clamp(min=1)


def clipped_surrogate_loss(
    inputs: LossInputs,
    bounds: ClipBounds,
    denominator: Tensor,
    mass: MassRule | None = None,
    dual_clip: float | None = None,
) -> LossOutput:
    """-sum_t w_t min(r_t A_t, clip(r_t, clip_low, clip_high) A_t) / denominator, over the trained tokens of one micro-batch.

    denominator: trained tokens of the whole update, 0-dim. dual_clip: c > 1, the floor c A of the objective where A < 0.
    mass: as in `token_metrics`.
    """
    ratio, log_ratio = importance_ratio(inputs.logprobs, inputs.behaviour_logprobs, inputs.response_mask)
    advantages = keep(inputs.advantages, inputs.response_mask)
    objective = clipped_objective(ratio, advantages, bounds.clip_low, bounds.clip_high, dual_clip)
    loss = weighted_loss(objective, inputs, denominator)
    clipped = is_clipped(ratio, advantages, bounds.clip_low, bounds.clip_high, dual_clip)
    metrics = token_metrics(inputs, bounds, ratio, log_ratio, objective, mass, dual_clip, clipped)
    return LossOutput(loss, {"policy/loss": loss.detach().double(), **metrics}, ratio.detach(), clipped)


@torch.no_grad()
def token_metrics(
    inputs: LossInputs,
    bounds: ClipBounds,
    ratio: Tensor,
    log_ratio: Tensor,
    objective: Tensor,
    mass: MassRule | None = None,
    dual_clip: float | None = None,
    clipped: Tensor | None = None,
) -> dict[str, Tensor]:
    """This micro-batch's part of each metric but `policy/loss`: float64, 0-dim; a token sum if its reduction is `token_mean`.

    objective: without weights; its absolute value is the surrogate mass of a clipped token.
    mass: what a token weighs in `bounds/{positive,negative}_mass`; None: r|A| unless it is clipped.
    clipped: bool, for a loss with a rule of its own; None: the rule of `is_clipped`.
    """
    mask = inputs.response_mask
    advantages = keep(inputs.advantages, mask)
    positive, negative = advantages > 0, advantages < 0
    dual = is_dual_clipped(ratio, advantages, dual_clip)
    if clipped is None:
        clipped = is_clipped(ratio, advantages, bounds.clip_low, bounds.clip_high, dual_clip)
    masses = _masses(inputs, ratio, objective, clipped, dual, mass or MassRule(dual_clip=dual_clip))
    clamped_log_ratio = log_ratio.double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def total(values: Tensor, where: Tensor = mask) -> Tensor:
        return masked_sum(values, where, torch.float64)

    return {
        "policy/approx_kl": total(clamped_log_ratio.expm1() - clamped_log_ratio),
        "policy/ratio_mean": total(ratio),
        "policy/ratio_max": masked_max(ratio, mask).double(),
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


def _masses(inputs: LossInputs, ratio: Tensor, objective: Tensor, clipped: Tensor, dual: Tensor, rule: MassRule) -> Tensor:
    """What every token weighs in P or N under `rule`, float64 [B, T]."""
    if rule.dual_clip is None:  # the loss may clip these tokens; the masses take them as they are
        clipped = clipped & ~dual
    unclipped = ratio.double() * keep(inputs.advantages, inputs.response_mask).double().abs()
    masses = torch.where(clipped, objective.double().abs() if rule.mass == "surrogate" else 0.0, unclipped)
    return rule.weigh(masses, inputs)
