"""AIME 2025: both papers of that year's American Invitational Mathematics Examination, 30 problems."""

from __future__ import annotations

from bapo.tasks.problems import BOXED, BadRows, Problems, Split, boxed_problems
from bapo.tasks.rows import Rows


def aime25(
    path: str = "math-ai/aime25",
    name: str | None = None,
    revision: str | None = None,
    question: str = "problem",
    instruction: str = BOXED,
    bad_rows: BadRows = "refuse",
    test_size: int | None = None,
) -> Problems:
    """The task; it has a test split only. Columns: `question`, and answer, from 0 to 999.

    path, name, revision: `bapo.tasks.rows.Rows`. opencompass/AIME2025 has a config for each paper, and its column is question.
    """
    rows: dict[Split, Rows] = {"test": Rows(path, "test", name, revision)}
    return boxed_problems("aime25", rows, question, "answer", "integer", instruction, bad_rows, {"test": test_size})
