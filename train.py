"""Run one experiment, or with -m a sweep of them: python train.py [experiment=NAME] [key=value ...]"""

import hydra
from omegaconf import DictConfig

from bapo.training.cli import cli


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> float | None:
    from bapo.training.job import optimized
    from bapo.training.train import run  # heavy: not for --help or --cfg job

    return optimized(cfg, run(cfg))


if __name__ == "__main__":
    cli(main)
