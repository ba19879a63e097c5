"""Questions and answers from files of one's own."""

from __future__ import annotations

from pathlib import Path

from bapo.tasks.answers import AnswerIn
from bapo.tasks.problems import BOXED, HASHES, BadRows, Problems, Split, boxed_problems
from bapo.tasks.rows import BUILDERS, Rows
from bapo.tasks.verify import Mode


def files(
    train: str | None = None,
    test: str | None = None,
    question: str = "question",
    answer: str = "answer",
    uid: str | None = None,
    mode: Mode = "math",
    answer_in: AnswerIn = "box",
    instruction: str | None = None,
    bad_rows: BadRows = "refuse",
    train_size: int | None = None,
    test_size: int | None = None,
) -> Problems:
    """The task. train, test: a JSONL, JSON or Parquet file each; without one there is no such split.

    question, answer, uid: its columns; without a uid, a row is known by its index. mode, answer_in (the last box, or what
    follows the last `####`): docs/verification.md. instruction: None for one that asks for the answer there.
    """
    asks = (HASHES if answer_in == "hashes" else BOXED) if instruction is None else instruction
    sizes: dict[Split, int | None] = {"train": train_size, "test": test_size}
    return boxed_problems("files", rows_of(train, test), question, answer, mode, asks, bad_rows, sizes, uid, answer_in)


def rows_of(train: str | None, test: str | None) -> dict[Split, Rows]:
    """Rows of each given file. Raises ValueError where there is none."""
    given: dict[Split, str | None] = {"train": train, "test": test}
    for split, path in given.items():
        if path is not None and (not (file := Path(path).expanduser()).is_file() or file.suffix not in BUILDERS):
            raise ValueError(f"task.{split} is {path!r}; it must be a file: {', '.join(BUILDERS)}")
    rows: dict[Split, Rows] = {
        split: Rows(path, split, key=f"task.{split}") for split, path in given.items() if path is not None
    }
    if not rows:
        raise ValueError("task.train and task.test are null; at least one of them must be a file")
    return rows
