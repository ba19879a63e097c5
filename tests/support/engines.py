"""Shared by the tests of engines: samples to continue, and the gap between two implementations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bapo.rollouts.pool import collate
from bapo.types import Sample


def asked(uid: str, sample_index: int, seed: int, prompt_ids: Sequence[int]) -> Any:
    """A sample of which nothing has been generated yet."""
    return Sample(uid, sample_index, seed, tuple(prompt_ids))


def largest_gap(samples: Sequence[Sample], policy: Any, pad_id: int = 0, **how: Any) -> float:
    """Largest |log-prob of the engine - of `policy`| over generated tokens, in nats."""
    batch = collate(samples, pad_id)
    return float((policy.token_stats(batch, **how).logprobs - batch.sampler_logprobs)[batch.response_mask].abs().max())
