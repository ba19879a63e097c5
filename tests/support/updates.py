"""Fits of `BapoModule` on given mini-batches, without a data side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import Logger

from bapo.data.epoch import EpochLoader
from bapo.losses import BapoLoss, BoundRange, FixedClipLoss
from bapo.losses.objective import Objective
from bapo.module import BapoModule
from bapo.policy.causal_lm import CausalLMPolicy, load_model
from bapo.types import Batch, MiniBatch

BAPO = BapoLoss(0.55, BoundRange(0.6, 0.9, 0.02), BoundRange(1.2, 3.0, 0.05))
GRPO = FixedClipLoss(0.8, 1.2)


class Rows(Logger):
    """Keeps every row it is given."""

    def __init__(self):
        super().__init__()
        self.rows: list[tuple[int, dict]] = []

    name, version = "rows", 0

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args, **kwargs):
        pass

    def __getitem__(self, name: str) -> list[float]:
        return [row[name] for _, row in self.rows]


class Rounds(L.LightningDataModule):
    """Given mini-batches, epoch by epoch."""

    def __init__(self, epochs: list[list[Batch]]):
        super().__init__()
        self.epochs = epochs

    def train_dataloader(self):
        return EpochLoader([MiniBatch(batch, {}) for batch in self.epochs[self.trainer.current_epoch]])


def adamw(lr: float) -> Callable:
    return partial(torch.optim.AdamW, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)


def fit(
    folder: Path, epochs: list[list[Batch]], loss=BAPO, budget: int = 10_000, lr=1e-2, schedule=None, policy=None, **trainer
):
    policy = policy or CausalLMPolicy(load_model(folder))
    module = BapoModule(policy, loss, Objective(), adamw(lr), budget, total_updates=100, lr_schedule=schedule)
    rows = Rows()
    options = {"max_epochs": len(epochs), "logger": rows, "enable_checkpointing": False, "log_every_n_steps": 1} | trainer
    trainer = L.Trainer(
        accelerator="cpu", devices=1, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        reload_dataloaders_every_n_epochs=1, num_sanity_val_steps=0, **options,
    )  # fmt: skip
    trainer.fit(module, datamodule=Rounds(epochs))
    return module, rows, trainer


def behaviour_of(folder: Path, batch: Batch) -> Batch:
    return replace(batch, behaviour_logprobs=CausalLMPolicy(load_model(folder)).token_stats(batch, 10_000).logprobs)
