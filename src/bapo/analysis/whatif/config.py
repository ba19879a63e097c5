"""The loss and the objective to replay with: the run's own, changed by overrides in Hydra's spelling."""

from __future__ import annotations

import re
from collections.abc import Sequence
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


def replayed_config(run: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """`loss` and `objective` of the run with the overrides applied. ValueError for one that does not fit.

    `loss=NAME` takes conf/loss/NAME.yaml in place of the run's loss, with what conf/task_loss says for the run's task, and adds
    what conf/loss_objective has for it to the objective; `objective=NAME` takes that file. `loss.key=value` changes one value.
    """
    if missing := [group for group in GROUPS if group not in run]:
        raise ValueError(f"the run's config.yaml has no {missing[0]}")
    parsed = _parsed(overrides)
    chosen = {o.key_or_group: str(o.value()) for o in parsed if o.key_or_group in GROUPS}
    cfg = OmegaConf.create({group: OmegaConf.to_container(run[group], resolve=True) for group in GROUPS})
    if chosen:
        composed = _composed(chosen, run)
        for group in chosen:
            cfg[group] = composed[group]
        extra = CONF / "loss_objective" / f"{chosen.get('loss')}.yaml"
        if "objective" not in chosen and extra.is_file():
            cfg.objective = OmegaConf.merge(cfg.objective, OmegaConf.load(extra))
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
            raise ValueError(f"{line}: a replay changes loss and objective only; the rest of the run is as it was")
        if override.is_delete() or override.is_sweep_override():
            raise ValueError(f"{line}: one value to each key, please; a replay knows neither ~ nor sweeps")
    return parsed


def _composed(chosen: dict[str, str], run: DictConfig) -> DictConfig:
    """The whole config with the files that were chosen; the task's file is the one with the run's `_target_`."""
    target = OmegaConf.select(run, "task._target_")
    files = sorted((CONF / "task").glob("*.yaml"))
    tasks = [path.stem for path in files if OmegaConf.select(OmegaConf.load(path), "_target_") == target]
    known = [name for name in tasks if (CONF / "task_loss" / f"{name}_{chosen.get('loss')}.yaml").is_file()]
    # A task without a file for this loss is as good as any other such task.
    task = known[0] if known else next(iter(tasks), "arithmetic")
    for group, name in chosen.items():
        if name not in (names := sorted(path.stem for path in (CONF / group).glob("*.yaml"))):
            raise ValueError(f"{group}={name}: it must be one of {', '.join(names)}")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", overrides=[f"task={task}", *(f"{group}={name}" for group, name in chosen.items())])


def _change(cfg: DictConfig, override: Override) -> None:
    key, known = override.key_or_group, config_check.all_keys(OmegaConf.to_container(cfg))
    if key not in known and not override.is_add():
        near = config_check.nearest(key, known)
        raise ValueError(f"unknown key {key!r}" + (f"; nearest: {near!r}" if near else ""))
    OmegaConf.update(cfg, key, override.value(), force_add=True)


def build(cfg: DictConfig) -> tuple[Loss, Objective]:
    """The objects of a replayed config; ValueError that names the field for a key, a type or a value that does not fit."""
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
