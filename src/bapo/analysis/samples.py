"""Read a policy's responses in the terminal: python -m bapo.analysis.samples RUN_DIR [--last] [--wrong] ...

Shows RUN_DIR/samples.jsonl: a few responses of every round of a training run, or all of an evaluation.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from bapo.training.run_folder import SAMPLES

LONGEST = 800
"""Characters of a text that are shown; a longer one is cut in the middle."""

Row = Mapping[str, Any]


def read_samples(run_dir: Path) -> list[Row]:
    """Rows of RUN_DIR/samples.jsonl, without a last one that a kill cut short. Raises ValueError if there is none."""
    path = run_dir / SAMPLES
    if not path.is_file():
        reason = "it is not the folder of a run or an evaluation"
        if (run_dir / "config.yaml").is_file():
            reason = "callbacks.samples was null, or the run has made no update yet"
        raise ValueError(f"there is no {SAMPLES} in {run_dir}: {reason}")
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not rows:
        raise ValueError(f"{path} is empty; the run has no samples yet")
    return rows


def choose(rows: Sequence[Row], round_index: int | None, last: bool, right: bool | None, n: int | None) -> list[Row]:
    """The last `n` rows of a round, of the newest one (`last`) or of all; right (correctness > 0), wrong or both (None).

    Raises ValueError for a round that does not exist, as in an evaluation, and if no row is left.
    """
    rounds = sorted({row["round"] for row in rows if "round" in row})
    if not rounds and (last or round_index is not None):
        option = "--last" if last else f"--round is {round_index}"
        raise ValueError(f"{option}; these are the samples of an evaluation, which has no rounds")
    selected = rounds[-1] if last else round_index
    if selected is not None and selected not in rounds:
        stretch = f"1 round, {rounds[0]}" if len(rounds) == 1 else f"{len(rounds)} rounds, from {rounds[0]} to {rounds[-1]}"
        raise ValueError(f"--round is {selected}; there are samples of {stretch}")
    chosen = [row for row in rows if selected is None or row["round"] == selected]
    if right is not None:
        chosen = [row for row in chosen if (_correctness(row) > 0) == right]
    if not chosen:
        where = "" if selected is None else f" in round {selected}"
        raise ValueError(f"there is no {'right' if right else 'wrong'} sample{where}")
    return chosen[-n:] if n else chosen


def shorten(text: str, longest: int | None) -> str:
    """Cut a text of more than `longest` characters in the middle, with a note; None: keep the whole."""
    if longest is None or len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"


def visible(text: str) -> str:
    """Escape control characters: a response must not command the terminal."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: f"\\x{ord(match[0]):02x}", text)


def _correctness(row: Row) -> float:
    """The task's reward; an evaluation adds nothing to it."""
    return float(row.get("correctness", row["reward"]))


def panel(row: Row, longest: int | None) -> RenderableType:
    """One sample: identity and grade, then prompt, answer and response."""
    correctness = _correctness(row)
    grade = f"reward {row['reward']:g}" + ("" if row["reward"] == correctness else f" (task {correctness:g})")
    place = f"round {row['round']}  update {row['global_step']}  " if "round" in row else ""
    facts = Text.assemble(
        (f"{place}{row['uid']} #{row['sample_index']}\n", "bold"),
        (grade, "green" if correctness > 0 else "red"),
        f"  {row['length']} tokens, {row['finish_reason']}" + ("" if row.get("kept", True) else "  not trained on"),
        "" if row.get("verified", True) else "  could not be verified",
    )
    return Group(Rule(style="dim"), facts, *_texts(row, longest))


def _texts(row: Row, longest: int | None) -> Iterator[RenderableType]:
    texts = {"prompt": row.get("prompt"), "answer": row["answer"]}
    if "round" not in row:  # in an evaluation `answer` is the one that the response gives
        texts = {"prompt": row.get("prompt"), "answer": row.get("gold"), "given": row["answer"] or "(no answer)"}
    for name, text in (texts | {"response": row["response"]}).items():
        if text or name == "response":
            yield Text(name, style="cyan")
            yield Padding(Text(visible(shorten(text or "", longest))), (0, 0, 0, 2), expand=False)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bapo.analysis.samples", description="Read a policy's responses.")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="of a run or an evaluation")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--round", type=int, metavar="N", help="of this round only, counted from 0")
    which.add_argument("--last", action="store_true", help="of the newest round only")
    parser.add_argument("--n", type=int, metavar="K", help="the last K of them")
    grades = parser.add_mutually_exclusive_group()
    grades.add_argument("--right", action="store_true", help="those with a task reward above 0")
    grades.add_argument("--wrong", action="store_true", help="the others")
    parser.add_argument("--full", action="store_true", help="long texts whole")
    args = parser.parse_args(arguments)
    if args.n is not None and args.n < 1:
        parser.error(f"--n is {args.n}; it must be >= 1")
    try:
        right = True if args.right else False if args.wrong else None
        rows = choose(read_samples(args.run_dir), args.round, args.last, right, args.n)
    except ValueError as error:
        parser.error(str(error))
    console = Console(highlight=False)
    for row in rows:
        console.print(panel(row, None if args.full else LONGEST))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it as it ends other commands
    main()
