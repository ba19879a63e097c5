"""Run one experiment, or with -m a sweep of them: python train.py [+experiment=NAME] [key=value ...]"""

import hydra
from omegaconf import DictConfig

from bapo.training.cli import cli
from bapo.training.fit import run


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> None:
    run(cfg)


if __name__ == "__main__":
    cli(main)
