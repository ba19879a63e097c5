"""AIME 2024: both papers of that year's American Invitational Mathematics Examination, 30 problems."""

from __future__ import annotations

from bapo.tasks.problems import BOXED, BadRows, Problems, Split, boxed_problems
from bapo.tasks.rows import Rows


def aime24(
    path: str = "HuggingFaceH4/aime_2024",
    revision: str | None = None,
    instruction: str = BOXED,
    bad_rows: BadRows = "refuse",
    test_size: int | None = None,
) -> Problems:
    """The task; its test split is what the data set calls train, and it has no other. Columns: problem, answer, from 0 to 999.

    path, revision: `bapo.tasks.rows.Rows`.
    """
    rows: dict[Split, Rows] = {"test": Rows(path, "train", None, revision)}
    return boxed_problems("aime24", rows, "problem", "answer", "integer", instruction, bad_rows, {"test": test_size})
