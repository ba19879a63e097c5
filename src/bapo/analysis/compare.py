"""A table per benchmark over evaluations and runs: python -m bapo.analysis.compare RUN... [--csv FILE]

A RUN is the folder of an evaluation (result.json), the folder of a training run, which counts with its last held-out results,
or a folder above several of either. A row is a policy under one sampling; values have their standard error over problems.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bapo.analysis.run_data import STEP, read_config, read_rows, run_folders
from bapo.evaluation.folder import SHORT, markdown, read_result, sampling_text, shown, task_name

SETTINGS = (
    "temperature", "top_p", "top_k", "max_tokens", "samples", "problems", "split", "template_hash", "data_hash", "dtype",
)  # fmt: skip
"""Settings in which two comparable numbers of one benchmark are equal."""
TASK_SETTINGS = ("task.mode", "task.answer_in")
"""Likewise of a task: they decide which answers are correct."""
EVAL = re.compile(r"eval/([\w-]+)/(.+)")
ERROR = "_stderr"

Scores = dict[str, tuple[float, float | None]]


@dataclass(frozen=True)
class Row:
    """Results of one policy on one benchmark, from an evaluation or a training run.

    name: of the policy. folder: tells rows of one policy apart. scores: metric -> (value, standard error or None).
    settings: as in result.json, as far as known; those of a training run may have `max_prompts` in place of `problems`.
    """

    benchmark: str
    name: str
    folder: str
    scores: Scores
    settings: Mapping[str, Any]

    @property
    def label(self) -> str:
        return f"{self.name} ({self.folder})"


def of_result(folder: Path) -> Row:
    """The row of an evaluation's folder. ValueError if result.json is not of an evaluation."""
    result = read_result(folder) or {}
    try:
        policy, benchmark = result["policy"], str(result["benchmark"])
        scores = {metric: (float(one["value"]), one["stderr"]) for metric, one in result["metrics"].items()}
        name = policy["name"] + ("" if policy["step"] is None else f" @ {policy['step']}")
        settings = dict(result["settings"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / 'result.json'} is not the result of an evaluation: it lacks {error}") from error
    return Row(benchmark, name, folder.resolve().name.removeprefix(f"{benchmark}-"), scores, settings)


def of_run(folder: Path) -> list[Row]:
    """The last held-out results of a training run, a row for each set. ValueError if there are none."""
    rows = [row for row in read_rows(folder) if any(name.startswith("eval/") for name in row)]
    if not rows:
        raise ValueError(f"{folder}: it was never evaluated: metrics.csv has no eval/*")
    last = {name: value for row in rows for name, value in row.items()}
    config, at = read_config(folder), folder.resolve()
    name = f"{config.get('name') or at.parent.name} @ {rows[-1][STEP]:.0f}"
    scores: dict[str, Scores] = {}
    for metric, value in last.items():
        if (match := EVAL.fullmatch(metric)) and not metric.endswith(ERROR):
            scores.setdefault(match[1], {})[match[2]] = (value, last.get(metric + ERROR))
    return [_run_row(one, name, at.name, values, config) for one, values in scores.items()]


def _run_row(benchmark: str, name: str, folder: str, scores: Scores, config: Mapping[str, Any]) -> Row:
    """The row of an evaluated set; the set of the run's own task is called as an evaluation of that task is."""
    callback = (config.get("callbacks") or {}).get("evaluate") or {}
    sampling = {key: value for key, value in (callback.get("sampling") or {}).items() if key != "_target_"}
    task: Mapping[str, Any] = (callback.get("benchmarks") or {}).get(benchmark) or {}
    if not task and config.get("task"):
        task = config["task"]
        benchmark = task_name(task)
    prompt = (config.get("rollout") or {}).get("prompt") or config.get("prompt")
    settings = sampling | {key: callback[key] for key in ("samples", "split") if key in callback}
    settings |= {"task": task, "prompt": prompt}
    most, size = callback.get("max_prompts"), task.get(f"{callback.get('split', 'test')}_size")
    if size is not None:
        settings["problems"] = size if most is None else min(most, size)
    elif most is not None:
        settings["max_prompts"] = most
    return Row(benchmark, name, folder, scores, settings)


def read(folders: Sequence[Path]) -> tuple[list[Row], list[str]]:
    """Rows of the folders, in order, each folder once; and a sentence for each run that is left out.

    ValueError for a folder that is and holds neither a result nor a run, and if no row is left.
    """
    rows: list[Row] = []
    left_out: list[str] = []
    seen: set[Path] = set()
    for folder in folders:
        results, runs = sorted(path.parent for path in folder.rglob("result.json")), run_folders(folder)
        if not results and not runs:
            raise ValueError(f"RUN is {str(folder)!r}; there is neither a result.json nor a run in or below it")
        for path in [*results, *runs]:
            if path.resolve() in seen:
                continue
            seen.add(path.resolve())
            try:
                rows += [of_result(path)] if path in results else of_run(path)
            except ValueError as error:
                if path in results:
                    raise
                left_out.append(f"left out: {error}")
    if not rows:
        raise ValueError("; ".join(left_out))
    return rows, left_out


def by_benchmark(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {name: [row for row in rows if row.benchmark == name] for name in dict.fromkeys(row.benchmark for row in rows)}


def warnings(rows: Sequence[Row]) -> list[str]:
    """A sentence for each known setting that differs between rows of one benchmark, so that their numbers do not compare."""
    sentences = []
    for name, same in by_benchmark(rows).items():
        most = max((row.settings["problems"] for row in same if "problems" in row.settings), default=None)
        tables = [_flat_settings(row, most) for row in same]
        keys = [*SETTINGS, *TASK_SETTINGS]
        for part, digest in (("task", "data_hash"), ("prompt", "template_hash")):
            if any(digest not in table for table in tables):  # a training run has a config and no digest
                keys += sorted({key for table in tables for key in table if key.startswith(f"{part}.")} - {*keys})
        for key in keys:
            values: dict[str, list[str]] = {}
            for row, table in zip(same, tables, strict=True):
                if key in table:
                    values.setdefault(str(table[key]), []).append(row.label)
            if len(values) > 1:
                listed = "; ".join(f"{value} in {_some(labels)}" for value, labels in values.items())
                sentences.append(f"{name}: {key} differs: {listed}")
    return sentences


def _some(labels: Sequence[str]) -> str:
    return ", ".join(labels[:2]) + (f" and {len(labels) - 2} more" if len(labels) > 2 else "")


def _flat_settings(row: Row, most: int | None) -> dict[str, Any]:
    """The settings of a row, those of its task and prompt as `task.digits`. most: problems of the largest row."""
    table: dict[str, Any] = {key: row.settings[key] for key in SETTINGS if key in row.settings}
    if "problems" not in table and "max_prompts" in row.settings and most is not None:  # the task does not say its size
        table["problems"] = min(row.settings["max_prompts"], most)
    for part in ("task", "prompt"):
        section = row.settings.get(part) or {}
        # The path of the training rows decides no held-out problem.
        table |= {f"{part}.{key}": _plain(value) for key, value in section.items() if key not in ("_target_", "train")}
    return table


def _plain(value: Any) -> Any:
    """A path in one spelling; any other value unchanged."""
    if isinstance(value, str) and "/" in value and Path(value).expanduser().exists():
        return str(Path(value).expanduser().resolve())
    return value


def metrics_of(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(metric for row in rows for metric in row.scores))


def table(rows: Sequence[Row]) -> str:
    """A heading and a table in Markdown for each benchmark, one row per policy and sampling."""
    parts = []
    for name, same in by_benchmark(rows).items():
        lines = []
        for row in same:
            problems = row.settings.get("problems") or (f"at most {most}" if (most := row.settings.get("max_prompts")) else "")
            line = {"run": row.name, "folder": row.folder, "problems": str(problems), "sampling": sampling_text(row.settings)}
            for metric in metrics_of(same):
                if score := row.scores.get(metric):
                    decimals = 1 if metric == "response_length_mean" else 3
                    line[SHORT.get(metric, metric)] = shown({"value": score[0], "stderr": score[1]}, decimals)
            lines.append(line)
        parts.append(f"## {name}\n\n{markdown(lines)}")
    return "\n".join(parts)


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """One table over all rows, a column for each value and one for its standard error; unknown cells are empty."""
    metrics = metrics_of(rows)
    header = ["benchmark", "run", "folder", *SETTINGS] + [f"{metric}{end}" for metric in metrics for end in ("", ERROR)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        for row in itertools.chain(*by_benchmark(rows).values()):
            cells: list[Any] = [row.benchmark, row.name, row.folder, *(row.settings.get(key) for key in SETTINGS)]
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
