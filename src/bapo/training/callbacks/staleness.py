"""Staleness of a round's tokens as a histogram."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from torch import Tensor

from bapo.rollouts.ranks import Ranks

HISTOGRAM = "staleness/histogram"


class StalenessHistogram(L.Callback):
    """At the first update of a round W&B and TensorBoard get the staleness, in updates, of all its pool's tokens. Rank 0 only.

    RUN/updates has them for every update.
    """

    def __init__(self) -> None:
        self.shown: int | None = None

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        round_index = data.schedule.round_of(trainer.current_epoch)
        if not trainer.is_global_zero or round_index == self.shown:
            return
        self.shown = round_index
        show = [logger for logger in trainer.loggers if isinstance(logger, WandbLogger | TensorBoardLogger)]
        if show:
            pool = data.pool(round_index, Ranks(trainer.global_rank, trainer.world_size))
            staleness = pool.batch.staleness(trainer.global_step)
            for logger in show:
                log_histogram(logger, staleness, trainer.global_step)


def log_histogram(logger: WandbLogger | TensorBoardLogger, staleness: Tensor, step: int) -> None:
    """staleness: int64 [N], in updates. W&B gets a bin per update, 64 at most."""
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.add_histogram(HISTOGRAM, staleness, step)
        return
    import wandb

    histogram: Any = wandb.Histogram(staleness.tolist(), num_bins=min(64, int(staleness.max() - staleness.min()) + 1))
    logger.log_metrics({HISTOGRAM: histogram}, step)
