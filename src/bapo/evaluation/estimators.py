"""Estimates of a policy from n responses to each of P problems: pure functions of numbers.

Every metric is a mean over problems of one value per problem; so its standard error and its interval are over problems too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

RESAMPLES = 2000
"""Bootstrap resamples of the P problems behind an interval."""


@dataclass(frozen=True)
class Estimate:
    """A mean over problems. stderr: its standard error, None for a single problem; low, high: its 95 % interval."""

    value: float
    stderr: float | None
    low: float
    high: float


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that k of n responses, taken without replacement, hold a correct one: 1 - C(n-c, k) / C(n, k).

    The unbiased estimator of Chen et al. (arXiv 2107.03374), as a product, so that no large binomial is formed. ValueError for
    k > n: nothing is known of more responses than there are.
    """
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}; with {n} responses it must be in [1, {n}]")
    if not 0 <= correct <= n:
        raise ValueError(f"correct is {correct}; with {n} responses it must be in [0, {n}]")
    if n - correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - correct + 1, n + 1))


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Expected correctness of the most frequent answer, ties broken uniformly; 0 where nobody answers.

    answers: of each response, in one spelling; None gives none and has no vote. An answer is as correct as the responses that
    give it are on average: a task may ask for more than the answer.
    """
    votes: dict[str, list[bool]] = defaultdict(list)
    for answer, right in zip(answers, correct, strict=True):
        if answer is not None:
            votes[answer].append(right)
    if not votes:
        return 0.0
    most = max(map(len, votes.values()))
    winners = [sum(voters) / most for voters in votes.values() if len(voters) == most]
    return sum(winners) / len(winners)


def standard_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean over problems: standard deviation (ddof 1) / sqrt(P). None for a single problem."""
    count = len(values)
    if count < 2:
        return None
    mean = math.fsum(values) / count
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count)


def estimates(columns: Mapping[str, Sequence[float]], seed: int = 0, resamples: int = RESAMPLES) -> dict[str, Estimate]:
    """name -> its estimate. columns: name -> the value of every problem, P of them each, in one order.

    The intervals are percentiles 2.5 and 97.5 of the means of `resamples` bootstrap samples of the P problems, which all
    columns share, from a generator of their own. ValueError without a problem.
    """
    count = len(next(iter(columns.values()), ()))
    if not count:
        raise ValueError("there are 0 problems; an estimate needs at least one")
    table = torch.tensor(list(columns.values()), dtype=torch.float64).T  # [P, metrics]
    generator = torch.Generator().manual_seed(seed)
    means = torch.stack([table[torch.randint(count, (count,), generator=generator)].mean(dim=0) for _ in range(resamples)])
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0).tolist()
    return {
        name: Estimate(math.fsum(values) / count, standard_error(values), low[index], high[index])
        for index, (name, values) in enumerate(columns.items())
    }
