"""GSM8K: grade-school word problems whose answer is a number (arXiv 2110.14168), from the hub or from files of its columns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from bapo.tasks.answers import last_box
from bapo.types import Prompt

INSTRUCTION = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)")


@dataclass(frozen=True)
class GSM8K:
    """The task (`bapo.types.Task`): reward 1.0 for a response whose last complete `\\boxed{...}` holds the right number.

    path: a data set of the hub, or a local folder with a JSONL or Parquet file of each split, named after it. Columns:
    question, and answer, which ends in `#### 72`. name, revision: which config of it, and which commit; neither counts for
    plain local files. train_size, test_size: the first rows of a split, all for None.
    """

    path: str = "openai/gsm8k"
    name: str | None = "main"
    revision: str | None = None
    train_size: int | None = None
    test_size: int | None = None

    def __post_init__(self) -> None:
        for field in ("train_size", "test_size"):
            if (value := getattr(self, field)) is not None and value < 1:
                raise ValueError(f"task.{field} is {value}; it must be >= 1, or null for all rows")

    def prompts(self, split: Literal["train", "test"]) -> Sequence[Prompt]:
        """The prompts of a split, in the order of its rows; read once. ValueError for data that cannot be had or trained on."""
        if split not in ("train", "test"):
            raise ValueError(f"split is {split!r}; it must be 'train' or 'test'")
        return self._train if split == "train" else self._test

    def verify(self, prompt: Prompt, response: str) -> float:
        """1.0 when the last complete box holds `prompt.answer` as a number, else 0.0. A number outside a box is no answer."""
        found = number(last_box(response) or "")
        return float(found is not None and found == number(prompt.answer))

    @cached_property
    def _train(self) -> tuple[Prompt, ...]:
        return self._read("train", self.train_size)

    @cached_property
    def _test(self) -> tuple[Prompt, ...]:
        return self._read("test", self.test_size)

    def _read(self, split: str, size: int | None) -> tuple[Prompt, ...]:
        rows = load_rows(self.path, self.name, self.revision, split)
        if size is not None and size > len(rows):
            raise ValueError(f"task.{split}_size is {size}; it must be <= {len(rows)}, the rows of {self.path!r}")
        read = [parse(f"gsm8k/{split}/{index}", row) for index, row in enumerate(rows[:size])]
        if bad := [str(index) for index, prompt in enumerate(read) if prompt is None]:
            some = ", ".join(bad[:10]) + (f", ... ({len(bad)} in all)" if len(bad) > 10 else "")
            what = f"rows without a question or without a number after '####': {some}"
            raise ValueError(f"task.path is {self.path!r}; split {split!r} has {what}")
        return tuple(prompt for prompt in read if prompt)


def load_rows(path: str, name: str | None, revision: str | None, split: str) -> list[Mapping[str, Any]]:
    """The rows of a split by the library datasets, which runs no code of a data set's own. Raises ValueError in one line."""
    import datasets  # takes a second

    local = Path(path).expanduser()
    if local.is_file():
        raise ValueError(f"task.path is {path!r}; name the folder that holds a file for each split, such as train.jsonl")
    datasets.disable_progress_bars()
    plain = local.is_dir() and not (local / "README.md").is_file()  # no README, no configs
    try:
        loaded = datasets.load_dataset(
            str(local) if local.exists() else path,
            None if plain else name,
            split=split,
            revision=None if local.exists() else revision,
            trust_remote_code=False,
        )
    except Exception as error:  # no network, no such data set, no such split, broken files: each with a class of its own
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"task.path is {path!r}; split {split!r} could not be loaded: {reason}") from error
    if missing := sorted({"question", "answer"} - set(loaded.column_names)):
        found = ", ".join(loaded.column_names)
        raise ValueError(f"task.path is {path!r}; split {split!r} has no column {', '.join(missing)} (it has {found})")
    return list(loaded)


def parse(uid: str, row: Mapping[str, Any]) -> Prompt | None:
    """The prompt of a row; None without a question or without a number after the last `####`."""
    question, answer = row["question"], row["answer"]
    if not isinstance(question, str) or not question.strip() or not isinstance(answer, str) or "####" not in answer:
        return None
    gold = answer.rpartition("####")[2].strip().replace(",", "")
    return Prompt(uid, question.strip() + INSTRUCTION, gold) if NUMBER.fullmatch(gold) else None


def number(text: str) -> Decimal | None:
    r"""`text` as a number, without `$`, commas, spaces and a full stop at its end; None if it is none."""
    bare = re.sub(r"\\?\$|,|\s", "", text).removesuffix(".")
    return Decimal(bare) if NUMBER.fullmatch(bare) else None
