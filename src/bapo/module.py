"""The Lightning module: one mini-batch is one optimizer update."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bapo.losses.objective import Objective
from bapo.losses.plan import plan_update, weigh_update
from bapo.losses.regularisers import regularised
from bapo.metrics import MetricParts
from bapo.ops.microbatch import SeenPart, cut_by_tokens
from bapo.optimizer import MakeOptimizer
from bapo.policy.causal_lm import CausalLMPolicy
from bapo.policy.snapshot import PolicySnapshot
from bapo.protocols import Loss
from bapo.types import Adapter, Batch, ClipBounds, MiniBatch, TokenStats
from bapo.updates import UpdateModule


class BapoModule(UpdateModule):
    """Trains `policy` with `loss`; `options` are those of `UpdateModule`.

    Neither gradient nor bounds depend on how a mini-batch is cut, or over how many ranks: the loss divides by the trained
    tokens of the whole update, and the bounds come from tallies summed over all of it.
    """

    def __init__(
        self,
        policy: CausalLMPolicy,
        loss: Loss,
        objective: Objective,
        optimizer: MakeOptimizer,
        token_budget: int,
        total_updates: int,
        reference: CausalLMPolicy | None = None,
        **options: Any,
    ):
        super().__init__(policy, optimizer, token_budget, total_updates, **options)
        self.loss = loss
        self.objective = objective
        self.observer: Any = None  # called after every step with (mini-batch, its `SeenPart`s, plan, row of the log)
        # In a tuple Lightning does not see it: a frozen model belongs neither into checkpoints nor to the gradient exchange.
        self._reference = (reference,)

    # -- what the data side may ask (PolicyHandle) --

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.policy.named_weights()

    def adapter(self) -> Adapter | None:
        return self.policy.adapter()

    def token_stats(self, batch: Batch) -> TokenStats:
        # As in training_step: under mixed precision the same weights give other numbers outside autocast.
        with self.trainer.precision_plugin.forward_context():
            return self.policy.token_stats(batch, self.token_budget)

    def reference_logprobs(self, batch: Batch) -> Tensor:
        (reference,) = self._reference
        if reference is None:
            return torch.zeros_like(batch.behaviour_logprobs)
        with self.trainer.precision_plugin.forward_context():
            return reference.to(self.device).token_stats(batch, self.token_budget).logprobs

    def version(self) -> int:
        return self.global_step

    def snapshot(self) -> PolicySnapshot:
        return PolicySnapshot(self, [p for p in self.policy.parameters() if p.requires_grad])

    # -- one update --

    def training_step(self, minibatch: MiniBatch, batch_idx: int) -> None:
        """One update: weigh its tokens, plan it (pass 1), accumulate its gradient (pass 2), step, log a row."""
        start = time.perf_counter()
        cuts = cut_by_tokens(minibatch.sequences.lengths(), self.token_budget)
        batches = [minibatch.sequences.select(rows) for rows in cuts]
        vocabulary = self.policy.model.config.vocab_size
        micro_batches = weigh_update(batches, self.objective, vocabulary, self._sum_over_ranks)
        loss_state = self.loss.state_dict()
        shared = self._forward(batches[0]) if len(batches) == 1 else None  # one forward serves both passes

        def logprobs(index: int) -> Tensor:
            return (shared or self.policy(batches[index])).logprobs

        plan = plan_update(micro_batches, logprobs, self.global_step, self.loss, self.objective, self._sum_over_ranks)
        parts = MetricParts()
        seen: list[SeenPart] = []
        for index, micro in enumerate(micro_batches):
            batch = micro.batch
            with self._synchronised(last=index == len(cuts) - 1):
                stats = shared or self._forward(batch)
                inputs = micro.loss_inputs(stats.logprobs)
                bounds = plan.bounds or self.loss.choose(self.loss.tally(inputs.detached()))
                output = self.loss(inputs, bounds, plan.denominator)
                loss, metrics = regularised(output, stats, batch, self.objective, plan.denominator)
                self._accumulate(loss)
            parts.add(metrics | micro.metrics | _state_metrics(batch, stats, self.global_step))
            if plan.bounds is None:
                parts.add(_bounds_metrics(bounds), weight=batch.response_mask.sum())
            if self.observer is not None:
                seen.append(micro.seen(cuts[index], inputs, stats.entropy, bounds, output))

        row = parts.reduce(self._gather, plan.tokens)
        if plan.bounds is not None:
            values = _bounds_metrics(plan.bounds)
            row |= dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))
        positive, negative = row["bounds/positive_mass"], row["bounds/negative_mass"]
        row["bounds/positive_ratio"] = positive / (positive + negative) if negative else 1.0
        if not self._step(row, row["policy/loss"], plan.tokens):
            self.loss.load_state_dict(loss_state)
            return
        if self.observer is not None:
            self.observer(minibatch, seen, plan, row)
        seconds = time.perf_counter() - start
        self.log_row(row | {"time/train": seconds, "perf/tokens_per_s": plan.tokens / seconds} | minibatch.metrics)

    def _forward(self, batch: Batch) -> TokenStats:
        return self.policy(batch, entropy_graph=self.objective.entropy_bonus > 0)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["bapo"]["loss"] = self.loss.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.loss.load_state_dict(checkpoint["bapo"]["loss"])


def _state_metrics(batch: Batch, stats: TokenStats, version: int) -> dict[str, Tensor]:
    staleness = torch.where(batch.response_mask, version - batch.policy_version, 0)
    return {"policy/entropy": stats.entropy.sum(), "staleness/mean": staleness.sum(), "staleness/max": staleness.max()}


def _bounds_metrics(bounds: ClipBounds) -> dict[str, Tensor]:
    return {"bounds/clip_low": bounds.clip_low, "bounds/clip_high": bounds.clip_high, **bounds.metrics}
