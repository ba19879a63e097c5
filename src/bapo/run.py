"""One experiment: check the config, build the objects, fit, report. Only the entry points import this."""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import time
import traceback
from collections.abc import Mapping
from contextlib import ExitStack, suppress
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

from bapo import config_check
from bapo.analysis.report import write_report
from bapo.callbacks.checkpoint import AtomicCheckpoints
from bapo.callbacks.progress import ProgressDisplay
from bapo.callbacks.stop import StopOnSignal
from bapo.data.datamodule import RolloutDataModule
from bapo.explain import explain
from bapo.loggers import CsvLogger, finish
from bapo.module import BapoModule
from bapo.options import PolicyOptions, TrainerOptions
from bapo.policy.causal_lm import DTYPES, load_tokenizer
from bapo.process import exit_on_sigterm, hush, known_to_children
from bapo.rollouts.collector import Collector
from bapo.rollouts.probe import TOLERANCE
from bapo.run_folder import (
    CHILD_RUN_DIR,
    discard_unused,
    is_main_process,
    newest_checkpoint,
    open_run_folder,
    plain_config,
    read_config,
    redact,
    resume_command,
    write_status,
)

log = logging.getLogger(__name__)

RESUME_MAY_CHANGE = ("trainer.max_rounds=",)


def run(cfg: DictConfig) -> dict[str, float]:
    """Runs the experiment of a composed config in Hydra's output folder; returns the last value of every metric.

    Raises ValueError for a config that cannot run, before a model is loaded. However it ends, status.json says so. With
    `explain` it says what the run would do, and leaves no folder.
    """
    hush()
    hydra = HydraConfig.get()
    folder = Path(os.environ.get(CHILD_RUN_DIR) or hydra.runtime.output_dir).absolute()
    resume = cfg.resume is not None
    if resume:
        if hydra.mode == RunMode.MULTIRUN or Path(cfg.resume).absolute() != folder:
            raise ValueError(f"resume is {cfg.resume!r}; it goes on in that folder: neither -m nor hydra.run.dir goes with it")
        cfg = _saved_config(folder, list(hydra.overrides.task))
    try:
        parts = build_parts(cfg)
    except (ValueError, OmegaConfBaseException) as error:
        if hydra.mode == RunMode.MULTIRUN:  # the job's own folder tells what was wrong with it
            log.error("%s", redact(str(error)))
            write_status(folder, "failed", error=redact(str(error)))
        elif not resume:
            discard_unused(folder)
        raise
    if parts["explain"]:
        print(explain(parts))
        discard_unused(folder, log_too=True)
        return {}
    checkpoint = newest_checkpoint(folder) if resume else None
    if checkpoint is not None:
        _check_rounds(parts, checkpoint)
    _absolute_paths(cfg)
    with open_run_folder(folder, cfg, resume):
        return _run_in(folder, parts, plain_config(cfg), checkpoint, resume)


def _run_in(
    folder: Path, parts: Mapping[str, Any], config: dict[str, Any], checkpoint: Path | None, resume: bool
) -> dict[str, float]:
    write_status(folder, "running", pid=os.getpid())
    start = time.time()
    try:
        with exit_on_sigterm():
            metrics, stopped_by = _fit(parts, config, folder, checkpoint, resume)
    except BaseException as error:
        # Lightning turns a second Ctrl-C into SystemExit.
        interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
        if not interrupted:
            log.error("%s", redact(traceback.format_exc()))
        with suppress(OSError):  # a full disk must not hide what went wrong first
            status = "interrupted" if interrupted else "failed"
            write_status(folder, status, error=redact(repr(error)), seconds=round(time.time() - start, 1))
        if is_main_process():
            again = (
                "to go on from the last checkpoint"
                if newest_checkpoint(folder)
                else "there is no checkpoint yet; to begin again"
            )
            log.info("%s: %s", again, resume_command(folder))
        if interrupted and error.args != (128 + signal.SIGTERM,):
            raise KeyboardInterrupt from error
        raise
    step = int(metrics["trainer/global_step"])
    status = "interrupted" if stopped_by else "finished"
    write_status(folder, status, global_step=step, seconds=round(time.time() - start, 1))
    if step and is_main_process():
        log.info("report: %s", write_report(folder))
    if stopped_by:
        if is_main_process():
            log.info("stopped after %d updates; to go on: %s", step, resume_command(folder))
        raise SystemExit(128 + stopped_by)
    return metrics


def _check_rounds(parts: Mapping[str, Any], checkpoint: Path) -> None:
    """A run cannot end before the point from which it goes on: ValueError."""
    epochs = int(torch.load(checkpoint, weights_only=True, mmap=True)["epoch"]) + 1
    least = math.ceil(epochs / parts["schedule"].epochs_per_round)
    if parts["trainer"].max_rounds < least:
        raise ValueError(
            f"trainer.max_rounds is {parts['trainer'].max_rounds}; this run is in round {least}: it must be >= {least}"
        )


def _absolute_paths(cfg: DictConfig) -> None:
    """A run that is resumed from another directory must find the same model."""
    if cfg.policy.path is not None and Path(cfg.policy.path).expanduser().exists():
        cfg.policy.path = str(Path(cfg.policy.path).expanduser().absolute())
    if cfg.policy.warm_start is not None and cfg.policy.warm_start.get("cache_dir"):
        cfg.policy.warm_start.cache_dir = str(Path(cfg.policy.warm_start.cache_dir).absolute())


def _saved_config(folder: Path, overrides: list[str]) -> DictConfig:
    """The config a run was started with; of a command line that resumes it, only `RESUME_MAY_CHANGE` counts."""
    cfg = read_config(folder)
    for key, value in {"explain": False, "reward": {}}.items():  # runs that began before there was this key
        cfg.setdefault(key, value)
    changes = [o for o in overrides if not o.startswith("resume=")]
    if refused := [o for o in changes if not o.startswith(RESUME_MAY_CHANGE)]:
        allowed = ", ".join(name.rstrip("=") for name in RESUME_MAY_CHANGE)
        raise ValueError(f"resume continues the run's own config: {' '.join(refused)} cannot be changed (allowed: {allowed})")
    cfg.merge_with_dotlist(changes)
    return cfg


def build_parts(cfg: DictConfig) -> dict[str, Any]:
    """The cheap objects of a config, checked one by one and together; engine, loggers and model are still recipes."""
    config = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(config, dict)
    config_check.check_keys_and_types(config)  # type: ignore[arg-type]
    try:
        parts = instantiate(config, _convert_="all")
    except Exception as error:
        if not isinstance(error.__cause__, ValueError):
            raise
        message, at = str(error.__cause__), re.search(r"full_key: (\S+)", str(error))
        if at and not message.startswith(at[1].split(".")[0]):
            message = f"{at[1]}.{message}"
        raise ValueError(message) from error
    config_check.check_sizes(parts)
    return parts


def _fit(
    parts: Mapping[str, Any], config: dict[str, Any], folder: Path, checkpoint: Path | None, resume: bool
) -> tuple[dict[str, float], int | None]:
    """Trains; returns the last value of every metric and the signal that stopped it, if one did.

    parts: the objects of the config; config: its plain values, for the loggers; checkpoint: where a resumed run goes on.
    """
    if parts["threads"]:
        torch.set_num_threads(parts["threads"])
    L.seed_everything(parts["seed"], verbose=False)
    if resume and checkpoint is None:
        log.warning("%s holds no checkpoint: the run begins again, with its rounds kept", folder)
    stop = StopOnSignal()
    with ExitStack() as at_the_end:
        module, data = _build_training(parts, folder, at_the_end)
        loggers: list[Logger] = []
        exit_code = [1]  # what the loggers are told unless the fit ends well
        at_the_end.callback(lambda: finish(loggers, exit_code[0]))
        resume_step = _updates_of(checkpoint) if resume else None
        loggers.append(CsvLogger(folder, resume_step))
        for make in filter(None, (parts["logger"] or {}).values()):
            loggers.append(make(save_dir=folder, resume_step=resume_step))
            loggers[-1].log_hyperparams(config)
        trainer = _build_trainer(parts, folder, loggers, stop, data)
        at_the_end.enter_context(known_to_children(folder))
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
        exit_code[0] = 128 + stop.received if stop.received else 0
    return module.latest | {"trainer/global_step": trainer.global_step}, stop.received


def _build_trainer(
    parts: Mapping[str, Any], folder: Path, loggers: list[Logger], stop: StopOnSignal, data: RolloutDataModule
) -> L.Trainer:
    options: TrainerOptions = parts["trainer"]
    chosen = [c if isinstance(c, L.Callback) else c(dirpath=folder / "checkpoints") for c in parts["callbacks"].values() if c]
    for display in (c for c in chosen if isinstance(c, ProgressDisplay)):
        data.on_phase = display.phase
    return L.Trainer(
        max_epochs=options.max_rounds * data.schedule.epochs_per_round,
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
        default_root_dir=folder,
    )


def _build_training(parts: Mapping[str, Any], folder: Path, at_the_end: ExitStack) -> tuple[BapoModule, RolloutDataModule]:
    policy: PolicyOptions = parts["policy"]
    rollout, schedule, options = parts["rollout"], parts["schedule"], parts["trainer"]
    path, temperature = policy.model_path(parts["task"]), rollout.sampling.temperature
    trained = policy.load(path, temperature, parts["seed"])
    reference = policy.load_reference(path, temperature) if parts["objective"].reference_kl else None
    engine = rollout.engine(model_path=path, dtype=DTYPES[policy.dtype], **policy.source)
    at_the_end.callback(engine.close)
    module = BapoModule(
        trained,
        parts["loss"],
        parts["objective"],
        parts["optimizer"],
        options.micro_batch_tokens,
        options.max_rounds * schedule.updates_per_round,
        reference,
    )
    tokenizer = load_tokenizer(path, **policy.source)
    collector = Collector(engine, parts["task"], tokenizer, parts["advantage"], rollout, parts["seed"], parts["reward"])
    precisions = [DTYPES[policy.dtype], engine.dtype, torch.bfloat16 if options.precision == "bf16-mixed" else torch.float32]
    tolerance = rollout.probe_tolerance or max(TOLERANCE[precision] for precision in precisions)
    data = RolloutDataModule(collector, schedule, folder / "rounds", parts["seed"], tolerance)
    data.connect(module)
    return module, data


def _updates_of(checkpoint: Path | None) -> int:
    return 0 if checkpoint is None else int(torch.load(checkpoint, weights_only=True, mmap=True)["global_step"])
