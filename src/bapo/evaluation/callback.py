"""Held-out evaluation during training."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import lightning as L

from bapo.evaluation import check_samples, evaluate
from bapo.protocols import Task
from bapo.rollouts.ranks import Ranks
from bapo.types import Prompt, SamplingParams


class Evaluate(L.Callback):
    """Logs `eval/<set>/*` before the first update and at the end of every `every_n_rounds`-th round and of the last one.

    A set is the first `max_prompts` prompts of `split`, `samples` responses to each: of every task in `benchmarks`, under its
    name there, or, without any, of the task trained on, under the name of the split.

    Runs at the last update of the round, before a checkpoint is written: no checkpoint lacks the evaluation before it.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        every_n_rounds: int = 1,
        samples: int = 1,
        max_prompts: int | None = None,
        split: Literal["train", "test"] = "test",
        benchmarks: Mapping[str, Any] | None = None,
    ):
        for name, value in (("every_n_rounds", every_n_rounds), ("max_prompts", max_prompts)):
            if value is not None and value < 1:
                raise ValueError(f"callbacks.evaluate.{name} is {value}; it must be >= 1")
        check_samples(samples, sampling, "callbacks.evaluate.samples")
        self.benchmarks = {name: task for name, task in (benchmarks or {}).items() if task is not None}
        for name, task in self.benchmarks.items():
            if not re.fullmatch(r"[\w-]+", name):
                raise ValueError(f"callbacks.evaluate.benchmarks has {name!r}; a name holds letters, digits, _ and - alone")
            if not isinstance(task, Task):
                raise ValueError(f"callbacks.evaluate.benchmarks.{name} is {task!r}; it must be a task, with a _target_")
        self.sampling = sampling
        self.every_n_rounds = every_n_rounds
        self.samples = samples
        self.max_prompts = max_prompts
        self.split = split
        self.due = False  # begun and not finished: an engine that fails leaves it to the resumed run

    def state_dict(self) -> dict[str, bool]:
        return {"due": self.due}

    def load_state_dict(self, state_dict: dict[str, bool]) -> None:
        self.due = state_dict["due"]

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuses prompts that are too long for the engine before the first pool is collected."""
        collector = trainer.datamodule.collector  # type: ignore[attr-defined]
        for task in self._sets(collector.task).values():
            collector.check(self.split, self._prompts(task), self.sampling, "callbacks.evaluate.sampling", task)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step == 0 or self.due:
            self._evaluate(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        epochs_per_round = trainer.datamodule.schedule.epochs_per_round  # type: ignore[attr-defined]
        rounds_done, rest = divmod(trainer.current_epoch + 1, epochs_per_round)
        end_of_round = trainer.is_last_batch and rest == 0
        last = trainer.current_epoch + 1 == trainer.max_epochs
        if end_of_round and (rounds_done % self.every_n_rounds == 0 or last):
            self._evaluate(trainer, pl_module)

    def _sets(self, trained_on: Task) -> Mapping[str, Task]:
        return self.benchmarks or {self.split: trained_on}

    def _prompts(self, task: Task) -> Sequence[Prompt]:
        return task.prompts(self.split)[: self.max_prompts]

    def _evaluate(self, trainer: L.Trainer, pl_module: Any) -> None:
        start = time.perf_counter()
        self.due = True
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        data.on_phase("eval")
        ranks = Ranks(trainer.global_rank, trainer.world_size)
        data.sync_engine(ranks)
        collector = data.collector
        row: dict[str, float] = {}
        for name, task in self._sets(collector.task).items():
            found = evaluate(
                collector.engine,
                task,
                collector.tokenizer,
                self._prompts(task),
                self.sampling,
                self.samples,
                collector.seed,
                ranks,
                collector.options.prompt,
            )
            row |= {f"eval/{name}/{metric}": value for metric, value in found.items()}
        self.due = False
        data.rest_engine()
        pl_module.log_row(row | {"time/eval": time.perf_counter() - start})
        data.on_phase("train")
