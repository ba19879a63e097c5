"""Demonstrations as token ids, encoded as a rollout's prompt is, and the data module that deals them out."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from bapo.data.epoch import EpochLoader
from bapo.rollouts.prompt_format import PromptFormat
from bapo.rollouts.schedule import Schedule, deal_minibatches
from bapo.rollouts.seeds import derive_seed
from bapo.sft.demonstrations import Demonstration
from bapo.types import Batch, MiniBatch, Prompt

log = logging.getLogger(__name__)

TEST_ROWS = 256
"""Held-out rows that are padded to one width."""

FEW = 16
"""Held-out demonstrations below which their mean loss says little."""


@dataclass(frozen=True)
class SftOptions:
    """`epochs` passes over the demonstrations, or `max_updates` updates if given, of about `batch_size` sequences each.

    test_share: share of the demonstrations held out; their loss is `sft/test_loss`, before the first update, after every
    `test_every_n_updates` and after the last. max_tokens: limit of prompt and response together, None: the model's positions;
    longer demonstrations are left out (`too_long` skip) or end the run (refuse).
    """

    epochs: int = 1
    max_updates: int | None = None
    batch_size: int = 64
    test_share: float = 0.02
    test_every_n_updates: int = 100
    max_tokens: int | None = None
    too_long: Literal["skip", "refuse"] = "skip"

    def __post_init__(self) -> None:
        for name in ("epochs", "max_updates", "batch_size", "test_every_n_updates", "max_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"sft.{name} is {value}; it must be >= 1")
        if not 0 <= self.test_share < 1:
            raise ValueError(f"sft.test_share is {self.test_share}; it must be in [0, 1)")

    def updates_per_epoch(self, rows: int) -> int:
        """Updates of like size that have every row in one of them."""
        return math.ceil(rows / self.batch_size)

    def total_updates(self, rows: int) -> int:
        return self.max_updates or self.epochs * self.updates_per_epoch(rows)


@dataclass(frozen=True)
class Row:
    """ids: int32 [prompt | response | end of sequence]; the first `prompt` of them are read, the rest is learned."""

    ids: Tensor
    prompt: int


def end_of_sequence(model: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[int, frozenset[int]]:
    """(id that ends a demonstration, all ids that end a response) of the model's generation config.

    The first is the tokenizer's own where it is one of several, as chat templates write it. ValueError if there is none.
    """
    eos = model.generation_config.eos_token_id
    if eos is None:
        raise ValueError("policy.path: generation_config.json names no eos_token_id; responses could never end")
    ids = eos if isinstance(eos, list) else [eos]
    own = tokenizer.eos_token_id
    return (own if own in ids else ids[0]), frozenset(ids)


def encode(
    tokenizer: PreTrainedTokenizerBase,
    prompt_format: PromptFormat,
    demonstrations: Sequence[Demonstration],
    eos: int,
    stops: frozenset[int],
) -> list[Row]:
    """A row for each demonstration: the prompt ids that the rollout engine would get, the response's own ids, and one `eos`.

    The texts are never tokenised together. Ids of `stops` at the end of a response are taken off before `eos`. ValueError for a
    text that cannot be tokenised names its demonstration.
    """
    rows = []
    for number, example in enumerate(demonstrations):
        chat: dict[str, Any] = {} if example.system is None else {"system": example.system}
        if example.turns:
            chat["examples"] = (*prompt_format.examples, *example.turns)
        try:
            layout = replace(prompt_format, **chat) if chat else prompt_format
            prompt = layout.encode(tokenizer, Prompt(f"demonstration {number}", example.prompt, ""))
            response = list(tokenizer(example.response, add_special_tokens=False)["input_ids"])
        except Exception as error:  # tokenizers raise plain Exception for a text that has no token
            raise ValueError(f"demonstration {number}, {example.prompt!r:.80}: {error}") from error
        while response and response[-1] in stops:
            response.pop()
        rows.append(Row(torch.tensor([*prompt, *response, eos], dtype=torch.int32), len(prompt)))
    return rows


def fitting(rows: Sequence[Row], max_tokens: int | None, positions: int, too_long: Literal["skip", "refuse"]) -> list[Row]:
    """The rows that are short enough. ValueError for a longer one if `too_long` is refuse, or if no row is left."""
    if max_tokens is not None and max_tokens > positions:
        raise ValueError(f"sft.max_tokens is {max_tokens}; it must be <= {positions}, the positions of the model")
    limit = max_tokens or positions
    short = [row for row in rows if len(row.ids) <= limit]
    over = [(number, len(row.ids)) for number, row in enumerate(rows) if len(row.ids) > limit]
    if over:
        bound = f"sft.max_tokens is {limit}" if max_tokens else f"the model has {limit} positions"
        number, length = over[0]
        message = f"{bound}; {len(over)} of {len(rows)} demonstrations are longer, such as number {number} with {length} tokens"
        if too_long == "refuse" or not short:
            raise ValueError(f"{message} (sft.too_long is {too_long})")
        log.warning("%s: left out", message)
    return short


def split(rows: Sequence[Row], test_share: float) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows); the same demonstrations always split the same way, whatever the run's seed."""
    held = max(1, round(test_share * len(rows))) if test_share else 0
    if held >= len(rows):
        raise ValueError(f"sft.test_share is {test_share}, {held} of {len(rows)} demonstrations; it must leave one to train on")
    if 0 < held < FEW:
        log.warning("sft.test_share is %s, %d of %d demonstrations: their loss says little", test_share, held, len(rows))
    generator = torch.Generator().manual_seed(derive_seed(0, "sft/test"))
    order = torch.randperm(len(rows), generator=generator).tolist()
    return [rows[i] for i in sorted(order[held:])], [rows[i] for i in sorted(order[:held])]


def padded(rows: Sequence[Row], pad_id: int) -> Batch:
    """Rows as a batch [B, T]. Masks go by position, so an end of sequence is learned where a pad has the same id."""
    ids = pad_sequence([row.ids.long() for row in rows], batch_first=True, padding_value=pad_id)
    lengths, prompts = torch.tensor([[len(row.ids), row.prompt] for row in rows])[:, :, None].unbind(dim=1)
    slots = torch.arange(ids.shape[1])
    attention, response = slots < lengths, (slots >= prompts) & (slots < lengths)
    unused, version, of_row = torch.zeros(ids.shape), torch.zeros_like(ids), torch.zeros(len(rows))
    return Batch(ids, attention, response, unused, unused, unused, unused, version, of_row, of_row)


@dataclass(frozen=True)
class _Epoch(Sequence[MiniBatch]):
    """The mini-batches of an epoch, each padded on access."""

    parts: Sequence[Tensor]
    rows: Sequence[Row]
    pad_id: int
    epoch: int

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: Any) -> Any:
        rows = sorted((self.rows[i] for i in self.parts[index].tolist()), key=lambda row: -len(row.ids))
        return MiniBatch(padded(rows, self.pad_id), {"sft/epoch": self.epoch})


class SftData(L.LightningDataModule):
    """Epoch n deals the training rows out in an order that (seed, n) decides; the last epoch ends with update `total`.

    on_phase: called with "eval" and "train" as they begin. schedule: tells a display how long an epoch is.
    """

    def __init__(self, train: Sequence[Row], test: Sequence[Row], options: SftOptions, pad_id: int, seed: int, world: int):
        super().__init__()
        self.train, self.test = train, test
        self.pad_id, self.seed = pad_id, seed
        self.per_epoch, self.total = options.updates_per_epoch(len(train)), options.total_updates(len(train))
        if len(train) // self.per_epoch < world:
            raise ValueError(
                f"sft.batch_size is {options.batch_size}; {len(train)} demonstrations make {self.per_epoch} updates with it, "
                f"and each of {world} processes needs one in every update: choose a larger one"
            )
        self.schedule = Schedule(epochs_per_round=1, minibatches_per_epoch=self.per_epoch)
        self.on_phase: Callable[[str], None] = lambda phase: None

    @property
    def epochs(self) -> int:
        return math.ceil(self.total / self.per_epoch)

    def train_dataloader(self) -> EpochLoader:
        assert self.trainer is not None
        epoch, rank, world = self.trainer.current_epoch, self.trainer.global_rank, self.trainer.world_size
        left = self.total - epoch * self.per_epoch
        parts = deal_minibatches(len(self.train), self.per_epoch, self.seed, epoch)[:left]
        mine = [self._longest_first(part)[rank::world] for part in parts]  # ranks get about the same number of tokens
        return EpochLoader(_Epoch(mine, self.train, self.pad_id, epoch))

    def _longest_first(self, part: Tensor) -> Tensor:
        lengths = torch.tensor([len(self.train[i].ids) for i in part.tolist()])
        return part[lengths.argsort(descending=True, stable=True)]

    def test_batches(self, rank: int, world: int) -> Iterator[Batch]:
        """This rank's share of the held-out rows."""
        mine = self.test[rank::world]
        for start in range(0, len(mine), TEST_ROWS):
            yield padded(mine[start : start + TEST_ROWS], self.pad_id)
