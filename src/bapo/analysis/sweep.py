"""A sweep as a table, seeds averaged: python -m bapo.analysis.sweep FOLDER... [--last SHARE] [--metric NAME]...

A FOLDER is a run or holds runs. Runs that differ in their seed alone share a line: mean and standard deviation, over seeds, of
each metric's mean over the last SHARE of a run's updates.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bapo.analysis.run_data import STEP, distinguish, flatten, held_out_names, read_config, read_rows, run_folders
from bapo.evaluation.folder import markdown

METRICS = ("rollout/reward_mean", "policy/entropy", "policy/clip_frac", "staleness/mean")
APART = ("seed", "name")
"""Config keys in which runs of one line may differ."""


def runs_below(folders: Sequence[Path]) -> list[Path]:
    """Runs with an update in and below the folders, each once. ValueError for a folder without one."""
    every: dict[Path, None] = {}
    for folder in folders:
        runs = [run for run in run_folders(folder) if len((run / "metrics.csv").read_text().splitlines()) > 1]
        if not runs:
            raise ValueError(f"FOLDER is {str(folder)!r}; there is no run with an update in or below it")
        every |= dict.fromkeys(run.resolve() for run in runs)
    return list(every)


def late_mean(rows: Sequence[dict[str, float]], metric: str, share: float) -> float | None:
    """Mean of the metric's values over the last `share` of the updates; None if there are none."""
    after = (1 - share) * rows[-1][STEP]
    values = [row[metric] for row in rows if row[STEP] > after and metric in row]
    return float(np.mean(values)) if values else None


def table(runs: Sequence[Path], share: float = 0.25, metrics: Sequence[str] = ()) -> str:
    """Return Markdown. metrics: () for the held-out results and `METRICS`. ValueError for one that no run has logged."""
    every = {run: read_rows(run) for run in runs}
    logged = sorted({name for rows in every.values() for row in rows for name in row})
    for metric in metrics:
        if metric not in logged:
            near = difflib.get_close_matches(metric, logged, n=1)
            raise ValueError(f"--metric is {metric!r}, which no run has logged" + (f"; nearest: {near[0]!r}" if near else ""))
    shown = metrics or [*dict.fromkeys(name for rows in every.values() for name in held_out_names(rows)), *METRICS]
    configs = {run: read_config(run) for run in runs}
    settings = [{key: value for key, value in config.items() if key not in APART} for config in configs.values()]
    alike: dict[str, list[Path]] = {}
    for run, label in zip(runs, distinguish(settings), strict=True):
        alike.setdefault(label, []).append(run)
    lines = []
    for label, same in sorted(alike.items()):
        seeds = {configs[run].get("seed") for run in same}
        line = {"runs": label or "all", "seeds": str(len(seeds)), "updates": _span([every[run][-1][STEP] for run in same])}
        for metric in shown:
            means = [late_mean(every[run], metric, share) for run in same]
            line[metric] = _mean_and_deviation([mean for mean in means if mean is not None])
        lines.append(line)
    return markdown(lines)


def warnings(folders: Sequence[Path], runs: Sequence[Path]) -> list[str]:
    """A sentence for each run without an update, unfinished, or present twice."""
    every = [path.parent.resolve() for folder in folders for path in sorted(folder.rglob("status.json"))]
    configs = {run: read_config(run) for run in dict.fromkeys([*runs, *every])}
    sentences = [f"without an update: {run}" for run, config in configs.items() if run not in runs and "loss" in config]
    sentences += [f"not finished: {run}" for run in runs if run in every and not _is_finished(run)]
    settings = {run: flatten(configs[run] | {"name": None}) for run in runs}
    pairs = itertools.combinations(runs, 2)
    return sentences + [f"the same settings and seed: {one} and {two}" for one, two in pairs if settings[one] == settings[two]]


def _is_finished(run: Path) -> bool:
    return '"finished"' in (run / "status.json").read_text(encoding="utf-8")


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"


def _mean_and_deviation(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{np.mean(values):.3f}" + (f" ({np.std(values, ddof=1):.3f})" if len(values) > 1 else "")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bapo.analysis.sweep", description="A sweep as a table, seeds averaged.")
    parser.add_argument("folders", nargs="+", metavar="FOLDER", type=Path, help="of a run, or above several")
    parser.add_argument("--last", metavar="SHARE", type=float, default=0.25, help="of a run's updates (default 0.25)")
    shown = f"may be repeated; default: the held-out results, {', '.join(METRICS)}"
    parser.add_argument("--metric", metavar="NAME", action="append", default=[], help=shown)
    args = parser.parse_args(arguments)
    if not 0 < args.last <= 1:
        parser.error(f"--last is {args.last}; it must be in (0, 1]")
    try:
        runs = runs_below(args.folders)
        text = table(runs, args.last, args.metric)
    except ValueError as error:
        parser.error(str(error))
    for warning in warnings(args.folders, runs):
        print(f"warning: {warning}", file=sys.stderr)
    print(text, end="")


if __name__ == "__main__":
    main()
