"""python -m bapo.analysis.whatif RUN_DIR [loss=NAME] [loss.KEY=VALUE] [objective.KEY=VALUE] ... [--name NAME]

Walks the recorded updates of a run with another loss, order, range, target or objective: which bounds it would have chosen,
what it would have clipped, and its loss on the same tokens. Without overrides it gives what was recorded.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from omegaconf import OmegaConf

from bapo.analysis.report import read_rows
from bapo.analysis.whatif.config import build, replayed_config
from bapo.analysis.whatif.table import page, write_csv, write_figure
from bapo.analysis.whatif.walk import walk
from bapo.records.files import FOLDER, check_complete
from bapo.training.cli import cli
from bapo.training.run_folder import folder_name, read_config


def replay(run_dir: Path, overrides: Sequence[str], name: str | None = None) -> Path:
    """Writes replay.csv, replay.md and figure.png; returns their folder, RUN_DIR/replay/NAME. `name`: the overrides if None.

    ValueError, in one line, for what cannot be replayed.
    """
    cfg = replayed_config(read_config(run_dir), overrides)
    loss, objective = build(cfg)
    logged = int(read_rows(run_dir)[-1]["trainer/global_step"]) if (run_dir / "metrics.csv").is_file() else None
    steps = check_complete(run_dir / FOLDER, logged)
    outcomes = list(walk(run_dir, steps, loss, objective))
    name = folder_name(name or ",".join(overrides) or "as_recorded")
    folder = run_dir / "replay" / name
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / "replay.csv", outcomes)
    text = page(outcomes, f"Replay: {name}", overrides, OmegaConf.to_yaml(cfg).strip())
    (folder / "replay.md").write_text(text, encoding="utf-8")
    write_figure(folder / "figure.png", outcomes, f"Replay: {name}")
    return folder


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bapo.analysis.whatif", description="What another loss would have chosen in a run."
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="loss=NAME, loss.KEY=VALUE, objective.KEY=VALUE")
    parser.add_argument("--name", help="of the folder in RUN_DIR/replay (default: the overrides)")
    args = parser.parse_intermixed_args(arguments)
    torch.set_num_threads(1)  # sums in the order of a run with threads=1
    folder = replay(args.run_dir, args.overrides, args.name)
    print((folder / "replay.md").read_text(encoding="utf-8").split("```yaml")[0].rstrip())
    print(f"\n{folder}")


if __name__ == "__main__":
    cli(main)
