"""Outcomes of a what-if as CSV, as a page of Markdown, and as a figure."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from bapo.analysis.whatif.walk import CORNERS, Choice, Outcome
from bapo.evaluation.folder import markdown
from bapo.files import write_atomic

VALUES = ("clip_low", "clip_high", "positive_ratio", "loss", "entropy_clip_cov")
CLIPPED = {f"clipped_{name}": index for index, name in enumerate(CORNERS)}
SAME_BOUNDS = 1e-9
SAME_LOSS = 1e-6


def values(choice: Choice) -> dict[str, float]:
    """Every number of a choice by its column."""
    numbers = {name: float(vars(choice)[name]) for name in VALUES}
    return numbers | {name: choice.clipped[index] for name, index in CLIPPED.items()}


def bounds_differ(outcome: Outcome) -> bool:
    pairs = zip(outcome.recorded.bounds, outcome.what_if.bounds, strict=True)
    return any(abs(one - other) > SAME_BOUNDS for one, other in pairs)


def write_csv(path: Path, outcomes: Sequence[Outcome]) -> None:
    """A row per update: recorded/<name> and what_if/<name> of every value."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        sides = [f"{side}/{name}" for name in (*VALUES, *CLIPPED) for side in ("recorded", "what_if")]
        writer.writerow(["trainer/global_step", "rollout/round", "tokens", "bounds_differ", *sides])
        for outcome in outcomes:
            pairs = zip(values(outcome.recorded).values(), values(outcome.what_if).values(), strict=True)
            cells = [repr(number) for pair in pairs for number in pair]
            writer.writerow([outcome.step, outcome.round, outcome.tokens, int(bounds_differ(outcome)), *cells])


def page(outcomes: Sequence[Outcome], title: str, changes: Sequence[str], settings: str) -> str:
    """The table, per round and overall, as Markdown; means over updates."""
    rounds = [(str(number), list(group)) for number, group in groupby(outcomes, key=lambda outcome: outcome.round)]
    table = markdown([_line(label, group) for label, group in [*rounds, ("all", outcomes)]])
    intro = f"Changed: {', '.join(f'`{change}`' for change in changes)}." if changes else agreement(outcomes)
    return (
        f"# {title}\n\n{intro}\n\nMeans over updates, recorded > what-if; one number where both are the same. `clipped_*` are "
        "shares of trained tokens, by sign of the advantage and side of the bounds. Data and log-probs are those of the run: "
        f"this says nothing about the run that would have followed.\n\n{table}\n```yaml\n{settings}\n```\n"
    )


def agreement(outcomes: Sequence[Outcome]) -> str:
    """A sentence on how well a what-if without changes reproduces the records."""
    difference = float(np.max([abs(o.recorded.loss - o.what_if.loss) for o in outcomes]))  # NaN if one is
    other = sum(map(bounds_differ, outcomes))
    text = (
        f"Nothing changed. Largest difference to a recorded loss: {difference:.2g}; other bounds than recorded in {other} of "
    )
    text += f"{len(outcomes)} updates."
    if not difference <= SAME_LOSS or other:
        text += " Both should be 0: was the code changed since the run, or is its device less exact than a CPU?"
    return text


def _line(label: str, outcomes: Sequence[Outcome]) -> dict[str, str]:
    differ = sum(map(bounds_differ, outcomes)) / len(outcomes)
    cells = {"round": label, "updates": str(len(outcomes)), "bounds differ": f"{differ:.0%}"}
    before, after = [values(o.recorded) for o in outcomes], [values(o.what_if) for o in outcomes]
    for name in (*VALUES, *CLIPPED):
        one, other = (_short(sum(row[name] for row in rows) / len(rows)) for rows in (before, after))
        cells[name] = one if one == other else f"{one} > {other}"
    return cells


def _short(number: float) -> str:
    text = f"{number:.4f}"
    return "0.0000" if text == "-0.0000" else text


def write_figure(path: Path, outcomes: Sequence[Outcome], title: str) -> None:
    """Plot recorded and what-if bounds, positive ratio, and clipped tokens by update."""
    import matplotlib  # only now: it takes a second

    from bapo.analysis.figures import COLOURS, STYLE, new_figure, save

    labels = {
        "clip_high": "clip_high", "clip_low": "clip_low", "positive_ratio": "positive ratio",
        "clipped, A > 0": "share clipped, A > 0", "clipped, A < 0": "share clipped, A < 0",
    }  # fmt: skip
    curves = []
    for side in ("recorded", "what_if"):
        rows = [values(vars(outcome)[side]) for outcome in outcomes]
        for row in rows:
            row["clipped, A > 0"] = row["clipped_positive_above"] + row["clipped_positive_below"]
            row["clipped, A < 0"] = row["clipped_negative_above"] + row["clipped_negative_below"]
        curves.append(rows)
    steps = [outcome.step for outcome in outcomes]
    with matplotlib.rc_context(STYLE):
        figure = new_figure(title, height=9.5)
        grid = figure.subplots(len(labels), 1, sharex=True)
        for axes, (name, label) in zip(grid, labels.items(), strict=True):
            for rows, legend, dash, colour in zip(curves, ("recorded", "what-if"), ("-", "--"), COLOURS, strict=False):
                axes.plot(steps, [row[name] for row in rows], color=colour, linestyle=dash, label=legend)
            axes.set_ylabel(label)
        grid[0].legend(loc="best")
        grid[-1].set_xlabel("optimizer updates")
        write_atomic(path, lambda partial: save(figure, partial))
