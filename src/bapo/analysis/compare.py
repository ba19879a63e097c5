"""One table over evaluations and runs: python -m bapo.analysis.compare RUN... [--csv FILE]

A RUN is the folder of an evaluation (result.json), a folder above several, or the folder of a training run, whose last held-out
scores are taken. A row is a policy, a column a metric of a benchmark; the standard error over problems follows the value.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bapo.analysis.report import read_config, read_rows
from bapo.evaluation.folder import markdown, read_result, shown

COMPARED = ("temperature", "top_p", "top_k", "max_tokens", "samples", "problems", "split", "template_hash", "data_hash")
"""Settings that have to be equal for two numbers of one benchmark to be comparable."""
EVAL = re.compile(r"eval/([\w-]+)/(.+)")
ERROR = "_stderr"


@dataclass
class Row:
    """A policy: benchmark -> metric -> (value, standard error or None), and benchmark -> settings, as far as they are known."""

    label: str
    identity: object
    scores: dict[str, dict[str, tuple[float, float | None]]] = field(default_factory=dict)
    settings: dict[str, Mapping[str, Any]] = field(default_factory=dict)


def read(folders: Sequence[Path]) -> list[Row]:
    """The rows of folders, in order. Results of one policy share a row unless they are of one benchmark.

    ValueError for a folder in which there is neither a result nor a run.
    """
    rows: list[Row] = []
    for folder in folders:
        results = sorted(folder.rglob("result.json")) if folder.is_dir() else []
        if results:
            for path in results:
                _add(rows, read_result(path.parent) or {}, path)
        elif (folder / "metrics.csv").is_file():
            rows.append(of_run(folder))
        else:
            raise ValueError(f"RUN is {str(folder)!r}; there is no result.json in or below it, and no metrics.csv in it")
    _distinguish(rows)
    return rows


def _add(rows: list[Row], result: Mapping[str, Any], path: Path) -> None:
    try:
        policy, name = result["policy"], str(result["benchmark"])
        scores = {metric: (float(one["value"]), one["stderr"]) for metric, one in result["metrics"].items()}
        settings = dict(result["settings"])
        label = policy["name"] + ("" if policy["step"] is None else f" @ {policy['step']}")
        identity = policy["fingerprint"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not the result of an evaluation: it lacks {error}") from error
    row = next((row for row in rows if row.identity == identity and name not in row.scores), None)
    if row is None:
        row = Row(label, identity)
        rows.append(row)
    row.scores[name], row.settings[name] = scores, settings


def of_run(folder: Path) -> Row:
    """The last held-out scores of a training run."""
    table = read_rows(folder)
    last = {name: value for row in table for name, value in row.items() if name.startswith("eval/")}
    steps = [row["trainer/global_step"] for row in table if any(name.startswith("eval/") for name in row)]
    if not last:
        raise ValueError(f"RUN is {str(folder)!r}; it was never evaluated: metrics.csv has no eval/*")
    config = read_config(folder)
    callback = (config.get("callbacks") or {}).get("evaluate") or {}
    sampling = {key: value for key, value in (callback.get("sampling") or {}).items() if key != "_target_"}
    settings = sampling | {key: callback[key] for key in ("samples", "split") if key in callback}
    name = str(config.get("name") or folder.resolve().parent.name)
    row = Row(f"{name}/{folder.resolve().name} @ {steps[-1]:.0f}", folder.resolve())
    for full, value in last.items():
        match = EVAL.fullmatch(full)
        if match and not full.endswith(ERROR):
            row.scores.setdefault(match[1], {})[match[2]] = (value, last.get(full + ERROR))
            row.settings[match[1]] = settings
    return row


def _distinguish(rows: Sequence[Row]) -> None:
    """Rows of one label get numbers."""
    labels = [row.label for row in rows]
    for index, row in enumerate(rows):
        if labels.count(labels[index]) > 1:
            row.label = f"{labels[index]} ({labels[: index + 1].count(labels[index])})"


def warnings(rows: Sequence[Row]) -> list[str]:
    """What makes numbers of one benchmark incomparable: a sentence for each setting that is known to differ between rows."""
    found = []
    for name in dict.fromkeys(name for row in rows for name in row.scores):
        for key in COMPARED:
            values = {row.label: row.settings[name][key] for row in rows if key in row.settings.get(name, {})}
            if len(set(map(repr, values.values()))) > 1:
                listed = ", ".join(f"{value} in {label}" for label, value in values.items())
                found.append(f"{name}: {key} differs: {listed}")
    return found


def columns(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """(benchmark, metric) of every column, benchmark by benchmark."""
    names = dict.fromkeys(name for row in rows for name in row.scores)
    return [(name, metric) for name in names for metric in dict.fromkeys(m for row in rows for m in row.scores.get(name, {}))]


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown."""
    lines = []
    for row in rows:
        line = {"run": row.label}
        for name, metric in columns(rows):
            if found := row.scores.get(name, {}).get(metric):
                decimals = 1 if metric == "response_length_mean" else 3
                line[f"{name} {metric}"] = shown({"value": found[0], "stderr": found[1]}, decimals)
        lines.append(line)
    return markdown(lines)


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """The same, a column for each value and one for its standard error; unknown cells are empty."""
    header = ["run"] + [f"{name}/{metric}{end}" for name, metric in columns(rows) for end in ("", ERROR)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        for row in rows:
            cells: list[Any] = [row.label]
            for name, metric in columns(rows):
                cells += row.scores.get(name, {}).get(metric, (None, None))
            writer.writerow(cells)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bapo.analysis.compare", description="One table over several runs.")
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="folder of an evaluation, above several, or of a run")
    parser.add_argument("--csv", metavar="FILE", type=Path, help="write the table there, too")
    args = parser.parse_args(arguments)
    try:
        rows = read(args.runs)
    except ValueError as error:
        parser.error(str(error))
    for warning in warnings(rows):
        print(f"warning: {warning}", file=sys.stderr)
    print(table(rows), end="")
    if args.csv:
        write_csv(rows, args.csv)


if __name__ == "__main__":
    main()
