"""One experiment: check the config, build the objects, fit, report. Only the entry points import this."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from bapo.analysis.report import write_report
from bapo.data.datamodule import RolloutDataModule
from bapo.engines.sync_check import TOLERANCE
from bapo.module import BapoModule
from bapo.policy.causal_lm import DTYPES, load_tokenizer
from bapo.policy.options import PolicyOptions
from bapo.rollouts.collector import Collector
from bapo.training import config_check
from bapo.training.explain import explain
from bapo.training.job import Entry, Job, Training, build, open_job, run_job
from bapo.training.run_folder import discard_unused

TRAIN = Entry(
    "train.py",
    config_check.TOP_LEVEL,
    config_check.check_sizes,
    may_change=("trainer.max_rounds=",),
    since={"explain": False, "reward": {}},
    report=lambda folder: write_report(folder),
)


def run(cfg: DictConfig) -> dict[str, float]:
    """Runs the experiment of a composed config in Hydra's output folder; returns the last value of every metric.

    Raises ValueError for a config that cannot run, before a model is loaded. However it ends, status.json says so. With
    `explain` it says what the run would do, and leaves no folder.
    """
    job = open_job(cfg, TRAIN)
    if job.parts["explain"]:
        print(explain(job.parts))
        discard_unused(job.folder, log_too=True)
        return {}
    if job.checkpoint is not None:
        _check_rounds(job.parts, job.checkpoint)
    return run_job(job, _build_training)


def build_parts(cfg: DictConfig) -> dict[str, Any]:
    """The cheap objects of a config, checked one by one and together; engine, loggers and model are still recipes."""
    return build(cfg, TRAIN)


def _check_rounds(parts: dict[str, Any], checkpoint: Path) -> None:
    """A run cannot end before the point from which it goes on: ValueError."""
    epochs = int(torch.load(checkpoint, weights_only=True, mmap=True)["epoch"]) + 1
    least = math.ceil(epochs / parts["schedule"].epochs_per_round)
    if parts["trainer"].max_rounds < least:
        raise ValueError(
            f"trainer.max_rounds is {parts['trainer'].max_rounds}; this run is in round {least}: it must be >= {least}"
        )


def _build_training(job: Job, at_the_end: ExitStack) -> Training:
    parts = job.parts
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
        lr_schedule=parts["optimizer"].schedule,
        max_grad_norm=parts["optimizer"].max_grad_norm,
    )
    tokenizer = load_tokenizer(path, **policy.source)
    collector = Collector(
        engine, parts["task"], tokenizer, parts["advantage"], rollout, parts["seed"], parts["reward"], schedule.max_age
    )
    precisions = [DTYPES[policy.dtype], engine.dtype, torch.bfloat16 if options.precision == "bf16-mixed" else torch.float32]
    tolerance = rollout.sync_tolerance or max(TOLERANCE[precision] for precision in precisions)
    data = RolloutDataModule(collector, schedule, job.folder / "rounds", parts["seed"], tolerance)
    data.connect(module)
    at_the_end.callback(data.give_up)
    return Training(module, data, options.max_rounds * schedule.epochs_per_round)
