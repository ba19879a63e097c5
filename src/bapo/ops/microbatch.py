"""Cutting a mini-batch into micro-batches that fit in memory."""

from __future__ import annotations

import torch
from torch import Tensor


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
