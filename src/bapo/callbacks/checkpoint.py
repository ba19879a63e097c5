"""When checkpoints are written and which are kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch.callbacks import ModelCheckpoint


@dataclass(frozen=True)
class Checkpoints:
    """Called with a folder: Lightning's checkpoint callback, every `every_n_updates` optimizer updates, the newest one kept."""

    every_n_updates: int = 16

    def __post_init__(self) -> None:
        if self.every_n_updates < 1:
            raise ValueError(f"every_n_updates is {self.every_n_updates}; it must be >= 1")

    def __call__(self, dirpath: Path) -> ModelCheckpoint:
        return ModelCheckpoint(
            dirpath,
            filename="update={step:06d}",
            auto_insert_metric_name=False,
            every_n_train_steps=self.every_n_updates,
            save_on_train_epoch_end=False,
        )
