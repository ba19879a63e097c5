"""Figures of a run from its metrics, and of several runs on the same axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bapo.analysis.run_data import Rows, held_out_names, points, round_starts

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
"""Above it a raw curve is thin, below its moving average."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes. series: metric -> legend; HELD_OUT stands for every evaluated set.

    log: a logarithmic axis if the values span much. smooth: a moving average if there are many.
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
    """Rows of a run and its label. levels: metric -> value of a dotted line -> its legend."""

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
_STALENESS = {"staleness/mean": "mean", "staleness/max": "maximum"}
PICTURES = (
    Picture(
        "reward",
        "Reward and held-out accuracy",
        (Panel("mean reward", {"rollout/reward_mean": "training prompts, sampled", HELD_OUT: ""}),),
    ),
    Picture("entropy", "Policy entropy", (Panel("nats per token", {"policy/entropy": "entropy"}),)),
    Picture(
        "clip_bounds",
        "Clip bounds on the importance ratio",
        (
            Panel("clip_high", {"bounds/clip_high": "clip_high"}, log=True),
            Panel("clip_low", {"bounds/clip_low": "clip_low"}),
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
    Picture("response_length", "Response length", (Panel("mean length (tokens)", {_RIGHT: "correct", _WRONG: "incorrect"}),)),
    Picture(
        "staleness",
        "Staleness of the trained tokens",
        (Panel("staleness (optimizer updates)", _STALENESS, smooth=False),),
    ),
    Picture("clip_frac", "Clipped tokens", (Panel("share of trained tokens", _CLIPPED),)),
)


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Mean of every `window` neighbours, len(values) - window + 1 of them."""
    sums = list(accumulate(values, initial=0.0))
    return [(stop - start) / window for start, stop in zip(sums, sums[window:], strict=False)]


def smoothing_window(rows: Rows) -> int:
    """Points to average over: a round, whose own course then cancels, if a run has many rounds."""
    return max(9, len(rows) // max(12, len(round_starts(rows))))


def has(runs: Sequence[Run], panel: Panel) -> dict[str, str]:
    """The panel's metrics that some run logged -> legend; every evaluated set by its own name."""
    series: dict[str, str] = {}
    for name, legend in panel.series.items():
        if name == HELD_OUT:
            sets = sorted({held for run in runs for held in held_out_names(run.rows)})
            series |= {held: "held-out: " + held.removeprefix("eval/").replace("/", " ") for held in sets}
        elif any(name in row for run in runs for row in run.rows):
            series[name] = legend
    return series


def missing(runs: Sequence[Run], picture: Picture) -> list[str]:
    """The picture's metrics that no run logged."""
    names = {name for panel in picture.panels for name in has(runs, panel)}
    names |= {HELD_OUT} if any(name.startswith("eval/") for name in names) else set()
    return [name for panel in picture.panels for name in panel.series if name not in names]


def new_figure(title: str, height: float = 4.6) -> Figure:
    figure = Figure(figsize=(7.6, height), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left")
    return figure


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=100, format="png", pil_kwargs={"compress_level": 3})  # level 6 takes as long as the drawing


def draw(picture: Picture, runs: Sequence[Run], path: Path) -> bool:
    """Write `picture` to `path` as a PNG; write nothing and return False if no run has any of its metrics."""
    panels = [(panel, names) for panel in picture.panels if (names := has(runs, panel))]
    if not panels:
        return False
    with matplotlib.rc_context(STYLE):
        figure = new_figure(picture.title, 4.6 if len(runs) == 1 else 4.7 + 0.11 * len(runs))
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
        save(figure, path)
    return True


def _draw_panel(axes: Axes, panel: Panel, names: Mapping[str, str], runs: Sequence[Run]) -> None:
    """Draw a dash per metric, and a colour per metric (one run) or per run (several)."""
    every_value: list[float] = []
    window = max(smoothing_window(run.rows) for run in runs)  # of one length, or runs would not compare
    for r, run in enumerate(runs):
        for s, name in enumerate(names):
            steps, values = points(run.rows, name)
            every_value += values
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
    if panel.log and min(every_value) > 0 and max(every_value) > 30 * min(every_value):
        axes.set_yscale("log")


def _levels(names: Mapping[str, str], runs: Sequence[Run]) -> dict[float, str]:
    return {level: text for run in runs for name in names for level, text in run.levels.get(name, {}).items()}


def _legend(axes: Axes, names: Mapping[str, str], runs: Sequence[Run]) -> None:
    """Name the dashes and the dotted lines; they are grey where a colour stands for a run."""
    handles = [
        Line2D([], [], color="#666666" if len(runs) > 1 else COLOURS[s], linestyle=DASHES[s % len(DASHES)], label=text)
        for s, text in enumerate(names.values())
    ]
    for level, text in _levels(names, runs).items():
        handles.append(Line2D([], [], color="#444444", linestyle=":", label=f"{text} {level:g}"))
    if len(handles) > 1:
        axes.legend(handles=handles, loc="best")


def _mark_rounds(grid: Sequence[Axes], run: Run) -> None:
    """Mark rounds on an axis above and, if they are few, by light lines."""
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
