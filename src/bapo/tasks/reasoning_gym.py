"""Any data set of the package reasoning_gym (arXiv 2505.24760) by its name: generated, and graded by its own scorer.

Worker processes generate and grade (`load`), so that a scorer that hangs on a model's text is killed, and since some generators
depend on Python's hash seed, which workers share.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import math
import random
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Literal, get_args

from bapo.protocols import Split, Task
from bapo.tasks.answers import last_box
from bapo.tasks.pool import shared_pool
from bapo.tasks.worker import Reply, shorten
from bapo.types import Prompt

AnswerIn = Literal["response", "box", "tag"]
EOS = "\x03"
ALPHABET = "\n" + "".join(chr(code) for code in range(0x20, 0x7F))
"""Printable ASCII and the line break: the characters of a tiny model of its own."""
RUNS_ANSWERS = {
    "binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
    "simple_integration", "spiral_matrix", "string_insertion",
}  # fmt: skip
"""Data sets of release 0.1.25 whose scorer gives the answer to Python's `eval`, or to sympy's parser, which is no better."""
RIGHT = 0.4
"""Share of right demonstrations; in the others one letter or digit is another."""
STEP = 2**29
"""Between the seeds of train, test and demonstrations: item i of a data set is made of its seed plus i."""
CHUNK = 32
"""Items made per question to a worker."""
LIMITS = {"make": {"timeout_s": 300.0, "memory_mb": 2048.0}, "score": {"timeout_s": 5.0, "memory_mb": 512.0}}


@dataclass(frozen=True)
class ReasoningGym(Task):
    """The task, and a poor demonstrator of it for a warm start.

    dataset: a name that the package knows. config: fields of that data set's own, but not its seed and size. seed: decides all.
    train_size, test_size: questions of each split; none of the test split is in train. answer_in: the part that is graded: all
    of the response, stripped, its last complete box, or its last `<answer>...</answer>`. instruction: follows every question.
    allow_eval: must be true for data sets whose scorer runs what a model has written (`RUNS_ANSWERS`).
    """

    alphabet: ClassVar[str] = ALPHABET
    eos: ClassVar[str] = EOS

    dataset: str
    config: Mapping[str, Any] | None = None
    seed: int = 0
    train_size: int = 4096
    test_size: int = 256
    answer_in: AnswerIn = "response"
    instruction: str = ""
    allow_eval: bool = False

    def __post_init__(self) -> None:
        for name in ("train_size", "test_size"):
            if not 1 <= (value := getattr(self, name)) < STEP // 4:
                raise ValueError(f"task.{name} is {value}; it must be in [1, {STEP // 4})")
        if self.answer_in not in get_args(AnswerIn):
            raise ValueError(f"task.answer_in is {self.answer_in!r}; it must be one of {', '.join(get_args(AnswerIn))}")
        if own := sorted({"seed", "size"} & {*(self.config or {})}):
            raise ValueError(f"task.config has {', '.join(own)}; task.seed, task.train_size and task.test_size decide that")
        if self.dataset in RUNS_ANSWERS and not self.allow_eval:
            raise ValueError(
                f"task.dataset is {self.dataset!r}, whose scorer runs what the model writes as Python; "
                "task.allow_eval=true allows it"
            )
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ValueError("task=reasoning_gym needs the package reasoning_gym: pip install reasoning_gym==0.1.25")

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """The prompts of a split, always the same ones, made once. ValueError for what the data set refuses."""
        if split not in ("train", "test"):
            raise ValueError(f"split is {split!r}; it must be 'train' or 'test'")
        return self._train if split == "train" else self._test

    def verify(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float | None]:
        """Rewards by the data set's own `score_answer` for the answer of each response; None if it raised or took too long."""
        questions = []
        for prompt, response in zip(prompts, responses, strict=True):
            split, index = prompt.uid.rsplit("/", 2)[1:]
            questions.append(self._about(split) | LIMITS["score"] | {"index": int(index), "answer": self.answer(response)})
        different = list({json.dumps(question): question for question in questions}.values())
        replies = {json.dumps(q): reply for q, reply in zip(different, _pool().ask_all(different), strict=True)}
        for reply in replies.values():
            self._check(reply, "refused")
        scores = [replies[json.dumps(question)].get("score") for question in questions]
        return [score if score is not None and math.isfinite(score) else None for score in scores]

    def answer(self, response: str) -> str | None:
        """The graded part of a response; None if it is empty."""
        part: str | None = response
        if self.answer_in == "box":
            part = last_box(response)
        elif self.answer_in == "tag":
            before, end, _ = response.rpartition("</answer>")
            _, begin, inside = before.rpartition("<answer>")
            part = inside if begin and end else None
        return (part or "").strip() or None

    def demonstrations(self, n: int, seed: int) -> list[tuple[str, str]]:
        """`n` pairs (prompt text, answer without `EOS`) on questions outside the test split; a share of `RIGHT` is right.

        ValueError for a data set without answers of its own.
        """
        if self.answer_in != "response":
            raise ValueError(f"task.answer_in is {self.answer_in!r}; demonstrations are answers and nothing else: response")
        rng = random.Random(f"reasoning_gym/demonstrations/{self.seed}/{seed}")
        made = min(n, self.train_size)  # of different questions
        items = [(text, answer) for _, text, answer in self._apart_from_test("demonstrations", made)]
        if any(not answer for _, answer in items):
            raise ValueError(f"task.dataset is {self.dataset!r}, which has no answers to show: choose a model, policy=hub")
        chosen = [*items, *rng.choices(items, k=n - made)]
        return [(text, answer if rng.random() < RIGHT else _another(answer, rng)) for text, answer in chosen]

    @cached_property
    def _test(self) -> tuple[Prompt, ...]:
        return tuple(self._prompt("test", *item) for item in self._made("test", 0, self.test_size))

    @cached_property
    def _train(self) -> tuple[Prompt, ...]:
        return tuple(self._prompt("train", *item) for item in self._apart_from_test("train", self.train_size))

    def _prompt(self, split: str, index: int, text: str, answer: str) -> Prompt:
        return Prompt(f"reasoning_gym/{self.dataset}/{split}/{index}", text, answer)

    def _apart_from_test(self, split: str, size: int) -> list[tuple[int, str, str]]:
        """The first `size` items of which no test question is one."""
        test = {prompt.text for prompt in self._test}
        items: list[tuple[int, str, str]] = []
        made = 0
        while len(items) < size and made < self._size(split):
            stop = min(made + size - len(items), self._size(split))
            items += [item for item in self._made(split, made, stop) if item[1] not in test]
            made = stop
        if len(items) < size:
            raise ValueError(
                f"task.dataset is {self.dataset!r} with task.config {dict(self.config or {})}: too few different questions; "
                f"of {made}, {len(items)} are not in a test split of {self.test_size}, and {size} are wanted"
            )
        return items

    def _made(self, split: str, start: int, stop: int) -> list[tuple[int, str, str]]:
        """(index, prompt text, answer) of the items [start, stop)."""
        starts = range(start, stop, CHUNK)
        parts = [{"start": at, "stop": min(at + CHUNK, stop)} for at in starts]
        made = []
        for reply in _pool().ask_all([self._about(split) | LIMITS["make"] | part for part in parts]):
            self._check(reply, "refused", "raised", "gave_up")
            made += [(question.strip() + self.instruction, answer) for question, answer in reply["items"]]
        return [(start + offset, *item) for offset, item in enumerate(made)]

    def _check(self, reply: Mapping[str, Any], *faults: str) -> None:
        """Raises ValueError for a reply that is one of `faults`."""
        for fault in faults:
            if fault in reply:
                raise ValueError(f"task.dataset is {self.dataset!r} with task.config {dict(self.config or {})}: {reply[fault]}")

    def _size(self, split: str) -> int:
        """The size of the data set that a split is taken from."""
        return self.test_size if split == "test" else 2 * self.train_size + self.test_size

    def _about(self, split: str) -> dict[str, Any]:
        """Identifies the data set to a worker."""
        first = random.Random(f"reasoning_gym/{self.seed}").randrange(STEP)
        seed = first + STEP * ("test", "train", "demonstrations").index(split)
        config = {**(self.config or {}), "seed": seed, "size": self._size(split)}
        return {"dataset": self.dataset, "config": json.dumps(config, sort_keys=True)}


def _pool() -> Any:
    return shared_pool("bapo.tasks.reasoning_gym")


def _another(answer: str, rng: random.Random) -> str:
    """`answer` with one letter or digit replaced by another of its kind; where there is none, with the first one left out."""
    places = [place for place, character in enumerate(answer) if character.isascii() and character.isalnum()]
    if not places:
        return answer[1:]
    place = rng.choice(places)
    kinds = (string.digits, string.ascii_lowercase, string.ascii_uppercase)
    kind = next(kind for kind in kinds if answer[place] in kind)
    return answer[:place] + rng.choice([other for other in kind if other != answer[place]]) + answer[place + 1 :]


def load() -> Reply:
    """The function of a worker: makes the items [start, stop) of a data set, or scores an answer to one."""
    import reasoning_gym

    @lru_cache(maxsize=8)
    def items_of(dataset: str, config: str) -> Any:
        return reasoning_gym.create_dataset(dataset, **json.loads(config))

    @lru_cache(maxsize=64)  # a group asks for the same one many times
    def item(dataset: str, config: str, index: int) -> Any:
        return items_of(dataset, config)[index]

    def reply(question: dict[str, Any]) -> dict[str, Any]:
        key = (question["dataset"], question["config"])
        try:
            items = items_of(*key)
        except Exception as error:
            return {"refused": _unknown(question["dataset"], reasoning_gym.factory.DATASETS) or shorten(error)}
        try:
            if "index" in question:
                return {"score": float(items.score_answer(question["answer"], item(*key, question["index"])))}
            chunk = [items[index] for index in range(question["start"], question["stop"])]
            return {"items": [(one["question"], "" if one["answer"] is None else str(one["answer"])) for one in chunk]}
        except MemoryError:
            return {"gave_up": "out of memory", "last": True}
        except Exception as error:
            return {"raised": shorten(error)}

    return reply


def _unknown(dataset: str, known: Iterable[str]) -> str | None:
    """The nearest names, if there is no data set of that name."""
    names = sorted(known)
    if dataset in names:
        return None
    near = difflib.get_close_matches(dataset, names, n=3, cutoff=0.5) or [name for name in names if dataset in name][:3]
    return f"reasoning_gym has no data set of that name; nearest: {', '.join(near) or 'none'} ({len(names)} in all)"
