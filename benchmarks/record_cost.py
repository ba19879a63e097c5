"""Cost of the update records: one record of many tokens, then the same small run with and without records.

python benchmarks/record_cost.py [OVERRIDE ...]
"""

from __future__ import annotations

import csv
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bapo.ops.microbatch import SeenPart
from bapo.records.files import FOLDER, load_update, recorded_steps, save_record
from bapo.training.callbacks.record import EDGES, record_of
from bapo.types import Batch, ClipBounds, LossInputs, MiniBatch

TRAIN = Path(__file__).parents[1] / "train.py"
REPEATS = 3


def part(rows: int, length: int) -> SeenPart:
    """Make a micro-batch of random tokens, as an update passes it to its observer."""
    generator = torch.Generator().manual_seed(0)
    now, noise, entropy = (torch.randn(rows, length, generator=generator) for _ in range(3))
    logprobs = -now.abs()
    advantages = torch.randn(rows, 1, generator=generator).expand(rows, length)
    mask = torch.ones(rows, length, dtype=torch.bool)
    inputs = LossInputs(logprobs, logprobs + 0.2 * noise, advantages, mask)
    low, high = (torch.tensor(value, dtype=torch.float64) for value in (0.8, 1.2))
    return SeenPart(torch.arange(rows), inputs, entropy.abs(), ClipBounds(low, high), None, None)


def writing(rows: int, length: int, repeats: int, folder: Path) -> tuple[float, float]:
    """Write records; return (seconds, bytes) of one of rows * length tokens in one micro-batch."""
    seen, mask = part(rows, length), torch.ones(rows, length, dtype=torch.bool)
    sequences = Batch(*[mask] * 7, policy_version=mask.long(), advantages=mask, rewards=mask)
    minibatch = MiniBatch(sequences, {}, torch.zeros(rows, 2, dtype=torch.int64))
    start = time.perf_counter()
    for step in range(repeats):
        save_record(folder, record_of(minibatch, [seen], {"step": step, "world": 1}), 0, EDGES)
    seconds = (time.perf_counter() - start) / repeats
    return seconds, sum(path.stat().st_size for path in folder.iterdir()) / repeats


def training(folder: Path, overrides: Sequence[str]) -> list[float]:
    """Run and return `time/train` of every update after the first ten, which warm up."""
    command = [sys.executable, str(TRAIN), f"hydra.run.dir={folder}", "callbacks.evaluate=null", *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with (folder / "timing.csv").open() as file:
        return [float(row["time/train"]) for row in csv.DictReader(file) if row["time/train"]][10:]


def write_table(sizes: Sequence[tuple[int, int]], repeats: int) -> None:
    print("| tokens of an update | ms per record | bytes per token |\n| --- | --- | --- |")
    for rows, length in sizes:
        with tempfile.TemporaryDirectory() as made:
            seconds, size = writing(rows, length, repeats, Path(made))
        print(f"| {rows * length:,} | {1000 * seconds:.1f} | {size / (rows * length):.1f} |")


def run_table(overrides: Sequence[str], repeats: int) -> None:
    """Runs take turns, so that both kinds see the same machine."""
    times: dict[str, list[float]] = {"with records": [], "without": []}
    with tempfile.TemporaryDirectory() as made:
        for turn in range(repeats):
            for name, extra in (("with records", ()), ("without", ("callbacks.record=null",))):
                times[name] += training(Path(made) / f"{turn}_{name.replace(' ', '_')}", [*overrides, *extra])
        updates = Path(made) / "0_with_records" / FOLDER
        size = sum(path.stat().st_size for path in updates.iterdir())
        tokens = sum(load_update(updates, step).facts["tokens"] for step in recorded_steps(updates))
    print("\n| a run | updates | median ms per update | mean ms |\n| --- | --- | --- | --- |")
    for name, values in times.items():
        print(f"| {name} | {len(values)} | {1000 * statistics.median(values):.2f} | {1000 * statistics.mean(values):.2f} |")
    print(f"\nfiles of the run: {size / tokens:.1f} bytes per token")


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_table([(64, 10), (64, 256), (256, 1024), (256, 8192)], repeats=5)
    run_table(sys.argv[1:] or ["trainer.max_rounds=8"], REPEATS)
