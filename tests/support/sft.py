"""Fine-tuning in seconds."""

from __future__ import annotations

from pathlib import Path

from bapo.sft.run import run
from support import run_experiment

TINY = (
    "task.digits=2", "task.train_size=50", "task.test_size=10", "data.n=80", "sft.batch_size=8", "sft.test_share=0.1",
    "sft.test_every_n_updates=4", "callbacks.checkpoint.every_n_updates=4", "lr_schedule.num_warmup_steps=2", "sft.epochs=2",
)  # fmt: skip
"""18 updates, 9 of each epoch, with 72 demonstrations; 8 are held out."""


def fine_tune(folder: Path, *overrides: str) -> dict[str, float]:
    """What `python sft.py OVERRIDES` does in run folder `folder`, in this process."""
    return run_experiment(folder, *overrides, config="sft", entry=run)
