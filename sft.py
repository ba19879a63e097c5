"""Fine-tune a model on demonstrations, or with -m a sweep of it: python sft.py [key=value ...]"""

import hydra
from omegaconf import DictConfig

from bapo.training.cli import cli


@hydra.main(version_base="1.3", config_path="conf", config_name="sft")
def main(cfg: DictConfig) -> float | None:
    from bapo.sft.run import run  # heavy: not for --help or --cfg job
    from bapo.training.job import optimized

    return optimized(cfg, run(cfg))


if __name__ == "__main__":
    cli(main, "sft")
