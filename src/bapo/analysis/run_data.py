"""A run's folder as numbers: rows of its metrics, its config, and labels that tell several runs apart."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

Rows = Sequence[Mapping[str, float]]

STEP = "trainer/global_step"


def read_rows(run_dir: Path) -> list[dict[str, float]]:
    """Rows of metrics.csv without their empty cells. Raises ValueError if there is none."""
    path = run_dir / "metrics.csv"
    if not path.is_file():
        raise ValueError(f"{path} is missing; is {run_dir} the folder of a run?")
    if not (rows := read_table(path)):
        raise ValueError(f"{path} has no rows; the run stopped before its first update")
    return rows


def read_table(path: Path) -> list[dict[str, float]]:
    """Rows of a CSV file of numbers; a last line that a kill cut short is left out."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    return [{key: float(cell) for key, cell in row.items() if cell} for row in csv.DictReader(lines)]


def read_config(run_dir: Path) -> dict[str, Any]:
    """The run's config as plain values; {} if there is none."""
    path = run_dir / "config.yaml"
    return (yaml.safe_load(path.read_text(encoding="utf-8")) or {}) if path.is_file() else {}


def run_folders(folder: Path) -> list[Path]:
    """Runs in and below a folder, sorted: they have metrics.csv and config.yaml."""
    return sorted(path.parent for path in folder.rglob("metrics.csv") if path.with_name("config.yaml").is_file())


def held_out_names(rows: Rows) -> list[str]:
    """`eval/<set>/avg@k` of every evaluated set, sorted."""
    return sorted({name for row in rows for name in row if re.fullmatch(r"eval/.*/avg@\d+", name)})


def points(rows: Rows, name: str) -> tuple[list[float], list[float]]:
    """(updates, values) of the rows that have `name`."""
    pairs = [(row[STEP], row[name]) for row in rows if name in row]
    return [step for step, _ in pairs], [value for _, value in pairs]


def round_starts(rows: Rows) -> dict[int, float]:
    """Round -> its first update."""
    starts: dict[int, float] = {}
    for row in rows:
        if "rollout/round" in row and row[STEP] > 0:
            starts.setdefault(int(row["rollout/round"]), row[STEP])
    return starts


def distinguish(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """One label per config: the settings that all of them have and that differ, `BapoLoss, seed 1`.

    Configs with one label get what differs among them appended. Equal configs have equal labels; a single config has "".
    """
    flat = [flatten(config) for config in configs]
    shared = [key for key in flat[0] if all(key in other for other in flat)]
    differing = [key for key in shared if key != "trainer.max_rounds" and len({repr(other[key]) for other in flat}) > 1]
    labels = [", ".join(_setting(key, other[key]) for key in differing) for other in flat]
    for label, count in Counter(labels).items():
        if 1 < count < len(labels):
            alike = [index for index, other in enumerate(labels) if other == label]
            for index, more in zip(alike, distinguish([configs[index] for index in alike]), strict=True):
                labels[index] = ", ".join(filter(None, (label, more)))
    return labels


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"loss": {"clip_low": 0.8}} -> {"loss.clip_low": 0.8}; lists are values.

    A null has a null `_target_` too, so that it differs from a section of the same name.
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat |= {f"{prefix}{key}": value} | ({f"{prefix}{key}._target_": None} if value is None else {})
    return flat


def _setting(key: str, value: object) -> str:
    name = key.rsplit(".", 1)[-1]
    if name == "_target_" and value is None:
        return f"no {key.split('.')[-2]}"
    return str(value).rsplit(".", 1)[-1] if name == "_target_" else f"{name} {value}"
