"""Counts of an update's tokens by sign, side and probability x ratio, and their entropy by ratio.

Sources: arXiv 2510.18927, Fig. 5 and 10. Ratios are those that the bounds are compared with (GSPO: of the response).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bapo.losses.surrogate import importance_ratio, is_clipped
from bapo.ops.microbatch import SeenPart

SIGNS = ("A < 0", "A = 0", "A > 0")
SIDES = ("r < clip_low", "inside", "r > clip_high")

PROBABILITY_EDGES = np.logspace(-6, 0, 25)
"""Four bins a decade from 1e-6 to 1; less likely tokens count in the first bin."""

RATIO_EDGES = np.logspace(-3, 3, 42, base=2)
"""41 bins of equal width in log r from 1/8 to 8, r = 1 in the centre of one; ratios outside count in the first or last bin."""


@torch.no_grad()
def clip_statistics(part: SeenPart) -> dict[str, Tensor]:
    """Sum over the trained tokens of a micro-batch; the sums add up over micro-batches and ranks.

    by_side: int64 [sign, side, clipped: no or yes], axes `SIGNS` and `SIDES`; histogram: int64 [sign, probability, ratio], with
    the token's probability under the policy at the update and the bins of `PROBABILITY_EDGES` and `RATIO_EDGES`;
    entropy_by_ratio: float64 [ratio], the sum of the entropies of each ratio bin's tokens.
    """
    inputs, mask = part.inputs, part.inputs.response_mask
    ratio, clipped = part.ratio, part.clipped
    if ratio is None:
        ratio, _ = importance_ratio(inputs.logprobs, inputs.behaviour_logprobs, mask)
    if clipped is None:
        clipped = is_clipped(ratio, inputs.advantages, part.bounds.clip_low, part.bounds.clip_high)
    r, advantages, logprobs = ratio[mask], inputs.advantages[mask], inputs.logprobs[mask]
    low, high = part.bounds.clip_low.to(r.dtype), part.bounds.clip_high.to(r.dtype)
    sign = (advantages >= 0).long() + (advantages > 0).long()
    side = (r >= low).long() + (r > high).long()
    by_side = torch.bincount((sign * 3 + side) * 2 + clipped[mask].long(), minlength=18).view(3, 3, 2)
    likely, ratios = _bins(logprobs.double().exp(), PROBABILITY_EDGES), _bins(r.double(), RATIO_EDGES)
    shape = (3, len(PROBABILITY_EDGES) - 1, len(RATIO_EDGES) - 1)
    flat = (sign * shape[1] + likely) * shape[2] + ratios
    entropy = torch.zeros(shape[2], dtype=torch.float64, device=r.device)
    return {
        "by_side": by_side,
        "histogram": torch.bincount(flat, minlength=shape[0] * shape[1] * shape[2]).view(shape),
        "entropy_by_ratio": entropy.index_add_(0, ratios, part.entropy[mask].double()),
    }


def _bins(values: Tensor, edges: np.ndarray) -> Tensor:
    """Bin of each value: from its lower edge to just below its upper one."""
    return torch.bucketize(values, torch.tensor(edges[1:-1], device=values.device), right=True)
