"""The shell around a loss: one optimizer update per mini-batch, its row of the log, its checkpoint."""

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

from bapo.optimizer import MakeOptimizer, MakeSchedule, build_schedule
from bapo.policy.causal_lm import CausalLMPolicy
from bapo.policy.checkpoint import with_base, without_base

log = logging.getLogger(__name__)

MAX_SKIPS_IN_A_ROW = 3


class NotFiniteError(RuntimeError):
    """Several updates in a row could not be made. The weights are those of the last update that was."""


class UpdateModule(L.LightningModule):
    """Holds `policy` and steps its optimizer; a subclass computes the gradient in `training_step`.

    A mini-batch is cut into micro-batches of at most `token_budget` padded tokens. lr_schedule, total_updates: see
    `build_schedule`. Gradients are clipped to the global 2-norm `max_grad_norm`, once per update.
    """

    def __init__(
        self,
        policy: CausalLMPolicy,
        optimizer: MakeOptimizer,
        token_budget: int,
        total_updates: int,
        lr_schedule: MakeSchedule | None = None,
        max_grad_norm: float = 1.0,
    ):
        super().__init__()
        self.automatic_optimization = False
        self.policy = policy
        self.optimizer, self.lr_schedule, self.max_grad_norm = optimizer, lr_schedule, max_grad_norm
        self.token_budget, self.total_updates = token_budget, total_updates
        self.skipped_updates = 0
        self.skips_in_a_row = 0
        self.latest: dict[str, float] = {}

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer([p for p in self.policy.parameters() if p.requires_grad])
        return {"optimizer": optimizer, "lr_scheduler": build_schedule(self.lr_schedule, optimizer, self.total_updates)}

    # -- one update: backward for every micro-batch, then one step --

    @contextmanager
    def _synchronised(self, last: bool) -> Iterator[None]:
        """Forward and backward of a micro-batch: ranks exchange gradients on the last one only."""
        block = getattr(self.trainer.strategy, "block_backward_sync", None)
        with nullcontext() if last or block is None else block():
            yield

    def _accumulate(self, loss: Tensor) -> None:
        # Data-parallel ranks average their gradients; the loss's denominator is already global, so they must add up.
        self.manual_backward(loss * self.trainer.world_size)

    def _step(self, row: dict[str, float], loss: float, tokens: float) -> bool:
        """Clips the gradient and steps; adds gradient norm (before clipping), lr and skips to `row`. Returns False if skipped.

        A loss or gradient that is not finite, or one of no tokens, moves nothing: neither weights nor lr nor the step count.
        """
        optimizer, schedule = self._optimizer(), self.lr_schedulers()
        lr = optimizer.param_groups[0]["lr"]
        norm = float(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm))
        stepped = tokens > 0 and math.isfinite(loss) and math.isfinite(norm)
        if stepped:
            optimizer.step()
            schedule.step()  # type: ignore[union-attr]
            self.skips_in_a_row = 0
        else:
            self.skipped_updates += 1
            self.skips_in_a_row += 1
            reason = f"loss {loss}, gradient norm {norm}, {tokens:g} trained tokens"
            log.warning("update skipped after %d: %s", self.global_step, reason)
        optimizer.zero_grad()
        if self.skips_in_a_row >= MAX_SKIPS_IN_A_ROW:
            raise NotFiniteError(
                f"{self.skips_in_a_row} updates in a row had a loss or gradient that is not finite, or no token, after "
                f"{self.global_step} completed updates; the weights are unchanged. Lower optimizer.lr, or look at the data."
            )
        row |= {"policy/grad_norm": norm, "policy/lr": lr, "policy/skipped_updates": self.skipped_updates}
        return stepped

    def _optimizer(self) -> LightningOptimizer:
        optimizer = self.optimizers()  # Lightning's wrapper: stepping it is what moves `global_step`
        assert isinstance(optimizer, LightningOptimizer)
        return optimizer

    # -- ranks --

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
        row = row | {"trainer/global_step": self.global_step}
        self.latest |= row
        # For callbacks that monitor a metric. `log_dict` of a whole row would cost a third of a small model's training time.
        self.trainer.callback_metrics.update({name: torch.tensor(float(value)) for name, value in row.items()})
        for logger in self.loggers:
            logger.log_metrics(row, step=self.global_step)

    # -- checkpoint --

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
