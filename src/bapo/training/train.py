"""One experiment of train.py: check the config, build the objects, fit. Heavy imports follow the checks."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from bapo.training.checks import check_run, check_sizes, data_digests
from bapo.training.config_check import TOP_LEVEL
from bapo.training.job import Entry, Job, build, open_job
from bapo.training.resume import read_provenance
from bapo.training.run_folder import discard_unused

if TYPE_CHECKING:
    from bapo.training.fit import Training

TRAIN = Entry("train.py", TOP_LEVEL, check_sizes, check_run, may_change=("trainer.max_rounds=",))


def run(cfg: DictConfig) -> dict[str, float]:
    """Runs the experiment of a composed config in Hydra's output folder; returns the last value of every metric.

    Raises ValueError for a config that cannot run, before a model is loaded. However it ends, status.json says so. With
    `explain` it says what the run would do, and leaves no folder.
    """
    job = open_job(cfg, TRAIN)
    if job.parts["explain"]:
        from bapo.training.explain import explain

        print(explain(job.parts))
        discard_unused(job.folder, log_too=True)
        return {}
    from bapo.training.fit import run_job

    if job.checkpoint is not None:
        _check_rounds(job.parts, job.checkpoint)
    return run_job(job, _build_training)


def build_parts(cfg: DictConfig) -> dict[str, Any]:
    """The cheap objects of a config, checked one by one and together; engine, loggers and model are still recipes."""
    return build(cfg, TRAIN)


def _check_rounds(parts: dict[str, Any], checkpoint: Path) -> None:
    """ValueError for a run that would end before the checkpoint it resumes from."""
    import torch

    epochs = int(torch.load(checkpoint, weights_only=True, mmap=True)["epoch"]) + 1
    least = math.ceil(epochs / parts["schedule"].epochs_per_round)
    if parts["trainer"].max_rounds < least:
        raise ValueError(
            f"trainer.max_rounds is {parts['trainer'].max_rounds}; this run is in round {least}: it must be >= {least}"
        )


def _build_training(job: Job, at_the_end: ExitStack) -> Training:
    import torch

    from bapo.data.datamodule import RolloutDataModule
    from bapo.engines.sync_check import TOLERANCE
    from bapo.module import BapoModule
    from bapo.policy.causal_lm import DTYPES, load_tokenizer
    from bapo.rollouts.collector import Collector
    from bapo.training.fit import Training

    parts, policy = job.parts, job.parts["policy"]
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
        lr_schedule=parts["lr_schedule"],
        max_grad_norm=options.max_grad_norm,
    )
    tokenizer = load_tokenizer(path, **policy.source)
    collector = Collector(
        engine, parts["task"], tokenizer, parts["advantage"], rollout, parts["seed"], parts["reward"], schedule.most_staleness
    )
    precisions = [DTYPES[policy.dtype], engine.dtype, torch.bfloat16 if options.mixed_precision else torch.float32]
    tolerance = rollout.sync_tolerance or max(TOLERANCE[precision] for precision in precisions)
    run_id = read_provenance(job.folder)["run_id"]
    data = RolloutDataModule(collector, schedule, job.folder / "rounds", parts["seed"], tolerance, run_id)
    data.connect(module)
    at_the_end.callback(data.abandon)
    digests = data_digests(parts["task"], parts["callbacks"])
    return Training(module, data, options.max_rounds * schedule.epochs_per_round, digests)
