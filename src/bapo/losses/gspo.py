"""GSPO: one importance ratio per response, the geometric mean of its tokens' ratios. Source: arXiv 2507.18071."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bapo.losses.surrogate import MAX_LOG_RATIO, check_fixed_bounds, clipped_objective, ratio_and_advantages
from bapo.losses.token_loss import constant_bounds, token_loss
from bapo.protocols import Loss
from bapo.types import ClipBounds, LossInputs, LossOutput


@dataclass(frozen=True)
class GspoLoss(Loss):
    """A response is clipped as a whole: -sum_t min(s A_t, clip(s, clip_low, clip_high) A_t) / denominator, s = exp(mean log r).

    As in the paper's token variant, s_t = sg(s) r_t / sg(r_t): its value is s and its gradient s d log pi_t, so that a token of
    weight 0 moves nothing. Where weights are equal within a response this is the sequence objective's own gradient. The mean is
    over all trained tokens of the row, weighted or not, each log r clamped at +-20 first. The paper averages over responses:
    objective.aggregation sequence_mean. Bounds are on s, whose scale is far finer than that of r (paper: 0.9997, 1.0004).
    Clipping, masses (s |A| unless clipped) and `policy/ratio_*` speak of s; `policy/approx_kl` and
    `policy/log_ratio_clamped_frac` of the tokens' r. Errors: ValueError unless 0 < clip_low < 1 < clip_high.
    """

    clip_low: float
    clip_high: float

    def __post_init__(self) -> None:
        check_fixed_bounds(self.clip_low, self.clip_high, of="the sequence ratio")

    def choose(self, tally: Tensor) -> ClipBounds:
        return constant_bounds(self.clip_low, self.clip_high, tally.device)

    def __call__(self, inputs: LossInputs, bounds: ClipBounds, denominator: Tensor) -> LossOutput:
        _, log_ratio, advantages = ratio_and_advantages(inputs)
        sequence = sequence_ratio(log_ratio, inputs.response_mask)
        objective = clipped_objective(sequence, advantages, bounds.clip_low, bounds.clip_high)
        return token_loss(inputs, bounds, denominator, objective=objective, ratio=sequence, log_ratio=log_ratio)


def sequence_ratio(log_ratio: Tensor, response_mask: Tensor) -> Tensor:
    """exp(mean of log r over the row's trained tokens), at each of them, with a gradient to that token alone; [B, T].

    log_ratio: 0 in masked slots.
    """
    clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    lengths = response_mask.sum(dim=1, keepdim=True).clamp(min=1)
    sequence = (clamped.detach().sum(dim=1, keepdim=True) / lengths).exp()
    return sequence * (clamped - clamped.detach()).exp()
