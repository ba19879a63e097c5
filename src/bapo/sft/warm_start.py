"""The embedded default's starting policy: a tiny model fitted to a task's noisy demonstrations, once, then kept in a cache."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
import transformers
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

from bapo.policy.folder_cache import kept_folder
from bapo.policy.tiny_qwen3 import qwen3_config, tiny_qwen3
from bapo.policy.tokenizer import character_tokenizer, check_alphabet

log = logging.getLogger(__name__)

VERSION = 1
"""Part of the cache's key: raise it when the same fields come to mean another model."""
IGNORED = -100
"""The label of a slot that is not trained."""
EARLY = 64
"""So many demonstrations are looked at first: they betray a change in the task's code, and texts too long for the model."""
_SIZES = {n: p.default for n, p in inspect.signature(qwen3_config).parameters.items() if p.default is not p.empty}


class DemonstratedTask(Protocol):
    """What a task needs for a warm start. Its `repr` states every field of it: it is part of the cache's key."""

    @property
    def alphabet(self) -> str:
        """Every character of prompts and responses, without `eos`."""

    @property
    def eos(self) -> str:
        """The character that ends a response."""

    def demonstrations(self, n: int, seed: int) -> Sequence[tuple[str, str]]:
        """Pairs (prompt text, response text without `eos`)."""


@dataclass(frozen=True)
class WarmStart:
    """Call it with a task to get the folder of a policy that has seen its demonstrations.

    steps: updates of AdamW, of `batch_size` demonstrations each. lr: peak of the learning rate; it rises over the first 2 % and
    falls to 0 along a cosine. demonstrations: how many different ones there are. model: sizes that differ from the defaults of
    `tiny_qwen3`. seed: decides demonstrations, their order and the initial weights.
    """

    steps: int = 600
    batch_size: int = 64
    lr: float = 3e-3
    demonstrations: int = 38_400
    seed: int = 0
    model: Mapping[str, Any] = field(default_factory=dict)
    cache_dir: str = "outputs/cache"

    def __post_init__(self) -> None:
        for name, least in {"steps": 1, "batch_size": 1, "demonstrations": 1, "seed": 0}.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}; it must be an integer >= {least}")
        if not isinstance(self.lr, int | float) or not 0 < self.lr < math.inf:
            raise ValueError(f"lr is {self.lr!r}; it must be a finite number > 0")
        unknown = sorted(set(self.model) - set(_SIZES))
        if unknown:
            raise ValueError(f"model has {', '.join(unknown)}; it takes {', '.join(_SIZES)}")
        try:
            qwen3_config(vocab_size=2, eos_token_id=0, pad_token_id=1, **self.model)
        except ValueError as error:
            raise ValueError(f"model.{error}") from error

    def __call__(self, task: DemonstratedTask) -> Path:
        """The folder for `task`, absolute; built if the cache does not hold it whole. Processes that race share one build.

        Raises ValueError for a task without demonstrations.
        """
        _check_task(task)
        return kept_folder(self.cache_dir, self._key(task), lambda folder: self._build(task, folder))

    def config(self, task: DemonstratedTask) -> Qwen3Config:
        """The sizes of the model to come, without making it."""
        _check_task(task)
        return qwen3_config(len(task.alphabet) + 2, eos_token_id=1, pad_token_id=0, **self.model)

    def _key(self, task: DemonstratedTask) -> str:
        """A digest of everything that decides the result."""
        shown = task.demonstrations(EARLY, self.seed)
        # Their tokens are their characters. The rest of them may take a minute to make.
        self._check_room(max(len(prompt) + len(response) + 1 for prompt, response in shown))
        task_repr = repr(task)
        if " at 0x" in task_repr:
            raise ValueError(f"task is {task_repr}; its repr must state its fields, for the cache (a dataclass does)")
        fields = {name: value for name, value in asdict(self).items() if name != "cache_dir"}
        decisive = [VERSION, torch.__version__, transformers.__version__, fields | {"model": {**_SIZES, **self.model}}]
        decisive += [task_repr, task.alphabet, task.eos, list(shown)]
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]

    def _check_room(self, longest: int) -> None:
        room = {**_SIZES, **self.model}["max_position_embeddings"]
        if longest > room:
            key = "policy.warm_start.model.max_position_embeddings"
            raise ValueError(f"{key} is {room}; it must be >= {longest}, the length of a demonstration")

    def _build(self, task: DemonstratedTask, folder: Path) -> dict[str, float]:
        start = time.perf_counter()
        tokenizer = character_tokenizer(task.alphabet, task.eos)
        input_ids, labels = encode(tokenizer, task.demonstrations(self.demonstrations, self.seed))
        self._check_room(input_ids.shape[1])
        model = tiny_qwen3(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, **self.model, seed=self.seed)
        note = "warm start: %d steps on %d demonstrations of %s; later runs take the result from the cache"
        log.info(note, self.steps, self.demonstrations, type(task).__name__)
        losses = fit(model, input_ids, labels, steps=self.steps, batch_size=self.batch_size, lr=self.lr, seed=self.seed)
        loss = sum(losses[-50:]) / len(losses[-50:])
        if not math.isfinite(loss):
            raise ValueError(
                f"policy.warm_start.lr is {self.lr}; the warm start diverged with it (loss {loss}): choose a smaller one"
            )
        with _quiet():
            model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        seconds = time.perf_counter() - start
        log.info("warm start: loss %.3f after %.0f s, kept in %s", loss, seconds, folder.parent)
        return {"loss": loss, "seconds": seconds}


@dataclass(frozen=True)
class Untrained:
    """Call it with a task to get the folder of what `WarmStart`, whose fields these are, would begin with.

    It holds a model that knows nothing, and its tokenizer.
    """

    seed: int = 0
    model: Mapping[str, Any] = field(default_factory=dict)
    cache_dir: str = "outputs/cache"

    def __post_init__(self) -> None:
        self._like()

    def _like(self) -> WarmStart:
        return WarmStart(seed=self.seed, model=self.model, cache_dir=self.cache_dir)

    def config(self, task: DemonstratedTask) -> Qwen3Config:
        """The sizes of the model to come, without making it."""
        return self._like().config(task)

    def __call__(self, task: DemonstratedTask) -> Path:
        """The folder for `task`, absolute; made if the cache does not hold it whole. ValueError as for `WarmStart`."""
        _check_task(task)
        decisive = [VERSION, torch.__version__, transformers.__version__, self.seed, {**_SIZES, **self.model}]
        decisive += [task.alphabet, task.eos]
        key = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]
        return kept_folder(self.cache_dir, f"untrained_{key}", lambda folder: self._build(task, folder))

    def _build(self, task: DemonstratedTask, folder: Path) -> dict[str, float]:
        tokenizer = character_tokenizer(task.alphabet, task.eos)
        model = tiny_qwen3(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, **self.model, seed=self.seed)
        with _quiet():
            model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return {}


def _check_task(task: object) -> None:
    if not hasattr(task, "demonstrations"):
        name = getattr(task, "name", type(task).__name__)
        raise ValueError(
            f"task is {name}, which has no demonstrations for policy.warm_start: choose a model for it, "
            "policy=hub policy.path=PATH_OR_HUB_ID"
        )


def encode(tokenizer: PreTrainedTokenizerFast, pairs: Sequence[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """Pairs (prompt, response) as `input_ids` and `labels`, int64 [B, T], rows [prompt | response | EOS | padding].

    `labels` holds the token itself on the slots of the response and of its EOS, `IGNORED` elsewhere. Slots are told apart by
    position, so that a pad or an EOS is trained where it stands for one and nowhere else. ValueError names a character that the
    tokenizer does not know.
    """
    check_alphabet(tokenizer, "".join(sorted({c for pair in pairs for text in pair for c in text})))
    prompts = tokenizer([prompt for prompt, _ in pairs])["input_ids"]
    responses = [[*ids, tokenizer.eos_token_id] for ids in tokenizer([response for _, response in pairs])["input_ids"]]
    width = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    input_ids, labels = [], []
    for prompt, response in zip(prompts, responses, strict=True):
        padding = width - len(prompt) - len(response)
        input_ids.append(prompt + response + [tokenizer.pad_token_id] * padding)
        labels.append([IGNORED] * len(prompt) + response + [IGNORED] * padding)
    return torch.tensor(input_ids), torch.tensor(labels)


def completion_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean negative log-prob of the labelled tokens, in nats; slot t of `logits` [B, T, V] predicts slot t + 1 of `labels`."""
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


class _CompletionModule(pl.LightningModule):
    """Supervised fit of a causal language model on (input_ids, labels)."""

    def __init__(self, model: PreTrainedModel, steps: int, lr: float) -> None:
        super().__init__()
        self.model, self.steps, self.lr = model, steps, lr
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        input_ids, labels = batch
        # No attention mask: padding stands to the right of every trained slot, and attention is causal.
        loss = completion_loss(self.model(input_ids=input_ids, use_cache=False).logits, labels)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, betas=(0.9, 0.95), weight_decay=0.0)
        rise = max(1, self.steps // 50)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / rise) * 0.5 * (1 + math.cos(math.pi * step / self.steps))
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(
    model: PreTrainedModel, input_ids: Tensor, labels: Tensor, *, steps: int, batch_size: int, lr: float, seed: int
) -> list[float]:
    """Train `model` in place, silently, on the CPU; the loss of every step. Leaves every ambient random state as it was."""

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        rows = torch.empty(0, dtype=torch.int64)
        for _ in range(steps):
            while len(rows) < batch_size:
                rows = torch.cat([rows, torch.randperm(len(input_ids), generator=generator)])
            now, rows = rows[:batch_size], rows[batch_size:]
            yield input_ids[now], labels[now]

    module = _CompletionModule(model, steps, lr)
    with _quiet(), isolate_rng(include_cuda=False):
        trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=steps, gradient_clip_val=1.0, barebones=True)
        trainer.fit(module, batches())
    assert len(module.losses) == steps
    return module.losses


@contextmanager
def _quiet() -> Iterator[None]:
    """No notes, warnings or progress bars of Lightning and transformers inside; both as before afterwards."""
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
