"""Inputs of losses: the golden cases, random sequences, and rearrangements that must not matter."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from bapo.types import LossInputs

CASES = json.loads((Path(__file__).parents[1] / "data" / "bound_search.json").read_text())["cases"]


def golden_inputs(case: dict) -> LossInputs:
    names = ("logprobs", "behaviour_logprobs", "advantages")
    return LossInputs(*(torch.tensor(case[n], dtype=torch.float64) for n in names), torch.tensor(case["response_mask"]).bool())


def random_inputs(seed: int, rows: int = 8, width: int = 9, dtype: torch.dtype = torch.float64) -> LossInputs:
    """Sequences of 1..width tokens, with weights."""
    generator = torch.Generator().manual_seed(seed)
    logprobs, behaviour, advantages = torch.randn(3, rows, width, generator=generator, dtype=torch.float64).to(dtype).unbind()
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    weights = 2 * torch.rand(rows, width, generator=generator, dtype=torch.float64).to(dtype)
    return LossInputs(logprobs, behaviour, advantages, torch.arange(width) < lengths, weights)


def rearrange(inputs: LossInputs, change: Callable[[Tensor], Tensor]) -> LossInputs:
    values = (getattr(inputs, field.name) for field in fields(inputs))
    return LossInputs(*(None if value is None else change(value) for value in values))


def padded(value: Tensor) -> Tensor:
    fill: float = 0 if value.dtype == torch.bool else math.nan
    return torch.cat([value, value.new_full((len(value), 5), fill)], dim=1)
