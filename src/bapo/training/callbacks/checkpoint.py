"""Writes checkpoints and keeps the newest."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from bapo.files import write_atomic
from bapo.protocols import EngineError
from bapo.training.resume import checkpoint_steps, content_digest, read_checkpoint, read_provenance
from bapo.training.run_folder import write_status


class Checkpoints(ModelCheckpoint):
    """Every `every_n_updates` optimizer updates and at the last one, be it the run's end or a stop; only the newest is kept.

    dirpath: None for RUN/checkpoints.
    """

    def __init__(self, every_n_updates: int = 16, dirpath: str | None = None):
        if every_n_updates < 1:
            raise ValueError(f"callbacks.checkpoint.every_n_updates is {every_n_updates}; it must be >= 1")
        super().__init__(
            dirpath,
            filename="update={step:06d}",
            auto_insert_metric_name=False,
            every_n_train_steps=every_n_updates,
            save_on_train_epoch_end=False,
        )

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.dirpath = self.dirpath or str(Path(trainer.default_root_dir) / "checkpoints")
        super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._last_global_step_saved = trainer.global_step  # what a resumed run was loaded from needs no saving

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        ends = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
        if ends or trainer.should_stop:
            self._save_newest(trainer, between=False)
        if trainer.is_global_zero:  # what this process has written or loaded; a later file may not load
            steps = checkpoint_steps(Path(str(self.dirpath)))
            for path in [path for path, step in steps.items() if step < self._last_global_step_saved]:
                path.unlink()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """A stop between two epochs (EarlyStopping) is saved too."""
        super().on_train_end(trainer, pl_module)
        self._save_newest(trainer, between=trainer.is_last_batch)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """A failed engine takes no update with it: what was trained since the last checkpoint is saved."""
        if isinstance(exception, EngineError):
            batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
            # In an evaluation after the last batch, that batch is not completed yet.
            between = trainer.is_last_batch and batches.completed == batches.processed
            self._save_newest(trainer, between)

    def _save_newest(self, trainer: L.Trainer, between: bool) -> None:
        """Saves unless that is done. between: two epochs; the one before is saved as at its last update, like all others."""
        debugging: Any = trainer.fast_dev_run  # type: ignore[attr-defined]
        # Not by the files in the folder: saving is a collective, and one rank may see a file before another does.
        if debugging or trainer.global_step == self._last_global_step_saved:
            return
        progress: Any = trainer.fit_loop.epoch_progress.current
        before = progress.processed, progress.completed
        if between:
            progress.processed = progress.completed = progress.completed - 1
        self._save_checkpoint(trainer, str(Path(str(self.dirpath)) / f"update={trainer.global_step:06d}.ckpt"))
        progress.processed, progress.completed = before


class AtomicCheckpoints(TorchCheckpointIO):
    """Writes beside the target and renames. Lightning's own writes elsewhere and moves, which over file systems is a copy.

    Every checkpoint carries the id of its run and a checksum; status.json tells that there is one.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        checkpoint["run_id"] = read_provenance(self.folder)["run_id"]
        checkpoint["digest"] = content_digest(checkpoint)
        write_atomic(Path(path), lambda partial: torch.save(checkpoint, partial))
        write_status(self.folder, "running", pid=os.getpid(), checkpoint=checkpoint["global_step"])

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return read_checkpoint(Path(path))
