"""The clipped surrogate: importance ratio, mass, the one rule for what is clipped, and the objective.

Notation: r importance ratio, A advantage, w a token's weight, c the dual clip, P and N masses of the tokens with A > 0 and with
A < 0. Tensors are [B, T].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bapo.ops.masked import keep
from bapo.types import LossInputs

MAX_LOG_RATIO = 20.0
"""|log r| beyond this is clamped before exp: in float32 exp(88.8) is infinite, and the backward of an unused branch 0 * inf."""

Mass = Literal["gradient", "surrogate"]
"""Mass of a token in P or N: r|A| when it is not clipped, else 0; or the absolute value of its clipped objective."""

MassWeight = Literal["none", "behaviour_prob"]
"""Factor of a mass: none; or the probability under the behaviour policy, as arXiv 2510.18927 prints Eq. 8."""


@dataclass(frozen=True)
class MassRule:
    """Mass of a token in P and N. dual_clip: c if the masses apply the dual clip; None if they do not."""

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

    log r is returned unclamped, r is the exponential of log r clamped at +-MAX_LOG_RATIO: finite, and without gradient there.
    An infinite log-ratio (a probability of zero) is NaN as one of two zeros is, so that the loss shows it.
    """
    log_ratio = keep(finite_or_nan(logprobs - behaviour_logprobs), response_mask)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), log_ratio


def ratio_and_advantages(inputs: LossInputs) -> tuple[Tensor, Tensor, Tensor]:
    """(r, log r, A) of every token; 1, 0 and 0 in masked slots."""
    ratio, log_ratio = importance_ratio(inputs.logprobs, inputs.behaviour_logprobs, inputs.response_mask)
    return ratio, log_ratio, keep(inputs.advantages, inputs.response_mask)


def finite_or_nan(values: Tensor) -> Tensor:
    """`values` with NaN for an infinity, which a clamp would make an ordinary number of."""
    return torch.where(values.isinf(), math.nan, values)


def token_weights(inputs: LossInputs) -> Tensor:
    """w, in the precision of the log-probs: 1 without weights, 0 in masked slots."""
    mask = inputs.response_mask
    return mask.to(inputs.logprobs.dtype) if inputs.weights is None else keep(inputs.weights, mask).to(inputs.logprobs.dtype)


def clip_counts(ratio: Tensor, advantages: Tensor, clip_lows: Tensor, clip_highs: Tensor) -> Tensor:
    """Number of bounds that clip each token, int32 [B, T]: the one rule for "is clipped", in the search and in the loss.

    A token with A > 0 is clipped by every bound of `clip_highs` below r, one with A < 0 by every bound of `clip_lows` above r;
    one with A = 0 by none, and so is a NaN. Both bound vectors ascend, [K_low] and [K_high], and are compared in r's precision.
    """
    below = bounds_below(ratio, clip_lows, clip_highs)
    counts = torch.where(advantages < 0, len(clip_lows) - below, below - len(clip_lows)).clamp_(min=0)
    return torch.where((advantages != 0) & ~ratio.isnan(), counts, 0)


def bounds_below(ratio: Tensor, clip_lows: Tensor, clip_highs: Tensor) -> Tensor:
    """Number of bounds of both ranges below r, int32 [B, T]; a bound of `clip_lows` equal to r counts as below it.

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


def check_fixed_bounds(clip_low: float, clip_high: float, of: str = "the ratio", zero: bool = False) -> None:
    """ValueError unless 0 < clip_low < 1 < clip_high < infinity; `zero` lets clip_low be 0. of: the bounded quantity."""
    if not (0 < clip_low < 1 or (zero and clip_low == 0)):
        raise ValueError(f"clip_low is {clip_low}; it must be in {'[' if zero else '('}0, 1), a bound on {of} itself")
    if not 1 < clip_high < math.inf:
        raise ValueError(f"clip_high is {clip_high}; it must be > 1 and finite, a bound on {of} itself")


def is_clipped(
    ratio: Tensor, advantages: Tensor, clip_low: Tensor, clip_high: Tensor, dual_clip: float | None = None
) -> Tensor:
    """True where the objective of a token ignores its ratio at these 0-dim bounds and this dual clip; bool [B, T]."""
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
