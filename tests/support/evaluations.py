"""Configs of evaluate.py."""

from __future__ import annotations

from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import open_dict

from bapo.evaluation.words import check_words, spelled_out
from bapo.training.cli import CONF
from bapo.training.run_folder import register_resolvers

TASK = ("benchmark.digit_ops.digits=2", "benchmark.digit_ops.train_size=200", "benchmark.digit_ops.test_size=32")
WARM = (
    "embedded.warm_start.steps=150", "embedded.warm_start.batch_size=32", "embedded.warm_start.model.hidden_size=32",
    "embedded.warm_start.model.intermediate_size=64", "embedded.warm_start.model.num_hidden_layers=1",
)  # fmt: skip
"""With TASK, the policy of conf/experiment/smoke.yaml."""


def composed(*overrides: str) -> Any:
    register_resolvers()
    check_words(spelled_out(overrides))
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("evaluate", overrides=spelled_out(overrides), return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg
