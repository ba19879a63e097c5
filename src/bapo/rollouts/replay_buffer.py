"""The replay buffer: groups of earlier rounds, trained on once more with those of the round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from bapo.rollouts.pool import Pool
from bapo.rollouts.seeds import derive_seed
from bapo.types import Batch


@dataclass(frozen=True)
class ReplayBuffer:
    """Every round trains on `groups` more groups, chosen from the pools of the `rounds` rounds before it.

    order: uniform, every group is as likely as any other; newest, later rounds first.
    """

    groups: int
    rounds: int = 1
    order: Literal["uniform", "newest"] = "uniform"

    def __post_init__(self) -> None:
        for name in ("groups", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"schedule.replay.{name} is {getattr(self, name)}; it must be >= 1")
        if self.order not in ("uniform", "newest"):
            raise ValueError(f"schedule.replay.order is {self.order!r}; it must be one of uniform, newest")

    def of(self, round_index: int) -> range:
        """The rounds whose pools are chosen from, in order."""
        return range(max(0, round_index - self.rounds), round_index)

    def add(self, pool: Pool, earlier: Sequence[Pool], seed: int, most_staleness: int | None = None) -> Pool:
        """`pool` with groups of `earlier` pools, in their order, behind its own; `seed` and the round choose.

        Advantages, behaviour log-probs and policy versions stay the same. A group is left out when its stalest token was
        generated more than `most_staleness` updates before the round's own data; None: no limit.
        """
        newest = pool.meta["policy_version"]
        generator = torch.Generator().manual_seed(derive_seed(seed, "replay", pool.meta["round"]))
        candidates = [(place, rows) for place, old in enumerate(earlier) for rows in recent_groups(old, newest, most_staleness)]
        chosen = torch.randperm(len(candidates), generator=generator).tolist()
        if self.order == "newest":
            chosen.sort(key=lambda index: -candidates[index][0])
        taken = [candidates[index] for index in chosen[: self.groups]]
        parts, names, places = [pool.batch], list(pool.rows), []
        for place, old in enumerate(earlier):
            rows = torch.tensor([row for at, rows in taken if at == place for row in rows], dtype=torch.int64)
            parts.append(old.batch.select(rows))
            names += [old.rows[row] for row in rows.tolist()]
            places += [(old.meta["round"], row) for row in rows.tolist()]
        again = sum(map(len, parts[1:]))
        metrics = {"replay/groups": float(len(taken)), "replay/row_frac": again / (again + len(pool.batch))}
        meta = pool.meta | {"metrics": pool.meta["metrics"] | metrics}
        return replace(pool, batch=joined(parts), rows=tuple(names), meta=meta, again=tuple(places))


def recent_groups(pool: Pool, newest: int, most_staleness: int | None) -> list[list[int]]:
    """Rows of each group of `pool` whose tokens were all generated at most `most_staleness` updates before version `newest`."""
    groups: dict[str, list[int]] = {}
    for row, (uid, _, _) in enumerate(pool.rows):
        groups.setdefault(uid, []).append(row)
    oldest = torch.where(pool.batch.response_mask, pool.batch.policy_version, newest).amin(dim=1)
    return [rows for rows in groups.values() if most_staleness is None or newest - int(oldest[rows].min()) <= most_staleness]


def joined(batches: Sequence[Batch]) -> Batch:
    """The rows of all batches, as wide as the widest, padded like a pool's rows."""
    width = max(batch.input_ids.shape[1] for batch in batches)
    blank = {"policy_version": -1}

    def wide(name: str, value: Tensor) -> Tensor:
        return pad(value, (0, width - value.shape[1]), value=blank.get(name, 0)) if value.dim() == 2 else value

    parts: dict[str, Any] = {f.name: torch.cat([wide(f.name, getattr(b, f.name)) for b in batches]) for f in fields(Batch)}
    return Batch(**parts)
