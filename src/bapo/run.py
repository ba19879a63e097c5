"""One experiment: check the config, build the objects, fit, report. Only the entry points import this."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
import transformers
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bapo import config_check
from bapo.analysis.report import write_report
from bapo.callbacks.progress import ProgressDisplay
from bapo.callbacks.stop import StopOnSignal
from bapo.data.datamodule import RolloutDataModule
from bapo.loggers import CsvLogger, finish
from bapo.module import BapoModule
from bapo.options import PolicyOptions, TrainerOptions
from bapo.policy.causal_lm import DTYPES, CausalLMPolicy, load_model, load_tokenizer
from bapo.rollouts.collector import Collector
from bapo.run_folder import (
    CHILD_RUN_DIR,
    discard_unused,
    is_main_process,
    newest_checkpoint,
    open_run_folder,
    plain_config,
    redact,
    write_status,
)

log = logging.getLogger(__name__)

RESUME_MAY_CHANGE = ("trainer.max_rounds=",)


def run(cfg: DictConfig) -> dict[str, float]:
    """Runs the experiment of a composed config in Hydra's output folder; returns the last value of every metric.

    Raises ValueError for a config that cannot run, before a model is loaded. However it ends, status.json says so.
    """
    _hush()
    hydra = HydraConfig.get()
    folder = Path(os.environ.get(CHILD_RUN_DIR) or hydra.runtime.output_dir).absolute()
    resume = cfg.resume is not None
    if resume:
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
    with open_run_folder(folder, cfg, resume):
        return _run_in(folder, parts, plain_config(cfg), resume)


def _run_in(folder: Path, parts: Mapping[str, Any], config: dict[str, Any], resume: bool) -> dict[str, float]:
    write_status(folder, "running", pid=os.getpid())
    start = time.time()
    try:
        with _exit_on_sigterm():
            metrics, stopped_by = _fit(parts, config, folder, resume)
    except BaseException as error:
        # Lightning turns a second Ctrl-C into SystemExit.
        interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
        if not interrupted:
            log.error("%s", redact(traceback.format_exc()))
        status = "interrupted" if interrupted else "failed"
        write_status(folder, status, error=redact(repr(error)), seconds=round(time.time() - start, 1))
        log.info("to go on from the last checkpoint: python train.py resume=%s", folder)
        if interrupted and error.args != (128 + signal.SIGTERM,):
            raise KeyboardInterrupt from error
        raise
    step = int(metrics["trainer/global_step"])
    status = "interrupted" if stopped_by else "finished"
    write_status(folder, status, global_step=step, seconds=round(time.time() - start, 1))
    if step and is_main_process():
        log.info("report: %s", write_report(folder))
    if stopped_by:
        log.info("stopped after %d updates; to go on: python train.py resume=%s", step, folder)
        raise SystemExit(128 + stopped_by)
    return metrics


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Before and after the updates, where `StopOnSignal` is not at work, kill -TERM ends the run as Ctrl-C does."""

    def handle(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _hush() -> None:
    """Keeps off the screen what libraries say of things that are meant here."""
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    # Asked on every save whether the file should hold weights alone; it should not.
    logging.getLogger("lightning.pytorch.trainer.connectors.checkpoint_connector").setLevel(logging.WARNING)
    for message in (
        ".*module.*in eval mode at the start of training",  # dropout is off for good, so the mode says nothing
        "Using ModelCheckpoint with manual optimization",  # the state after an update is the state wanted
        ".*sync_dist=True.*",  # every rank logs the same numbers, reduced already
        ".*LeafSpec.*is deprecated",
        ".*does not have many workers",  # mini-batches are in memory
        ".*Checkpoint directory .* exists and is not empty",  # as it must be for a resumed run
    ):
        warnings.filterwarnings("ignore", message=message)


def _saved_config(folder: Path, overrides: list[str]) -> DictConfig:
    """The config a run was started with; of a command line that resumes it, only `RESUME_MAY_CHANGE` counts."""
    cfg = OmegaConf.load(folder / "config.yaml")
    assert isinstance(cfg, DictConfig)
    changes = [o for o in overrides if not o.startswith("resume=")]
    if refused := [o for o in changes if not o.startswith(RESUME_MAY_CHANGE)]:
        allowed = ", ".join(name.rstrip("=") for name in RESUME_MAY_CHANGE)
        raise ValueError(f"resume continues the run's own config: {' '.join(refused)} cannot be changed (allowed: {allowed})")
    cfg.merge_with_dotlist(changes)
    cfg.resume = str(folder)
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


def _fit(parts: Mapping[str, Any], config: dict[str, Any], folder: Path, resume: bool) -> tuple[dict[str, float], int | None]:
    """Trains; returns the last value of every metric and the signal that stopped it, if one did.

    parts: the objects of the config; config: its plain values, for the loggers.
    """
    if parts["threads"]:
        torch.set_num_threads(parts["threads"])
    L.seed_everything(parts["seed"], verbose=False)
    checkpoint = newest_checkpoint(folder) if resume else None
    if resume and checkpoint is None:
        log.warning("%s holds no checkpoint: the run begins again, with its rounds kept", folder)
    stop = StopOnSignal(folder / "checkpoints")
    with ExitStack() as at_the_end:
        module, data = _build_training(parts, folder)
        at_the_end.callback(data.collector.engine.close)
        loggers: list[Logger] = []
        exit_code = [1]  # what the loggers are told unless the fit ends well
        at_the_end.callback(lambda: finish(loggers, exit_code[0]))
        resume_step = _updates_of(checkpoint) if resume else None
        loggers.append(CsvLogger(folder, resume_step))
        for make in (parts["logger"] or {}).values():
            loggers.append(make(save_dir=folder, resume_step=resume_step))
            loggers[-1].log_hyperparams(config)
        trainer = _build_trainer(parts, folder, loggers, stop, data)
        at_the_end.enter_context(_known_to_children(folder))
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
        reload_dataloaders_every_n_epochs=1,  # the data module decides what an epoch trains on, so it is always asked
        use_distributed_sampler=False,  # it deals rows to ranks itself
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        default_root_dir=folder,
    )


@contextmanager
def _known_to_children(folder: Path) -> Iterator[None]:
    """Lightning starts further ranks by this process's command line: they must find this folder, and run this job alone."""
    hydra, argv = HydraConfig.get(), sys.argv
    os.environ[CHILD_RUN_DIR] = str(folder)
    if hydra.mode == RunMode.MULTIRUN:
        sys.argv = [argv[0], *hydra.overrides.task]
    try:
        yield
    finally:
        sys.argv = argv
        os.environ.pop(CHILD_RUN_DIR, None)


def _build_training(parts: Mapping[str, Any], folder: Path) -> tuple[BapoModule, RolloutDataModule]:
    policy_options: PolicyOptions = parts["policy"]
    rollout, schedule, options = parts["rollout"], parts["schedule"], parts["trainer"]
    path: Any = policy_options.path or policy_options.warm_start(parts["task"])  # type: ignore[misc]
    source: dict[str, Any] = {"revision": policy_options.revision, "trust_remote_code": policy_options.trust_remote_code}
    model = load_model(path, policy_options.dtype, **source)
    engine = rollout.engine(model_path=path, dtype=DTYPES[policy_options.dtype], **source)
    module = BapoModule(
        CausalLMPolicy(model, rollout.sampling.temperature, policy_options.chunk_tokens),
        parts["loss"],
        parts["optimizer"],
        options.micro_batch_tokens,
        options.max_rounds * schedule.updates_per_round,
    )
    collector = Collector(engine, parts["task"], load_tokenizer(path, **source), parts["advantage"], rollout, parts["seed"])
    data = RolloutDataModule(collector, schedule, folder / "rounds", parts["seed"])
    data.connect(module)
    return module, data


def _updates_of(checkpoint: Path | None) -> int:
    return 0 if checkpoint is None else int(torch.load(checkpoint, weights_only=True, mmap=True)["global_step"])
