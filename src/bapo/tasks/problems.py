"""Base of tasks on data sets: questions with one right answer each, checked when they are read, and their judge."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

from bapo.tasks.answers import READERS, AnswerIn, plain, small_integer
from bapo.tasks.equivalence import MAX_CHARACTERS, canonical
from bapo.tasks.rows import BadRowError, Row, Rows, text
from bapo.tasks.verify import Mode, check_golds, verify_answers
from bapo.types import Prompt

log = logging.getLogger(__name__)

Split = Literal["train", "test"]
BadRows = Literal["refuse", "skip"]

BOXED = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
"""What follows a question, so that the model knows where its answer is looked for."""
HASHES = '\n\nLet\'s think step by step and output the final answer after "####".'
"""Likewise; verl's own words."""
SILENT = 64
"""So many responses without one answer among them are a reason to say so."""
LISTED = 10
"""How many rows of a kind a message names."""


class Judge(Protocol):
    """A kind of right answer. place: where in a response it has to be, for messages."""

    @property
    def place(self) -> str: ...

    def faults(self, golds: Sequence[str]) -> Mapping[int, str]:
        """Errors of golds, by index."""
        ...

    def rewards(self, responses: Sequence[str], golds: Sequence[str]) -> list[float | None]: ...

    def answer(self, response: str) -> str | None: ...


@dataclass(frozen=True)
class Boxed:
    r"""Judges what stands in the last complete `\boxed{...}`, or after the last `####`, by docs/verification.md."""

    mode: Mode = "math"
    answer_in: AnswerIn = "box"

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"task.mode is {self.mode!r}; it must be one of {', '.join(get_args(Mode))}")
        if self.answer_in not in get_args(AnswerIn):
            raise ValueError(f"task.answer_in is {self.answer_in!r}; it must be one of {', '.join(get_args(AnswerIn))}")

    @property
    def place(self) -> str:
        return r"in a \boxed{...}" if self.answer_in == "box" else "after ####"

    def faults(self, golds: Sequence[str]) -> dict[int, str]:
        different = list(dict.fromkeys(golds))
        faults = {different[index]: fault for index, fault in check_golds(different, self.mode).items()}
        faults |= {gold: f"is longer than {MAX_CHARACTERS} characters" for gold in faults if len(gold) > MAX_CHARACTERS}
        return {index: faults[gold] for index, gold in enumerate(golds) if gold in faults}

    def rewards(self, responses: Sequence[str], golds: Sequence[str]) -> list[float | None]:
        verdicts = verify_answers(responses, golds, self.mode, answer_in=self.answer_in)
        return [None if verdict.outcome == "unverified" else verdict.reward for verdict in verdicts]

    def answer(self, response: str) -> str | None:
        """In one spelling as far as no formula has to be compared: `0.50` is 1/2, but `x+1` is not `1+x`."""
        box = READERS[self.answer_in](response)
        if box is None or len(box) > MAX_CHARACTERS:
            return None
        if self.mode == "integer":
            number = small_integer(box)
            return None if number is None else str(number)
        if self.mode == "exact":
            return plain(box) or None
        return canonical(box)


@dataclass(frozen=True)
class Problems:
    """A task (`bapo.protocols.Task`): the questions of a data set.

    name: begins every uid. rows: where each split is that the task has. parse: question and gold of a row, which has `columns`;
    raises BadRowError. instruction: follows every question. bad_rows: rows that no prompt can be made of, or whose gold nothing
    can be compared with, end in a ValueError (refuse), or are left out (skip). sizes: so many of the first rows of a split, all
    for None. keep: rows it refuses are not there at all. uid_column: of the identity of a row, else that is its index.
    """

    name: str
    rows: Mapping[Split, Rows]
    columns: Sequence[str]
    parse: Callable[[Row], tuple[str, str]]
    judge: Judge = field(default_factory=Boxed)
    instruction: str = BOXED
    bad_rows: BadRows = "refuse"
    sizes: Mapping[Split, int | None] = field(default_factory=dict)
    keep: Callable[[Row], bool] | None = None
    uid_column: str | None = None
    _read: dict[str, tuple[Prompt, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _said: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for split, size in self.sizes.items():
            if size is not None and size < 1:
                raise ValueError(f"task.{split}_size is {size}; it must be >= 1, or null for all rows")
        if self.bad_rows not in get_args(BadRows):
            raise ValueError(f"task.bad_rows is {self.bad_rows!r}; it must be one of {', '.join(get_args(BadRows))}")

    @property
    def splits(self) -> tuple[Split, ...]:
        """Those that `prompts` knows."""
        return tuple(self.rows)

    @property
    def path(self) -> str:
        """Path of the first split."""
        return next(iter(self.rows.values())).path

    @property
    def revision(self) -> str | None:
        return next(iter(self.rows.values())).revision

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """The prompts of a split, in the order of its rows; read once. ValueError for data that cannot be had or trained on."""
        if split not in get_args(Split):
            raise ValueError(f"split is {split!r}; it must be 'train' or 'test'")
        if split not in self.rows:
            raise ValueError(f"split is {split!r}; the task {self.name} has only {', '.join(map(repr, self.rows))}")
        if split not in self._read:
            self._read[split] = self._prompts(split)
        return self._read[split]

    def verify(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float | None]:
        """1.0 for a right answer, else 0.0; None where nobody knows. Says once that many have no answer at all."""
        rewards = self.judge.rewards(responses, [prompt.answer for prompt in prompts])
        if len(rewards) >= SILENT and not self._said and not any(rewards) and not any(map(self.judge.answer, responses)):
            self._said.add("silent")
            note = "task %s: not one of %d responses has an answer %s, so none can be right: does task.instruction ask for it?"
            log.warning(note, self.name, len(rewards), self.judge.place)
        return rewards

    def answer(self, response: str) -> str | None:
        return self.judge.answer(response)

    def _prompts(self, split: Split) -> tuple[Prompt, ...]:
        where, size = self.rows[split], self.sizes.get(split)
        loaded = where.read(self.columns)
        indices = [i for i, row in enumerate(loaded) if self.keep(row)] if self.keep else list(range(len(loaded)))
        if size is not None and size > len(indices):
            raise ValueError(f"task.{split}_size is {size}; it must be <= {len(indices)}, the rows of {where.path!r}")
        if not indices:
            raise ValueError(f"{where} has no rows" + (" that the task keeps" if self.keep else ""))
        read: dict[int, Prompt] = {}
        faults: dict[int, str] = {}
        for index, row in zip(indices[:size], loaded.select(indices[:size]), strict=True):
            try:
                question, gold = self.parse(row)
                own = text(row[self.uid_column], "a uid") if self.uid_column else index
                read[index] = Prompt(f"{self.name}/{split}/{own}", question + self.instruction, gold)
            except BadRowError as error:
                faults[index] = str(error)
        wrong = self.judge.faults([prompt.answer for prompt in read.values()])
        faults |= {index: f"whose answer {wrong[place]}" for place, index in enumerate(read) if place in wrong}
        if faults:
            self._report(where, len(indices[:size]), faults)
        good = tuple(prompt for index, prompt in read.items() if index not in faults)
        _check_uids(where, good)
        return good

    def _report(self, where: Rows, asked: int, faults: Mapping[int, str]) -> None:
        """Says once which rows cannot be used; ValueError unless they may be skipped and others are left."""
        kinds: dict[str, list[int]] = {}
        for index in sorted(faults):
            kinds.setdefault(faults[index], []).append(index)
        said = "; ".join(f"{len(found)} {kind}: {_some(found)}" for kind, found in kinds.items())
        message = f"{where} has bad rows, {len(faults)} of {asked}: {said}"
        if len(faults) == asked or self.bad_rows == "refuse":
            raise ValueError(message + ("" if len(faults) == asked else "; task.bad_rows=skip leaves them out"))
        log.warning("%s; they are left out", message)


def boxed_problems(
    name: str,
    rows: Mapping[Split, Rows],
    question: str,
    answer: str,
    mode: Mode,
    instruction: str,
    bad_rows: BadRows,
    sizes: Mapping[Split, int | None],
    uid: str | None = None,
    answer_in: AnswerIn = "box",
) -> Problems:
    """The most common data set: a column of questions and one of answers, as text or as numbers."""

    def parse(row: Row) -> tuple[str, str]:
        return text(row[question], "a question"), text(row[answer], "an answer")

    columns = [question, answer, *([uid] if uid else [])]
    return Problems(name, rows, columns, parse, Boxed(mode, answer_in), instruction, bad_rows, sizes, uid_column=uid)


def _check_uids(where: Rows, prompts: Sequence[Prompt]) -> None:
    seen: set[str] = set()
    if twice := [prompt.uid for prompt in prompts if prompt.uid in seen or seen.add(prompt.uid)]:  # type: ignore[func-returns-value]
        raise ValueError(f"{where} has uids more than once, among them {', '.join(twice[:LISTED])}")


def _some(found: Sequence[int]) -> str:
    return ", ".join(map(str, found[:LISTED])) + (", ..." if len(found) > LISTED else "")
