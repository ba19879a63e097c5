"""The books of a round: which groups were begun, and what became of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bapo.rollouts.draw import Sample
from bapo.rollouts.groups import Group, Member, PartialRollouts


@dataclass
class Drawn:
    """What a round has drawn so far: `position` in the prompts, groups that are `waiting` to be finished, those just `done`,
    the judged `samples` of all that were done with their `members`, and the counts of everything else.

    begun: groups taken up or begun; lost: by the engine; tokens: drawn in this round; dropped: given up for good.
    """

    position: int
    waiting: list[Group] = field(default_factory=list)
    done: list[Group] = field(default_factory=list)
    dropped: list[Group] = field(default_factory=list)
    members: list[Member] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    begun: int = 0
    lost: int = 0
    tokens: int = 0

    def take_up(self, carried: Sequence[Group], partial: PartialRollouts | None, version: int) -> None:
        """Goes on with what the round before left, but for what is too old."""
        self.begun += len(carried)
        for group in carried:
            age = version - min(member.rollout.policy_version for member in group.members)
            old = partial is not None and partial.max_age is not None and age > partial.max_age
            (self.dropped if old else self.waiting).append(group)

    def extend(
        self, asked: Sequence[Group], extended: Sequence[Group], new: int, max_tokens: int, partial: PartialRollouts | None
    ) -> None:
        """Sorts out what came back: `asked`, of which the last `new` were begun now, became `extended`, in any order."""
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

    def check_accounts(self, kept_groups: int, judged_groups: int) -> None:
        """Every group that was begun is trained on, filtered out, dropped, lost or pending; none of them twice."""
        filtered = judged_groups - kept_groups
        assert self.begun == kept_groups + filtered + len(self.dropped) + self.lost + len(self.waiting), vars(self)
