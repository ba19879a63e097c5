"""The Lightning module: one mini-batch is one optimizer update."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor

from bapo.metrics import lookup
from bapo.ops.microbatch import cut_by_tokens
from bapo.optimizer import Optimizer
from bapo.policy.causal_lm import CausalLMPolicy
from bapo.types import Batch, ClipBounds, Loss, LossInputs, MiniBatch, Scores

log = logging.getLogger(__name__)

MAX_SKIPS_IN_A_ROW = 3


class BapoModule(L.LightningModule):
    """Trains `policy` with `loss`. A mini-batch is cut into micro-batches of at most `token_budget` padded tokens.

    Neither gradient nor bounds depend on how it is cut, or over how many ranks: the loss divides by the trained tokens of the
    whole update, and the bounds come from tallies summed over all of it. `total_updates` is the horizon of the lr schedule.
    """

    def __init__(self, policy: CausalLMPolicy, loss: Loss, optimizer: Optimizer, token_budget: int, total_updates: int):
        super().__init__()
        self.automatic_optimization = False
        self.policy = policy
        self.loss = loss
        self.optimizer = optimizer
        self.token_budget = token_budget
        self.total_updates = total_updates
        self.skipped_updates = 0
        self.skips_in_a_row = 0
        self.latest: dict[str, float] = {}

    # -- what the data side may ask (PolicyHandle) --

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.policy.named_weights()

    def score(self, batch: Batch) -> Scores:
        # As in training_step: under mixed precision the same weights give other numbers outside autocast.
        with self.trainer.precision_plugin.forward_context():
            return self.policy.score(batch, self.token_budget)

    def version(self) -> int:
        return self.global_step

    # -- one update --

    def training_step(self, minibatch: MiniBatch, batch_idx: int) -> None:
        start = time.perf_counter()
        whole = minibatch.sequences
        micro_batches = [whole.select(rows) for rows in cut_by_tokens(whole.lengths(), self.token_budget)]
        single = self.policy(micro_batches[0]) if len(micro_batches) == 1 else None
        bounds, denominator = self._choose(micro_batches, single)

        parts = MetricParts()
        for index, micro in enumerate(micro_batches):
            with self._synchronised(index == len(micro_batches) - 1):
                scores = single or self.policy(micro)
                output = self.loss(_loss_inputs(micro, scores), bounds, denominator)
                # Data-parallel ranks average their gradients; the denominator is already global, so they must add up.
                self.manual_backward(output.loss * self.trainer.world_size)
            parts.add(output.metrics)
            parts.add(_state_metrics(micro, scores, self.global_step))

        row = parts.reduce(self._gather, float(denominator))
        lr = self._optimizer().param_groups[0]["lr"]
        grad_norm, stepped = self._step(row["policy/loss"], float(denominator))
        if stepped:
            row |= _bounds_metrics(bounds, row)
            row |= {"policy/grad_norm": grad_norm, "policy/lr": lr, "policy/skipped_updates": self.skipped_updates}
            seconds = time.perf_counter() - start
            row |= {"time/train": seconds, "perf/tokens_per_s": float(denominator) / seconds}
            self.log_row(row | minibatch.metrics)

    def _choose(self, micro_batches: list[Batch], single: Scores | None) -> tuple[ClipBounds, Tensor]:
        """Pass 1: bounds and trained tokens of the whole update, in one collective. No pass where it cannot matter."""
        tokens = torch.zeros(1, dtype=torch.float64, device=self.device)
        tally: Tensor | float = 0.0
        with torch.no_grad():
            for micro in micro_batches:
                tokens += micro.response_mask.sum()
                if not self.loss.adaptive:
                    scores = Scores(micro.behaviour_logprobs, micro.behaviour_logprobs)
                elif single is not None:
                    scores = Scores(single.logprobs.detach(), single.entropy)
                elif _is_fresh(micro, self.global_step):  # the policy still is the one that sampled: every ratio is 1
                    scores = Scores(micro.behaviour_logprobs, micro.behaviour_logprobs)
                else:
                    scores = self.policy(micro)
                tally = tally + self.loss.tally(_loss_inputs(micro, scores))
        assert isinstance(tally, Tensor)
        total = self._gather(torch.cat([tokens, tally])).sum(dim=0)
        return self.loss.choose(total[1:]), total[0]

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
        checkpoint["bapo"] = {"skipped_updates": self.skipped_updates, "skips_in_a_row": self.skips_in_a_row}
        # A fit resumed at the end of an epoch counts one epoch less as begun than one that never stopped (Lightning 2.6.6), and
        # its own checkpoints would start an epoch again that is over. Both are written as if they had never stopped.
        progress = checkpoint["loops"]["fit_loop"]["epoch_progress"]
        begun, done = self.current_epoch + 1, self.current_epoch
        for counts in (progress["total"], progress["current"]):
            counts |= {"ready": begun, "started": begun, "processed": done, "completed": done}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.skipped_updates = checkpoint["bapo"]["skipped_updates"]
        self.skips_in_a_row = checkpoint["bapo"]["skips_in_a_row"]


class MetricParts:
    """Adds up the parts of metrics over micro-batches, then over ranks, each as its `reduction` says."""

    def __init__(self) -> None:
        self.parts: dict[str, Tensor] = {}

    def add(self, parts: dict[str, Tensor]) -> None:
        for name, part in parts.items():
            part = part.detach().double()
            if name not in self.parts:
                self.parts[name] = part
            elif lookup(name).reduction == "max":
                self.parts[name] = torch.maximum(self.parts[name], part)
            else:
                self.parts[name] = self.parts[name] + part

    def reduce(self, gather: Any, tokens: float) -> dict[str, float]:
        """`gather`: [n] -> [ranks, n]; `tokens`: trained tokens of the update. Every rank holds the same names."""
        names = sorted(self.parts)
        gathered = gather(torch.stack([self.parts[name] for name in names])).cpu()
        sums, largest = gathered.sum(dim=0).tolist(), gathered.amax(dim=0).tolist()
        row = {}
        for name, total, peak in zip(names, sums, largest, strict=True):
            reduction = lookup(name).reduction
            row[name] = peak if reduction == "max" else total / max(1, tokens) if reduction == "token_mean" else total
        return row


def _is_fresh(batch: Batch, version: int) -> bool:
    return bool((batch.policy_version[batch.response_mask] == version).all())


def _loss_inputs(batch: Batch, scores: Scores) -> LossInputs:
    return LossInputs(
        logprobs=scores.logprobs,
        behaviour_logprobs=batch.behaviour_logprobs,
        advantages=batch.advantages[:, None].expand_as(batch.behaviour_logprobs),
        response_mask=batch.response_mask,
    )


def _state_metrics(batch: Batch, scores: Scores, version: int) -> dict[str, Tensor]:
    age = torch.where(batch.response_mask, version - batch.policy_version, 0)
    return {"policy/entropy": scores.entropy.sum(), "staleness/mean": age.sum(), "staleness/max": age.max()}


def _bounds_metrics(bounds: ClipBounds, row: dict[str, float]) -> dict[str, float]:
    """`bounds/*`: for every loss the bounds and the positive ratio at them, for a searching one its account of the search."""
    positive, negative = row["bounds/positive_mass"], row["bounds/negative_mass"]
    metrics = {
        "bounds/clip_low": float(bounds.clip_low),
        "bounds/clip_high": float(bounds.clip_high),
        "bounds/positive_ratio": positive / (positive + negative) if negative else 1.0,
    }
    for name in ("positive_ratio_start", "target_met", "saturated", "search_effective"):
        if (value := getattr(bounds, name)) is not None:
            metrics[f"bounds/{name}"] = float(value)
    return metrics
