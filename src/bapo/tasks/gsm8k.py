"""GSM8K: grade-school word problems whose answer is a number (arXiv 2110.14168), from the hub or from files of its columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from bapo.tasks.answers import last_box
from bapo.tasks.problems import BOXED, BadRows, Problems
from bapo.tasks.rows import BadRowError, Row, Rows, text

NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)")
_MONEY = r"(?:\\?\$)*"
SAID = re.compile(rf"{_MONEY}([+-]?){_MONEY}((?:[0-9]{{1,3}}(?:,[0-9]{{3}})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+){_MONEY}\.?{_MONEY}")
"""A number as it is written: commas between groups of three digits, `$` around it, a full stop behind it."""


def gsm8k(
    path: str = "openai/gsm8k",
    name: str | None = "main",
    revision: str | None = None,
    instruction: str = BOXED,
    bad_rows: BadRows = "refuse",
    train_size: int | None = None,
    test_size: int | None = None,
) -> Problems:
    """The task. Columns: question, and answer, which ends in `#### 72`. path, name, revision: `bapo.tasks.rows.Rows`."""
    if Path(path).expanduser().is_file():
        raise ValueError(f"task.path is {path!r}; name the folder that holds a file for each split, such as train.jsonl")
    return Problems(
        name="gsm8k",
        rows={"train": Rows(path, "train", name, revision), "test": Rows(path, "test", name, revision)},
        columns=["question", "answer"],
        parse=parse,
        judge=Numbers(),
        instruction=instruction,
        bad_rows=bad_rows,
        sizes={"train": train_size, "test": test_size},
    )


@dataclass(frozen=True)
class Numbers:
    """Right is the number in the last complete box, and nothing but a number: mode math would let `48+24` pass for 72."""

    @property
    def place(self) -> str:
        return r"in a \boxed{...}"

    def faults(self, golds: Sequence[str]) -> dict[int, str]:
        return {index: "is no number" for index, gold in enumerate(golds) if number(gold) is None}

    def rewards(self, responses: Sequence[str], golds: Sequence[str]) -> list[float | None]:
        return [float(_said(response) == number(gold)) for response, gold in zip(responses, golds, strict=True)]

    def answer(self, response: str) -> str | None:
        found = _said(response)
        if found is None:
            return None
        digits = f"{found:f}"
        return "0" if not found else digits.rstrip("0").rstrip(".") if "." in digits else digits


def parse(row: Row) -> tuple[str, str]:
    """Question and gold of a row."""
    question, answer = text(row["question"], "a question"), text(row["answer"], "an answer")
    said = answer.rpartition("####")[2].strip()
    gold = said.replace(",", "")
    if "####" not in answer or not NUMBER.fullmatch(gold) or number(said) is None:
        raise BadRowError("without a number after '####'")
    return question, gold


def number(text: str) -> Decimal | None:
    r"""`text` as a number, without `$`, the commas of thousands and a full stop at its end; None if it is none, or two."""
    match = SAID.fullmatch(re.sub(r"(?<![0-9.,])\s+|\s+(?![0-9.,])", "", text))
    return Decimal(match[1] + match[2].replace(",", "")) if match else None


def _said(response: str) -> Decimal | None:
    return number(last_box(response) or "")
