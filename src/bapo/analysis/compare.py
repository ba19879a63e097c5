"""A table per benchmark over evaluations and runs: python -m bapo.analysis.compare RUN... [--csv FILE]

A RUN is the folder of an evaluation (result.json), the folder of a training run, whose last held-out scores are taken, or a
folder above several of either. A row is a policy asked in one way; the standard error over problems follows the value.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bapo.analysis.compared import ERROR, Row, of_result, of_run
from bapo.evaluation.folder import SHORT, markdown, sampling_text, shown

COMPARED = (
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "samples",
    "problems",
    "split",
    "template_hash",
    "data_hash",
    "dtype",
)
"""Settings that have to be equal for two numbers of one benchmark to be comparable."""
JUDGING = ("task.mode", "task.answer_in")
"""Likewise of a task: what is right."""


def read(folders: Sequence[Path]) -> tuple[list[Row], list[str]]:
    """The rows of folders, in order, each folder once, and what was left out: a sentence for each.

    ValueError for a folder in and below which there is neither a result nor a run, and where no row is left.
    """
    rows: list[Row] = []
    left_out: list[str] = []
    seen: set[Path] = set()
    for folder in folders:
        results = sorted(path.parent for path in folder.rglob("result.json"))
        runs = sorted(path.parent for path in folder.rglob("metrics.csv") if path.with_name("config.yaml").is_file())
        if not results and not runs:
            raise ValueError(f"RUN is {str(folder)!r}; there is neither a result.json nor a run in or below it")
        for found in [*results, *runs]:
            if found.resolve() in seen:
                continue
            seen.add(found.resolve())
            try:
                rows += [of_result(found)] if found in results else of_run(found)
            except ValueError as error:
                if found in results:
                    raise
                left_out.append(f"left out: {error}")
    if not rows:
        raise ValueError("; ".join(left_out))
    return rows, left_out


def by_benchmark(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {name: [row for row in rows if row.benchmark == name] for name in dict.fromkeys(row.benchmark for row in rows)}


def warnings(rows: Sequence[Row]) -> list[str]:
    """What makes numbers of one benchmark incomparable: a sentence for each setting that is known to differ between rows."""
    found = []
    for name, same in by_benchmark(rows).items():
        most = max((row.settings["problems"] for row in same if "problems" in row.settings), default=None)
        tables = [_settings(row, most) for row in same]
        keys = [*COMPARED, *JUDGING]
        for part, digest in (("task", "data_hash"), ("prompt", "template_hash")):
            if any(digest not in table for table in tables):  # of a training run the config is known, and no digest
                keys += sorted({key for table in tables for key in table if key.startswith(f"{part}.")} - {*keys})
        for key in keys:
            values: dict[str, list[str]] = {}
            for row, table in zip(same, tables, strict=True):
                if key in table:
                    values.setdefault(str(table[key]), []).append(row.label)
            if len(values) > 1:
                listed = "; ".join(f"{value} in {_some(labels)}" for value, labels in values.items())
                found.append(f"{name}: {key} differs: {listed}")
    return found


def _some(labels: Sequence[str]) -> str:
    return ", ".join(labels[:2]) + (f" and {len(labels) - 2} more" if len(labels) > 2 else "")


def _settings(row: Row, most: int | None) -> dict[str, Any]:
    """The settings of a row, those of its task and prompt as `task.digits`. most: problems of the largest row."""
    table: dict[str, Any] = {key: row.settings[key] for key in COMPARED if key in row.settings}
    if "problems" not in table and "max_prompts" in row.settings and most is not None:  # whose task does not say its size
        table["problems"] = min(row.settings["max_prompts"], most)
    for part in ("task", "prompt"):
        section = row.settings.get(part) or {}
        # The path of the training rows decides no held-out problem.
        table |= {f"{part}.{key}": _plain(value) for key, value in section.items() if key not in ("_target_", "train")}
    return table


def _plain(value: Any) -> Any:
    """A path in one spelling."""
    if isinstance(value, str) and "/" in value and Path(value).expanduser().exists():
        return str(Path(value).expanduser().resolve())
    return value


def metrics_of(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(metric for row in rows for metric in row.scores))


def table(rows: Sequence[Row]) -> str:
    """A heading and a table in Markdown for each benchmark; a row says whose numbers they are and how they were drawn."""
    parts = []
    for name, same in by_benchmark(rows).items():
        lines = []
        for row in same:
            line = {"run": row.name, "folder": row.folder, "problems": _problems(row), "sampling": sampling_text(row.settings)}
            for metric in metrics_of(same):
                if found := row.scores.get(metric):
                    decimals = 1 if metric == "response_length_mean" else 3
                    line[SHORT.get(metric, metric)] = shown({"value": found[0], "stderr": found[1]}, decimals)
            lines.append(line)
        parts.append(f"## {name}\n\n{markdown(lines)}")
    return "\n".join(parts)


def _problems(row: Row) -> str:
    most = row.settings.get("max_prompts")
    return str(row.settings.get("problems") or ("" if most is None else f"at most {most}"))


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """The same rows in one table, a column for each value and one for its standard error; unknown cells are empty."""
    metrics = metrics_of(rows)
    header = ["benchmark", "run", "folder", *COMPARED] + [f"{metric}{end}" for metric in metrics for end in ("", ERROR)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        for row in itertools.chain(*by_benchmark(rows).values()):
            cells: list[Any] = [row.benchmark, row.name, row.folder, *(row.settings.get(key) for key in COMPARED)]
            for metric in metrics:
                cells += row.scores.get(metric, (None, None))
            writer.writerow(cells)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bapo.analysis.compare", description="A table per benchmark over runs.")
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="folder of an evaluation, a run, or above several")
    parser.add_argument("--csv", metavar="FILE", type=Path, help="write one table over all, too")
    args = parser.parse_args(arguments)
    try:
        rows, left_out = read(args.runs)
    except ValueError as error:
        parser.error(str(error))
    for warning in [*left_out, *warnings(rows)]:
        print(f"warning: {warning}", file=sys.stderr)
    print(table(rows), end="")
    if args.csv:
        write_csv(rows, args.csv)


if __name__ == "__main__":
    main()
