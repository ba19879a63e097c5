"""Recorded updates re-run from their log-probs: the bounds a loss chooses, what it clips, its value. No model, no engine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bapo.losses.objective import Objective
from bapo.losses.plan import plan_update, weigh_update
from bapo.metrics import MetricParts
from bapo.ops.microbatch import SeenPart
from bapo.protocols import Loss
from bapo.records.clipping import clip_statistics
from bapo.records.files import FOLDER, UpdateRecord, load_arrays, load_update, record_path
from bapo.rollouts.pool import load_pool
from bapo.rollouts.replay_buffer import joined
from bapo.types import Batch

CORNERS = {"positive_above": (2, 2), "positive_below": (2, 0), "negative_above": (0, 2), "negative_below": (0, 0)}
"""Sign of the advantage and side of the bounds -> place in `by_side`: where a token can be clipped."""


@dataclass(frozen=True)
class Choice:
    """Bounds of an update (the mean over tokens if each micro-batch has its own), its loss, and shares of its tokens.

    clipped: share of the trained tokens clipped at each of `CORNERS`.
    """

    clip_low: float
    clip_high: float
    positive_ratio: float
    loss: float
    entropy_clip_cov: float
    clipped: tuple[float, ...]

    @property
    def bounds(self) -> tuple[float, float]:
        return self.clip_low, self.clip_high


@dataclass(frozen=True)
class Outcome:
    step: int
    round: int
    tokens: int
    recorded: Choice
    what_if: Choice


@dataclass(frozen=True)
class Rows:
    """Sequences of several rounds; index: (round, row) -> place among them."""

    batch: Batch
    index: dict[tuple[int, int], int]

    def select(self, places: np.ndarray) -> Batch:
        return self.batch.select(torch.tensor([self.index[tuple(place)] for place in places.tolist()], dtype=torch.int64))


def walk(run_dir: Path, steps: Sequence[int], loss: Loss, objective: Objective) -> Iterator[Outcome]:
    """Yield the outcomes of `steps` in order; the state of a loss evolves as in training.

    Holds one update and the sequences of one round; other pools only while their rows are taken out. ValueError, in one line,
    for a file that is missing, damaged or of another run; facts and rows of all updates are read before the first is re-run.
    """
    folder, rounds = run_dir / FOLDER, run_dir / "rounds"
    heads = [(step, facts, arrays["rows"]) for step in steps for facts, arrays in [load_arrays(folder, step, ("rows",))]]
    for _, group in groupby(heads, key=lambda head: head[1]["round"]):
        of_round = list(group)
        rows = rows_of(rounds, np.unique(np.concatenate([places for _, _, places in of_round]), axis=0))
        for step, _, _ in of_round:
            record = load_update(folder, step)
            choice = what_if(folder, record, rows, loss, objective)
            yield Outcome(step, record.round, int(record.facts["tokens"]), recorded(record), choice)


def rows_of(rounds: Path, places: np.ndarray) -> Rows:
    """Load the sequences at `places` (round, row), int [K, 2], each once."""
    parts: list[Batch] = []
    index: dict[tuple[int, int], int] = {}
    for number in np.unique(places[:, 0]).tolist():
        wanted = places[places[:, 0] == number, 1]
        pool = load_pool(rounds, number)
        if pool is None:
            raise ValueError(f"{rounds} holds no complete round {number}, on which updates were made")
        if wanted.max() >= len(pool.batch):
            raise ValueError(f"round {number} in {rounds} has {len(pool.batch)} rows, and row {wanted.max()} was trained on")
        index |= {(number, row): len(index) + at for at, row in enumerate(wanted.tolist())}
        parts.append(pool.batch.select(torch.as_tensor(wanted, dtype=torch.int64)))
    return Rows(joined(parts), index)


def recorded(record: UpdateRecord) -> Choice:
    facts = record.facts
    low, high, ratio = facts["clip_low"], facts["clip_high"], facts["positive_ratio"]
    return Choice(low, high, ratio, facts["loss"], facts["entropy_clip_cov"], shares(record.by_side, facts["tokens"]))


def shares(by_side: Any, tokens: float) -> tuple[float, ...]:
    return tuple(float(by_side[(*corner, 1)]) / max(1, tokens) for corner in CORNERS.values())


@torch.no_grad()
def what_if(folder: Path, record: UpdateRecord, rows: Rows, loss: Loss, objective: Objective) -> Choice:
    """Repeat `BapoModule.training_step` with the recorded log-probs in place of a model."""
    batches, logprobs = recorded_batches(folder, record, rows)
    micro_batches = weigh_update(batches, objective, int(record.facts["vocabulary"]), lambda counts: counts)
    loss_state = loss.state_dict()
    version = record.step - 1
    plan = plan_update(micro_batches, logprobs.__getitem__, version, loss, objective, lambda sums: sums)
    parts, by_side, bounds_sum = MetricParts(), np.zeros((3, 3, 2)), torch.zeros(2, dtype=torch.float64)
    for micro, values in zip(micro_batches, logprobs, strict=True):
        inputs = micro.loss_inputs(values)
        bounds = plan.bounds or loss.choose(loss.tally(inputs))
        output = loss(inputs, bounds, plan.denominator)
        parts.add(output.metrics)
        seen = SeenPart(torch.arange(len(micro.batch)), inputs, torch.zeros_like(values), bounds, output.ratio, output.clipped)
        by_side += clip_statistics(seen)["by_side"].numpy()
        bounds_sum += torch.stack([bounds.clip_low, bounds.clip_high]) * inputs.response_mask.sum()
    row = parts.reduce(lambda vector: vector[None], plan.tokens)
    if not math.isfinite(row["policy/loss"]):  # such an update would have been skipped
        loss.load_state_dict(loss_state)
    chosen = plan.bounds
    low, high = (torch.stack([chosen.clip_low, chosen.clip_high]) if chosen else bounds_sum / max(1, plan.tokens)).tolist()
    positive, negative = row["bounds/positive_mass"], row["bounds/negative_mass"]
    ratio = positive / (positive + negative) if negative else 1.0
    return Choice(low, high, ratio, row["policy/loss"], row["policy/entropy_clip_cov"], shares(by_side, plan.tokens))


def recorded_batches(folder: Path, record: UpdateRecord, rows: Rows) -> tuple[list[Batch], list[Tensor]]:
    """The update's micro-batches, and the recorded log-probs [B, T] of each."""
    cuts = np.cumsum(record.micro_batches)[:-1]
    batches = [rows.select(places) for places in np.split(record.rows, cuts)]
    masks = [batch.response_mask for batch in batches]
    counts = torch.cat([mask.sum(dim=1) for mask in masks])
    if counts.tolist() != record.lengths.tolist():
        raise ValueError(f"{record_path(folder, record.step)} does not fit the pools in rounds/: are they of another run?")
    values = torch.from_numpy(record.logprobs).split([int(mask.sum()) for mask in masks])
    logprobs = [torch.zeros(mask.shape).masked_scatter(mask, part) for mask, part in zip(masks, values, strict=True)]
    return batches, logprobs
