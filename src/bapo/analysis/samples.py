"""Prompts and responses of a run, read in the terminal: python -m bapo.analysis.samples RUN_DIR [--last] [--wrong] ...

Shows RUN_DIR/samples.jsonl: of a training run a few responses of every round, of an evaluation all of them.
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
"""Characters of a text that are shown; of a longer one, both ends."""

Row = Mapping[str, Any]


def read_samples(run_dir: Path) -> list[Row]:
    """The rows of RUN_DIR/samples.jsonl but for a last one that a kill cut short. Raises ValueError when there is none."""
    path = run_dir / SAMPLES
    if not path.is_file():
        why = "callbacks.samples was null, or the run has made no update yet" if (run_dir / "config.yaml").is_file() else ""
        raise ValueError(f"there is no {SAMPLES} in {run_dir}: " + (why or "it is no folder of a run or an evaluation"))
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not rows:
        raise ValueError(f"{path} is empty; the run has no samples yet")
    return rows


def choose(rows: Sequence[Row], round_index: int | None, last: bool, right: bool | None, n: int | None) -> list[Row]:
    """The last `n` rows of a round, of the newest one (`last`) or of all, right (correctness > 0), wrong or both (None).

    Raises ValueError for a round that is not there, as in an evaluation, and where nothing is left.
    """
    rounds = sorted({row["round"] for row in rows if "round" in row})
    if not rounds and (last or round_index is not None):
        asked = "--last" if last else f"--round is {round_index}"
        raise ValueError(f"{asked}; these are the samples of an evaluation, which has no rounds")
    wanted = rounds[-1] if last else round_index
    if wanted is not None and wanted not in rounds:
        count = "1 round" if len(rounds) == 1 else f"{len(rounds)} rounds, from {rounds[0]} to {rounds[-1]}"
        raise ValueError(f"--round is {wanted}; there are samples of {count}" + (f", {rounds[0]}" if len(rounds) == 1 else ""))
    chosen = [row for row in rows if wanted is None or row["round"] == wanted]
    if right is not None:
        chosen = [row for row in chosen if (_correctness(row) > 0) == right]
    if not chosen:
        where = "" if wanted is None else f" in round {wanted}"
        raise ValueError(f"there is no {'right' if right else 'wrong'} sample{where}")
    return chosen[-n:] if n else chosen


def shorten(text: str, longest: int | None) -> str:
    """Both ends of a text of more than `longest` characters, with a note of what is left out; None: the whole."""
    if longest is None or len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"


def visible(text: str) -> str:
    """Control characters written out: a response must not command the terminal."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)


def _correctness(row: Row) -> float:
    """The reward of an evaluation has no terms added."""
    return float(row.get("correctness", row["reward"]))


def panel(row: Row, longest: int | None) -> RenderableType:
    """One sample: who, how it was judged, then prompt, answer and response as they are."""
    correctness = _correctness(row)
    judged = f"reward {row['reward']:g}" + ("" if row["reward"] == correctness else f" (task {correctness:g})")
    when = f"round {row['round']}  update {row['global_step']}  " if "round" in row else ""
    facts = Text.assemble(
        (f"{when}{row['uid']} #{row['sample_index']}\n", "bold"),
        (judged, "green" if correctness > 0 else "red"),
        f"  {row['length']} tokens, {row['finish_reason']}" + ("" if row.get("kept", True) else "  not trained on"),
        "" if row.get("verified", True) else "  could not be verified",
    )
    return Group(Rule(style="dim"), facts, *_texts(row, longest))


def _texts(row: Row, longest: int | None) -> Iterator[RenderableType]:
    texts = {"prompt": row.get("prompt"), "answer": row["answer"]}
    if "round" not in row:  # there `answer` is what the response gives
        texts = {"prompt": row.get("prompt"), "answer": row.get("gold"), "given": row["answer"] or "(no answer)"}
    for name, text in (texts | {"response": row["response"]}).items():
        if text or name == "response":  # older evaluations have neither prompt nor right answer
            yield Text(name, style="cyan")
            yield Padding(Text(visible(shorten(text or "", longest))), (0, 0, 0, 2), expand=False)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bapo.analysis.samples", description="Read what a policy has answered.")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="of a run or an evaluation")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--round", type=int, metavar="N", help="of this round only, counted from 0")
    which.add_argument("--last", action="store_true", help="of the newest round only")
    parser.add_argument("--n", type=int, metavar="K", help="the last K of them")
    judged = parser.add_mutually_exclusive_group()
    judged.add_argument("--right", action="store_true", help="those that the task gave more than 0")
    judged.add_argument("--wrong", action="store_true", help="the others")
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
