"""Digit operations: apply an operation, named by a letter, to a few digits. Generated, graded exactly.

A prompt is a letter, digits and "=": `b58392=`. A response is an attempt, then either the end of the sequence or "x" (a
withdrawal) and another attempt: `23589x98532`. Only the last attempt counts. So a response that doubts itself grows, and with a
demonstrator that withdraws what is wrong, wrong answers are longer than right ones: the imbalance BAPO is about.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from bapo.protocols import Split, Task
from bapo.types import Prompt

EOS = "."
RETRY = "x"
OPERATIONS: dict[str, Callable[[str], str]] = {
    "a": lambda digits: "".join(sorted(digits)),
    "b": lambda digits: "".join(sorted(digits, reverse=True)),
    "c": lambda digits: digits,
    "d": lambda digits: digits[::-1],
    "e": lambda digits: digits[1:] + digits[:1],
    "f": lambda digits: digits[-1:] + digits[:-1],
}
"""Sort up, sort down, copy, reverse, rotate left by one, rotate right by one."""
ALPHABET = "0123456789" + "".join(OPERATIONS) + "=" + RETRY
"""Every character of a prompt or a response, without `EOS`."""

RIGHT_OPERATION = {"a": 0.5, "b": 0.4, "c": 0.3, "d": 0.2, "e": 0.15, "f": 0.1}
"""Share of the demonstrator's attempts that apply the operation asked for; else one of the others, uniformly."""
DIGIT_NOISE = 0.02
"""Share of digits that the demonstrator writes wrongly."""


@dataclass(frozen=True)
class DigitOps(Task):
    """The task, and a poor demonstrator of it for the warm start.

    seed: decides both splits. train_size, test_size: prompts of each; all distinct, so no test text is in train.
    digits: digits of a prompt. max_attempts: a response with more earns nothing.
    """

    alphabet: ClassVar[str] = ALPHABET
    eos: ClassVar[str] = EOS

    seed: int = 0
    train_size: int = 16_384
    test_size: int = 512
    digits: int = 5
    max_attempts: int = 3

    def __post_init__(self) -> None:
        if not 2 <= self.digits <= 16:
            raise ValueError(f"digits is {self.digits}; it must be in [2, 16]")
        for name in ("train_size", "test_size", "max_attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be >= 1")
        if self.train_size + self.test_size > self._space:
            raise ValueError(
                f"train_size + test_size is {self.train_size + self.test_size}; with digits = {self.digits} "
                f"it must be <= {self._space}, the number of different prompts"
            )

    def prompts(self, split: Split) -> tuple[Prompt, ...]:
        """The prompts of a split, always the same ones. The test split does not depend on `train_size`."""
        if split == "test":
            indices = self._test_indices
        elif split == "train":
            indices = self._train_indices
        else:
            raise ValueError(f"split is {split!r}; it must be 'train' or 'test'")
        return tuple(self._prompt(f"digit_ops/{split}/{row}", index) for row, index in enumerate(indices))

    def verify(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
        """1.0 where the last attempt is `prompt.answer` to the letter and there are at most `max_attempts`, else 0.0."""
        return [float(self.answer(response) == prompt.answer) for prompt, response in zip(prompts, responses, strict=True)]

    def answer(self, response: str) -> str | None:
        """The last attempt; None without one, or after more than `max_attempts`."""
        attempts = response.split(RETRY)
        return attempts[-1] or None if len(attempts) <= self.max_attempts else None

    def demonstrations(self, n: int, seed: int) -> list[tuple[str, str]]:
        """`n` pairs (prompt text, response text without `EOS`) of the noisy demonstrator, on any prompt outside the test split.

        It withdraws an attempt that it finds wrong while it has another one, and starts anew: the new attempt is independent
        of the one before. An attempt by another operation that happens to give the right digits is right.
        """
        rng = random.Random(f"digit_ops/demonstrations/{seed}")
        test = set(self._test_indices)
        pairs: list[tuple[str, str]] = []
        while len(pairs) < n:
            index = rng.randrange(self._space)
            if index not in test:
                prompt = self._prompt("", index)
                pairs.append((prompt.text, self._demonstrate(prompt, rng)))
        return pairs

    def _demonstrate(self, prompt: Prompt, rng: random.Random) -> str:
        attempts: list[str] = []
        while len(attempts) < self.max_attempts and prompt.answer not in attempts:
            attempts.append(_attempt(prompt.text[0], prompt.text[1:-1], rng))
        return RETRY.join(attempts)

    @property
    def _space(self) -> int:
        """Number of different prompts; prompt number i asks operation i mod 6 of the digits i div 6."""
        return len(OPERATIONS) * 10**self.digits

    @cached_property
    def _test_indices(self) -> list[int]:
        return random.Random(f"digit_ops/test/{self.seed}").sample(range(self._space), self.test_size)

    @cached_property
    def _train_indices(self) -> list[int]:
        test = set(self._test_indices)
        sample = random.Random(f"digit_ops/train/{self.seed}").sample(range(self._space), self.train_size + self.test_size)
        return [index for index in sample if index not in test][: self.train_size]

    def _prompt(self, uid: str, index: int) -> Prompt:
        number, which = divmod(index, len(OPERATIONS))
        letter = "abcdef"[which]
        digits = f"{number:0{self.digits}d}"
        return Prompt(uid, f"{letter}{digits}=", OPERATIONS[letter](digits))


def _attempt(letter: str, digits: str, rng: random.Random) -> str:
    """One attempt of the demonstrator: the right operation or another one, then noise on every digit."""
    if rng.random() >= RIGHT_OPERATION[letter]:
        letter = rng.choice([other for other in OPERATIONS if other != letter])
    return "".join(
        rng.choice([other for other in "0123456789" if other != digit]) if rng.random() < DIGIT_NOISE else digit
        for digit in OPERATIONS[letter](digits)
    )
