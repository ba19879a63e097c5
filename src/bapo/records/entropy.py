"""How the entropy changed after an update, beside the covariance that is to foretell it (arXiv 2510.18927, Eq. 6)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bapo.records.files import UpdateRecord


@dataclass
class EntropyChanges:
    """Is told of one update after the other, all ranks of each; nats per token. Keeps sums per sequence, no tokens.

    `covariances` are Eq. 6's, as logged. `same_rows` and `logged` measure the change that follows each update in two ways.
    """

    steps: list[int] = field(default_factory=list)
    covariances: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    _changes: list[float] = field(default_factory=list)
    _tokens: list[int] = field(default_factory=list)
    _last: dict[tuple[int, ...], tuple[int, int, float]] = field(default_factory=dict)
    _epoch: int = -1

    def add(self, record: UpdateRecord) -> None:
        epoch, index = int(record.facts["epoch"]), len(self.steps)
        self.steps.append(record.step)
        self.covariances.append(record.facts["entropy_clip_cov"])
        self.entropies.append(record.facts["entropy"])
        self._changes.append(0.0)
        self._tokens.append(0)
        if epoch > self._epoch:  # only the epoch before is compared with
            self._last = {place: last for place, last in self._last.items() if last[1] == epoch - 1}
            self._epoch = epoch
        totals = record.entropy_of_rows().tolist()
        for place, total, tokens in zip(map(tuple, record.rows.tolist()), totals, record.lengths.tolist(), strict=True):
            before = self._last.get(place)
            if before is not None and before[1] == epoch - 1:
                then, _, total_then = before
                self._changes[then] += (total - total_then) / (record.step - self.steps[then])
                self._tokens[then] += tokens
            self._last[place] = (index, epoch, total)

    def same_rows(self) -> list[float]:
        """Over an update's own tokens that are trained on again in the next epoch: the mean of (entropy then - entropy now) /
        (updates between). The same tokens, with updates on other data between; NaN where there is no next epoch.
        """
        return [change / n if n else math.nan for change, n in zip(self._changes, self._tokens, strict=True)]

    def logged(self) -> list[float]:
        """The next update's `policy/entropy` less this one's: one update apart, but over other tokens; NaN for the last."""
        return [after - now for now, after in zip(self.entropies, self.entropies[1:], strict=False)] + [math.nan]


def correlation(one: Sequence[float], other: Sequence[float]) -> tuple[float, int]:
    """(Pearson's r, number of pairs) where both are finite; r is NaN for fewer than three pairs, or for equal values."""
    pairs = np.array([pair for pair in zip(one, other, strict=True) if all(map(math.isfinite, pair))]).reshape(-1, 2)
    if len(pairs) < 3 or not pairs.std(axis=0).all():
        return math.nan, len(pairs)
    return float(np.corrcoef(pairs.T)[0, 1]), len(pairs)
