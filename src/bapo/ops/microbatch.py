"""Cutting a mini-batch into micro-batches that fit in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bapo.types import Batch, ClipBounds, LossInputs, LossOutput


def cut_by_tokens(lengths: Tensor, token_budget: int) -> list[Tensor]:
    """Rows of each micro-batch, longest rows first: as many rows as keep rows * longest row <= `token_budget`.

    lengths: int64 [B], tokens of each row without padding. A row longer than the budget gets a micro-batch of its own.
    Neighbours have like lengths, so little padding is computed. Returns int64 row indices; every row is in exactly one.
    """
    if token_budget < 1:
        raise ValueError(f"token_budget is {token_budget}; it must be >= 1")
    lengths = lengths.cpu()
    order = torch.argsort(lengths, descending=True, stable=True)
    cuts: list[Tensor] = []
    start = 0
    while start < len(order):
        rows = max(1, token_budget // max(1, int(lengths[order[start]])))
        cuts.append(order[start : start + rows])
        start += rows
    return cuts


@dataclass(frozen=True)
class SeenPart:
    """A micro-batch before the update's step: its rows of the mini-batch, int64 [B]; `entropy`, `ratio`, `clipped` [B, T]."""

    rows: Tensor
    inputs: LossInputs
    entropy: Tensor
    bounds: ClipBounds
    ratio: Tensor | None
    clipped: Tensor | None


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch, the weights [B, T] of its tokens, and its part of the metrics of that weighting."""

    batch: Batch
    weights: Tensor
    metrics: dict[str, Tensor]

    def loss_inputs(self, logprobs: Tensor) -> LossInputs:
        return LossInputs(
            logprobs=logprobs,
            behaviour_logprobs=self.batch.behaviour_logprobs,
            advantages=self.batch.advantages[:, None].expand_as(self.batch.behaviour_logprobs),
            response_mask=self.batch.response_mask,
            weights=self.weights,
        )

    def seen(self, rows: Tensor, inputs: LossInputs, entropy: Tensor, bounds: ClipBounds, output: LossOutput) -> SeenPart:
        """The values that an update has computed of this micro-batch, `rows` of its mini-batch; without graphs."""
        return SeenPart(rows, inputs.detached(), entropy.detach(), bounds, output.ratio, output.clipped)

    def on_policy(self, version: int) -> bool:
        """True if the policy of `version` generated every token."""
        return bool((self.batch.policy_version[self.batch.response_mask] == version).all())
