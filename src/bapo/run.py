"""One experiment: check the config, build the objects, fit, report. Only the entry points import this."""

from __future__ import annotations

import logging
import os
import re
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from bapo import config_check
from bapo.analysis.report import write_report
from bapo.callbacks.evaluate import Evaluate
from bapo.callbacks.progress import ProgressDisplay
from bapo.callbacks.stop import StopOnSignal
from bapo.data.datamodule import RolloutDataModule
from bapo.loggers import CsvLogger, finish
from bapo.module import BapoModule
from bapo.options import PolicyOptions, TrainerOptions
from bapo.policy.causal_lm import DTYPES, CausalLMPolicy, load_model, load_tokenizer
from bapo.rollouts.collector import Collector
from bapo.run_folder import CHILD_RUN_DIR, newest_checkpoint, open_run_folder, redact, write_status

log = logging.getLogger(__name__)

RESUME_MAY_CHANGE = ("trainer.max_rounds=",)


def run(cfg: DictConfig) -> dict[str, float]:
    """Runs the experiment of a composed config in Hydra's output folder; returns the last value of every metric.

    Raises ValueError for a config that cannot run, before anything is loaded or written.
    """
    hydra = HydraConfig.get()
    folder = Path(os.environ.get(CHILD_RUN_DIR) or hydra.runtime.output_dir).absolute()
    resume = cfg.resume is not None
    if resume:
        cfg = _saved_config(folder, list(hydra.overrides.task))
    parts = build_parts(cfg)
    open_run_folder(folder, cfg)
    write_status(folder, "running", pid=os.getpid())
    start = time.time()
    try:
        metrics, stopped_by = _fit(cfg, parts, folder, resume)
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        if not interrupted:
            log.error("%s", redact(traceback.format_exc()))
        write_status(folder, "interrupted" if interrupted else "failed", error=redact(repr(error)), seconds=time.time() - start)
        log.info("to go on: python train.py resume=%s", folder)
        raise
    step = int(metrics.get("trainer/global_step", 0))
    status = "interrupted" if stopped_by else "finished"
    write_status(folder, status, global_step=step, seconds=round(time.time() - start, 1))
    if step:
        log.info("report: %s", write_report(folder))
    if stopped_by:
        log.info("stopped after %d updates; to go on: python train.py resume=%s", step, folder)
        raise SystemExit(128 + stopped_by)
    return metrics


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


def _fit(cfg: DictConfig, parts: Mapping[str, Any], folder: Path, resume: bool) -> tuple[dict[str, float], int | None]:
    """Trains; returns the last value of every metric and the signal that stopped it, if one did."""
    if parts["threads"]:
        torch.set_num_threads(parts["threads"])
    L.seed_everything(parts["seed"], verbose=False)
    checkpoint = newest_checkpoint(folder) if resume else None
    if resume and checkpoint is None:
        log.warning("%s holds no checkpoint: the run begins again, with its rounds kept", folder)

    module, data = _build_training(parts, folder)
    options: TrainerOptions = parts["trainer"]
    evaluate: Evaluate = parts["callbacks"]["evaluate"]
    progress: ProgressDisplay = parts["callbacks"]["progress"]
    stop = StopOnSignal(folder / "checkpoints")
    data.on_phase = evaluate.on_phase = progress.phase
    loggers = _build_loggers(cfg, parts, folder, _updates_of(checkpoint) if resume else None)
    schedule = parts["schedule"]
    trainer = L.Trainer(
        max_epochs=options.max_rounds * schedule.epochs_per_round,
        accelerator=options.accelerator,
        devices=options.devices,
        num_nodes=options.num_nodes,
        strategy=options.strategy,
        precision=options.precision,  # type: ignore[arg-type]
        logger=loggers,
        callbacks=[evaluate, stop, progress, parts["callbacks"]["checkpoint"](dirpath=folder / "checkpoints")],
        reload_dataloaders_every_n_epochs=1,  # the data module decides what an epoch trains on, so it is always asked
        use_distributed_sampler=False,  # it deals rows to ranks itself
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        default_root_dir=folder,
    )
    os.environ[CHILD_RUN_DIR] = str(folder)
    code = 1
    try:
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
        code = 128 + stop.received if stop.received else 0
    finally:
        os.environ.pop(CHILD_RUN_DIR, None)
        data.collector.engine.close()
        finish(loggers, code)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, stop.received


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
    module.max_rounds, module.epochs_per_round = options.max_rounds, schedule.epochs_per_round
    collector = Collector(engine, parts["task"], load_tokenizer(path, **source), parts["advantage"], rollout, parts["seed"])
    data = RolloutDataModule(collector, schedule, folder / "rounds", parts["seed"])
    data.connect(module)
    return module, data


def _build_loggers(cfg: DictConfig, parts: Mapping[str, Any], folder: Path, resume_step: int | None) -> list[Any]:
    """The CSV logger always, then those of the `logger` group."""
    chosen = [make(save_dir=folder, resume_step=resume_step) for make in (parts["logger"] or {}).values()]
    return [CsvLogger(folder, resume_step), *chosen]


def _updates_of(checkpoint: Path | None) -> int:
    return 0 if checkpoint is None else int(torch.load(checkpoint, weights_only=True, mmap=True)["global_step"])
