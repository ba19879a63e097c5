"""What is compared: the scores of one policy on one benchmark, from an evaluation or from a training run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bapo.analysis.report import read_config, read_rows
from bapo.evaluation.folder import read_result, task_name

EVAL = re.compile(r"eval/([\w-]+)/(.+)")
ERROR = "_stderr"


@dataclass(frozen=True)
class Row:
    """name: of the policy. folder: what tells rows of one policy apart. scores: metric -> (value, standard error or None).

    settings: as in result.json, as far as they are known; of a training run also `max_prompts`.
    """

    benchmark: str
    name: str
    folder: str
    scores: Mapping[str, tuple[float, float | None]]
    settings: Mapping[str, Any]

    @property
    def label(self) -> str:
        return f"{self.name} ({self.folder})"


def of_result(folder: Path) -> Row:
    """The row of an evaluation's folder. ValueError for what is no result."""
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
    """The last held-out scores of a training run, a row for each set. ValueError where there are none."""
    rows = read_rows(folder)
    last = {name: value for row in rows for name, value in row.items() if name.startswith("eval/")}
    steps = [row["trainer/global_step"] for row in rows if any(name.startswith("eval/") for name in row)]
    if not last:
        raise ValueError(f"{folder}: it was never evaluated: metrics.csv has no eval/*")
    config, at = read_config(folder), folder.resolve()
    callback = (config.get("callbacks") or {}).get("evaluate") or {}
    scores: dict[str, dict[str, tuple[float, float | None]]] = {}
    for full, value in last.items():
        match = EVAL.fullmatch(full)
        if match and not full.endswith(ERROR):
            scores.setdefault(match[1], {})[match[2]] = (value, last.get(full + ERROR))
    name = f"{config.get('name') or at.parent.name} @ {steps[-1]:.0f}"
    return [_row(one, name, at.name, found, config, callback) for one, found in scores.items()]


def _row(
    one: str, name: str, folder: str, scores: Mapping[str, Any], config: Mapping[str, Any], callback: Mapping[str, Any]
) -> Row:
    """The row of a set, which is called as the evaluation of its task is."""
    sampling = {key: value for key, value in (callback.get("sampling") or {}).items() if key != "_target_"}
    settings: dict[str, Any] = sampling | {key: callback[key] for key in ("samples", "split") if key in callback}
    task: Mapping[str, Any] = (callback.get("benchmarks") or {}).get(one) or {}
    if not task and config.get("task"):
        task = config["task"]
        one = task_name(task)
    prompt = (config.get("rollout") or {}).get("prompt") or config.get("prompt")
    settings |= {"task": task, "prompt": prompt}
    most, size = callback.get("max_prompts"), task.get(f"{callback.get('split', 'test')}_size")
    if size is not None:
        settings["problems"] = size if most is None else min(most, size)
    elif most is not None:
        settings["max_prompts"] = most
    return Row(one, name, folder, scores, settings)
