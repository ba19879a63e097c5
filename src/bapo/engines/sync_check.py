"""The check after every sync that an engine serves the trainer's weights: both compute the log-probs of a few samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from bapo.protocols import Engine, EngineError, PolicyHandle
from bapo.rollouts.pool import collate
from bapo.rollouts.seeds import derive_seed
from bapo.types import Sample, SamplingParams

PROMPTS = 4
TOKENS = 16
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.5}
"""Largest difference of a log-prob, in nats, between two implementations that hold the same weights in this precision."""


class SyncCheckError(EngineError):
    """The engine does not serve the weights that the trainer sent."""


def sync_gap(
    engine: Engine, policy: PolicyHandle, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams, pad_id: int
) -> float:
    """Return the largest |engine's log-prob - trainer's| over up to `TOKENS` tokens sampled after each of `prompts`, in nats.

    The path is that of the rollouts themselves: same temperature, same log-probs of the sampled tokens. top_p and top_k are
    left out, as they cut the engine's distribution and not the trainer's.
    """
    plain = replace(sampling, max_tokens=min(TOKENS, sampling.max_tokens), top_p=1.0, top_k=0)
    requests = [Sample("sync", index, derive_seed("probe", index), ids) for index, ids in enumerate(prompts)]
    samples = engine.generate(requests, plain)
    if not samples:
        raise EngineError("the engine answered none of the requests that follow a sync")
    batch = collate(samples, pad_id)
    gap = (policy.token_stats(batch).logprobs - batch.sampler_logprobs)[batch.response_mask]
    return float(gap.abs().nan_to_num(nan=math.inf).max())


def check_sync(gap: float, tolerance: float, temperature: float, version: int) -> None:
    """Raises `SyncCheckError` for a gap above `tolerance`."""
    if gap <= tolerance:
        return
    raise SyncCheckError(
        f"after the sync of policy version {version} the engine's log-probs differ from the trainer's by {gap:.3g} nats; "
        f"rollout.sync_tolerance allows {tolerance:g}. Nothing was trained on its samples. Likely causes: the engine kept "
        "old weights or a stale output head; it serves another model or LoRA adapter; its log-probs are not those at "
        f"temperature {temperature:g}; its precision is below the trainer's (rollout.engine.dtype): set the tolerance for it."
    )
