"""A sweep as a table, seeds averaged: python -m bapo.analysis.sweep FOLDER... [--last SHARE] [--metric NAME]...

A FOLDER is a run or holds runs. A line is what runs have in common but for their seed: the mean over seeds, and the standard
deviation over them, of each metric's mean over the last SHARE of a run's updates.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from bapo.analysis.figures import STEP, held_out_names
from bapo.analysis.labels import distinguish
from bapo.analysis.report import read_config, read_rows
from bapo.evaluation.folder import markdown
from bapo.metrics import lookup

METRICS = ("rollout/reward_mean", "policy/entropy", "policy/clip_frac", "staleness/mean")
APART = ("seed", "name")
"""Keys of a config in which runs of one line may differ."""


def runs_below(folders: Sequence[Path]) -> list[Path]:
    """Every run in and below the folders, once. ValueError for a folder without one."""
    found: dict[Path, None] = {}
    for folder in folders:
        runs = sorted(path.parent for path in folder.rglob("metrics.csv") if path.with_name("config.yaml").is_file())
        if not runs:
            raise ValueError(f"FOLDER is {str(folder)!r}; there is no run in or below it")
        found |= dict.fromkeys(run.resolve() for run in runs)
    return list(found)


def late_mean(rows: Sequence[dict[str, float]], metric: str, share: float) -> float | None:
    """Mean of the metric's values over the last `share` of the updates; None if it has none there."""
    after = (1 - share) * rows[-1][STEP]
    values = [row[metric] for row in rows if row[STEP] > after and metric in row]
    return statistics.fmean(values) if values else None


def table(runs: Sequence[Path], share: float = 0.25, metrics: Sequence[str] = ()) -> str:
    """Markdown. metrics: () for the held-out scores and `METRICS`."""
    every = {run: read_rows(run) for run in runs}
    shown = metrics or [*dict.fromkeys(name for rows in every.values() for name in held_out_names(rows)), *METRICS]
    configs = [{key: value for key, value in read_config(run).items() if key not in APART} for run in runs]
    alike: dict[str, list[Path]] = {}
    for run, label in zip(runs, distinguish(configs), strict=True):
        alike.setdefault(label, []).append(run)
    lines = []
    for label, same in sorted(alike.items()):
        line = {"runs": label or "all", "seeds": str(len(same)), "updates": _span([every[run][-1][STEP] for run in same])}
        for metric in shown:
            means = [late_mean(every[run], metric, share) for run in same]
            line[metric] = _mean_and_deviation([mean for mean in means if mean is not None])
        lines.append(line)
    return markdown(lines)


def is_finished(run: Path) -> bool:
    status = run / "status.json"
    return status.is_file() and json.loads(status.read_text(encoding="utf-8")).get("status") == "finished"


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"


def _mean_and_deviation(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{statistics.fmean(values):.3f}" + (f" ({statistics.stdev(values):.3f})" if len(values) > 1 else "")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bapo.analysis.sweep", description="A sweep as a table, seeds averaged.")
    parser.add_argument("folders", nargs="+", metavar="FOLDER", type=Path, help="of a run, or above several")
    parser.add_argument("--last", metavar="SHARE", type=float, default=0.25, help="of a run's updates (default 0.25)")
    shown = f"may be repeated; default: the held-out scores, {', '.join(METRICS)}"
    parser.add_argument("--metric", metavar="NAME", action="append", default=[], help=shown)
    args = parser.parse_args(arguments)
    if not 0 < args.last <= 1:
        parser.error(f"--last is {args.last}; it must be in (0, 1]")
    try:
        for name in args.metric:
            lookup(name)
        runs = runs_below(args.folders)
        text = table(runs, args.last, args.metric)
    except (ValueError, KeyError) as error:
        parser.error(str(error.args[0]))
    if unfinished := [str(run) for run in runs if not is_finished(run)]:
        print("warning: not finished:", *unfinished, file=sys.stderr)
    print(text, end="")


if __name__ == "__main__":
    main()
