"""A process among the data-parallel ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from bapo.protocols import EngineError

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Ranks:
    """This process among the data-parallel ones. group: torch's process group to talk over; None: the default one."""

    rank: int = 0
    world: int = 1
    group: Any = None

    def gather(self, item: Item) -> list[Item]:
        """The item of every rank, in rank order, on every rank."""
        if self.world == 1:
            return [item]
        items: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(items, item, group=self.group)
        return items

    def share(self, items: Sequence[Item], work: Callable[[Sequence[Item]], Sequence[Result]]) -> list[Result]:
        """Results of `work` on `items`, each rank on its share; in their order, unless a share comes back shorter."""
        parts = self.gather_from(lambda: list(work(items[self.rank :: self.world])))
        return [part[index] for index in range(max(map(len, parts), default=0)) for part in parts if index < len(part)]

    def gather_from(self, work: Callable[[], Item]) -> list[Item]:
        """Results of `work` of every rank. If it failed on one, the others raise EngineError instead of waiting for ever."""
        if self.world == 1:
            return [work()]
        item, failure, own = None, "", None
        try:
            item = work()
        except Exception as error:
            failure, own = f"rank {self.rank}: {error}", error
        parts = self.gather((item, failure))
        if own is not None and not isinstance(own, EngineError):
            raise own
        if failures := [text for _, text in parts if text]:
            raise EngineError("; ".join(failures))
        return [part for part, _ in parts]  # type: ignore[misc]
