"""Score a policy on benchmarks: python evaluate.py [policy=PATH_OR_HUB_ID] [benchmark=NAME] [protocol=NAME] [key=value ...]"""

import sys

import hydra
from omegaconf import DictConfig

from bapo.evaluation.words import check_words, spelled_out
from bapo.training.cli import cli


@hydra.main(version_base="1.3", config_path="conf", config_name="evaluate")
def main(cfg: DictConfig) -> None:
    from bapo.evaluation.run import run  # heavy: not for --help or --cfg job

    run(cfg)


def checked() -> None:
    check_words(sys.argv[1:])
    main()


if __name__ == "__main__":
    sys.argv[1:] = spelled_out(sys.argv[1:])
    cli(checked, "evaluate")
