"""When checkpoints are written and which are kept."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.callbacks import ModelCheckpoint


def checkpoints(dirpath: Path, every_n_updates: int = 16) -> ModelCheckpoint:
    """Lightning's checkpoint callback: every `every_n_updates` optimizer updates, the newest one kept."""
    if every_n_updates < 1:
        raise ValueError(f"callbacks.checkpoint.every_n_updates is {every_n_updates}; it must be >= 1")
    return ModelCheckpoint(
        dirpath,
        filename="update={step:06d}",
        auto_insert_metric_name=False,
        every_n_train_steps=every_n_updates,
        save_on_train_epoch_end=False,
    )
