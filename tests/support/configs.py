"""Configs of a command line, whole or shrunk to seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf, open_dict

from bapo.training.cli import CONF, plain_overlay
from bapo.training.config_check import all_keys
from bapo.training.run_folder import register_resolvers
from bapo.training.train import build_parts


def composed(*overrides: str) -> DictConfig:
    """The config of a command line, Hydra's own part included."""
    register_resolvers()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", overrides=[plain_overlay(o) for o in overrides], return_hydra_config=True)


def without_hydra(cfg: DictConfig) -> DictConfig:
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


def parts_of(*overrides: str) -> dict[str, Any]:
    return build_parts(without_hydra(composed(*overrides)))


def leaves(node: Any, path: str = "") -> dict[str, Any]:
    """Dotted key -> value of everything in a config that is not a section."""
    if not isinstance(node, dict):
        return {path: node}
    return {k: v for key, value in node.items() for k, v in leaves(value, f"{path}.{key}" if path else key).items()}


def plain(path: Path) -> dict[str, Any]:
    """A file of conf as it stands, without its defaults list."""
    content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items() if key not in ("defaults", "hydra", "name")}


def shrunk(*overrides: str, keep: Sequence[str] = (), cache_dir: Path | None = None) -> list[str]:
    """`overrides` with the sizes of conf/experiment/smoke.yaml, where the config has such a key, in one round of two updates.

    keep: groups whose sizes stay as they are. cache_dir: where the warm start is kept.
    """
    sizes = leaves(plain(CONF / "experiment" / "smoke.yaml"))
    sizes |= {"schedule.epochs_per_round": 1, "schedule.minibatches_per_epoch": 2, "trainer.max_rounds": 1}
    sizes |= {"callbacks.evaluate.max_prompts": 8} | ({"policy.warm_start.cache_dir": cache_dir} if cache_dir else {})
    known = all_keys(OmegaConf.to_container(without_hydra(composed(*overrides))))
    chosen = {key: value for key, value in sizes.items() if key in known and key.split(".")[0] not in keep}
    return [*overrides, *(f"{key}={value}" for key, value in chosen.items())]


def warm_model(cache_dir: Path) -> Path:
    """A small model that has seen its task, as a folder; made once."""
    parts = parts_of(*shrunk(cache_dir=cache_dir))
    return parts["policy"].warm_start(parts["task"])
