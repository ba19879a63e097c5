"""Writes what every update saw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch

from bapo.ops.microbatch import SeenPart
from bapo.records.clipping import PROBABILITY_EDGES, RATIO_EDGES, clip_statistics
from bapo.records.files import FOLDER, UpdateRecord, forget_after, save_record
from bapo.types import MiniBatch

EDGES = {"probability_edges": PROBABILITY_EDGES, "ratio_edges": RATIO_EDGES}
LOGGED = {
    "loss": "policy/loss",
    "entropy": "policy/entropy",
    "entropy_clip_cov": "policy/entropy_clip_cov",
    "clip_low": "bounds/clip_low",
    "clip_high": "bounds/clip_high",
    "positive_ratio": "bounds/positive_ratio",
}
"""Fact -> metric."""


class Record(L.Callback):
    """RUN/updates/*.npz: every update, of every rank its own rows, on disk before the update's row of the log and checkpoint.

    A resumed run takes away what lies beyond its checkpoint. Nothing is computed again: the update hands over what it has.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Rank 0 alone takes away: no rank gets through its first update, and to its first file, without rank 0."""
        folder = Path(trainer.default_root_dir) / FOLDER
        if trainer.is_global_zero:
            forget_after(folder, trainer.global_step)
        vocabulary = int(pl_module.policy.model.config.vocab_size)

        def observe(minibatch: MiniBatch, parts: list[SeenPart], plan: Any, row: dict[str, float]) -> None:
            facts = {
                "step": trainer.global_step,
                "round": int(minibatch.metrics["rollout/round"]),
                "epoch": int(minibatch.metrics["rollout/epoch"]),
                "world": trainer.world_size,
                "vocabulary": vocabulary,
                "tokens": int(plan.tokens),
                "denominator": float(plan.denominator),
                **{fact: row[name] for fact, name in LOGGED.items()},
            }
            save_record(folder, record_of(minibatch, parts, facts), trainer.global_rank, EDGES)

        pl_module.observer = observe

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        pl_module.observer = None


def record_of(minibatch: MiniBatch, parts: list[SeenPart], facts: dict[str, float]) -> UpdateRecord:
    """One rank's record of an update; every tensor of it is read from the device here."""
    assert minibatch.places is not None, "the data side does not say where the sequences are on disk"
    staleness = minibatch.sequences.staleness(int(facts["step"]) - 1).unique(return_counts=True)
    statistics = [clip_statistics(part) for part in parts]
    masks = [part.inputs.response_mask for part in parts]

    def numbers(tensors: list[torch.Tensor], dtype: Any) -> np.ndarray:
        return torch.cat(tensors).cpu().numpy().astype(dtype)

    def total(name: str) -> np.ndarray:
        return torch.stack([sums[name] for sums in statistics]).sum(dim=0).cpu().numpy()

    return UpdateRecord(
        facts=facts,
        rows=minibatch.places[torch.cat([part.rows for part in parts]).cpu()].numpy().astype(np.int32),
        lengths=numbers([mask.sum(dim=1) for mask in masks], np.int32),
        micro_batches=np.array([len(part.rows) for part in parts], dtype=np.int32),
        bounds=numbers([torch.stack([p.bounds.clip_low, p.bounds.clip_high])[None] for p in parts], np.float64),
        logprobs=numbers([p.inputs.logprobs[mask] for p, mask in zip(parts, masks, strict=True)], np.float32),
        entropy=numbers([p.entropy[mask] for p, mask in zip(parts, masks, strict=True)], np.float32),
        staleness=torch.stack(staleness, dim=1).cpu().numpy(),
        by_side=total("by_side"),
        histogram=total("histogram").astype(np.int32),
        entropy_by_ratio=total("entropy_by_ratio"),
    )
