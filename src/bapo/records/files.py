"""One file per update: RUN/updates/update_000123.npz, and one per further rank, update_000123_rank001.npz."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from bapo.files import read_json, write_atomic

FORMAT = 1
FOLDER = "updates"

Array = np.ndarray


@dataclass(frozen=True)
class UpdateRecord:
    """Data of one update, of one rank or all: B sequences with N trained tokens, cut into M micro-batches.

    facts: plain numbers about the whole update, all ranks: step (completed updates, this one included), round, epoch, world,
    vocabulary, tokens, denominator, and, as logged, loss, entropy, clip_low, clip_high, positive_ratio, entropy_clip_cov.
    rows: int32 [B, 2], round and row of the pool's file, in training order. lengths: int32 [B], trained tokens of each.
    micro_batches: int32 [M], sequences in each. bounds: float64 [M, 2], clip_low and clip_high of each.
    logprobs, entropy: float32 [N], row after row, under the policy before the step. staleness: int64 [S, 2], pairs of a
    staleness in updates and its number of trained tokens. by_side, histogram, entropy_by_ratio: see `bapo.records.clipping`.
    """

    facts: Mapping[str, float]
    rows: Array
    lengths: Array
    micro_batches: Array
    bounds: Array
    logprobs: Array
    entropy: Array
    staleness: Array
    by_side: Array
    histogram: Array
    entropy_by_ratio: Array

    @property
    def step(self) -> int:
        return int(self.facts["step"])

    @property
    def round(self) -> int:
        return int(self.facts["round"])


ARRAYS = tuple(f.name for f in fields(UpdateRecord) if f.name != "facts")
ADDED = ("by_side", "histogram", "entropy_by_ratio")


def record_path(folder: Path, step: int, rank: int = 0) -> Path:
    return folder / (f"update_{step:06d}.npz" if rank == 0 else f"update_{step:06d}_rank{rank:03d}.npz")


def save_record(folder: Path, record: UpdateRecord, rank: int, edges: Mapping[str, Array]) -> None:
    """Write one rank's file, atomically. edges: bins of the histogram, for readers of the file."""
    run_id = read_json(folder.parent / "provenance.json").get("run_id", "")
    facts = json.dumps({"format": FORMAT, "rank": rank, "run_id": run_id, **record.facts})
    arrays: dict[str, Any] = {name: getattr(record, name) for name in ARRAYS} | dict(edges)

    def write(path: Path) -> None:
        with path.open("wb") as file:
            np.savez_compressed(file, facts=np.array(facts), **arrays)

    write_atomic(record_path(folder, record.step, rank), write, sync=False)  # once per update: a sync takes as long as the rest


def forget_after(folder: Path, step: int) -> None:
    """Remove the files of updates after `step`, and partial files that a kill has left."""
    for path in folder.glob("update_*"):
        match = re.fullmatch(r"update_(\d+)(?:_rank\d+)?\.npz(\.partial)?", path.name)
        if match and (match[2] or int(match[1]) > step):
            path.unlink(missing_ok=True)


def recorded_steps(folder: Path) -> list[int]:
    """The updates that have a file, ascending."""
    names = (re.fullmatch(r"update_(\d+)\.npz", path.name) for path in folder.glob("update_*.npz"))
    return sorted(int(name[1]) for name in names if name)


def check_complete(folder: Path, last: int | None = None) -> list[int]:
    """The recorded updates, from 1 on without a gap. ValueError if there is none, or one up to `last` is missing."""
    steps = recorded_steps(folder)
    if not steps:
        raise ValueError(f"{folder} holds no update; a run writes them unless callbacks.record is null")
    for expected in range(1, max(steps[-1], last or 0) + 1):
        if expected > len(steps) or steps[expected - 1] != expected:
            raise ValueError(f"{record_path(folder, expected)} is missing")
    return steps


def load_arrays(folder: Path, step: int, names: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Array]]:
    """Facts of an update and the named arrays of all its ranks, in rank order. ValueError for a missing or damaged file."""
    parts = [_read(record_path(folder, step), names)]
    parts += [_read(record_path(folder, step, rank), names) for rank in range(1, int(parts[0][0]["world"]))]
    run_id = read_json(folder.parent / "provenance.json").get("run_id")
    for rank, (facts, _) in enumerate(parts):
        path = record_path(folder, step, rank)
        if (facts["step"], facts["rank"]) != (step, rank):
            raise ValueError(f"{path} is damaged: it is the record of update {facts['step']}, rank {facts['rank']}")
        if run_id is not None and facts["run_id"] != run_id:
            raise ValueError(f"{path} is of another run, {facts['run_id']}; this run is {run_id}")
    arrays = {name: [part[name] for _, part in parts] for name in names}
    return parts[0][0], {
        name: np.sum(values, axis=0) if name in ADDED else np.concatenate(values) for name, values in arrays.items()
    }


def load_update(folder: Path, step: int) -> UpdateRecord:
    """An update with the sequences of every rank. ValueError, in one line, for a missing or damaged file."""
    facts, arrays = load_arrays(folder, step, ARRAYS)
    record = UpdateRecord(facts, **arrays)
    sequences, tokens = int(record.micro_batches.sum()), int(record.lengths.sum())
    if not (len(record.rows) == len(record.lengths) == sequences and len(record.logprobs) == len(record.entropy) == tokens):
        raise ValueError(f"{record_path(folder, step)} is damaged: its parts do not fit together")
    return record


def _read(path: Path, names: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Array]]:
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    try:
        with np.load(path) as file:
            facts = json.loads(str(file["facts"]))
            arrays = {name: np.atleast_1d(file[name]) for name in names}
            version, missing = facts.get("format"), {"step", "round", "world", "rank", "run_id"} - facts.keys()
    except Exception as error:  # zip, zlib, numpy and JSON each have their own
        raise ValueError(f"{path} is damaged: it cannot be read as an npz file with {', '.join(names)}") from error
    if version != FORMAT:
        raise ValueError(f"{path} has format {version}; this version reads {FORMAT}")
    if missing:
        raise ValueError(f"{path} is damaged: its facts lack {', '.join(sorted(missing))}")
    return facts, arrays
