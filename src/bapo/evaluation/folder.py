"""The files of an evaluation's folder, whole after a kill at any time."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bapo.evaluation.scoring import Scored
from bapo.files import write_json_atomic, write_text_atomic

SAMPLES, RESULT = "samples.jsonl", "result.json"
SHORT = {
    "response_length_mean": "length", "truncated_frac": "truncated", "no_answer_frac": "no answer",
    "unverified_frac": "unverified",
}  # fmt: skip
"""Metrics in the head of a table."""


def read_samples(folder: Path, samples: int) -> list[Scored]:
    """The responses to finished problems, those with all of their `samples`, in the file's order.

    A last line that a kill has cut short is dropped, and so is the rest of its problem. ValueError for any other damage.
    """
    path = folder / SAMPLES
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    groups: dict[str, dict[int, Scored]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            one = Scored(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is damaged in line {number}: {error}; without the file it begins again") from error
        group = groups.setdefault(one.uid, {})
        if one.sample_index in group or not 0 <= one.sample_index < samples:
            raise ValueError(f"{path} is damaged in line {number}: sample {one.sample_index} of problem {one.uid!r}")
        group[one.sample_index] = one
    return [group[index] for group in groups.values() if len(group) == samples for index in range(samples)]


def write_samples(folder: Path, kept: Sequence[Scored]) -> None:
    """Makes the file hold `kept` and nothing else; left alone where that is what it holds."""
    path, text = folder / SAMPLES, _lines(kept)
    if (path.read_bytes() if path.is_file() else b"") != text.encode():
        write_text_atomic(path, text)


def add_samples(folder: Path, scored: Sequence[Scored]) -> None:
    """Appends finished problems; they are on the disk when it returns."""
    with (folder / SAMPLES).open("a", encoding="utf-8") as file:
        file.write(_lines(scored))
        file.flush()
        os.fsync(file.fileno())


def _lines(scored: Sequence[Scored]) -> str:
    # ASCII, so that no character of a response ends a line.
    return "".join(json.dumps(asdict(one)) + "\n" for one in scored)


def read_result(folder: Path) -> dict[str, Any] | None:
    """result.json; None where the evaluation has not ended."""
    path = folder / RESULT
    if not path.is_file():
        return None
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}; without the file it is made again") from error


def write_result(folder: Path, result: Mapping[str, Any]) -> None:
    """result.csv, result.md and, last, result.json, which stands for a finished evaluation."""
    row = summary_row(result)
    text = io.StringIO()
    writer = csv.DictWriter(text, row, lineterminator="\n")
    writer.writeheader()
    writer.writerow(row)
    write_text_atomic(folder / "result.csv", text.getvalue())
    write_text_atomic(folder / "result.md", markdown([shown_row(result)]))
    write_json_atomic(folder / RESULT, result)


def summary_row(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result in one flat row: what was evaluated, how, and every metric with its error and interval."""
    row = {"policy": result["policy"]["name"], "step": result["policy"]["step"], "benchmark": result["benchmark"]}
    row |= {name: result["settings"][name] for name in ("problems", "samples", "temperature", "top_p", "top_k", "max_tokens")}
    row |= {"seed": result["settings"]["seed"]}
    for name, estimate in result["metrics"].items():
        row |= {name: estimate["value"], f"{name}_stderr": estimate["stderr"]}
        row |= {f"{name}_low": estimate["low"], f"{name}_high": estimate["high"]}
    return row


def shown_row(result: Mapping[str, Any]) -> dict[str, str]:
    """A result as people read it: shares with their standard errors, three decimals."""
    policy, settings = result["policy"], result["settings"]
    step = "" if policy["step"] is None else f" @ {policy['step']}"
    row = {"policy": f"{policy['name']}{step}", "benchmark": result["benchmark"], "problems": str(settings["problems"])}
    row["sampling"] = sampling_text(settings)
    for name, estimate in result["metrics"].items():
        row[SHORT.get(name, name)] = shown(estimate, 1 if name == "response_length_mean" else 3)
    return row


def sampling_text(settings: Mapping[str, Any]) -> str:
    """`4 at T 1, top_p 1, 20 tokens`, of the settings that are known."""
    parts = [f"{settings['samples']} at T {settings['temperature']:g}"] if {"samples", "temperature"} <= settings.keys() else []
    parts += [f"top_p {settings['top_p']:g}"] if "top_p" in settings else []
    parts += [f"top_k {settings['top_k']}"] if settings.get("top_k") else []
    return ", ".join(parts + ([f"{settings['max_tokens']} tokens"] if "max_tokens" in settings else []))


def task_name(config: Mapping[str, Any]) -> str:
    """The default name of a task of a config: the module of its class."""
    return re.sub(r"[^\w-]", "_", str(config["_target_"]).split(".")[-2])


def shown(estimate: Mapping[str, Any], decimals: int = 3) -> str:
    """`0.412 ± 0.020`, the standard error after the value where there is one."""
    error = estimate["stderr"]
    return f"{estimate['value']:.{decimals}f}" + ("" if error is None else f" ± {error:.{decimals}f}")


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """A Markdown table; its columns are those of all rows. A bar inside a cell is escaped."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, ["---"] * len(columns), *([row.get(name, "") for name in columns] for row in rows)]
    return "".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |\n" for line in cells)
