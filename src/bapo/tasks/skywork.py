"""Skywork-OR1-RL-Data, its mathematics: 105,055 problems with how hard three models found them (arXiv 2505.22312)."""

from __future__ import annotations

import json
from typing import Any, Literal

from bapo.tasks.problems import BOXED, BadRows, Boxed, Problems
from bapo.tasks.rows import BadRowError, Row, Rows, member, text
from bapo.tasks.verl_format import last_user_turn

Rated = Literal["DeepSeek-R1-Distill-Qwen-1.5B", "DeepSeek-R1-Distill-Qwen-7B", "DeepSeek-R1-Distill-Qwen-32B"]
ATTEMPTS = 16


def skywork(
    path: str = "Skywork/Skywork-OR1-RL-Data",
    revision: str | None = None,
    difficulty_model: Rated | None = None,
    min_difficulty: int = 1,
    max_difficulty: int = 15,
    instruction: str = BOXED,
    bad_rows: BadRows = "skip",
    train_size: int | None = None,
) -> Problems:
    """The task; its train split is what the data set calls math, and it has no other. path, revision: `bapo.tasks.rows.Rows`.

    A problem has a difficulty for each of three models: how many of its 16 attempts were wrong, 0 if all were right.
    difficulty_model: only problems whose difficulty for it is in [min_difficulty, max_difficulty] are there, and those without
    one are not; null for all of them. The authors train each model on 1 to 15 of its own.
    """
    for field, value in (("min_difficulty", min_difficulty), ("max_difficulty", max_difficulty)):
        if not 0 <= value <= ATTEMPTS:
            raise ValueError(f"task.{field} is {value}; it must be in [0, {ATTEMPTS}], wrong attempts of {ATTEMPTS}")
    if min_difficulty > max_difficulty:
        raise ValueError(f"task.min_difficulty is {min_difficulty}; it must be <= {max_difficulty}, task.max_difficulty")

    def keep(row: Row) -> bool:
        difficulty = member(row["extra_info"], "model_difficulty", str(difficulty_model))
        return difficulty is not None and min_difficulty <= difficulty <= max_difficulty

    return Problems(
        name="skywork",
        rows={"train": Rows(path, "math", None, revision)},
        columns=["prompt", "reward_model", "extra_info"],
        parse=parse,
        judge=Boxed("math"),
        instruction=instruction,
        bad_rows=bad_rows,
        sizes={"train": train_size},
        keep=keep if difficulty_model else None,
    )


def parse(row: Row) -> tuple[str, str]:
    """Question and gold of a row."""
    golds = _read(member(row["reward_model"], "ground_truth"))
    if not isinstance(golds, list) or len(golds) != 1:
        raise BadRowError("whose reward_model.ground_truth is no list of one answer")
    return last_user_turn(row["prompt"], "refuse"), text(golds[0], "an answer")


def _read(written: Any) -> Any:
    try:
        return json.loads(written)
    except (TypeError, ValueError):
        return None
