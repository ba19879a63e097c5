"""When checkpoints are written, how, and which are kept."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from bapo.protocols import EngineError
from bapo.training.run_folder import checkpoint_steps


@dataclass(frozen=True)
class Checkpoints:
    """Called with a folder: Lightning's checkpoint callback, every `every_n_updates` optimizer updates, the newest one kept."""

    every_n_updates: int = 16

    def __post_init__(self) -> None:
        if self.every_n_updates < 1:
            raise ValueError(f"every_n_updates is {self.every_n_updates}; it must be >= 1")

    def __call__(self, dirpath: Path) -> ModelCheckpoint:
        return RunCheckpoint(
            dirpath,
            filename="update={step:06d}",
            auto_insert_metric_name=False,
            every_n_train_steps=self.every_n_updates,
            save_on_train_epoch_end=False,
        )


class RunCheckpoint(ModelCheckpoint):
    """Also saves at the last update, be it the run's end or a stop, and takes away what is older."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        folder = Path(str(self.dirpath))
        ends = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
        if (ends or trainer.should_stop) and trainer.global_step not in checkpoint_steps(folder).values():
            trainer.save_checkpoint(folder / f"update={trainer.global_step:06d}.ckpt")
        if trainer.is_global_zero:
            steps = checkpoint_steps(folder)
            for path in [path for path, step in steps.items() if step < max(steps.values())]:
                path.unlink()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """A failed engine takes no update with it: what was trained since the last checkpoint is saved."""
        folder = Path(str(self.dirpath))
        if not isinstance(exception, EngineError) or trainer.global_step in {0, *checkpoint_steps(folder).values()}:
            return
        progress: Any = trainer.fit_loop.epoch_progress.current
        if progress.processed == progress.started:
            # Between two epochs. The one before is saved as at its last update, where every other checkpoint stands.
            progress.processed = progress.completed = progress.completed - 1
        trainer.save_checkpoint(folder / f"update={trainer.global_step:06d}.ckpt")


class AtomicCheckpoints(TorchCheckpointIO):
    """Writes beside the target and renames. Lightning's own writes elsewhere and moves, which over file systems is a copy."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        with partial.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
