"""The objective around a loss: the weight of each token, and the count that their sum is divided by.

loss = -(weights * objective).sum() / count, with a count over the whole update and all ranks, so that it does not depend on how
the update is cut. weights = aggregation scale * mismatch correction * token filter. Tensors are [B, T], one response per row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bapo.losses.surrogate import MAX_LOG_RATIO, finite_or_nan
from bapo.ops.masked import keep, masked_sum
from bapo.types import check_choices

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]
"""Every token alike (DAPO); every response alike, by the mean of its tokens (GRPO); the sum over a constant (Dr.GRPO)."""

Correction = Literal["none", "token_tis", "sequence_tis", "token_mis", "sequence_mis"]
"""Truncated (tis) or masked (mis) importance sampling from engine to trainer, by token or by the product over the response."""

KlEstimator = Literal["k1", "k2", "k3"]
"""Estimators of the KL to the reference policy from one sample: see `kl_estimate` in `bapo.losses.regularisers`."""


@dataclass(frozen=True)
class Objective:
    """Weights, denominator and regularisers around a loss; the defaults are a plain token mean.

    aggregation, sequence_constant: see `aggregation_scale`; Dr.GRPO's constant is the most tokens that a response may have.
    correction, correction_cap, correction_low: see `mismatch_factor`. top_entropy_frac: share of the trained tokens, those of
    highest entropy, to train on; 1 trains on all (see `entropy_filter`). entropy_bonus, reference_kl: coefficients of the
    terms in `bapo.losses.regularisers`, 0 for none; kl_estimator: of the second.
    Errors: ValueError for a value out of its bounds or an unknown option.
    """

    aggregation: Aggregation = "token_mean"
    sequence_constant: int | None = None
    correction: Correction = "none"
    correction_cap: float = 2.0
    correction_low: float = 0.5
    top_entropy_frac: float = 1.0
    entropy_bonus: float = 0.0
    reference_kl: float = 0.0
    kl_estimator: KlEstimator = "k3"

    def __post_init__(self) -> None:
        check_choices(self)
        if self.aggregation == "sequence_sum" and self.sequence_constant is None:
            raise ValueError("sequence_constant is None; aggregation sequence_sum divides by it: >= 1")
        if self.sequence_constant is not None and self.aggregation != "sequence_sum":
            raise ValueError(
                f"sequence_constant is {self.sequence_constant}; it must be null unless aggregation is sequence_sum"
            )
        constant = 1 if self.sequence_constant is None else self.sequence_constant
        for name, fits, bound in (
            ("sequence_constant", 1 <= constant < math.inf, ">= 1 and finite"),
            ("correction_cap", 1 <= self.correction_cap < math.inf, ">= 1 and finite: matching policies have factor 1"),
            ("correction_low", 0 <= self.correction_low <= 1, "in [0, 1]"),
            ("top_entropy_frac", 0 < self.top_entropy_frac <= 1, "in (0, 1]"),
            ("entropy_bonus", 0 <= self.entropy_bonus < math.inf, ">= 0 and finite"),
            ("reference_kl", 0 <= self.reference_kl < math.inf, ">= 0 and finite"),
        ):
            if not fits:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {bound}")

    def count(self, response_mask: Tensor) -> Tensor:
        """This micro-batch's part of the denominator; 0-dim float64, adds up over micro-batches and ranks."""
        return aggregation_count(response_mask, self.aggregation)

    def scale(self, response_mask: Tensor) -> Tensor:
        """Weights by the aggregation alone, for the regularisers; float32 [B, T], 0 in masked slots."""
        return aggregation_scale(response_mask, self.aggregation, self.sequence_constant)

    @torch.no_grad()
    def weights(
        self, response_mask: Tensor, behaviour_logprobs: Tensor, sampler_logprobs: Tensor, kept: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(`LossInputs.weights`, this micro-batch's part of the metrics as token sums).

        kept: bool [B, T], the tokens that `entropy_filter` keeps; None keeps all. A token that is filtered out, or masked by
        mis, weighs 0 but stays in the count. The masses P and N, and so BAPO's bounds, are those of the weighted tokens.
        """
        mask = response_mask
        factor, corrected = mismatch_factor(
            mask, behaviour_logprobs, sampler_logprobs, self.correction, self.correction_cap, self.correction_low
        )
        kept = mask if kept is None else kept
        weights = keep(self.scale(mask) * factor, kept)

        def total(values: Tensor) -> Tensor:
            return masked_sum(values, mask, torch.float64)

        return weights, {
            "policy/kept_token_frac": total(kept),
            "mismatch/correction_mean": total(factor),
            "mismatch/corrected_frac": total(corrected),
        }


def aggregation_count(response_mask: Tensor, aggregation: Aggregation) -> Tensor:
    """Denominator of the weighted sum: trained tokens, or responses with a trained token; 0-dim float64."""
    if aggregation == "token_mean":
        return response_mask.sum(dtype=torch.float64)
    return response_mask.any(dim=1).sum(dtype=torch.float64)


def aggregation_scale(response_mask: Tensor, aggregation: Aggregation, constant: int | None = None) -> Tensor:
    """Weight of a token's objective by the aggregation alone; float32 [B, T], 0 in masked slots.

    token_mean: 1. sequence_mean: 1 / trained tokens of its response. sequence_sum: 1 / constant.
    """
    scale = response_mask.float()
    if aggregation == "sequence_mean":
        return scale / scale.sum(dim=1, keepdim=True).clamp(min=1)
    if aggregation == "sequence_sum":
        assert constant is not None
        return scale / constant
    return scale


@torch.no_grad()
def mismatch_factor(
    response_mask: Tensor, behaviour_logprobs: Tensor, sampler_logprobs: Tensor, correction: Correction, cap: float, low: float
) -> tuple[Tensor, Tensor]:
    """(factor, truncated or masked) of every token, float and bool [B, T]; 1 and False in masked slots.

    x = exp(behaviour - sampler) of the token, or for sequence_* of the whole response: the exponential of the sum over its
    trained tokens; logs clamped at +-20. tis: min(x, cap). mis: x if low <= x <= cap, else 0. No gradient passes.
    Sources: token_tis, Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025); the others,
    Liu, Li et al., "When speed kills stability" (2025).
    """
    log_ratio = keep(finite_or_nan(behaviour_logprobs - sampler_logprobs), response_mask)
    if correction == "none":
        return torch.ones_like(log_ratio), torch.zeros_like(response_mask)
    if correction.startswith("sequence"):
        log_ratio = keep(log_ratio.sum(dim=1, keepdim=True).expand_as(log_ratio), response_mask)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if correction.endswith("tis"):
        return ratio.clamp(max=cap), ratio > cap
    outside = (ratio < low) | (ratio > cap)
    return torch.where(outside, 0, ratio), outside


@torch.no_grad()
def entropy_histogram(entropy: Tensor, response_mask: Tensor, upper: float, bins: int = 4096) -> Tensor:
    """Trained tokens per bin of entropy, float64 [bins], additive over micro-batches and ranks.

    Bins are of equal width over [0, upper] nats, log V being the most a token over V words can have; what rounding puts outside
    counts in the first or last one. A NaN counts in the last.
    """
    index = torch.bucketize(keep(entropy, response_mask).double(), _edges(bins, upper, entropy.device), right=True)
    weights = response_mask.double().flatten()
    return weights.new_zeros(bins).index_add_(0, index.flatten(), weights)


@torch.no_grad()
def entropy_threshold(histogram: Tensor, keep_frac: float, upper: float) -> Tensor:
    """The highest bin edge at or above which at least `keep_frac` of the tokens lie; 0-dim float64, -inf to keep all.

    The exact quantile lies in the bin that starts here, so the surplus over `keep_frac` is within one bin.
    """
    at_or_above = histogram.flip(0).cumsum(0).flip(0)
    enough = at_or_above >= keep_frac * at_or_above[0]  # true up to some bin, always for the first
    edges = _edges(len(histogram), upper, histogram.device)
    lower = torch.cat([edges.new_full((1,), -math.inf), edges])
    return lower.take(enough.long().sum() - 1)


def entropy_filter(entropy: Tensor, response_mask: Tensor, threshold: Tensor) -> Tensor:
    """The trained tokens with entropy >= threshold, bool [B, T]; a NaN stays, so that the loss shows it.

    Training on the 20 % of highest entropy: arXiv 2506.01939, whose mean stays over all tokens. Of equal entropies, all stay.
    """
    return response_mask & ~(entropy.double() < threshold)


def _edges(bins: int, upper: float, device: torch.device) -> Tensor:
    """Lower edges of the second and later bins, ascending, float64 [bins - 1]."""
    return torch.arange(1, bins, dtype=torch.float64, device=device) * (upper / bins)
