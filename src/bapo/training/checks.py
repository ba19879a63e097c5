"""Checks over the built objects of a config: they must fit together, and on this machine."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from bapo.files import digest
from bapo.optimizer import check_optimizer, check_schedule
from bapo.protocols import Task
from bapo.training.config_check import check_trainer_flags
from bapo.training.process import hush

log = logging.getLogger(__name__)

MAX_SEED = 2**32 - 1  # the largest that NumPy takes


def check_machine(parts: Mapping[str, Any]) -> None:
    """ValueError if this machine cannot train the built objects of a config, or a library refuses its arguments.

    The last of all checks, as it imports what takes seconds.
    """
    if not parts.get("explain"):  # a run may be explained on a machine that could not run it
        hush()
        check_trainer_flags(parts["trainer"].flags)
        parts["trainer"].check()
    if parts["lr_schedule"] is not None:
        check_schedule(parts["lr_schedule"], check_optimizer(parts["optimizer"]))


def check_run(parts: Mapping[str, Any]) -> None:
    """ValueError for a split that a task lacks, or for what this machine or a library refuses."""
    _check_splits(parts["task"], parts["callbacks"])
    check_machine(parts)


def check_numbers(parts: Mapping[str, Any]) -> None:
    """ValueError for plain values at the top that are out of bounds, or an optimizer that refuses its arguments."""
    if not 0 <= parts["seed"] <= MAX_SEED:
        raise ValueError(f"seed is {parts['seed']}; it must be in [0, {MAX_SEED}]")
    if parts["threads"] is not None and parts["threads"] < 1:
        raise ValueError(f"threads is {parts['threads']}; it must be >= 1, or null for torch's own choice")
    check_optimizer(parts["optimizer"])


def _check_splits(task: Any, callbacks: Mapping[str, Any]) -> None:
    """ValueError if there is nothing to train on, or nothing to evaluate."""
    add = "+task@callbacks.evaluate.benchmarks.NAME=NAME"
    if not isinstance(task, Task):
        raise ValueError(f"task is a {type(task).__name__}; it must be a class that derives from bapo.protocols.Task")
    if "train" not in task.splits:
        only = ", ".join(task.splits)
        raise ValueError(f"task is {task.name}, which has only {only}: nothing to train on; to be evaluated: {add}")
    for callback in (c for c in callbacks.values() if hasattr(c, "benchmarks")):
        for name, benchmark in (callback.benchmarks or {"": task}).items():
            if callback.split not in (splits := benchmark.splits):
                where = f"callbacks.evaluate.benchmarks.{name}" if name else f"task {benchmark.name}"
                other = f"callbacks.evaluate.benchmarks.{name}=null" if name else add
                raise ValueError(
                    f"callbacks.evaluate.split is {callback.split!r}; {where} has only {', '.join(splits)}: "
                    f"callbacks.evaluate=null, callbacks.evaluate.split={splits[0]} or {other}"
                )


def data_digests(task: Task, callbacks: Mapping[str, Any]) -> dict[str, str]:
    """A digest of the prompts of every set that a run trains on or is evaluated on, by its name."""
    sets = {"train": task.prompts("train")}
    for callback in (c for c in callbacks.values() if hasattr(c, "benchmarks")):
        for name, benchmark in (callback.benchmarks or {callback.split: task}).items():
            sets[name] = benchmark.prompts(callback.split)
    return {name: digest([(prompt.uid, prompt.text, prompt.answer) for prompt in prompts]) for name, prompts in sets.items()}


def check_sizes(parts: Mapping[str, Any]) -> None:
    """ValueError for objects of a training config that do not fit together, as far as plain values tell."""
    check_numbers(parts)
    rollout, trainer = parts["rollout"], parts["trainer"]
    if trainer.max_rounds is None:
        raise ValueError("trainer.max_rounds is None; it must be >= 1")
    if not parts["explain"]:
        rollout.engine.require()
    if "correctness" in parts["reward"]:
        raise ValueError("reward.correctness is the task's own reward; a term beside it must have another name")
    _check_rollout(rollout, parts["schedule"], trainer.max_rounds)
    if rollout.engine.lora_sync == "native":
        _check_native_adapter(parts["policy"].lora, rollout.engine.max_lora_rank)


def _check_rollout(rollout: Any, schedule: Any, max_rounds: int) -> None:
    if rollout.group_size < 2:
        raise ValueError(
            f"rollout.group_size is {rollout.group_size}; a group-relative advantage compares responses to one prompt: >= 2"
        )
    if rollout.partial and rollout.partial.tokens_per_round >= rollout.sampling.max_tokens:
        raise ValueError(
            f"rollout.partial.tokens_per_round is {rollout.partial.tokens_per_round}; it must be < "
            f"rollout.sampling.max_tokens, {rollout.sampling.max_tokens}: else every response is finished in its first round"
        )
    if rollout.partial:
        schedule.check_room("rollout.partial")
    if schedule.lag >= max_rounds:
        log.warning("schedule.lag is %d, trainer.max_rounds %d: no round trains on data that stale", schedule.lag, max_rounds)
    pool, cut = rollout.prompts_per_round * rollout.group_size, schedule.minibatches_per_epoch
    if pool % cut:
        near = sorted((n for n in range(1, pool + 1) if pool % n == 0), key=lambda n: (abs(n - cut), n))[:4]
        raise ValueError(
            f"schedule.minibatches_per_epoch is {cut}, which does not divide the pool of rollout.prompts_per_round * "
            f"rollout.group_size = {rollout.prompts_per_round} * {rollout.group_size} = {pool} responses; "
            f"{', '.join(str(n) for n in sorted(near))} would"
        )
    if rollout.sampling.top_p < 1 or rollout.sampling.top_k > 0:
        log.warning("rollout.sampling uses top_p or top_k: the engine samples from another distribution than the policy's")


def _check_native_adapter(lora: Any, max_rank: int) -> None:
    if lora is None:
        raise ValueError("rollout.engine.lora_sync is 'native'; without policy.lora it must be merged")
    if lora.r > max_rank:
        raise ValueError(f"policy.lora.r is {lora.r}; it must be <= rollout.engine.max_lora_rank, {max_rank}")
    if lora.modules_to_save:
        raise ValueError(f"policy.lora.modules_to_save is {lora.modules_to_save}; with lora_sync native it must be empty")
