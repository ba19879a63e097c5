"""Reports: RUN/report.html and RUN/figures/*.png of one run; comparison.html, the same figures overlaid, of several.

python -m bapo.analysis.report RUN_DIR                          remake the report of one run
python -m bapo.analysis.report RUN_DIR RUN_DIR ... [--out DIR]  compare; DIR is the folder that holds them all unless given
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from bapo.analysis.figures import PICTURES, Picture, Run, draw, missing
from bapo.analysis.run_data import STEP, Rows, distinguish, held_out_names, points, read_config, read_rows, read_table
from bapo.analysis.token_figures import draw_token_figures
from bapo.files import write_text_atomic
from bapo.metrics import METRICS

CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1180px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; overflow-wrap: anywhere; } .sub { color: #666; margin-top: .2rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid #e6e6e6; vertical-align: top; }
th { font-weight: 600; } td { overflow-wrap: anywhere; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); gap: 1.2rem; }
figure { margin: 0; } img { width: 100%; height: auto; } figcaption { color: #555; font-size: .85rem; }
.wide { overflow-x: auto; }
pre { background: #f6f6f6; padding: 1rem; overflow-x: auto; font-size: .85rem; }
"""


def ranges(config: Mapping[str, Any]) -> dict[str, float]:
    """bounds/clip_low and bounds/clip_high -> start of the range that the loss searches; {} for fixed bounds."""
    loss = config.get("loss") or {}
    sections: dict[str, Any] = {f"bounds/{name}": loss.get(name) for name in ("clip_low", "clip_high")}
    return {name: section["start"] for name, section in sections.items() if _is_range(section)}


def _is_range(bound: Any) -> bool:
    return isinstance(bound, Mapping) and "start" in bound


def levels(config: Mapping[str, Any]) -> dict[str, dict[float, str]]:
    """Dotted lines: the start of each bound's range, and the target of the search."""
    lines = {name: {start: "start"} for name, start in ranges(config).items()}
    target = (config.get("loss") or {}).get("target_positive_ratio")
    return lines if target is None else lines | {"bounds/positive_ratio": {target: "target"}}


def describe(section: object) -> str:
    """A config group in a line: its class, its plain values, `a to b` for a range."""
    if not isinstance(section, Mapping):
        return str(section)
    parts = [str(section["_target_"]).rsplit(".", 1)[-1]] if "_target_" in section else []
    for key, value in section.items():
        if _is_range(value):
            parts.append(f"{key} {value['start']} to {value.get('stop')}")
        elif not str(key).startswith("_") and isinstance(value, str | int | float):
            parts.append(f"{key} {value}")
    return ", ".join(parts)


def key_numbers(rows: Rows, config: Mapping[str, Any]) -> dict[str, str]:
    """Numbers at the top of a report: label -> text."""
    facts = {"updates": f"{rows[-1][STEP]:.0f}"}
    if rounds := points(rows, "rollout/round")[1]:
        facts["rounds"] = f"{max(rounds) + 1:.0f}"
    named = {"rollout/reward_mean": "reward", **{name: f"held-out {name[5:]}" for name in held_out_names(rows)}}
    for name, label in (named | {"policy/entropy": "entropy (nats)"}).items():
        steps, values = points(rows, name)
        if values:
            best = f", best {max(values):.3f} at update {steps[values.index(max(values))]:.0f}" * name.startswith("eval/")
            facts[label] = f"{values[0]:.3f} first, {values[-1]:.3f} last{best}"
    for name in ("clip_low", "clip_high"):
        if values := points(rows, f"bounds/{name}")[1]:
            facts[f"mean {name}"] = f"{_mean(values):.3f}"
    means, maxima = points(rows, "staleness/mean")[1], points(rows, "staleness/max")[1]
    if means and maxima:
        facts["staleness (updates)"] = f"mean {_mean(means):.1f}, maximum {max(maxima):.0f}"
    if dropped := points(rows, "partial/dropped_groups")[1]:
        facts["unfinished groups dropped"] = f"{sum(dropped):.0f}"
    moved = share_moved(rows, ranges(config))
    return facts if moved is None else facts | {"updates with a bound off its start": f"{moved:.0%}"}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def share_moved(rows: Rows, starts: Mapping[str, float]) -> float | None:
    """Share of updates with a bound that is not at its start; None without ranges. starts: as `ranges` gives them."""
    searched = [[abs(row[name] - start) > 1e-9 for name, start in starts.items() if name in row] for row in rows]
    moved = [any(bounds) for bounds in searched if bounds]
    return _mean(moved) if moved else None


def wall_time(run_dir: Path) -> str | None:
    """Sum of timing.csv over every start of the run; None if nothing was timed."""
    path = run_dir / "timing.csv"
    rows = read_table(path) if path.is_file() else []
    seconds = sum(value for row in rows for name, value in row.items() if name.startswith("time/"))
    seconds -= sum(row["time/refill"] for row in rows if "time/wait" in row)  # in the background, but for time/wait
    if not seconds:
        return None
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"


def summary(run_dir: Path, rows: Rows, config: Mapping[str, Any]) -> dict[str, str]:
    """The table at the top: label -> text."""
    status_file = run_dir / "status.json"
    status = json.loads(status_file.read_text(encoding="utf-8")) if status_file.is_file() else {}
    policy = config.get("policy") or {}
    made_here = (policy.get("warm_start") or {}).get("model")
    known = {
        "status": status.get("status"),
        "loss": config.get("loss"),
        "model": policy.get("path") or made_here or policy or None,
        "seed": config.get("seed"),
    }
    facts = {label: describe(value) for label, value in known.items() if value is not None}
    time = wall_time(run_dir)
    return facts | key_numbers(rows, config) | ({"time in updates, refills and evaluations": time} if time else {})


def figure(path: Path, title: str, caption: str) -> str:
    """A PNG as HTML, embedded."""
    image = base64.b64encode(path.read_bytes()).decode()
    return (
        f'<figure><img alt="{escape(title)}" src="data:image/png;base64,{image}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>\n"
    )


def formulas(picture: Picture, absent: Sequence[str]) -> str:
    """Formulas of the metrics that a picture shows."""
    shown = [name for panel in picture.panels for name in panel.series if name not in absent and name in METRICS]
    return "; ".join(f"{name}: {METRICS[name].formula}" for name in shown)


def table(facts: Mapping[str, Mapping[str, str]]) -> str:
    """A column per run, a line per fact; labels of the runs at the head if there are several."""
    head = "<tr><th></th>" + "".join(f"<th>{escape(run)}</th>" for run in facts) + "</tr>\n" if len(facts) > 1 else ""
    lines = [
        f"<tr><th>{escape(label)}</th>" + "".join(f"<td>{escape(column.get(label, ''))}</td>" for column in facts.values())
        for label in dict.fromkeys(label for column in facts.values() for label in column)
    ]
    return f'<div class="wide"><table>\n{head}{"".join(line + "</tr>" for line in lines)}\n</table></div>'


def page(
    title: str,
    subtitle: str,
    facts: Mapping[str, Mapping[str, str]],
    runs: Sequence[Run],
    figures: Path,
    more: str = "",
    details: str = "",
) -> str:
    """Draw every picture into `figures`; return the HTML. facts: run label -> its table. more: HTML of further figures."""
    figures.mkdir(parents=True, exist_ok=True)
    images, absent = "", []
    for picture in PICTURES:
        path = figures / f"{picture.stem}.png"
        absent += missing(runs, picture)
        if draw(picture, runs, path):
            images += figure(path, picture.title, formulas(picture, absent))
        else:
            path.unlink(missing_ok=True)
    note = f'<p class="sub">Not drawn, as no run logged them: {escape(", ".join(absent))}.</p>' if absent else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head><body>\n"
        f'<h1>{escape(title)}</h1><p class="sub">{escape(subtitle)}</p>\n{table(facts)}\n'
        f'<div class="figures">\n{images}{more}</div>\n{note}\n{details}\n</body></html>\n'
    )


def write_report(run_dir: Path) -> Path:
    """Write RUN/report.html and RUN/figures/*.png from metrics.csv, config.yaml and status.json; return the HTML's path.

    Only metrics.csv must exist. The page needs no other file and no network. Raises ValueError if there is no row.
    """
    rows, config = read_rows(run_dir), read_config(run_dir)
    name, folder = str(config.get("name") or run_dir.resolve().name), run_dir.resolve().name
    tokens, problem = token_figures(run_dir, run_dir / "figures")
    details = problem
    if (source := run_dir / "config.yaml").is_file():
        text = escape(source.read_text(encoding="utf-8"))
        details += f"<details><summary>Resolved configuration</summary><pre>{text}</pre></details>"
    facts, runs = {name: summary(run_dir, rows, config)}, [Run(name, rows, levels(config))]
    path = run_dir / "report.html"
    html = page(name, f"run folder {folder}", facts, runs, run_dir / "figures", tokens, details)
    write_text_atomic(path, html)
    return path


def token_figures(run_dir: Path, figures: Path) -> tuple[str, str]:
    """HTML of the figures from RUN/updates, and of the error that prevented them; "" for a run without records."""
    try:
        captions = draw_token_figures(run_dir, figures)
    except ValueError as error:
        return "", f'<p class="sub">Figures of single tokens are not drawn: {escape(str(error))}</p>'
    return "".join(figure(figures / f"{stem}.png", stem, caption) for stem, caption in captions.items()), ""


def write_comparison(run_dirs: Sequence[Path], out: Path | None = None) -> Path:
    """Overlay runs in OUT/comparison.html and OUT/comparison_figures; OUT is their common parent unless given."""
    if not run_dirs:
        raise ValueError("run_dirs is empty; a comparison needs the folders of runs")
    folders = list(dict.fromkeys(run_dir.resolve() for run_dir in run_dirs))
    parent = Path(os.path.commonpath([folder.parent for folder in folders]))
    target = out or parent
    configs = [read_config(folder) for folder in folders]
    labels = distinguish(configs)
    runs, facts = [], {}
    for folder, config, label in zip(folders, configs, labels, strict=True):
        place = str(folder.relative_to(parent))
        label = label if labels.count(label) == 1 and label else f"{place}: {label}".removesuffix(": ")
        rows = read_rows(folder)
        runs.append(Run(label, rows, levels(config)))
        facts[label] = {"run folder": place} | summary(folder, rows, config)
    html = page("Comparison", f"{len(runs)} runs", facts, runs, target / "comparison_figures")
    write_text_atomic(target / "comparison.html", html)
    return target / "comparison.html"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bapo.analysis.report", description="Report on a run, or compare runs.")
    parser.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", type=Path)
    parser.add_argument("--out", type=Path, help="folder for comparison.html (default: the folder that holds every run)")
    args = parser.parse_args(arguments)
    if args.out and len(args.run_dirs) == 1:
        parser.error("--out is for comparisons; the report of one run goes into its folder")
    # A sweep's folder/* holds more than runs.
    runs = [path for path in args.run_dirs if len(args.run_dirs) == 1 or (path / "metrics.csv").is_file()]
    if skipped := [str(path) for path in args.run_dirs if path not in runs]:
        print("skipped, no metrics.csv in them:", *skipped, file=sys.stderr)
    try:
        print(write_report(args.run_dirs[0]) if len(args.run_dirs) == 1 else write_comparison(runs, args.out))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
