"""A task on a data set: questions with one right answer each, described by a YAML file of conf/task alone."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from bapo.protocols import Split, Task
from bapo.tasks.answers import PLACES, AnswerIn, number
from bapo.tasks.rows import BUILDERS, BadRowError, Row, Rows, member, text, top
from bapo.tasks.verify import Mode, check_golds, verify_answers, vote
from bapo.types import Prompt

log = logging.getLogger(__name__)

AnswerFormat = Literal["text", "hashes", "json_list"]
OtherTurns = Literal["refuse", "drop"]
BadRows = Literal["refuse", "skip"]
CHOICES = {
    "other_turns": OtherTurns, "answer_format": AnswerFormat, "mode": Mode, "answer_in": AnswerIn, "bad_rows": BadRows,
}  # fmt: skip

INSTRUCTIONS: dict[AnswerIn, str] = {
    "box": "\n\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "hashes": '\n\nLet\'s think step by step and output the final answer after "####".',  # verl's words
}
WARN_AFTER = 64
"""Responses without one answer among them that are worth a warning."""
LISTED = 10
"""Rows of a kind that a message names."""


@dataclass(frozen=True)
class DatasetTask(Task):
    r"""Questions and answers in columns of a data set, or of files.

    name: begins every uid. path, config, revision: a data set of the hub, its config and commit, or local files
    (`bapo.tasks.rows.Rows`). train, test: the data set's name of each split, or, with path null, a file; null: no such split.
    question_column: texts, or chats, whose last user turn is the question. other_turns: a chat with turns besides it is a bad
    row (refuse), or loses them (drop). answer_column, uid_column, difficulty_column: a dot leads into a field,
    `reward_model.ground_truth`. Without uid_column a row is known by its index.
    answer_format: the column holds the answer (text), a solution with the answer after its last `####` (hashes), or a JSON list
    of one answer (json_list). mode: which answers are the same, docs/verification.md. answer_in: the place of the answer in a
    response, its last `\boxed{...}` or after its last `####`. instruction: follows every question; null: words that ask for it.
    difficulty_column: only rows with a number in [min_difficulty, max_difficulty] there are kept; null: no bound.
    bad_rows: rows without a question or an answer that can be compared end in a ValueError (refuse) or are left out (skip).
    train_size, test_size: the first rows of the split; null: all.
    """

    name: str = "dataset"
    path: str | None = None
    config: str | None = None
    revision: str | None = None
    train: str | None = None
    test: str | None = None
    question_column: str = "question"
    other_turns: OtherTurns = "refuse"
    answer_column: str = "answer"
    answer_format: AnswerFormat = "text"
    uid_column: str | None = None
    difficulty_column: str | None = None
    min_difficulty: float | None = None
    max_difficulty: float | None = None
    mode: Mode = "math"
    answer_in: AnswerIn = "box"
    instruction: str | None = None
    bad_rows: BadRows = "refuse"
    train_size: int | None = None
    test_size: int | None = None
    _prompts: dict[str, tuple[Prompt, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _warned: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for key, choices in CHOICES.items():
            if (value := getattr(self, key)) not in get_args(choices):
                raise ValueError(f"task.{key} is {value!r}; it must be one of {', '.join(get_args(choices))}")
        for key in ("train_size", "test_size"):
            if (size := getattr(self, key)) is not None and size < 1:
                raise ValueError(f"task.{key} is {size}; it must be >= 1, or null for all rows")
        least, most = self.min_difficulty, self.max_difficulty
        if least is not None and most is not None and least > most:
            raise ValueError(f"task.min_difficulty is {least}; it must be <= {most}, task.max_difficulty")
        if not self.splits:
            raise ValueError("task.train and task.test are null; at least one of them must be a file, or a split of task.path")
        if self.path is not None and len(self.splits) > 1 and Path(self.path).expanduser().is_file():
            raise ValueError(
                f"task.path is {self.path!r}; name the folder that holds a file for each split, such as train.jsonl"
            )
        for split in self.splits if self.path is None else ():
            file = Path(getattr(self, split)).expanduser()
            if not file.is_file() or file.suffix not in BUILDERS:
                there = "" if file.exists() else ", and there is none of that name"
                raise ValueError(f"task.{split} is {getattr(self, split)!r}; it must be a file: {', '.join(BUILDERS)}{there}")

    @property
    def splits(self) -> tuple[Split, ...]:
        return tuple(split for split in get_args(Split) if getattr(self, split) is not None)

    @property
    def source(self) -> tuple[str, str | None]:
        return self.path or self.train or self.test or "", self.revision

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """The prompts of a split, in the order of its rows; read once. ValueError for data that cannot be loaded or used."""
        if split not in get_args(Split):
            raise ValueError(f"split is {split!r}; it must be 'train' or 'test'")
        if split not in self.splits:
            raise ValueError(f"split is {split!r}; the task {self.name} has only {', '.join(map(repr, self.splits))}")
        if split not in self._prompts:
            self._prompts[split] = self._read(split)
        return self._prompts[split]

    def verify(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float | None]:
        """1.0 for a right answer, else 0.0; None if it cannot be verified. Warns once if many responses have no answer."""
        golds = [prompt.answer for prompt in prompts]
        verdicts = verify_answers(responses, golds, self.mode, answer_in=self.answer_in)
        rewards = [None if verdict.outcome == "unverified" else verdict.reward for verdict in verdicts]
        for prompt, verdict in zip(prompts, verdicts, strict=True):
            if verdict.outcome == "unverified" and prompt.uid not in self._warned:
                self._warned.add(prompt.uid)
                log.warning("task %s: an answer to %s could not be verified: %s", self.name, prompt.uid, verdict.reason)
        if (
            len(rewards) >= WARN_AFTER
            and "no answer" not in self._warned
            and not any(rewards)
            and not any(map(self.answer, responses))
        ):
            self._warned.add("no answer")
            note = "task %s: not one of %d responses has an answer %s, so none can be right: does task.instruction ask for it?"
            log.warning(note, self.name, len(rewards), PLACES[self.answer_in])
        return rewards

    def answer(self, response: str) -> str | None:
        return vote(response, self.mode, self.answer_in)

    def _read(self, split: Split) -> tuple[Prompt, ...]:
        place = getattr(self, split)
        source = (
            Rows(place, split, key=f"task.{split}") if self.path is None else Rows(self.path, place, self.config, self.revision)
        )
        columns = (self.question_column, self.answer_column, self.uid_column, self.difficulty_column)
        table = source.read([column for column in columns if column])
        indices = self._kept(source, table)
        size = getattr(self, f"{split}_size")
        if size is not None and size > len(indices):
            raise ValueError(f"task.{split}_size is {size}; it must be <= {len(indices)}, the rows of {source.path!r}")
        indices = indices[:size]
        prompts, faults = self._parsed(split, indices, table.select(indices))
        if faults:
            self._refuse(source, len(indices), faults)
        uids = Counter(prompt.uid for prompt in prompts)
        if twice := [uid for uid, count in uids.items() if count > 1]:
            raise ValueError(f"{source} has uids more than once, among them {', '.join(twice[:LISTED])}")
        return prompts

    def _kept(self, source: Rows, table: Any) -> list[int]:
        """Indices of the rows whose difficulty is within the bounds."""
        if not len(table):
            raise ValueError(f"{source} has no rows")
        if self.difficulty_column is None:
            return list(range(len(table)))
        column, least, most = self.difficulty_column, self.min_difficulty, self.max_difficulty
        rows = table.select_columns([top(column, table.column_names)])
        values = [member(row, column) for row in rows]
        kept = [
            index
            for index, value in enumerate(values)
            if isinstance(value, int | float) and (least is None or least <= value) and (most is None or value <= most)
        ]
        if not kept:
            raise ValueError(f"{source} has no row with a {column} in [{least}, {most}]")
        return kept

    def _parsed(self, split: Split, indices: Sequence[int], rows: Iterable[Row]) -> tuple[tuple[Prompt, ...], dict[int, str]]:
        """The prompts of the good rows, and what is wrong with each bad one, by its index."""
        prompts: dict[int, Prompt] = {}
        faults: dict[int, str] = {}
        for index, row in zip(indices, rows, strict=True):
            try:
                question, answer = self._question(row), self._answer(row)
                uid = text(member(row, self.uid_column), "a uid") if self.uid_column else index
                prompts[index] = Prompt(f"{self.name}/{split}/{uid}", question + self._instruction, answer)
            except BadRowError as error:
                faults[index] = str(error)
        wrong = check_golds({prompt.answer for prompt in prompts.values()}, self.mode)
        faults |= {index: f"whose answer {wrong[p.answer]}" for index, p in prompts.items() if p.answer in wrong}
        return tuple(prompt for index, prompt in prompts.items() if index not in faults), faults

    @property
    def _instruction(self) -> str:
        return INSTRUCTIONS[self.answer_in] if self.instruction is None else self.instruction

    def _question(self, row: Row) -> str:
        value = member(row, self.question_column)
        return last_user_turn(value, self.other_turns) if isinstance(value, list) else text(value, "a question")

    def _answer(self, row: Row) -> str:
        answer = member(row, self.answer_column)
        if self.answer_format == "json_list":
            answer = only_item(answer, self.answer_column)
        answer = text(answer, "an answer" if self.answer_column == "answer" else f"a {self.answer_column}")
        if self.answer_format == "hashes":
            answer = text(answer.rpartition("####")[2] if "####" in answer else None, "an answer after '####'")
        return answer.replace(",", "") if self.mode == "number" and number(answer) is not None else answer

    def _refuse(self, source: Rows, count: int, faults: Mapping[int, str]) -> None:
        """Logs which rows cannot be used; ValueError unless they may be skipped and others are left."""
        kinds: dict[str, list[int]] = {}
        for index in sorted(faults):
            kinds.setdefault(faults[index], []).append(index)
        listed = "; ".join(f"{len(rows)} {kind}: {_first(rows)}" for kind, rows in kinds.items())
        message = f"{source} has bad rows, {len(faults)} of {count}: {listed}"
        if len(faults) == count or self.bad_rows == "refuse":
            raise ValueError(message + ("" if len(faults) == count else "; task.bad_rows=skip leaves them out"))
        log.warning("%s; they are left out", message)


def last_user_turn(turns: Sequence[Any], other_turns: OtherTurns) -> str:
    """The text of the last user turn. Raises BadRowError without one, and for turns besides it unless they may be dropped."""
    user = [member(turn, "content") for turn in turns if member(turn, "role") == "user"]
    question = text(user[-1] if user else None, "a user turn")
    if other_turns == "refuse" and len(turns) > 1:
        raise BadRowError(
            "with turns besides a user turn (rollout.prompt.system takes a system turn for all rows, and "
            "task.other_turns=drop drops them)"
        )
    return question


def only_item(value: Any, column: str) -> Any:
    """The one item of a JSON list. Raises BadRowError for any other text."""
    try:
        items = json.loads(value)
    except (TypeError, ValueError):
        items = None
    if not isinstance(items, list) or len(items) != 1:
        raise BadRowError(f"whose {column} is no list of one answer")
    return items[0]


def _first(rows: Sequence[int]) -> str:
    return ", ".join(map(str, rows[:LISTED])) + (", ..." if len(rows) > LISTED else "")
