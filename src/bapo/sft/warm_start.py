"""Small policies made here, once, and kept in a cache: untrained, or fitted to a task's noisy demonstrations."""

from __future__ import annotations

import inspect
import logging
import math
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bapo.files import digest
from bapo.policy.folder_cache import kept_folder
from bapo.policy.tiny_qwen3 import qwen3_config, qwen3_sizes, tiny_qwen3
from bapo.protocols import Task

if TYPE_CHECKING:  # the libraries take seconds to import: a config is checked without them
    from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

    from bapo.sft.rows import Row

log = logging.getLogger(__name__)

VERSION = 2
"""Part of the cache's key: raise it when the same fields come to mean another model."""
EARLY = 64
"""Demonstrations made for the cache's key: they betray a change in the task's code, and texts too long for the model."""
HELD_OUT = 256
"""Further demonstrations, whose loss is that of the warm start."""
_SIZES = {n: p.default for n, p in inspect.signature(qwen3_sizes).parameters.items() if p.default is not p.empty}


@dataclass(frozen=True)
class Untrained:
    """Call it with a task to get the folder of a model with random weights and its character tokenizer.

    seed: decides the weights. model: sizes that differ from the defaults of `tiny_qwen3`.
    """

    seed: int = 0
    model: Mapping[str, Any] = field(default_factory=dict)
    cache_dir: str = "outputs/cache"

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.model) - set(_SIZES)):
            raise ValueError(f"model has {', '.join(unknown)}; it takes {', '.join(_SIZES)}")
        if not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"seed is {self.seed!r}; it must be an integer >= 0")
        try:
            qwen3_sizes(vocab_size=2, eos_token_id=0, pad_token_id=1, **self.model)
        except ValueError as error:
            raise ValueError(f"model.{error}") from error

    def __call__(self, task: Any) -> Path:
        """The folder for `task`, absolute; built if the cache does not hold it whole. Processes that race share one build.

        Raises ValueError for a task without demonstrations.
        """
        _check_task(task)
        return kept_folder(self.cache_dir, self._key(task), lambda folder: self._build(task, folder))

    def config(self, task: Any) -> Qwen3Config:
        """The sizes of the model to come, without making it."""
        _check_task(task)
        return qwen3_config(len(task.alphabet) + 2, eos_token_id=1, pad_token_id=0, **self.model)

    def _key(self, task: Any) -> str:
        return f"untrained_{digest(*self._decisive(task))}"

    def _decisive(self, task: Any) -> list[Any]:
        """Everything that decides the model."""
        options = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "cache_dir"}
        options["model"] = {**_SIZES, **self.model}
        return [VERSION, version("torch"), version("transformers"), options, task.alphabet, task.eos]

    def _build(self, task: Any, folder: Path) -> dict[str, float]:
        from bapo.policy.tokenizer import character_tokenizer

        tokenizer = character_tokenizer(task.alphabet, task.eos)
        model = tiny_qwen3(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, **self.model, seed=self.seed)
        facts = self._train(model, tokenizer, task)
        with quiet():
            model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return facts

    def _train(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, task: Any) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class WarmStart(Untrained):
    """Call it with a task to get the folder of a policy fine-tuned on its demonstrations.

    steps: updates of AdamW, of `batch_size` demonstrations each. lr: peak of the learning rate; it rises over the first 2 % and
    falls to 0 along a cosine. demonstrations: how many different ones there are. seed: decides demonstrations, their order and
    the initial weights.
    """

    steps: int = 600
    batch_size: int = 64
    lr: float = 3e-3
    demonstrations: int = 38_400

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("steps", "batch_size", "demonstrations"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be an integer >= 1")
        if not isinstance(self.lr, int | float) or not 0 < self.lr < math.inf:
            raise ValueError(f"lr is {self.lr!r}; it must be a finite number > 0")

    def _key(self, task: Any) -> str:
        examples = task.demonstrations(EARLY, self.seed)
        # A token per character. All of the demonstrations may take a minute to make.
        self._check_room(max(len(prompt) + len(response) + 1 for prompt, response in examples))
        if " at 0x" in repr(task):
            raise ValueError(f"task is {task!r}; its repr must state its fields, for the cache (a dataclass does)")
        return digest(*self._decisive(task), repr(task), list(examples))

    def _check_room(self, longest: int) -> None:
        room = {**_SIZES, **self.model}["max_position_embeddings"]
        if longest > room:
            key = "policy.warm_start.model.max_position_embeddings"
            raise ValueError(f"{key} is {room}; it must be >= {longest}, the length of a demonstration")

    def _train(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, task: Any) -> dict[str, float]:
        from bapo.rollouts.prompt_format import PLAIN
        from bapo.sft.demonstrations import TaskDemonstrations
        from bapo.sft.rows import encode

        start = time.perf_counter()
        texts = TaskDemonstrations(self.demonstrations + HELD_OUT, self.seed)(task)
        eos = tokenizer.eos_token_id
        rows = encode(tokenizer, PLAIN, texts, eos, frozenset())
        self._check_room(max(len(row.ids) for row in rows))
        note = "warm start: %d updates on %d demonstrations of %s; later runs take the result from the cache"
        log.info(note, self.steps, self.demonstrations, type(task).__name__)
        loss = self._fit(model, rows[: self.demonstrations], rows[self.demonstrations :], tokenizer.pad_token_id)
        if not math.isfinite(loss):
            raise ValueError(
                f"policy.warm_start.lr is {self.lr}; the warm start diverged with it (loss {loss}): choose a smaller one"
            )
        seconds = time.perf_counter() - start
        log.info("warm start: loss %.3f after %.0f s", loss, seconds)
        return {"loss": loss, "seconds": seconds}

    def _fit(self, model: PreTrainedModel, train: list[Row], held_out: list[Row], pad_id: int) -> float:
        """Fine-tunes `model` in place, silently, on the CPU; returns the loss of `held_out`. Leaves ambient random states."""
        import lightning.pytorch as pl
        import torch
        from lightning.pytorch.utilities.seed import isolate_rng
        from transformers import get_scheduler

        from bapo.policy.causal_lm import CausalLMPolicy
        from bapo.sft.module import SftModule
        from bapo.sft.rows import SftData, SftOptions
        from bapo.updates import NotFiniteError

        options = SftOptions(max_updates=self.steps, batch_size=self.batch_size)
        data = SftData(train, held_out, options, pad_id, self.seed, world=1)
        module = SftModule(
            CausalLMPolicy(model),
            partial(torch.optim.AdamW, lr=self.lr, betas=(0.9, 0.95), weight_decay=0.0),
            token_budget=self.batch_size * model.config.max_position_embeddings,
            total_updates=self.steps,
            test_every=self.steps,
            lr_schedule=partial(get_scheduler, "cosine", num_warmup_steps=max(1, self.steps // 50)),
        )
        with quiet(), isolate_rng(include_cuda=False):
            trainer = pl.Trainer(
                accelerator="cpu", devices=1, max_epochs=data.epochs, reload_dataloaders_every_n_epochs=1, logger=False,
                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
            try:
                trainer.fit(module, datamodule=data)
            except NotFiniteError:
                return math.nan
        return module.latest["sft/test_loss"]


def _check_task(task: Task) -> None:
    if not task.has_demonstrations:
        raise ValueError(
            f"task is {task.name}, which has no demonstrations for policy.warm_start: choose a model for it, "
            "policy=hub policy.path=PATH_OR_HUB_ID"
        )


@contextmanager
def quiet() -> Iterator[None]:
    """No notes, warnings or progress bars of Lightning and transformers inside; both as before afterwards."""
    import transformers

    logger = logging.getLogger("lightning.pytorch")
    level, bars = logger.level, transformers.utils.logging.is_progress_bar_enabled()
    logger.setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning")
            yield
    finally:
        logger.setLevel(level)
        if bars:
            transformers.utils.logging.enable_progress_bar()
