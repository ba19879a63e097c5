"""The Lightning module of supervised fine-tuning: one mini-batch of demonstrations is one optimizer update."""

from __future__ import annotations

import time
from typing import Any

import torch

from bapo.metrics import MetricParts
from bapo.ops.masked import masked_sum
from bapo.ops.microbatch import cut_by_tokens
from bapo.optimizer import MakeOptimizer
from bapo.policy.causal_lm import CausalLMPolicy
from bapo.types import MiniBatch
from bapo.updates import UpdateModule


class SftModule(UpdateModule):
    """Minimises the mean negative log-prob of the response tokens, end of sequence included, of the whole mini-batch.

    Every token counts alike, however the mini-batch is cut and over however many ranks. test_every: updates between two looks
    at the held-out rows of the data module, for `sft/test_loss`.
    """

    def __init__(
        self,
        policy: CausalLMPolicy,
        optimizer: MakeOptimizer,
        token_budget: int,
        total_updates: int,
        test_every: int = 100,
        **options: Any,
    ):
        super().__init__(policy, optimizer, token_budget, total_updates, **options)
        self.test_every = test_every

    def training_step(self, minibatch: MiniBatch, batch_idx: int) -> None:
        start = time.perf_counter()
        whole = minibatch.sequences
        cuts = cut_by_tokens(whole.lengths(), self.token_budget)
        denominator = self._sum_over_ranks(whole.response_mask.sum(dtype=torch.float64)[None]).sum()
        parts = MetricParts()
        for index, rows in enumerate(cuts):
            batch = whole.select(rows)
            with self._synchronised(last=index == len(cuts) - 1):
                stats = self.policy(batch)
                loss = -masked_sum(stats.logprobs, batch.response_mask) / denominator
                self._accumulate(loss)
            parts.add({"sft/loss": loss, "policy/entropy": stats.entropy.sum()})
        tokens = float(denominator)
        row = parts.reduce(self._gather, tokens)
        stepped = self._step(row, row["sft/loss"], tokens)
        if stepped:
            seconds = time.perf_counter() - start
            self.log_row(row | {"time/train": seconds, "perf/tokens_per_s": tokens / seconds} | minibatch.metrics)
        last = self.trainer.is_last_batch and self.trainer.current_epoch + 1 == self.trainer.max_epochs
        if last or (stepped and self.global_step % self.test_every == 0):
            self._test()  # before a checkpoint is written: none lacks the look before it

    def on_train_start(self) -> None:
        if self.global_step == 0:
            self._test()

    @torch.no_grad()
    def _test(self) -> None:
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        if not data.test:
            return
        start = time.perf_counter()
        data.on_phase("eval")
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for batch in data.test_batches(self.trainer.global_rank, self.trainer.world_size):
            with self.trainer.precision_plugin.forward_context():
                stats = self.policy.token_stats(batch, self.token_budget)
            sums += torch.stack([-stats.logprobs.double().sum(), batch.response_mask.sum().double()]).to(self.device)
        total, tokens = self._gather(sums).sum(dim=0).tolist()
        self.log_row({"sft/test_loss": total / tokens, "time/eval": time.perf_counter() - start})
        data.on_phase("train")
