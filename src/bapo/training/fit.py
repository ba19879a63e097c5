"""The fit of a job: Trainer, loggers and callbacks around a module and its data, watched to its end."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf

from bapo.training.callbacks.checkpoint import AtomicCheckpoints
from bapo.training.callbacks.progress import ProgressDisplay
from bapo.training.callbacks.stop import StopOnSignal
from bapo.training.job import Job
from bapo.training.loggers import finish, make_loggers
from bapo.training.process import exit_on_sigterm, hush, known_to_children
from bapo.training.resume import check_unchanged, record_run
from bapo.training.run_folder import (
    how_to_resume,
    is_main_process,
    log_failure,
    open_run_folder,
    plain_config,
    provenance,
    redact,
    resume_command,
    write_status,
)
from bapo.updates import UpdateModule

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Training:
    """Module and data of a fit of `epochs` Lightning epochs.

    digests: of the rows that it uses, by name. conclude: called at the end of a fit that nothing stopped.
    """

    module: UpdateModule
    data: Any
    epochs: int
    digests: Mapping[str, str]
    conclude: Callable[[], None] = lambda: None


def run_job(job: Job, training: Callable[[Job, ExitStack], Training]) -> dict[str, float]:
    """Runs the job in its folder; returns the last value of every metric. However it ends, status.json says so.

    training: called with a stack on which it may leave what must be closed in the end. A signal that stops the fit ends in
    SystemExit, with a checkpoint.
    """
    hush()
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
            log_failure(error, folder, HydraConfig.get().mode == RunMode.MULTIRUN)
        with suppress(OSError):  # a full disk must not hide what went wrong first
            status = "interrupted" if interrupted else "failed"
            write_status(folder, status, error=redact(repr(error)), seconds=round(time.time() - start, 1))
        if is_main_process():
            log.info("%s", how_to_resume(folder, again, error))
        if interrupted and error.args != (128 + signal.SIGTERM,):
            raise KeyboardInterrupt from error
        raise
    step = int(metrics["trainer/global_step"])
    status = "interrupted" if stopped_by else "finished"
    write_status(folder, status, global_step=step, seconds=round(time.time() - start, 1))
    for callback in job.parts["callbacks"].values():
        if step and is_main_process() and hasattr(callback, "on_run_end"):  # a hook beyond Lightning's: the report's
            callback.on_run_end(folder)
    if stopped_by:
        if is_main_process():
            log.info("stopped after %d updates; to resume: %s", step, again)
        raise SystemExit(128 + stopped_by)
    return metrics


def _fit(job: Job, training: Callable[[Job, ExitStack], Training]) -> tuple[dict[str, float], int | None]:
    """Trains; returns the last value of every metric and the signal that stopped it, if one did."""
    parts, folder, checkpoint = job.parts, job.folder, job.checkpoint
    if parts["threads"]:
        torch.set_num_threads(parts["threads"])
    L.seed_everything(parts["seed"], verbose=False)
    if job.resume and checkpoint is None:
        log.warning("%s holds no checkpoint: the run starts again, with its rounds kept", folder)
    stop = StopOnSignal()
    with ExitStack() as at_the_end:
        made = training(job, at_the_end)
        resume_step = _updates_of(checkpoint) if job.resume else None
        _check_data(job, made.digests, resume_step)
        loggers: list[Logger] = []
        exit_code = [1]  # what the loggers are told unless the fit ends well
        at_the_end.callback(lambda: finish(loggers, exit_code[0]))
        for logger in make_loggers(parts["logger"], folder, resume_step):
            loggers.append(logger)
            logger.log_hyperparams(plain_config(job.cfg))
        trainer = _build_trainer(job, made, loggers, stop)
        at_the_end.enter_context(known_to_children(folder))
        trainer.fit(made.module, datamodule=made.data, ckpt_path=checkpoint, weights_only=True)
        if stop.received is None:
            made.conclude()
        exit_code[0] = 128 + stop.received if stop.received else 0
    return made.module.latest | {"trainer/global_step": trainer.global_step}, stop.received


def _check_data(job: Job, digests: Mapping[str, str], resume_step: int | None) -> None:
    """Records what the run is made of. ValueError if a resumed run has other data than before."""
    if resume_step is not None:
        check_unchanged(job.folder, {"data": digests}, job.allow_changes)
    if is_main_process():
        now = {"data": digests, "config": plain_config(job.cfg), "packages": provenance()["packages"]}
        record_run(job.folder, now, resume_step)


def _build_trainer(job: Job, made: Training, loggers: list[Logger], stop: StopOnSignal) -> L.Trainer:
    callbacks = [callback for callback in job.parts["callbacks"].values() if callback is not None]
    for display in (c for c in callbacks if isinstance(c, ProgressDisplay)):
        made.data.on_phase = display.phase
    return job.parts["trainer"].build(
        max_epochs=made.epochs,
        logger=loggers,
        callbacks=[*callbacks, stop],
        plugins=[AtomicCheckpoints(job.folder)],
        reload_dataloaders_every_n_epochs=1,  # the data module decides what an epoch trains on, so it is always asked
        use_distributed_sampler=False,  # it deals rows to ranks itself
        enable_progress_bar=any(isinstance(c, ProgressBar) for c in callbacks),
        enable_checkpointing=any(isinstance(c, Checkpoint) for c in callbacks),  # else Lightning would add its own
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        default_root_dir=job.folder,
    )


def _updates_of(checkpoint: Path | None) -> int:
    return 0 if checkpoint is None else int(torch.load(checkpoint, weights_only=True, mmap=True)["global_step"])
