"""M2PO: outliers are masked until the update's mean squared log-ratio is small. Source: arXiv 2510.01161, Algorithm 1."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bapo.losses.surrogate import MAX_LOG_RATIO, clip_counts, is_clipped, ratio_and_advantages, token_weights
from bapo.losses.token_loss import token_loss
from bapo.protocols import Loss
from bapo.types import ClipBounds, LossInputs, LossOutput

CANDIDATES = 1024
SMALLEST_WIDTH = 1e-3
"""Widths that the cut may have, in |log r|: 1024 from 1e-3 to a hair above MAX_LOG_RATIO, each 1 % above the one before."""


@dataclass(frozen=True)
class M2poLoss(Loss):
    """The farthest tokens are masked until those left are near on average: -sum_t M_t r_t A_t / denominator.

    Looked at are the tokens that a clip looks at, A > 0 and r > 1 or A < 0 and r < 1. The largest (log r)^2 among them are
    masked (M = 0) until the mean of the rest, weighted like the objective, is <= m2_threshold; every other token has M = 1. The
    cut is one width w for the whole update, |log r| <= w, logged as the bounds exp(-w) and exp(w): the gradient is that of
    PPO's clip at these bounds. Masked is clipped; masses are the gradient's, M r |A|.

    How exact: the mean is exact, the cut falls on one of `CANDIDATES` widths. So the bound on the mean always holds, and what
    is masked beyond the paper's tokens lies within 1 % in |log r| of a token that the paper masks. A batch that needs no mask
    gets none. Errors: ValueError unless m2_threshold > 1e-6, the square of the smallest width.
    """

    m2_threshold: float
    adaptive = True

    def __post_init__(self) -> None:
        if not SMALLEST_WIDTH**2 < self.m2_threshold < math.inf:
            raise ValueError(f"m2_threshold is {self.m2_threshold}; it must be > {SMALLEST_WIDTH**2:g} and finite, in nats^2")

    @torch.no_grad()
    def tally(self, inputs: LossInputs) -> Tensor:
        """Weights, then weighted (log r)^2, of the looked-at tokens that c widths mask, c = 0..CANDIDATES.

        float64 [2 * (CANDIDATES + 1)].
        """
        ratio, log_ratio, advantages = ratio_and_advantages(inputs)
        lows, highs = _candidates(ratio.device)
        counts = clip_counts(ratio, advantages, lows, highs).flatten()
        weights = torch.where(advantages * (ratio - 1) > 0, token_weights(inputs), 0).double().flatten()
        squares = log_ratio.double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).square().flatten()
        bins = weights.new_zeros(2, CANDIDATES + 1)
        return bins.index_add_(1, counts, torch.stack([weights, weights * squares])).flatten()

    @torch.no_grad()
    def choose(self, tally: Tensor) -> ClipBounds:
        """The widest bounds under which the mean (log r)^2 of the unmasked tokens is <= m2_threshold."""
        weights, squares = tally.view(2, CANDIDATES + 1).cumsum(dim=1)[:, :-1]
        fits = squares <= self.m2_threshold * weights  # true up to some width: the mean grows with it
        chosen = (fits.long().sum() - 1).clamp(min=0)
        lows, highs = _candidates(tally.device)
        return ClipBounds(lows.flip(0).take(chosen), highs.take(chosen))

    def __call__(self, inputs: LossInputs, bounds: ClipBounds, denominator: Tensor) -> LossOutput:
        ratio, log_ratio, advantages = ratio_and_advantages(inputs)
        masked = is_clipped(ratio, advantages, bounds.clip_low, bounds.clip_high)
        objective = torch.where(masked, 0, ratio) * advantages
        return token_loss(inputs, bounds, denominator, objective=objective, ratio=ratio, log_ratio=log_ratio, clipped=masked)


def _candidates(device: torch.device) -> tuple[Tensor, Tensor]:
    """Bounds on the ratio at every width, both ascending, float64 [CANDIDATES]; the widest ones mask no clamped ratio."""
    exponents = torch.linspace(0, 1, CANDIDATES, dtype=torch.float64, device=device)
    widths = SMALLEST_WIDTH * ((MAX_LOG_RATIO + 0.01) / SMALLEST_WIDTH) ** exponents
    return (-widths).exp().flip(0), widths.exp()
