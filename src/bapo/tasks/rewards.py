"""Reward terms beside correctness: each a function of a rollout and its text, logged by its name as `rollout/reward/<name>`.

What is trained on is correctness plus every term of conf/reward that is chosen; an evaluation counts correctness alone.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

from bapo.types import Sample


@dataclass(frozen=True)
class Overlong:
    """DAPO's soft overlong punishment (arXiv 2503.14476, Eq. 13), in tokens of the response with its end-of-sequence token.

    0 up to max_tokens * (1 - buffer_frac), from there in a straight line down to -`penalty` at max_tokens.
    """

    max_tokens: int
    buffer_frac: float = 0.2
    penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be >= 1")
        if not 0 < self.buffer_frac <= 1:
            raise ValueError(f"buffer_frac is {self.buffer_frac}; it must be in (0, 1]")
        if not 0 < self.penalty < math.inf:
            raise ValueError(f"penalty is {self.penalty}; it must be > 0 and finite")

    def __call__(self, rollout: Sample, text: str) -> float:
        buffer = self.buffer_frac * self.max_tokens
        over = len(rollout.response_ids) - (self.max_tokens - buffer)
        return -self.penalty * min(max(over / buffer, 0.0), 1.0)


@dataclass(frozen=True)
class Format:
    """`reward` if the whole text matches the regular expression `pattern`, whose dots match line breaks, else 0."""

    pattern: str
    reward: float = 0.1

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern is {self.pattern!r}; it must be a regular expression: {error}") from error
        if self.reward == 0 or not math.isfinite(self.reward):
            raise ValueError(f"reward is {self.reward}; it must be finite and not 0")

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.DOTALL)

    def __call__(self, rollout: Sample, text: str) -> float:
        return self.reward if self._compiled.fullmatch(text) else 0.0
