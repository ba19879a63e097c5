"""What a trainer of a policy does around its loss: one optimizer update per mini-batch, its row in the log, its checkpoint."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor

from bapo.metrics import lookup
from bapo.optimizer import Optimizer
from bapo.policy.causal_lm import CausalLMPolicy
from bapo.policy.checkpoint import with_base, without_base

log = logging.getLogger(__name__)

MAX_SKIPS_IN_A_ROW = 3


class UpdateModule(L.LightningModule):
    """Holds `policy` and steps its optimizer; a subclass differentiates. `total_updates` is the horizon of the lr schedule.

    A mini-batch is cut into micro-batches of at most `token_budget` padded tokens.
    """

    def __init__(self, policy: CausalLMPolicy, optimizer: Optimizer, token_budget: int, total_updates: int):
        super().__init__()
        self.automatic_optimization = False
        self.policy = policy
        self.optimizer = optimizer
        self.token_budget = token_budget
        self.total_updates = total_updates
        self.skipped_updates = 0
        self.skips_in_a_row = 0
        self.latest: dict[str, float] = {}

    def _step(self, loss: float, tokens: float) -> tuple[float, bool]:
        """Clips the gradient and steps; returns (norm before clipping, stepped).

        A loss or gradient that is not finite, or one of no tokens, moves nothing: neither weights nor lr nor the step count.
        """
        optimizer, scheduler = self._optimizer(), self.lr_schedulers()
        norm = float(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.optimizer.max_grad_norm))
        stepped = tokens > 0 and math.isfinite(loss) and math.isfinite(norm)
        if stepped:
            optimizer.step()
            scheduler.step()  # type: ignore[union-attr]
            self.skips_in_a_row = 0
        else:
            self.skipped_updates += 1
            self.skips_in_a_row += 1
            log.warning(
                "update skipped after %d: loss %s, gradient norm %s, %d trained tokens", self.global_step, loss, norm, tokens
            )
        optimizer.zero_grad()
        if self.skips_in_a_row >= MAX_SKIPS_IN_A_ROW:
            raise RuntimeError(
                f"{self.skips_in_a_row} updates in a row had a loss or gradient that is not finite, or no token, after "
                f"{self.global_step} completed updates; the weights are as they were. Lower optimizer.lr, or look at the data."
            )
        return norm, stepped

    def _optimizer(self) -> LightningOptimizer:
        optimizer = self.optimizers()  # Lightning's wrapper: stepping it is what moves `global_step`
        assert isinstance(optimizer, LightningOptimizer)
        return optimizer

    @contextmanager
    def _synchronised(self, last: bool) -> Iterator[None]:
        """Ranks exchange gradients on the last micro-batch only."""
        block = getattr(self.trainer.strategy, "block_backward_sync", None)
        with nullcontext() if last or block is None else block():
            yield

    def _gather(self, vector: Tensor) -> Tensor:
        """[n] -> [ranks, n]."""
        if self.trainer.world_size == 1:
            return vector[None]
        parts = [torch.empty_like(vector) for _ in range(self.trainer.world_size)]
        torch.distributed.all_gather(parts, vector)
        return torch.stack(parts)

    def _sum_over_ranks(self, vector: Tensor) -> Tensor:
        return self._gather(vector).sum(dim=0)

    def log_row(self, row: dict[str, float]) -> None:
        """One row per optimizer update, to every logger; its step is the number of completed updates.

        `latest` keeps the last value of every metric. Every rank must give the same row.
        """
        for name in row:
            lookup(name)
        row = row | {"trainer/global_step": self.global_step}
        self.latest |= row
        self.log_dict({name: float(value) for name, value in row.items()}, logger=False)  # for callbacks that watch a metric
        for logger in self.loggers:
            logger.log_metrics(row, step=self.global_step)

    # -- Lightning's hooks --

    def configure_optimizers(self) -> Any:
        trainable = [p for p in self.policy.parameters() if p.requires_grad]
        optimizer, scheduler = self.optimizer.build(trainable, self.total_updates)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        without_base(self, checkpoint)
        checkpoint["bapo"] = {"skipped_updates": self.skipped_updates, "skips_in_a_row": self.skips_in_a_row}
        # A fit resumed at the end of an epoch counts one epoch less as begun than one that never stopped (Lightning 2.6.6), and
        # its own checkpoints would start an epoch again that is over. Both are written as if they had never stopped.
        progress = checkpoint["loops"]["fit_loop"]["epoch_progress"]
        begun, done = self.current_epoch + 1, self.current_epoch
        for counts in (progress["total"], progress["current"]):
            counts |= {"ready": begun, "started": begun, "processed": done, "completed": done}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        with_base(self, checkpoint)
        self.skipped_updates, self.skips_in_a_row = (checkpoint["bapo"][name] for name in ("skipped_updates", "skips_in_a_row"))
