"""The Lightning module: one mini-batch is one optimizer update."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bapo.losses.objective import Objective
from bapo.losses.plan import plan_update, weigh_update
from bapo.losses.regularisers import entropy_bonus, reference_kl
from bapo.metrics import MetricParts
from bapo.ops.microbatch import MicroBatch, cut_by_tokens
from bapo.optimizer import Optimizer
from bapo.policy.causal_lm import CausalLMPolicy
from bapo.policy.snapshot import PolicySnapshot
from bapo.protocols import Loss
from bapo.types import Adapter, Batch, ClipBounds, LossOutput, MiniBatch, TokenStats
from bapo.updates import UpdateModule


class BapoModule(UpdateModule):
    """Trains `policy` with `loss`.

    Neither gradient nor bounds depend on how a mini-batch is cut, or over how many ranks: the loss divides by the trained
    tokens of the whole update, and the bounds come from tallies summed over all of it.
    """

    def __init__(
        self,
        policy: CausalLMPolicy,
        loss: Loss,
        objective: Objective,
        optimizer: Optimizer,
        token_budget: int,
        total_updates: int,
        reference: CausalLMPolicy | None = None,
    ):
        super().__init__(policy, optimizer, token_budget, total_updates)
        self.loss = loss
        self.observer: Any = None  # called after every step with (mini-batch, its `SeenPart`s, plan, row of the log)
        self.objective = objective
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
        start = time.perf_counter()
        whole = minibatch.sequences
        cuts = cut_by_tokens(whole.lengths(), self.token_budget)
        vocabulary = self.policy.model.config.vocab_size
        micro_batches = weigh_update([whole.select(rows) for rows in cuts], self.objective, vocabulary, self._sum_over_ranks)
        single = self._score(micro_batches[0]) if len(micro_batches) == 1 else None
        learned = self.loss.state_dict() if hasattr(self.loss, "state_dict") else None

        def logprobs(index: int) -> Tensor:
            return (single or self.policy(micro_batches[index].batch)).logprobs

        plan = plan_update(micro_batches, logprobs, self.global_step, self.loss, self.objective, self._sum_over_ranks)

        parts = MetricParts()
        seen: list[Any] = []
        for index, micro in enumerate(micro_batches):
            with self._synchronised(index == len(micro_batches) - 1):
                scores = single or self._score(micro)
                inputs = micro.loss_inputs(scores.logprobs)
                bounds = plan.bounds or self.loss.choose(self.loss.tally(replace(inputs, logprobs=inputs.logprobs.detach())))
                output = self.loss(inputs, bounds, plan.denominator)
                loss, metrics = self._regularised(output, micro, scores, plan.denominator)
                # Data-parallel ranks average their gradients; the denominator is already global, so they must add up.
                self.manual_backward(loss * self.trainer.world_size)
            parts.add(metrics | micro.metrics | _state_metrics(micro.batch, scores, self.global_step))
            if plan.bounds is None:
                parts.add(_bounds_metrics(bounds), weight=micro.batch.response_mask.sum())
            if self.observer is not None:
                seen.append(micro.seen(cuts[index], inputs, scores.entropy, bounds, output))

        row = parts.reduce(self._gather, plan.tokens)
        if plan.bounds is not None:
            found = _bounds_metrics(plan.bounds)
            row |= dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True))
        lr = self._optimizer().param_groups[0]["lr"]
        grad_norm, stepped = self._step(row["policy/loss"], plan.tokens)
        if stepped:
            positive, negative = row["bounds/positive_mass"], row["bounds/negative_mass"]
            row |= {"bounds/positive_ratio": positive / (positive + negative) if negative else 1.0}
            row |= {"policy/grad_norm": grad_norm, "policy/lr": lr, "policy/skipped_updates": self.skipped_updates}
            if self.observer is not None:
                self.observer(minibatch, seen, plan, row)
            seconds = time.perf_counter() - start
            self.log_row(row | {"time/train": seconds, "perf/tokens_per_s": plan.tokens / seconds} | minibatch.metrics)
        elif learned is not None:
            self.loss.load_state_dict(learned)  # type: ignore[attr-defined]

    def _score(self, micro: MicroBatch) -> TokenStats:
        return self.policy(micro.batch, entropy_graph=self.objective.entropy_bonus > 0)

    def _regularised(
        self, output: LossOutput, micro: MicroBatch, scores: TokenStats, denominator: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The policy loss with the objective's other terms, and their metrics."""
        objective, mask = self.objective, micro.batch.response_mask
        loss, metrics = output.loss, output.metrics
        if objective.entropy_bonus:
            scale = objective.scale(mask)
            loss = loss + entropy_bonus(scores.entropy, mask, scale, denominator, objective.entropy_bonus)
        if objective.reference_kl:
            penalty = reference_kl(
                scores.logprobs, micro.batch.reference_logprobs, mask, objective.scale(mask), denominator,
                objective.reference_kl, objective.kl_estimator,
            )  # fmt: skip
            loss, metrics = loss + penalty.loss, metrics | penalty.metrics
        return loss, metrics

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if hasattr(self.loss, "state_dict"):  # a loss that learns from update to update
            checkpoint["bapo"]["loss"] = self.loss.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if hasattr(self.loss, "load_state_dict"):
            self.loss.load_state_dict(checkpoint["bapo"]["loss"])


def _state_metrics(batch: Batch, scores: TokenStats, version: int) -> dict[str, Tensor]:
    age = torch.where(batch.response_mask, version - batch.policy_version, 0)
    return {"policy/entropy": scores.entropy.sum(), "staleness/mean": age.sum(), "staleness/max": age.max()}


def _bounds_metrics(bounds: ClipBounds) -> dict[str, Tensor]:
    return {"bounds/clip_low": bounds.clip_low, "bounds/clip_high": bounds.clip_high, **bounds.metrics}
