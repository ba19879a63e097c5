"""How old the data may be: how many updates are made on one pool before it is drawn anew."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bapo.rollouts.seeds import derive_seed


@dataclass(frozen=True)
class Schedule:
    """`epochs_per_round` passes (E) over each pool, every pass cut into `minibatches_per_epoch` optimizer updates.

    The k-th update of a round trains on data that are k updates old: 0 .. E * minibatches_per_epoch - 1.
    """

    epochs_per_round: int = 4
    minibatches_per_epoch: int = 4

    def __post_init__(self) -> None:
        for name in ("epochs_per_round", "minibatches_per_epoch"):
            if getattr(self, name) < 1:
                raise ValueError(f"schedule.{name} is {getattr(self, name)}; it must be >= 1")

    @property
    def updates_per_round(self) -> int:
        return self.epochs_per_round * self.minibatches_per_epoch

    def round_of(self, epoch: int) -> int:
        """The round that Lightning's epoch number `epoch` trains on."""
        return epoch // self.epochs_per_round


def deal_minibatches(rows: int, minibatches: int, seed: int, epoch: int) -> list[Tensor]:
    """A permutation of the rows that depends on (seed, epoch) alone, cut into parts whose sizes differ by at most 1."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "minibatches", epoch))
    return list(torch.randperm(rows, generator=generator).tensor_split(minibatches))


def prompt_slots(prompts: int, start: int, count: int, seed: int) -> list[tuple[int, int]]:
    """(prompt index, data epoch) at positions start .. start + count - 1 of the endless prompt order.

    Every data epoch visits each of the `prompts` once, in an order of its own that depends on (seed, data epoch) alone.
    """
    slots: list[tuple[int, int]] = []
    order: list[int] = []
    for position in range(start, start + count):
        data_epoch, place = divmod(position, prompts)
        if not order or place == 0:
            generator = torch.Generator().manual_seed(derive_seed(seed, "prompts", data_epoch))
            order = torch.randperm(prompts, generator=generator).tolist()
        slots.append((order[place], data_epoch))
    return slots
