"""One job of an entry point, whatever it trains: its config checked, its run folder opened, its fit watched, its end told."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bapo.policy.options import TrainerOptions
from bapo.training import config_check
from bapo.training.callbacks.checkpoint import AtomicCheckpoints
from bapo.training.callbacks.progress import ProgressDisplay
from bapo.training.callbacks.stop import StopOnSignal
from bapo.training.loggers import CsvLogger, finish
from bapo.training.process import exit_on_sigterm, hush, known_to_children
from bapo.training.run_folder import (
    CHILD_RUN_DIR,
    discard_unused,
    how_to_go_on,
    is_main_process,
    log_failure,
    newest_checkpoint,
    open_run_folder,
    plain_config,
    read_config,
    redact,
    resume_command,
    write_status,
)
from bapo.updates import UpdateModule

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """An entry point. script: its file, as a user types it. top_level: the keys of its config; plain: values among them.

    check: raises ValueError for built objects that do not fit together. may_change: how an override begins that a resumed run
    may be given. since: keys that runs of older versions lack, and what stands for them. report: made in a run folder in the
    end.
    """

    script: str
    top_level: Set[str]
    check: Callable[[dict[str, Any]], None]
    may_change: tuple[str, ...] = ()
    since: Mapping[str, Any] = field(default_factory=dict)
    report: Callable[[Path], Path] | None = None
    plain: Mapping[str, Any] = field(default_factory=lambda: config_check.PLAIN)


@dataclass(frozen=True)
class Job:
    """An entry point's checked config and the folder to run it in. parts: the built objects; checkpoint: where it goes on."""

    entry: Entry
    folder: Path
    cfg: DictConfig
    parts: dict[str, Any]
    resume: bool
    checkpoint: Path | None


@dataclass(frozen=True)
class Training:
    """What a job fits, for `epochs` of Lightning's epochs. conclude: done at the end of a fit that nothing stopped."""

    module: UpdateModule
    data: Any
    epochs: int
    conclude: Callable[[], None] = lambda: None


def open_job(cfg: DictConfig, entry: Entry) -> Job:
    """The job of a composed config in Hydra's output folder.

    Raises ValueError for a config that cannot run, before a model is loaded; a folder that was made for it is taken away.
    """
    hush()
    hydra = HydraConfig.get()
    folder = Path(os.environ.get(CHILD_RUN_DIR) or hydra.runtime.output_dir).absolute()
    resume = cfg.resume is not None
    if resume:
        if hydra.mode == RunMode.MULTIRUN or Path(cfg.resume).absolute() != folder:
            raise ValueError(f"resume is {cfg.resume!r}; it goes on in that folder: neither -m nor hydra.run.dir goes with it")
        cfg = _saved_config(folder, list(hydra.overrides.task), entry)
    try:
        parts = build(cfg, entry)
    except (ValueError, OmegaConfBaseException) as error:
        if hydra.mode == RunMode.MULTIRUN:  # the job's own folder tells what was wrong with it
            log.error("%s", redact(str(error)))
            write_status(folder, "failed", error=redact(str(error)))
        elif not resume:
            discard_unused(folder)
        raise
    return Job(entry, folder, cfg, parts, resume, newest_checkpoint(folder) if resume else None)


def _saved_config(folder: Path, overrides: list[str], entry: Entry) -> DictConfig:
    """The config a run was started with; of a command line that resumes it, only `Entry.may_change` counts."""
    cfg = read_config(folder)
    for key, value in entry.since.items():
        cfg.setdefault(key, value)
    if missing := sorted(entry.top_level - cfg.keys()):
        raise ValueError(f"resume is {str(folder)!r}; it is no run of {entry.script}: its config has no {', '.join(missing)}")
    changes = [o for o in overrides if not o.startswith("resume=")]
    if refused := [o for o in changes if not o.startswith(entry.may_change)]:
        allowed = ", ".join(name.rstrip("=") for name in entry.may_change) or "nothing"
        raise ValueError(f"resume continues the run's own config: {' '.join(refused)} cannot be changed (allowed: {allowed})")
    cfg.merge_with_dotlist(changes)
    return cfg


def build(cfg: DictConfig, entry: Entry) -> dict[str, Any]:
    """The cheap objects of a config, checked one by one and together; engine, loggers and model are still recipes."""
    config = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(config, dict)
    config_check.check_keys_and_types(config, entry.top_level, entry.plain)  # type: ignore[arg-type]
    try:
        parts = instantiate(config, _convert_="all")
    except Exception as error:
        if not isinstance(error.__cause__, ValueError):
            raise
        at = re.search(r"full_key: (\S+)", str(error))
        raise ValueError(_placed(str(error.__cause__), at[1]) if at else str(error.__cause__)) from error
    entry.check(parts)
    return parts


def _placed(message: str, at: str) -> str:
    """`message` of what was built at the key `at`."""
    group = at.split(".")[0]
    if re.search(r"(?<![\w.])task[.=]", message):
        return message if group == "task" else config_check.task_at(message, at)
    return message if message.startswith(group) else f"{at}.{message}"


def run_job(job: Job, training: Callable[[Job, ExitStack], Training]) -> dict[str, float]:
    """Runs the job in its folder; returns the last value of every metric. However it ends, status.json says so.

    training: called with a stack on which it may leave what must be closed in the end. A signal that stops the fit ends in
    SystemExit, with a checkpoint.
    """
    _absolute_paths(job.cfg)
    with open_run_folder(job.folder, job.cfg, job.resume, job.entry.script):
        return _run_in_folder(job, training)


def _absolute_paths(cfg: DictConfig) -> None:
    """A run that is resumed from another directory must find the same model and data."""
    for key in ("policy.path", "data.path", "task.path", "task.train", "task.test"):
        path = OmegaConf.select(cfg, key)
        if path is not None and Path(path).expanduser().exists():
            OmegaConf.update(cfg, key, str(Path(path).expanduser().absolute()))
    if cfg.policy.warm_start is not None and cfg.policy.warm_start.get("cache_dir"):
        cfg.policy.warm_start.cache_dir = str(Path(cfg.policy.warm_start.cache_dir).absolute())


def _run_in_folder(job: Job, training: Callable[[Job, ExitStack], Training]) -> dict[str, float]:
    folder, again = job.folder, resume_command(job.folder, job.entry.script)
    write_status(folder, "running", pid=os.getpid())
    start = time.time()
    try:
        with exit_on_sigterm():
            metrics, stopped_by = _fit(job, training)
    except BaseException as error:
        # Lightning turns a second Ctrl-C into SystemExit.
        interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
        if not interrupted:
            log_failure(error, HydraConfig.get().mode == RunMode.MULTIRUN)
        with suppress(OSError):  # a full disk must not hide what went wrong first
            status = "interrupted" if interrupted else "failed"
            write_status(folder, status, error=redact(repr(error)), seconds=round(time.time() - start, 1))
        if is_main_process():
            log.info("%s", how_to_go_on(folder, again, error))
        if interrupted and error.args != (128 + signal.SIGTERM,):
            raise KeyboardInterrupt from error
        raise
    step = int(metrics["trainer/global_step"])
    status = "interrupted" if stopped_by else "finished"
    write_status(folder, status, global_step=step, seconds=round(time.time() - start, 1))
    if job.entry.report is not None and step and is_main_process():
        log.info("report: %s", job.entry.report(folder))
    if stopped_by:
        if is_main_process():
            log.info("stopped after %d updates; to go on: %s", step, again)
        raise SystemExit(128 + stopped_by)
    return metrics


def _fit(job: Job, training: Callable[[Job, ExitStack], Training]) -> tuple[dict[str, float], int | None]:
    """Trains; returns the last value of every metric and the signal that stopped it, if one did."""
    parts, folder, checkpoint = job.parts, job.folder, job.checkpoint
    if parts["threads"]:
        torch.set_num_threads(parts["threads"])
    L.seed_everything(parts["seed"], verbose=False)
    if job.resume and checkpoint is None:
        log.warning("%s holds no checkpoint: the run begins again, with its rounds kept", folder)
    stop = StopOnSignal()
    with ExitStack() as at_the_end:
        made = training(job, at_the_end)
        loggers: list[Logger] = []
        exit_code = [1]  # what the loggers are told unless the fit ends well
        at_the_end.callback(lambda: finish(loggers, exit_code[0]))
        resume_step = _updates_of(checkpoint) if job.resume else None
        loggers.append(CsvLogger(folder, resume_step))
        config = plain_config(job.cfg)
        for make in filter(None, (parts["logger"] or {}).values()):
            loggers.append(make(save_dir=folder, resume_step=resume_step))
            loggers[-1].log_hyperparams(config)
        trainer = _build_trainer(job, made, loggers, stop)
        at_the_end.enter_context(known_to_children(folder))
        trainer.fit(made.module, datamodule=made.data, ckpt_path=checkpoint, weights_only=True)
        if stop.received is None:
            made.conclude()
        exit_code[0] = 128 + stop.received if stop.received else 0
    return made.module.latest | {"trainer/global_step": trainer.global_step}, stop.received


def _build_trainer(job: Job, made: Training, loggers: list[Logger], stop: StopOnSignal) -> L.Trainer:
    options: TrainerOptions = job.parts["trainer"]
    checkpoints = job.folder / "checkpoints"
    chosen = [c if isinstance(c, L.Callback) else c(dirpath=checkpoints) for c in job.parts["callbacks"].values() if c]
    for display in (c for c in chosen if isinstance(c, ProgressDisplay)):
        made.data.on_phase = display.phase
    return L.Trainer(
        max_epochs=made.epochs,
        accelerator=options.accelerator,
        devices=options.devices,
        num_nodes=options.num_nodes,
        strategy=options.strategy,
        precision=options.precision,  # type: ignore[arg-type]
        logger=loggers,
        callbacks=[*chosen, stop],
        plugins=[AtomicCheckpoints()],
        reload_dataloaders_every_n_epochs=1,  # the data module decides what an epoch trains on, so it is always asked
        use_distributed_sampler=False,  # it deals rows to ranks itself
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        default_root_dir=job.folder,
    )


def _updates_of(checkpoint: Path | None) -> int:
    return 0 if checkpoint is None else int(torch.load(checkpoint, weights_only=True, mmap=True)["global_step"])
