"""Demonstrations as texts: those of a task, or the rows of a file or of a data set of the hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from bapo.protocols import Task
from bapo.tasks.rows import BUILDERS, Rows


@dataclass(frozen=True)
class Demonstration:
    """`response` to `prompt`. A chat may have a `system` text and earlier `turns` (question, answer), which are read only."""

    prompt: str
    response: str
    system: str | None = None
    turns: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class TaskDemonstrations:
    """Called with a task: `n` of its demonstrations, which `seed` decides."""

    n: int = 38_400
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("n", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"data.{name} is {getattr(self, name)}; it must be >= {least}")

    def check(self, task: Task) -> None:
        if not task.has_demonstrations:
            raise ValueError(f"task is {task.name}, which has no demonstrations: data=file data.path=PATH_OR_HUB_ID")

    def __call__(self, task: Task) -> list[Demonstration]:
        return [Demonstration(prompt, response) for prompt, response in task.demonstrations(self.n, self.seed)]


@dataclass(frozen=True)
class FileDemonstrations:
    """Called with a task, which it ignores: the rows of a JSONL or Parquet file, or of a data set of the hub.

    path, name, revision, split: as in `bapo.tasks.rows.Rows`. prompt, response: columns of texts. messages: instead of these, a
    column of chats, lists of {role, content}: an optional system turn, then user and assistant in turns; the assistant's last
    turn is the response. rows: number of first rows to take, None: all.
    """

    path: str
    prompt: str = "prompt"
    response: str = "response"
    messages: str | None = None
    name: str | None = None
    revision: str | None = None
    split: str = "train"
    rows: int | None = None

    def __post_init__(self) -> None:
        if self.rows is not None and self.rows < 1:
            raise ValueError(f"data.rows is {self.rows}; it must be >= 1, or null for all rows")
        file = Path(self.path).expanduser()
        if (self.path.startswith((".", "/", "~")) or file.suffix in BUILDERS) and not file.exists():
            raise ValueError(f"data.path is {self.path!r}; there is no such file")

    def check(self, task: Any) -> None:
        """Any task will do."""

    def __call__(self, task: Any) -> list[Demonstration]:
        """The demonstrations. ValueError, which names the row, counted from 0, for data that cannot be read or learned from."""
        columns = [self.prompt, self.response] if self.messages is None else [self.messages]
        table = Rows(self.path, self.split, self.name, self.revision, key="data.path").read(columns)
        demonstrations = []
        for number, row in enumerate(islice(table, self.rows)):
            try:
                demonstrations.append(self._parse(row))
            except ValueError as error:
                raise ValueError(f"data.path is {self.path!r}; row {number}: {error}") from error
        if not demonstrations:
            raise ValueError(f"data.path is {self.path!r}; it has no rows")
        return demonstrations

    def _parse(self, row: Mapping[str, Any]) -> Demonstration:
        if self.messages is not None:
            return _chat(row[self.messages])
        return Demonstration(_text(self.prompt, row[self.prompt]), _text(self.response, row[self.response]))


def _chat(messages: Any) -> Demonstration:
    if not isinstance(messages, list) or not all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in messages):
        raise ValueError(f"its messages are {messages!r:.80}; they must be a list of objects with role and content")
    roles = [m["role"] for m in messages]
    begins = 1 if roles[:1] == ["system"] else 0
    pairs = len(roles[begins:]) // 2
    if not pairs or roles[begins:] != ["user", "assistant"] * pairs:
        order = "an optional system, then user, assistant, user, assistant ..."
        raise ValueError(f"its roles are {', '.join(map(str, roles))}; they must be {order}")
    texts = [_text(f"content of message {place}", m["content"]) for place, m in enumerate(messages)]
    turns = list(zip(texts[begins::2], texts[begins + 1 :: 2], strict=True))
    return Demonstration(*turns[-1], system=texts[0] if begins else None, turns=tuple(turns[:-1]))


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"its {name} is {value!r:.80}; it must be a text, and not empty")
    return value
