"""MATH-500: 500 problems of the test split of MATH (arXiv 2103.03874; the choice is that of arXiv 2305.20050)."""

from __future__ import annotations

from bapo.tasks.problems import BOXED, BadRows, Problems, Split, boxed_problems
from bapo.tasks.rows import Rows


def math500(
    path: str = "HuggingFaceH4/MATH-500",
    revision: str | None = None,
    instruction: str = BOXED,
    bad_rows: BadRows = "refuse",
    test_size: int | None = None,
) -> Problems:
    """The task; it has a test split only. Columns: problem, answer, as in LaTeX. path, revision: `bapo.tasks.rows.Rows`."""
    rows: dict[Split, Rows] = {"test": Rows(path, "test", None, revision)}
    return boxed_problems("math500", rows, "problem", "answer", "math", instruction, bad_rows, {"test": test_size})
