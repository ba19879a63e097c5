"""python -m bapo.analysis.whatif RUN_DIR [loss=NAME] [loss.KEY=VALUE] [objective.KEY=VALUE] ... [--name NAME]

Re-runs the recorded updates of a run under another loss, search order, range, target or objective: the bounds it would choose,
what it would clip, and its loss on the same tokens. Without overrides it must reproduce the log.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from omegaconf import OmegaConf

from bapo.analysis.run_data import STEP, read_rows
from bapo.analysis.whatif.config import build, changed_config
from bapo.analysis.whatif.table import page, write_csv, write_figure
from bapo.analysis.whatif.walk import walk
from bapo.files import write_text_atomic
from bapo.records.files import FOLDER, check_complete
from bapo.training.cli import cli
from bapo.training.run_folder import folder_name, read_config


def what_if(run_dir: Path, overrides: Sequence[str], name: str | None = None, config_dir: Path | None = None) -> Path:
    """Write whatif.csv, whatif.md and figure.png; return their folder, RUN_DIR/whatif/NAME. name: the overrides if None.

    ValueError, in one line, for a run or an override that does not fit.
    """
    cfg = changed_config(read_config(run_dir), overrides, config_dir)
    loss, objective = build(cfg)
    last = int(read_rows(run_dir)[-1][STEP]) if (run_dir / "metrics.csv").is_file() else None
    outcomes = list(walk(run_dir, check_complete(run_dir / FOLDER, last), loss, objective))
    name = folder_name(name or ",".join(overrides) or "as_recorded")
    folder = run_dir / "whatif" / name
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / "whatif.csv", outcomes)
    text = page(outcomes, f"What if: {name}", overrides, OmegaConf.to_yaml(cfg).strip())
    write_text_atomic(folder / "whatif.md", text)
    write_figure(folder / "figure.png", outcomes, f"What if: {name}")
    return folder


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bapo.analysis.whatif", description="Re-run updates under another loss.")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="loss=NAME, loss.KEY=VALUE, objective.KEY=VALUE")
    parser.add_argument("--name", help="of the folder in RUN_DIR/whatif (default: the overrides)")
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="a conf folder of your own, for loss=NAME")
    args = parser.parse_intermixed_args(arguments)
    torch.set_num_threads(1)  # sums in the order of a run with threads=1
    folder = what_if(args.run_dir, args.overrides, args.name, args.config_dir)
    print((folder / "whatif.md").read_text(encoding="utf-8").split("```yaml")[0].rstrip())
    print(f"\n{folder}")


if __name__ == "__main__":
    cli(main)
