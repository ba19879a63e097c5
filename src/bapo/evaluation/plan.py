"""The plan of an evaluation: policy, prompts, settings, and the folder that follows from them, before any model is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedTokenizerBase

from bapo.evaluation.folder import task_name
from bapo.evaluation.policy import PolicySource, find_policy, of_task
from bapo.files import digest
from bapo.policy.causal_lm import load_tokenizer
from bapo.protocols import Task
from bapo.rollouts.grading import check_prompts
from bapo.rollouts.prompt_format import PromptFormat
from bapo.training.config_check import task_at
from bapo.training.run_folder import read_config
from bapo.types import Prompt, SamplingParams

INDIFFERENT = {
    "urls", "api_key_env", "gpus", "device", "batch_size", "max_num_seqs", "gpu_memory_utilization", "sleep_level", "sync_dir",
    "weight_sync", "cpu_kv_cache_gib", "timeout_s", "generate_timeout_s", "start_timeout_s", "request_timeout_s", "max_retries",
    "concurrency",
}  # fmt: skip
TRAINING_ONLY = re.compile(r"[+~]*rollout\.(?!engine\b|prompt\b|sync_tolerance\b)([\w.]+)")


@dataclass(frozen=True)
class Plan:
    """One benchmark for one policy. `identity`: everything that decides what is generated, as plain values."""

    benchmark: str
    task: Task
    problems: Sequence[Prompt]
    source: PolicySource
    tokenizer: PreTrainedTokenizerBase
    prompt_format: PromptFormat
    sampling: SamplingParams
    dtype: str
    identity: Mapping[str, Any]
    output_dir: str

    @property
    def samples(self) -> int:
        return int(self.identity["samples"])

    @property
    def seed(self) -> int:
        return int(self.identity["seed"])

    @property
    def folder(self) -> Path:
        return Path(self.output_dir) / self.source.name / f"{self.benchmark}-{digest(self.identity)[:12]}"

    def settings(self) -> dict[str, Any]:
        """Settings that must be equal for two results to be comparable, and further facts about the generation."""
        return {
            **asdict(self.sampling),
            "samples": self.samples,
            "problems": len(self.problems),
            "seed": self.seed,
            "prompt": asdict(self.prompt_format),
            **{key: self.identity[key] for key in ("split", "template_hash", "data_hash", "task", "engine", "dtype")},
        }


def plans(cfg: DictConfig, parts: Mapping[str, Any], overrides: Sequence[str]) -> list[Plan]:
    """A plan for each benchmark. parts: the built objects of `cfg`; overrides: the command line. ValueError for what cannot be.

    Of a run, its own prompt format and, unless a benchmark is given, its own task are used; what the command line says of
    `rollout.prompt` comes on top.
    """
    for override in overrides:
        if match := TRAINING_ONLY.match(override):
            raise ValueError(f"rollout.{match[1]} counts in training alone; here it is sampling.*, samples and max_problems")
    sections: Any = OmegaConf.to_container(cfg.benchmark, resolve=True)
    tasks = {name: task for name, task in parts["benchmark"].items() if task is not None}
    if parts["policy"].path is None and of_task(parts["embedded"]):  # each task has its own
        sources = {name: _find(parts, task) for name, task in tasks.items()}
    else:
        source = _find(parts, None)
        if source.run is not None and not any(re.match(r"[+~]*benchmark\b", override) for override in overrides):
            own = _of_run(source.run, "task")
            sections, tasks = {task_name(own): own}, {task_name(own): _own_task(source.run, own)}
        sources = dict.fromkeys(tasks, source)
    if parts["devices"] > 1 and len({source.fingerprint for source in sources.values()}) > 1:
        raise ValueError(f"devices is {parts['devices']}; with policy.path null it takes one benchmark at a time")
    return [_plan(name, task, sections[name], sources[name], cfg, parts, overrides) for name, task in tasks.items()]


def _find(parts: Mapping[str, Any], task: Any) -> PolicySource:
    made = HydraConfig.get().runtime.choices.get("policy@embedded", "embedded")
    return find_policy(parts["policy"], task, parts["embedded"], made, parts["cache_dir"])


def _own_task(run: Path, section: Any) -> Any:
    try:
        return instantiate(section, _convert_="all")
    except InstantiationException as error:
        if not isinstance(error.__cause__, ValueError):
            raise
        raise ValueError(f"the task of the run {str(run)!r}: {error.__cause__}; benchmark=NAME is another") from error


@contextmanager
def named(benchmark: str) -> Iterator[None]:
    """Renames `task.path` in a task's error to `benchmark.<benchmark>.path`, its key here."""
    try:
        yield
    except ValueError as error:
        message = task_at(str(error), f"benchmark.{benchmark}")
        if message == str(error):
            raise
        raise ValueError(message) from error


def _of_run(run: Path, *keys: str) -> Any:
    """The section of a run's config under the first of `keys` that it has, resolved; None if it has none."""
    cfg = read_config(run)
    section = next((found for key in keys if (found := OmegaConf.select(cfg, key)) is not None), None)
    return None if section is None else OmegaConf.to_container(section, resolve=True)


def _plan(
    name: str,
    task: Any,
    section: Mapping[str, Any],
    source: PolicySource,
    cfg: DictConfig,
    parts: Mapping[str, Any],
    overrides: Sequence[str],
) -> Plan:
    with named(name):
        problems = task.prompts(parts["split"])[: parts["max_problems"]]
    tokenizer = load_tokenizer(source.like, **source.load)
    prompt_format = _prompt_format(source.run, cfg, parts["rollout"].prompt, overrides)
    sampling, dtype = parts["sampling"], parts["policy"].dtype or source.dtype
    check_prompts(task, parts["split"], problems, tokenizer, prompt_format, sampling, source.positions, "sampling")
    identity = {
        "policy": source.fingerprint,
        "benchmark": name,
        "task": section,
        "split": parts["split"],
        "data_hash": data_hash(problems),
        "template_hash": template_hash(tokenizer, prompt_format),
        "sampling": asdict(sampling),
        "samples": parts["samples"],
        "seed": parts["seed"],
        "engine": _decisive(OmegaConf.to_container(cfg.rollout.engine, resolve=True)),
        "dtype": dtype,
    }
    return Plan(name, task, problems, source, tokenizer, prompt_format, sampling, dtype, identity, parts["output_dir"])


def _decisive(engine: Any) -> dict[str, Any]:
    """The part of an engine's section that may change a number: not its place, timeouts or batch sizes."""
    return {key: value for key, value in engine.items() if key not in INDIFFERENT}


def _prompt_format(run: Path | None, cfg: DictConfig, configured: PromptFormat, overrides: Sequence[str]) -> PromptFormat:
    own = _of_run(run, "rollout.prompt", "prompt") if run is not None else None
    if own is None:
        return configured
    asked: Any = OmegaConf.to_container(cfg.rollout.prompt, resolve=True)
    for override in overrides:
        if match := re.match(r"[+~]*rollout\.prompt\.(\w+)", override):
            own[match[1]] = asked[match[1]]
    return instantiate(own, _convert_="all")


def data_hash(problems: Sequence[Prompt]) -> str:
    """A digest of the problems, in their order."""
    return digest([(problem.uid, problem.text, problem.answer) for problem in problems])


def template_hash(tokenizer: PreTrainedTokenizerBase, prompt_format: PromptFormat) -> str:
    """A digest of what stands around a question: the format, and for a chat the tokenizer's template."""
    chat = getattr(tokenizer, "chat_template", None) if prompt_format.kind == "chat" else None
    return digest(asdict(prompt_format), chat)
