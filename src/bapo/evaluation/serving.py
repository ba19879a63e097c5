"""The engine that serves one policy for an evaluation, and the ranks that use it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric

from bapo.engines.sync_check import TOLERANCE, check_sync, sync_gap
from bapo.evaluation.policy import PolicySource
from bapo.policy.causal_lm import DTYPES, CausalLMPolicy, load_model
from bapo.protocols import Engine
from bapo.rollouts.options import RolloutOptions
from bapo.rollouts.ranks import Ranks
from bapo.training.process import known_to_children
from bapo.types import Batch, SamplingParams, TokenStats

CHECKED_TOKENS = 16384
"""Padded tokens of a forward pass of the sync check."""


class _Scorer:
    """The side of a policy that the sync check needs."""

    def __init__(self, policy: CausalLMPolicy):
        self.policy = policy

    def token_stats(self, batch: Batch) -> TokenStats:
        return self.policy.token_stats(batch, CHECKED_TOKENS)


@contextmanager
def started(source: PolicySource, rollout: RolloutOptions, dtype: str) -> Iterator[Engine]:
    """The engine of the policy's sizes, before it has the policy's weights, until the end of the block."""
    engine = rollout.engine(model_path=source.folder(), dtype=DTYPES[dtype], **source.load)
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def launched(devices: int) -> Iterator[Ranks]:
    """This process among `devices` ranks, which Lightning starts by this command line, or torchrun has started.

    They exchange texts and numbers only, over gloo, wherever their engines compute.
    """
    world = int(os.environ.get("WORLD_SIZE", devices)) if "TORCHELASTIC_RUN_ID" in os.environ else devices
    if world != devices:
        raise ValueError(f"devices is {devices}; torchrun has started {world} processes: devices={world}")
    if devices == 1:
        yield Ranks()
        return
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    fabric = Fabric(accelerator="cpu", devices=devices, strategy="ddp")
    with known_to_children(Path()):
        fabric.launch()
        try:
            yield Ranks(fabric.global_rank, fabric.world_size)
        except BaseException:
            for process in getattr(fabric.strategy.launcher, "procs", []):
                process.terminate()
            raise


def served(
    engine: Any,
    source: PolicySource,
    dtype: str,
    rollout: RolloutOptions,
    prompts: Sequence[tuple[int, ...]],
    pad_id: int,
    ranks: Ranks,
) -> None:
    """Hands the policy's weights to the engine and has it prove that it serves them; EngineError, on every rank, if not."""
    version = source.step or 0

    def work() -> float:
        if engine.shared and ranks.rank > 0:
            engine.set_version(version)
            return 0.0
        policy = CausalLMPolicy(load_model(source.folder(), dtype, **source.load))
        engine.load_weights(policy.named_weights(), version)
        plain = SamplingParams(temperature=1.0, max_tokens=rollout.sampling.max_tokens)
        return sync_gap(engine, _Scorer(policy), prompts, plain, pad_id)  # type: ignore[arg-type]

    found = max(ranks.gather_from(work))
    check_sync(found, rollout.sync_tolerance or max(TOLERANCE[DTYPES[dtype]], TOLERANCE[engine.dtype]), 1.0, version)
