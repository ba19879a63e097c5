"""The books of a round: which groups were begun, and what became of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bapo.advantages import zero_variance
from bapo.protocols import EngineError
from bapo.rollouts.grading import GradedSample
from bapo.rollouts.groups import Group, Member, PartialRollouts


@dataclass
class Drawn:
    """What a round has drawn so far, by weights of `version`: groups that are `waiting` to be finished, those just `done`, the
    judged `samples` of all that were done with their `members`, and the counts of everything else.

    position: in the prompts; begun: groups taken up or begun; lost: by the engine; dropped: given up for good, with the judged
    `dropped_samples` of those that were finished; tokens: drawn in this round, in `seconds`.
    """

    round_index: int
    version: int
    position: int
    waiting: list[Group] = field(default_factory=list)
    done: list[Group] = field(default_factory=list)
    dropped: list[Group] = field(default_factory=list)
    members: list[Member] = field(default_factory=list)
    samples: list[GradedSample] = field(default_factory=list)
    dropped_samples: list[GradedSample] = field(default_factory=list)
    begun: int = 0
    lost: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def uids(self) -> list[str]:
        """Of the samples' groups."""
        return [sample.rollout.uid for sample in self.samples]

    @property
    def rewards(self) -> Tensor:
        """Of the samples, float32 [N]."""
        return torch.tensor([sample.reward for sample in self.samples], dtype=torch.float32)

    @property
    def kept(self) -> Tensor:
        """Which samples are in groups with differing rewards, bool [N]."""
        return ~zero_variance(self.rewards, self.uids)

    def teaching(self, mask_truncated: bool) -> int:
        """Samples with tokens to train on, in groups with differing rewards."""
        cut = torch.tensor([mask_truncated and s.rollout.finish_reason == "length" for s in self.samples], dtype=torch.bool)
        return int((self.kept & ~cut).sum())

    def take_up(self, carried: Sequence[Group], max_age: int | None) -> None:
        """Goes on with what the round before left, but for groups with a token from more than `max_age` updates ago."""
        self.begun += len(carried)
        for group in carried:
            stale = max_age is not None and self.version - group.oldest > max_age
            (self.dropped if stale else self.waiting).append(group)

    def extend(
        self, asked: Sequence[Group], extended: Sequence[Group], new: int, max_tokens: int, partial: PartialRollouts | None
    ) -> None:
        """Sorts out what came back: `asked`, of which the last `new` were begun now, became `extended`, in any order."""
        if wrong := [group.uid for group in extended if group.newest > self.version]:
            raise EngineError(
                f"the engine drew {wrong[0]!r} by newer weights than the version {self.version} that it was given"
            )
        before = {group.uid: group.size for group in asked}
        came_back = {group.uid: group for group in extended}
        self.position += new
        self.begun += new
        self.lost += len(asked) - len(extended)
        self.tokens += sum(group.size - before[group.uid] for group in extended)
        self.waiting, self.done = [], []
        for group in [came_back[uid] for uid in before if uid in came_back]:  # in the order asked, whoever drew them
            if group.is_finished(max_tokens):
                self.done.append(group)
                self.members += group.members
            elif partial is not None and partial.max_spans is not None and group.spans >= partial.max_spans:
                self.dropped.append(group)
            else:
                self.waiting.append(group)

    def check_accounts(self) -> None:
        """Every group that was begun is trained on, filtered out, dropped, lost or pending; none of them twice."""
        judged = set(self.uids)
        trained = {uid for uid, keep in zip(self.uids, self.kept.tolist(), strict=True) if keep}
        filtered = judged - trained
        assert self.begun == len(trained) + len(filtered) + len(self.dropped) + self.lost + len(self.waiting), vars(self)
