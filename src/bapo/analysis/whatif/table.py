"""What a replay found, as CSV, as a page of Markdown, and as a picture."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from bapo.analysis.figures import COLOURS, STYLE
from bapo.analysis.whatif.walk import CORNERS, Choice, Outcome

VALUES: dict[str, Callable[[Choice], float]] = {
    "clip_low": lambda c: c.clip_low,
    "clip_high": lambda c: c.clip_high,
    "positive_ratio": lambda c: c.positive_ratio,
    "loss": lambda c: c.loss,
    "entropy_clip_cov": lambda c: c.entropy_clip_cov,
}
CLIPPED = {f"clipped_{name}": index for index, name in enumerate(CORNERS)}
SAME_BOUNDS = 1e-9
SAME_LOSS = 1e-6


def values(choice: Choice) -> dict[str, float]:
    """Every number of a choice by its column."""
    found = {name: value(choice) for name, value in VALUES.items()}
    return found | {name: choice.clipped[index] for name, index in CLIPPED.items()}


def bounds_differ(outcome: Outcome) -> bool:
    pairs = zip(outcome.recorded.bounds, outcome.replayed.bounds, strict=True)
    return any(abs(one - other) > SAME_BOUNDS for one, other in pairs)


def write_csv(path: Path, outcomes: Sequence[Outcome]) -> None:
    """A row per update: recorded/<name> and replayed/<name> of every value."""
    names = [*VALUES, *CLIPPED]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        sides = [f"{side}/{name}" for name in names for side in ("recorded", "replayed")]
        writer.writerow(["trainer/global_step", "rollout/round", "tokens", "bounds_differ", *sides])
        for outcome in outcomes:
            pairs = [values(outcome.recorded), values(outcome.replayed)]
            cells = [repr(pair[name]) for name in names for pair in pairs]
            writer.writerow([outcome.step, outcome.round, outcome.tokens, int(bounds_differ(outcome)), *cells])


def page(outcomes: Sequence[Outcome], title: str, changes: Sequence[str], settings: str) -> str:
    """The table, per round and overall, as Markdown; means over updates."""
    header = ["round", "updates", "bounds differ", *VALUES, *CLIPPED]
    lines = ["| " + " | ".join(header) + " |", "| " + " | ".join(["---"] * len(header)) + " |"]
    for number, group in groupby(outcomes, key=lambda outcome: outcome.round):
        lines.append(_line(str(number), list(group)))
    lines.append(_line("all", outcomes))
    table = "\n".join(lines)
    intro = f"Changed: {', '.join(f'`{change}`' for change in changes)}." if changes else agreement(outcomes)
    return (
        f"# {title}\n\n{intro}\n\nMeans over updates, recorded > replayed; one number where both are the same. `clipped_*` are "
        "shares of trained tokens, by sign of the advantage and side of the bounds. The data, and the policy's log-probs, are "
        f"those of the run: this says nothing of the run that would have followed.\n\n{table}\n\n```yaml\n{settings}\n```\n"
    )


def agreement(outcomes: Sequence[Outcome]) -> str:
    """How well a replay that changes nothing gives what was recorded."""
    farthest = float(np.max([abs(o.recorded.loss - o.replayed.loss) for o in outcomes]))  # nan if one is
    other = sum(map(bounds_differ, outcomes))
    text = f"Nothing changed. Largest difference to a recorded loss: {farthest:.2g}; other bounds than recorded in {other} of "
    text += f"{len(outcomes)} updates."
    if farthest > SAME_LOSS or other or math.isnan(farthest):
        text += " Both should be none: was the code changed since the run, or is its device one that computes less exactly?"
    return text


def _line(label: str, outcomes: Sequence[Outcome]) -> str:
    cells = [label, str(len(outcomes)), f"{sum(map(bounds_differ, outcomes)) / len(outcomes):.0%}"]
    before, after = (
        [values(side) for side in sides] for sides in zip(*((o.recorded, o.replayed) for o in outcomes), strict=True)
    )
    for name in (*VALUES, *CLIPPED):
        one, other = (_short(sum(row[name] for row in rows) / len(rows)) for rows in (before, after))
        cells.append(one if one == other else f"{one} > {other}")
    return "| " + " | ".join(cells) + " |"


def _short(number: float) -> str:
    text = f"{number:.4f}"
    return "0.0000" if text == "-0.0000" else text


def write_figure(path: Path, outcomes: Sequence[Outcome], title: str) -> None:
    """Recorded and replayed bounds, positive ratio, and clipped tokens by update."""
    panels = {
        "clip_high": lambda c: c.clip_high,
        "clip_low": lambda c: c.clip_low,
        "positive ratio": lambda c: c.positive_ratio,
        "share clipped, A > 0": lambda c: c.clipped[0] + c.clipped[1],
        "share clipped, A < 0": lambda c: c.clipped[2] + c.clipped[3],
    }
    steps = [outcome.step for outcome in outcomes]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 9.5), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left")
        grid = figure.subplots(len(panels), 1, sharex=True)
        for axes, (label, value) in zip(grid, panels.items(), strict=True):
            axes.plot(steps, [value(o.recorded) for o in outcomes], color=COLOURS[0], label="recorded")
            axes.plot(steps, [value(o.replayed) for o in outcomes], color=COLOURS[1], linestyle="--", label="replayed")
            axes.set_ylabel(label)
        grid[0].legend(loc="best")
        grid[-1].set_xlabel("optimizer updates")
        partial = path.with_suffix(".partial")
        figure.savefig(partial, dpi=130, format="png")
    os.replace(partial, path)
