"""One job of an entry point, whatever it trains: its config checked, its folder found. Imports nothing heavy by itself."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bapo.training.config_check import HEAVY, PLAIN, check_heavy_calls, check_keys_and_types, task_at
from bapo.training.resume import check_unchanged, chosen_checkpoint, read_checkpoint, set_aside
from bapo.training.run_folder import (
    CHILD_RUN_DIR,
    discard_unused,
    is_main_process,
    plain_config,
    provenance,
    read_config,
    redact,
    write_status,
)
from bapo.training.trainer import read_trainer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """An entry point. script: its file, as a user types it. top_level: the keys of its config; plain: values among them.

    check_light, check: raise ValueError for built objects that do not fit, before and after `HEAVY` sections are built.
    may_change: beginnings of the overrides that a resumed run accepts.
    """

    script: str
    top_level: Set[str]
    check_light: Callable[[dict[str, Any]], None]
    check: Callable[[dict[str, Any]], None]
    may_change: tuple[str, ...] = ()
    plain: Mapping[str, Any] = field(default_factory=lambda: PLAIN)


@dataclass(frozen=True)
class Job:
    """An entry point's checked config and the folder to run it in. parts: the built objects; checkpoint: where it resumes."""

    entry: Entry
    folder: Path
    cfg: DictConfig
    parts: dict[str, Any]
    resume: bool
    checkpoint: Path | None
    allow_changes: bool = False


def open_job(cfg: DictConfig, entry: Entry) -> Job:
    """The job of a composed config in Hydra's output folder.

    Raises ValueError for a config that cannot run, before a model is loaded; a folder that was made for it is removed.
    """
    hydra = HydraConfig.get()
    folder = Path(os.environ.get(CHILD_RUN_DIR) or hydra.runtime.output_dir).absolute()
    resume = cfg.resume is not None
    if resume:
        if hydra.mode == RunMode.MULTIRUN or Path(cfg.resume).absolute() != folder:
            raise ValueError(f"resume is {cfg.resume!r}; a run resumes in that folder: neither -m nor hydra.run.dir fits")
        resume_from, allow_changes = cfg.resume_from, bool(cfg.allow_changes)
        checkpoint = chosen_checkpoint(folder, resume_from)
        cfg = _saved_config(folder, list(hydra.overrides.task), entry, allow_changes)
    elif cfg.resume_from is not None:
        raise ValueError(f"resume_from is {cfg.resume_from!r}; it goes with resume=RUN_DIR")
    try:
        parts = build(cfg, entry)
    except (ValueError, OmegaConfBaseException) as error:
        if hydra.mode == RunMode.MULTIRUN:  # the job's own folder tells what was wrong with it
            log.error("%s", redact(str(error)))
            write_status(folder, "failed", error=redact(str(error)))
        elif not resume:
            discard_unused(folder)
        raise
    if resume and resume_from is not None and is_main_process():
        _set_aside(folder, checkpoint)
    return Job(entry, folder, cfg, parts, resume, checkpoint if resume else None, allow_changes if resume else False)


def _set_aside(folder: Path, checkpoint: Path | None) -> None:
    state: dict[str, Any] = read_checkpoint(checkpoint) if checkpoint else {"global_step": 0}
    rounds = state.get("RolloutDataModule", {"newest": -1})["newest"] + 1
    if aside := set_aside(folder, int(state["global_step"]), rounds):
        log.info("what the run recorded after update %d is in %s", state["global_step"], aside)


def _saved_config(folder: Path, overrides: list[str], entry: Entry, allow_changes: bool) -> DictConfig:
    """The config a run was started with; of a command line that resumes it, only `Entry.may_change` counts.

    ValueError if the file has been changed since, or a package has, unless `allow_changes`.
    """
    cfg = read_config(folder)
    if missing := sorted(entry.top_level - cfg.keys()):
        raise ValueError(f"resume is {str(folder)!r}; it is no run of {entry.script}: its config has no {', '.join(missing)}")
    check_unchanged(folder, {"config": plain_config(cfg), "packages": provenance()["packages"]}, allow_changes)
    changes = [o for o in overrides if not o.startswith(("resume=", "resume_from=", "allow_changes="))]
    if refused := [o for o in changes if not o.startswith(entry.may_change)]:
        allowed = ", ".join(name.rstrip("=") for name in entry.may_change) or "nothing"
        raise ValueError(f"resume continues the run's own config: {' '.join(refused)} cannot be changed (allowed: {allowed})")
    cfg.merge_with_dotlist(changes)
    return cfg


def build(cfg: DictConfig, entry: Entry) -> dict[str, Any]:
    """The cheap objects of a config, checked one by one and together; engine, loggers, trainer and model are still recipes."""
    config: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    check_keys_and_types(config, entry.top_level, entry.plain)
    parts: dict[str, Any] = {"trainer": read_trainer(config["trainer"])} if "trainer" in config else {}
    parts |= {name: _instantiate(name, section) for name, section in config.items() if name not in HEAVY}
    entry.check_light(parts)
    check_heavy_calls(config)
    parts |= {name: _instantiate(name, config[name]) for name in ("callbacks", "lr_schedule") if name in config}
    parts["logger"] = config.get("logger") or {}
    entry.check(parts)
    return parts


def _instantiate(name: str, section: Any) -> Any:
    if not isinstance(section, dict | list):
        return section
    try:
        return instantiate(section, _convert_="all")
    except Exception as error:
        if not isinstance(error.__cause__, ValueError):
            raise
        inside = re.search(r"full_key: (\S+)", str(error))
        path = f"{name}.{inside[1]}" if inside else name
        raise ValueError(_placed(str(error.__cause__), path)) from error


def _placed(message: str, at: str) -> str:
    """`message` of what was built at the key `at`."""
    group = at.split(".")[0]
    if re.search(r"(?<![\w.])task[.=]", message):
        return message if group == "task" else task_at(message, at)
    return message if message.startswith(group) else f"{at}.{message}"


def optimized(cfg: DictConfig, metrics: Mapping[str, float]) -> float | None:
    """The last value of `optimized_metric`, for a sweeper; None if the config names none. ValueError for one never logged."""
    name = cfg.optimized_metric
    if name is None or not metrics:
        return None
    if name not in metrics:
        near = ", ".join(difflib.get_close_matches(name, metrics, n=3)) or ", ".join(sorted(metrics))
        raise ValueError(f"optimized_metric is {name!r}, which the run has not logged; near: {near}")
    return float(metrics[name])
