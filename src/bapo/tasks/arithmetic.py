"""Arithmetic: add, subtract, multiply two small whole numbers. Generated, graded exactly.

A prompt is `7 + 5 = ?`. A response is right when it is the number, `12`, or the whole equation, `7 + 5 = 12`, and nothing else.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from bapo.protocols import Split, Task
from bapo.types import Prompt

EOS = "."
OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
RIGHT = 0.4
"""Share of answers that the demonstrator knows; else it guesses within `NEAR` of the answer."""
NEAR = 5


@dataclass(frozen=True)
class Arithmetic(Task):
    """The task, and a poor demonstrator of it for a warm start.

    operations: which of + - *. largest: both numbers are in [0, largest]; a difference is never negative. train_size,
    test_size: prompts of each split; all distinct, so no test question is in train. seed: decides both.
    """

    alphabet: ClassVar[str] = "0123456789+-*= ?"
    eos: ClassVar[str] = EOS

    seed: int = 0
    operations: Sequence[str] = ("+", "-", "*")
    largest: int = 12
    train_size: int = 320
    test_size: int = 64

    def __post_init__(self) -> None:
        if (
            not self.operations
            or sorted(set(self.operations)) != sorted(self.operations)
            or set(self.operations) - {*OPERATIONS}
        ):
            raise ValueError(
                f"task.operations is {list(self.operations)}; it must be some of {', '.join(OPERATIONS)}, each once"
            )
        for name in ("largest", "train_size", "test_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"task.{name} is {getattr(self, name)}; it must be >= 1")
        if self.train_size + self.test_size > (space := len(self._questions)):
            raise ValueError(
                f"task.train_size + task.test_size is {self.train_size + self.test_size}; with task.largest = {self.largest} "
                f"it must be <= {space}, the number of different questions"
            )

    def prompts(self, split: Split) -> tuple[Prompt, ...]:
        """The prompts of a split, always the same ones. The test split does not depend on `train_size`."""
        if split not in ("train", "test"):
            raise ValueError(f"split is {split!r}; it must be 'train' or 'test'")
        rows = self._shuffled[: self.test_size] if split == "test" else self._shuffled[self.test_size :][: self.train_size]
        return tuple(_prompt(f"arithmetic/{split}/{row}", *question) for row, question in enumerate(rows))

    def verify(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
        """1.0 where the response is the number or the equation, spaces and a full stop at its end aside, else 0.0."""
        return [
            float(_bare(response) in (p.answer, _bare(p.text[:-1]) + p.answer))
            for p, response in zip(prompts, responses, strict=True)
        ]

    def answer(self, response: str) -> str | None:
        """The text after the last `=`; None if it is empty."""
        return _bare(response).rpartition("=")[2] or None

    def demonstrations(self, n: int, seed: int) -> list[tuple[str, str]]:
        """`n` pairs (prompt text, a number without `EOS`) on any question outside the test split."""
        rng = random.Random(f"arithmetic/demonstrations/{seed}")
        pairs = []
        for question in rng.choices(self._shuffled[self.test_size :], k=n):
            prompt = _prompt("", *question)
            guess = max(0, int(prompt.answer) + rng.randint(-NEAR, NEAR))
            pairs.append((prompt.text, prompt.answer if rng.random() < RIGHT else str(guess)))
        return pairs

    @property
    def _questions(self) -> list[tuple[int, str, int]]:
        numbers = range(self.largest + 1)
        return [(a, sign, b) for sign in self.operations for a in numbers for b in numbers if sign != "-" or a >= b]

    @cached_property
    def _shuffled(self) -> list[tuple[int, str, int]]:
        questions = self._questions
        random.Random(f"arithmetic/{self.seed}").shuffle(questions)
        return questions


def _bare(text: str) -> str:
    """`text` without spaces and a full stop at its end."""
    return "".join(text.split()).removesuffix(".")


def _prompt(uid: str, a: int, sign: str, b: int) -> Prompt:
    return Prompt(uid, f"{a} {sign} {b} = ?", str(OPERATIONS[sign](a, b)))
