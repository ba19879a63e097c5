"""The plan of one optimizer update: token weights, clip bounds and denominator over all its micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bapo.losses.objective import Objective, entropy_filter, entropy_histogram, entropy_threshold
from bapo.ops.microbatch import MicroBatch
from bapo.protocols import Loss
from bapo.types import Batch, ClipBounds

Reduce = Callable[[Tensor], Tensor]
"""Sums a vector over the ranks."""


@dataclass(frozen=True)
class Plan:
    """Result of pass 1. bounds: None if each micro-batch chooses its own; denominator: 0-dim; tokens: trained tokens."""

    bounds: ClipBounds | None
    denominator: Tensor
    tokens: float


@torch.no_grad()
def weigh_update(batches: Sequence[Batch], objective: Objective, vocabulary: int, reduce: Reduce) -> list[MicroBatch]:
    """Micro-batches with the weights of their tokens; the entropy filter has one threshold for the whole update."""
    filters: list[Tensor | None] = [None] * len(batches)
    if objective.top_entropy_frac < 1:
        upper = math.log(vocabulary)
        counts = torch.stack([entropy_histogram(b.behaviour_entropy, b.response_mask, upper) for b in batches]).sum(dim=0)
        threshold = entropy_threshold(reduce(counts), objective.top_entropy_frac, upper)
        filters = [entropy_filter(b.behaviour_entropy, b.response_mask, threshold) for b in batches]
    return [
        MicroBatch(b, *objective.weights(b.response_mask, b.behaviour_logprobs, b.sampler_logprobs, kept))
        for b, kept in zip(batches, filters, strict=True)
    ]


@torch.no_grad()
def plan_update(
    micro_batches: Sequence[MicroBatch],
    logprobs: Callable[[int], Tensor],
    version: int,
    loss: Loss,
    objective: Objective,
    reduce: Reduce,
) -> Plan:
    """Bounds, denominator and token count of the update that follows policy `version`, in one reduction over ranks.

    logprobs: gives the policy's log-probs [B, T] of micro-batch i. It is called only where they matter: not if the bounds
    ignore them, nor if policy `version` itself generated every token, which makes every ratio 1.
    """
    whole = loss.bounds_scope == "update"
    sums = []
    for index, micro in enumerate(micro_batches):
        mask = micro.batch.response_mask
        parts = [mask.sum(dtype=torch.float64)[None], objective.count(mask)[None]]
        if whole:
            known = not loss.adaptive or micro.on_policy(version)
            values = micro.batch.behaviour_logprobs if known else logprobs(index).detach()
            parts.append(loss.tally(micro.loss_inputs(values)))
        sums.append(torch.cat(parts))
    total = reduce(torch.stack(sums).sum(dim=0))
    return Plan(loss.choose(total[2:]) if whole else None, denominator=total[1], tokens=float(total[0]))
