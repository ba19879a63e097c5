"""Loss and objective of a what-if: the run's own, changed by overrides in Hydra's spelling."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from bapo.losses.objective import Objective
from bapo.protocols import Loss
from bapo.training import config_check
from bapo.training.cli import CONF

GROUPS = ("loss", "objective")


def changed_config(run: DictConfig, overrides: Sequence[str], config_dir: Path | None = None) -> DictConfig:
    """`loss` and `objective` of the run with the overrides applied. ValueError for one that does not fit.

    `loss=NAME` replaces the run's loss by that file of conf/loss, and merges the file's part of the objective, if it has one,
    into the run's; `objective=NAME` replaces the objective. `loss.key=value` changes one value.
    config_dir: a conf folder of the user's own.
    """
    if missing := [group for group in GROUPS if group not in run]:
        raise ValueError(f"the run's config.yaml has no {missing[0]}")
    parsed = _parsed(overrides)
    chosen = {o.key_or_group: str(o.value()) for o in parsed if o.key_or_group in GROUPS}
    cfg = OmegaConf.create({group: OmegaConf.to_container(run[group], resolve=True) for group in GROUPS})
    if chosen:
        composed, default = _composed(chosen, config_dir), OmegaConf.load(CONF / "objective" / "default.yaml")
        for group in chosen:
            cfg[group] = composed[group]
        if "objective" not in chosen:
            part = {key: value for key, value in composed.objective.items() if value != default.get(key)}
            cfg.objective = OmegaConf.merge(cfg.objective, part)
    for override in parsed:
        if override.key_or_group not in GROUPS:
            _change(cfg, override)
    return cfg


def _parsed(overrides: Sequence[str]) -> list[Override]:
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ValueError(" ".join(str(error).split("\nSee ")[0].split())) from error
    for override in parsed:
        line, key = str(override.input_line), override.key_or_group
        if key.split(".")[0] not in GROUPS or override.package is not None:
            raise ValueError(f"{line}: a what-if changes loss and objective only")
        if override.is_delete() or override.is_sweep_override():
            raise ValueError(f"{line}: a what-if takes one value per key, without ~ and sweeps")
    return parsed


def _composed(chosen: dict[str, str], config_dir: Path | None) -> DictConfig:
    """The whole config with the chosen files."""
    folders = [CONF] if config_dir is None else [CONF, config_dir.resolve()]
    for group, name in chosen.items():
        names = sorted(path.stem for folder in folders for path in (folder / group).glob("*.yaml"))
        if name not in names:
            raise ValueError(f"{group}={name}: it must be one of {', '.join(names)}")
    searched = [f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in folders[1:])}]"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", overrides=[*searched, *(f"{group}={name}" for group, name in chosen.items())])


def _change(cfg: DictConfig, override: Override) -> None:
    key, known = override.key_or_group, config_check.all_keys(OmegaConf.to_container(cfg))
    if key not in known and not override.is_add():
        near = config_check.nearest(key, known)
        raise ValueError(f"unknown key {key!r}" + (f"; nearest: {near!r}" if near else ""))
    OmegaConf.update(cfg, key, override.value(), force_add=True)


def build(cfg: DictConfig) -> tuple[Loss, Objective]:
    """Instantiate loss and objective; ValueError that names the field for a key, a type or a value that does not fit."""
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    if wrong := [group for group in GROUPS if not isinstance(config[group], dict) or "_target_" not in config[group]]:
        raise ValueError(f"{wrong[0]} is {config[wrong[0]]!r}; it must be a section with a _target_")
    config_check.check_sections(config)
    try:
        parts = instantiate(config, _convert_="all")
    except HydraException as error:
        at = re.search(r"full_key: (\S+)", str(error))
        message = " ".join(str(error.__cause__ or error).split())
        raise ValueError(f"{at[1]}.{message}" if at else message) from error
    return parts["loss"], parts["objective"]
