"""Staleness: updates on one pool, and rounds between generating a pool and training on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bapo.rollouts.replay_buffer import ReplayBuffer
from bapo.rollouts.seeds import derive_seed


@dataclass(frozen=True)
class Schedule:
    """`epochs_per_round` passes (E) over each pool, every pass cut into `minibatches_per_epoch` optimizer updates.

    The pool of round n is drawn by the policy at the start of round n - `lag`; those of the first `lag` rounds, for which there
    is no such policy, at the start of the run. Their staleness is `staleness` from round `lag` on. replay: groups of
    earlier rounds to train on once more; None: none. overlap: a pool is drawn while the policy trains; it is the same pool.
    max_staleness: no token is trained on more than so many updates after the weights that drew it: older groups, replayed or
    unfinished until then, are left out; None: no such bound.
    """

    epochs_per_round: int = 4
    minibatches_per_epoch: int = 4
    lag: int = 0
    replay: ReplayBuffer | None = None
    overlap: bool = False
    max_staleness: int | None = None

    def __post_init__(self) -> None:
        for name in ("epochs_per_round", "minibatches_per_epoch"):
            if getattr(self, name) < 1:
                raise ValueError(f"schedule.{name} is {getattr(self, name)}; it must be >= 1")
        if self.lag < 0:
            raise ValueError(f"schedule.lag is {self.lag}; it must be >= 0")
        if self.overlap and not self.lag:
            raise ValueError("schedule.overlap is True with schedule.lag 0; data drawn beside the training are older: lag >= 1")
        if self.max_staleness is not None and self.most_staleness < 0:  # type: ignore[operator]
            raise ValueError(
                f"schedule.max_staleness is {self.max_staleness}; it must be >= {self.staleness(self.lag)[-1]}: so old do "
                f"schedule.lag {self.lag} and {self.updates_per_round} updates per round make the data"
            )
        if self.replay:
            self.check_room("schedule.replay")

    @property
    def updates_per_round(self) -> int:
        return self.epochs_per_round * self.minibatches_per_epoch

    def staleness(self, round_index: int) -> range:
        """Updates between the weights that drew a round's data and each update on them."""
        oldest = min(round_index, self.lag) * self.updates_per_round
        return range(oldest, oldest + self.updates_per_round)

    @property
    def most_staleness(self) -> int | None:
        """Updates by which a token may be older than the policy that its round's data are drawn by; None: any number."""
        return None if self.max_staleness is None else self.max_staleness - self.staleness(self.lag)[-1]

    def check_room(self, what: str) -> None:
        """ValueError if `max_staleness` keeps even groups of the round before from being trained on. what: wants them."""
        if self.most_staleness is not None and self.most_staleness < self.updates_per_round:
            least = self.staleness(self.lag)[-1] + self.updates_per_round
            raise ValueError(
                f"schedule.max_staleness is {self.max_staleness}; with {what} it must be >= {least}: groups of the round "
                f"before are {self.updates_per_round} updates older than the round's own"
            )

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
