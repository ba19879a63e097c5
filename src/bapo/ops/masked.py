"""Reductions over the tokens a mask keeps. What the other slots hold (NaN included) has no influence on values or gradients."""

from __future__ import annotations

import torch
from torch import Tensor


def keep(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where `mask` is true, else 0; same shape. Selects instead of multiplying: NaN * 0 is NaN."""
    return torch.where(mask, values, 0)


def masked_sum(values: Tensor, mask: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Sum of the kept values, 0-dim, accumulated in `dtype`; 0 when none is kept."""
    return keep(values, mask).sum(dtype=dtype)


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Largest kept value, 0-dim, of values that are >= 0; 0 when none is kept."""
    return keep(values, mask).amax() if values.numel() else values.new_zeros(())
