"""A few responses of every round, for people to read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from bapo.files import write_text_atomic
from bapo.rollouts.ranks import Ranks
from bapo.training.run_folder import SAMPLES


class Samples(L.Callback):
    """At the first update of a round, `per_round` rows of its pool's `meta["samples"]` go to RUN/samples.jsonl and the loggers.

    A line of the file is an object: round, global_step (completed updates when the round was generated) and the row. W&B gets a
    table and TensorBoard a text, both named `samples`. A resumed run leaves the lines of an uninterrupted one. Rank 0 only.
    """

    def __init__(self, per_round: int = 8):
        if per_round < 1:
            raise ValueError(f"callbacks.samples.per_round is {per_round}; it must be >= 1; callbacks.samples=null writes none")
        self.per_round = per_round
        self.written: int | None = None  # the newest round in the file; None before this process has looked

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        # Here, not where a fit or an epoch starts: resumed at an epoch's end, a fit starts in an epoch that is over.
        round_index = data.schedule.round_of(trainer.current_epoch)
        if not trainer.is_global_zero or round_index == self.written:
            return
        file = Path(trainer.default_root_dir) / SAMPLES
        if self.written is None:
            keep_before(file, round_index)
        self.written = round_index
        pool = data.pool(round_index, Ranks(trainer.global_rank, trainer.world_size))
        step = {"round": round_index, "global_step": pool.meta["policy_version"]}
        rows = [step | row for row in pool.meta.get("samples", [])[: self.per_round]]
        if rows:
            with file.open("a", encoding="utf-8") as lines:
                lines.write("".join(json.dumps(row) + "\n" for row in rows))
            for logger in trainer.loggers:
                show(logger, rows)


def keep_before(file: Path, round_index: int) -> None:
    """Takes the lines of `round_index` and later rounds out of the file, and one that a kill cut short: they come again."""
    if not file.exists():
        return
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["round"] < round_index]
    write_text_atomic(file, "".join(kept))


def show(logger: Logger, rows: Sequence[Mapping[str, Any]]) -> None:
    """The rows of one round to a logger that shows texts; others get nothing."""
    step = rows[0]["global_step"]
    if isinstance(logger, WandbLogger):
        columns = list(rows[0])
        logger.log_table("samples", columns=columns, data=[[row[name] for name in columns] for row in rows], step=step)
    elif isinstance(logger, TensorBoardLogger):
        logger.experiment.add_text("samples", "\n\n---\n\n".join(map(_markdown, rows)), step)


def _markdown(row: Mapping[str, Any]) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in row.items() if name not in ("prompt", "response"))
    blocks = (row["prompt"], row["response"])
    return "\n\n".join([facts, *("\n".join(f"    {line}" for line in block.splitlines()) for block in blocks)])  # as code
