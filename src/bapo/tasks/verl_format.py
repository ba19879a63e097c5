"""Files as the trainer verl reads them: `prompt` as chat messages, the right answer in `reward_model.ground_truth`."""

from __future__ import annotations

from typing import Any, Literal, get_args

from bapo.tasks.answers import AnswerIn
from bapo.tasks.files import rows_of
from bapo.tasks.problems import BadRows, Boxed, Problems
from bapo.tasks.rows import BadRowError, Row, member, text
from bapo.tasks.verify import Mode

OtherTurns = Literal["refuse", "drop"]


def verl_format(
    train: str | None = None,
    test: str | None = None,
    mode: Mode = "math",
    answer_in: AnswerIn = "box",
    other_turns: OtherTurns = "refuse",
    instruction: str = "",
    bad_rows: BadRows = "refuse",
    train_size: int | None = None,
    test_size: int | None = None,
) -> Problems:
    """The task. train, test: a Parquet, JSONL or JSON file each; without one there is no such split.

    The last user turn is the question. other_turns: a row with turns besides it, such as a system turn, is a bad row (refuse),
    or loses them (drop); a system turn for all rows is rollout.prompt.system. answer_in: where the prompts ask for the answer:
    in a box, or after `####`, as those that verl makes of GSM8K. instruction: most such files have one already.
    """
    if other_turns not in get_args(OtherTurns):
        raise ValueError(f"task.other_turns is {other_turns!r}; it must be one of {', '.join(get_args(OtherTurns))}")

    def parse(row: Row) -> tuple[str, str]:
        question = last_user_turn(row["prompt"], other_turns)
        return question, text(member(row["reward_model"], "ground_truth"), "a reward_model.ground_truth")

    return Problems(
        name="verl_format",
        rows=rows_of(train, test),
        columns=["prompt", "reward_model"],
        parse=parse,
        judge=Boxed(mode, answer_in),
        instruction=instruction,
        bad_rows=bad_rows,
        sizes={"train": train_size, "test": test_size},
    )


def last_user_turn(messages: Any, other_turns: OtherTurns) -> str:
    """Its text. Raises BadRowError without one, and for turns besides it unless they may be dropped."""
    turns = messages if isinstance(messages, list) else []
    asked = [member(turn, "content") for turn in turns if member(turn, "role") == "user"]
    question = text(asked[-1] if asked else None, "a user turn")
    if other_turns == "refuse" and len(turns) > 1:
        raise BadRowError("with turns besides a user turn (rollout.prompt.system takes a system turn for all rows, and "
                          "task.other_turns=drop drops them)")  # fmt: skip
    return question
