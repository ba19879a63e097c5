"""The pictures of a run, and of several runs on the same axes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

Rows = Sequence[Mapping[str, float]]

STEP = "trainer/global_step"
# Okabe and Ito's palette, then three of Tol's: safe for colour-blind eyes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255", "#999933", "#888888")
DASHES: tuple[Any, ...] = ("-", "--", ":", "-.")
STYLE: Any = {
    "font.size": 10.5,
    "figure.titlesize": 12.5,
    "figure.titleweight": "bold",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.limits": (-3, 5),
    "grid.color": "#e6e6e6",
    "legend.edgecolor": "none",
    "legend.fontsize": 9.5,
}
MANY_POINTS = 60
"""Above it a raw curve is drawn thin, below its moving average."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes. series: metric -> legend; HELD_OUT stands for every set that was evaluated.

    log: a logarithmic axis where the values span much. smooth: a moving average where there are many.
    """

    ylabel: str
    series: Mapping[str, str]
    log: bool = False
    smooth: bool = True


@dataclass(frozen=True)
class Picture:
    stem: str
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Run:
    """What there is to draw of a run. `levels`: metric -> values to mark with a dotted line -> what they are."""

    label: str
    rows: Rows
    levels: Mapping[str, Mapping[float, str]] = field(default_factory=dict)


HELD_OUT = "eval/*/avg@*"
_RIGHT, _WRONG = "rollout/response_length_correct_mean", "rollout/response_length_incorrect_mean"
_CLIPPED = {
    "policy/clip_frac": "all",
    "policy/clip_frac_high": "A > 0, above clip_high",
    "policy/clip_frac_low": "A < 0, below clip_low",
}
_RATIOS = {"bounds/positive_ratio": "at the chosen bounds", "bounds/positive_ratio_start": "at the start of both ranges"}
PICTURES = (
    Picture(
        "reward",
        "Reward and held-out accuracy",
        (Panel("mean reward", {"rollout/reward_mean": "training prompts, sampled", HELD_OUT: ""}),),
    ),
    Picture("entropy", "Entropy of the policy", (Panel("nats per token", {"policy/entropy": "entropy"}),)),
    Picture(
        "clip_bounds",
        "Clip bounds on the importance ratio",
        (
            Panel("upper bound", {"bounds/clip_high": "clip_high"}, log=True),
            Panel("lower bound", {"bounds/clip_low": "clip_low"}),
        ),
    ),
    Picture("positive_ratio", "Positive ratio", (Panel("share of mass with A > 0", _RATIOS),)),
    Picture(
        "grad_norm",
        "Gradient norm and learning rate",
        (
            Panel("norm before clipping", {"policy/grad_norm": "gradient norm"}, log=True),
            Panel("learning rate", {"policy/lr": "learning rate"}, smooth=False),
        ),
    ),
    Picture(
        "response_length",
        "Length of right and wrong answers",
        (Panel("mean length (tokens)", {_RIGHT: "right", _WRONG: "wrong"}),),
    ),
    Picture(
        "staleness",
        "Staleness of the trained tokens",
        (Panel("age (optimizer updates)", {"staleness/mean": "mean", "staleness/max": "largest"}, smooth=False),),
    ),
    Picture("clip_frac", "Clipped tokens", (Panel("share of trained tokens", _CLIPPED),)),
)


def held_out_names(rows: Rows) -> list[str]:
    """`eval/<set>/avg@k` of every set, sorted."""
    return sorted({name for row in rows for name in row if re.fullmatch(r"eval/.*/avg@\d+", name)})


def points(rows: Rows, name: str) -> tuple[list[float], list[float]]:
    """(updates, values) of the rows that have `name`."""
    found = [(row[STEP], row[name]) for row in rows if name in row]
    return [step for step, _ in found], [value for _, value in found]


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Mean of every `window` neighbours, len(values) - window + 1 of them."""
    sums = list(accumulate(values, initial=0.0))
    return [(stop - start) / window for start, stop in zip(sums, sums[window:], strict=False)]


def smoothing_window(rows: Rows) -> int:
    """Points to average over: a whole round, whose own up and down then cancels, as long as a run has many rounds."""
    return max(9, len(rows) // max(12, len(round_starts(rows))))


def round_starts(rows: Rows) -> dict[int, float]:
    """Round -> its first update."""
    starts: dict[int, float] = {}
    for row in rows:
        if "rollout/round" in row and row[STEP] > 0:
            starts.setdefault(int(row["rollout/round"]), row[STEP])
    return starts


def has(runs: Sequence[Run], panel: Panel) -> dict[str, str]:
    """The panel's metrics that some run logged, every evaluated set by its own name -> legend."""
    found: dict[str, str] = {}
    for name, legend in panel.series.items():
        if name == HELD_OUT:
            sets = sorted({held for run in runs for held in held_out_names(run.rows)})
            found |= {held: "held-out: " + held.removeprefix("eval/").replace("/", " ") for held in sets}
        elif any(name in row for run in runs for row in run.rows):
            found[name] = legend
    return found


def missing(runs: Sequence[Run], picture: Picture) -> list[str]:
    """The picture's metrics that no run logged."""
    return [
        name
        for panel in picture.panels
        for name in panel.series
        if not any(found == name or (name == HELD_OUT and found.startswith("eval/")) for found in has(runs, panel))
    ]


def draw(picture: Picture, runs: Sequence[Run], path: Path) -> bool:
    """Write `picture` to `path` as a PNG; False, and nothing written, when no run has any of its metrics."""
    panels = [(panel, names) for panel in picture.panels if (names := has(runs, panel))]
    if not panels:
        return False
    with matplotlib.rc_context(STYLE):
        height = 4.6 if len(runs) == 1 else 4.7 + 0.11 * len(runs)
        figure = Figure(figsize=(7.6, height), layout="constrained")
        figure.suptitle(picture.title, x=0.01, ha="left")
        grid = list(figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0])
        for axes, (panel, names) in zip(grid, panels, strict=True):
            _draw_panel(axes, panel, names, runs)
            _legend(axes, names, runs)
        if len(runs) == 1:
            _mark_rounds(grid, runs[0])
        else:
            handles = [Line2D([], [], color=COLOURS[r % len(COLOURS)], label=run.label) for r, run in enumerate(runs)]
            figure.legend(handles=handles, loc="outside lower center", ncols=2)
        grid[-1].set_xlabel("optimizer updates")
        figure.savefig(path, dpi=130)
    return True


def _draw_panel(axes: Axes, panel: Panel, names: Mapping[str, str], runs: Sequence[Run]) -> None:
    """A dash per metric; a colour per metric too for one run, per run for several."""
    drawn: list[float] = []
    window = max(smoothing_window(run.rows) for run in runs)  # of one length, or runs would not compare
    for r, run in enumerate(runs):
        for s, name in enumerate(names):
            steps, values = points(run.rows, name)
            drawn += values
            colour = COLOURS[(r if len(runs) > 1 else s) % len(COLOURS)]
            few = len(values) <= max(MANY_POINTS, 2 * window)
            if panel.smooth and not few:
                axes.plot(steps, values, color=colour, linewidth=0.6, alpha=0.4 if len(runs) == 1 else 0.15)
                steps, values = steps[window // 2 :], moving_average(values, window)
            line = {"color": colour, "linestyle": DASHES[s % len(DASHES)], "linewidth": 1.8}
            axes.plot(steps[: len(values)], values, marker="o" if few else "", markersize=3, **line)
    for level in _levels(names, runs):
        axes.axhline(level, color="#444444", linestyle=":", linewidth=1.5)
    axes.set_ylabel(panel.ylabel)
    if panel.log and min(drawn) > 0 and max(drawn) > 30 * min(drawn):
        axes.set_yscale("log")


def _levels(names: Mapping[str, str], runs: Sequence[Run]) -> dict[float, str]:
    return {level: text for run in runs for name in names for level, text in run.levels.get(name, {}).items()}


def _legend(axes: Axes, names: Mapping[str, str], runs: Sequence[Run]) -> None:
    """What the dashes are, and the dotted lines; grey where a colour is a run."""
    grey = len(runs) > 1
    handles = [
        Line2D([], [], color="#666666" if grey else COLOURS[s], linestyle=DASHES[s % len(DASHES)], label=text)
        for s, text in enumerate(names.values())
    ]
    for level, text in _levels(names, runs).items():
        handles.append(Line2D([], [], color="#444444", linestyle=":", label=f"{text} {level:g}"))
    if len(handles) > 1:
        axes.legend(handles=handles, loc="best")


def _mark_rounds(grid: Sequence[Axes], run: Run) -> None:
    """Rounds on an axis above; where they are few also as light lines."""
    starts = round_starts(run.rows)
    if not starts:
        return
    if len(starts) <= 12:
        for axes in grid:
            for step in starts.values():
                axes.axvline(step, color="#d0d0d0", linewidth=0.8, zorder=0)
    every = max(1, math.ceil(len(starts) / 10))
    ticks = {number: step for number, step in starts.items() if number % every == 0}
    above = grid[0].secondary_xaxis("top")
    above.set_xticks(list(ticks.values()), [str(number) for number in ticks])
    above.tick_params(labelsize=8.5, colors="#777777")
    above.spines["top"].set_visible(False)
    above.set_xlabel("round", fontsize=8.5, color="#777777")
