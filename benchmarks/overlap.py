"""Time saved by generating in the background: runs with schedule.overlap and without, in turns; ratio of their wall times.

python benchmarks/overlap.py [OVERRIDE ...]

Default: the embedded run on vLLM (make vllm), a lag of one round, with 4 epochs per round and with 1.
"""

from __future__ import annotations

import csv
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bapo.records.files import FOLDER, record_path, recorded_steps

TRAIN = Path(__file__).parents[1] / "train.py"
COMMON = ("schedule.lag=1", "callbacks.evaluate=null")
DEFAULT = ("rollout=vllm", "threads=1", "trainer.max_rounds=20")
REPEATS = 3


@dataclass(frozen=True)
class Seconds:
    """Per round, over the middle of a run: wall time, and the time of generation and training within it."""

    wall: float
    generation: float
    training: float


def measure(folder: Path, updates_per_round: int, overrides: Sequence[str]) -> Seconds:
    """Time a run from the end of its second round to the end of its last but one: as many rounds generated as trained."""
    command = [sys.executable, str(TRAIN), f"hydra.run.dir={folder}", *COMMON, *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rounds = len(recorded_steps(folder / FOLDER)) // updates_per_round
    ends = [record_path(folder / FOLDER, n * updates_per_round).stat().st_mtime for n in (2, rounds - 1)]
    with (folder / "timing.csv").open() as file:
        rows = list(csv.DictReader(file))[2 * updates_per_round : (rounds - 1) * updates_per_round]

    def per_round(name: str) -> float:
        return sum(float(row[name]) for row in rows if row.get(name)) / (rounds - 3)

    return Seconds((ends[1] - ends[0]) / (rounds - 3), per_round("time/refill"), per_round("time/train"))


def compare(epochs: int, overrides: Sequence[str], repeats: int) -> None:
    """Print a line of the table. The two kinds take turns, so that both see the same machine."""
    measured: dict[str, list[Seconds]] = {"false": [], "true": []}
    sizes = (f"schedule.epochs_per_round={epochs}", "schedule.minibatches_per_epoch=4")
    with tempfile.TemporaryDirectory() as temporary:
        for turn in range(repeats):
            for overlap, seconds in measured.items():
                folder = Path(temporary) / f"{turn}_{overlap}"
                seconds.append(measure(folder, 4 * epochs, [*sizes, f"schedule.overlap={overlap}", *overrides]))
    ratios = [one.wall / other.wall for one, other in zip(measured["false"], measured["true"], strict=True)]
    generation, training, sequential = (
        statistics.median(getattr(s, name) for s in measured["false"]) for name in ("generation", "training", "wall")
    )
    background = statistics.median(s.wall for s in measured["true"])
    rest = sequential - generation - training  # syncs, files, checkpoints: sequential in both
    best = sequential / (max(generation, training) + rest)
    print(
        f"| {epochs} | {generation:.2f} | {training:.2f} | {sequential:.2f} | {background:.2f} | "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | {best:.2f} |",
        flush=True,
    )


if __name__ == "__main__":
    overrides = sys.argv[1:] or DEFAULT
    print("Seconds per round, median of", REPEATS, "runs each;", " ".join(overrides))
    print("\n| E | generation | training | sequential | in the background | ratio (lowest to highest) | at best |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for epochs in (4, 1):
        compare(epochs, overrides, REPEATS)
