"""AdamW and its learning-rate schedule, counted in optimizer updates."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR


@dataclass(frozen=True)
class Optimizer:
    """AdamW; `warmup_updates` of linear warm-up (update k of them uses k / warmup_updates of `lr`), then `decay` to 0 or none.

    Gradients are clipped to the global 2-norm `max_grad_norm`, once per update.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_updates: int = 0
    decay: Literal["none", "linear", "cosine"] = "none"
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        for name, ok, bound in (
            ("lr", 0 < self.lr < math.inf, "> 0 and finite"),
            ("betas", len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas), "two numbers in [0, 1)"),
            ("eps", 0 < self.eps < math.inf, "> 0 and finite"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, ">= 0 and finite"),
            ("warmup_updates", self.warmup_updates >= 0, ">= 0"),
            ("decay", self.decay in ("none", "linear", "cosine"), "none, linear or cosine"),
            ("max_grad_norm", self.max_grad_norm > 0, "> 0"),
        ):
            if not ok:
                raise ValueError(f"optimizer.{name} is {getattr(self, name)!r}; it must be {bound}")

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        first, second = self.betas
        return torch.optim.AdamW(parameters, lr=self.lr, betas=(first, second), eps=self.eps, weight_decay=self.weight_decay)

    def schedule(self, optimizer: torch.optim.Optimizer, num_training_steps: int) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: self.lr_factor(step - 1, num_training_steps - 1))

    def lr_factor(self, done: int, total_updates: int) -> float:
        """Share of `lr` used by the update that follows `done` completed ones."""
        if done < self.warmup_updates:
            return (done + 1) / self.warmup_updates
        if self.decay == "none":
            return 1.0
        progress = min(1.0, (done - self.warmup_updates) / max(1, total_updates - self.warmup_updates))
        return 1 - progress if self.decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
