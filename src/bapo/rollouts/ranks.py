"""A process among the data-parallel ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from bapo.contracts import EngineError

Item = TypeVar("Item")


@dataclass(frozen=True)
class Ranks:
    """This process among the data-parallel ones."""

    rank: int = 0
    world: int = 1

    def gather(self, item: Item) -> list[Item]:
        """The item of every rank, in rank order, on every rank."""
        if self.world == 1:
            return [item]
        items: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(items, item)
        return items

    def gather_from(self, work: Callable[[], Item]) -> list[Item]:
        """What `work` gives every rank. If it failed on one, the others raise EngineError instead of waiting for ever."""
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
