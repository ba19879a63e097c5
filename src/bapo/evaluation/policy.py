"""Finds the policy that a path, a hub id or nothing names, and writes it as a folder that any engine reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from transformers import AutoConfig

from bapo.export import policy_config, policy_options, trained_policy, write_model
from bapo.files import digest, file_digest
from bapo.policy.folder_cache import MARK, kept_folder
from bapo.policy.options import PolicyOptions
from bapo.sft.warm_start import Untrained, WarmStart
from bapo.training.resume import checkpoint_steps, newest_checkpoint, read_checkpoint
from bapo.training.run_folder import folder_name

MODEL_FILES = {".safetensors", ".bin", ".json", ".txt", ".model", ".jinja"}


@dataclass(frozen=True)
class PolicySource:
    """A policy that can be evaluated, found but not loaded.

    name: one path component. path: as the user named it. fingerprint: of what it computes; equal ones are the same policy.
    step: completed optimizer updates, where that is known. like: a folder or hub id with its tokenizer and its sizes. folder:
    called when weights are needed, for a folder or hub id that every engine reads; it may load and write a model.
    load: what goes with either wherever something is loaded from it. positions: the most tokens of a sequence, if it says.
    run: the folder of the run that trained it. of_task: a small model of one task's characters.
    """

    name: str
    path: str
    fingerprint: str
    like: str | Path
    folder: Callable[[], str | Path]
    load: Mapping[str, Any]
    dtype: str = "float32"
    step: int | None = None
    positions: int | None = None
    run: Path | None = field(default=None)
    of_task: bool = False


@dataclass(frozen=True)
class PolicyChoice:
    """path: a model folder, a hub id (with `revision`), a run folder or a checkpoint in one; None for the embedded policy.

    dtype: of the weights that are evaluated; None: as trained, float32 where that is not known.
    """

    path: str | None = None
    revision: str | None = None
    dtype: Literal["float32", "bfloat16"] | None = None
    trust_remote_code: bool = False


def find_policy(choice: PolicyChoice, task: Any, embedded: PolicyOptions, made: str, cache_dir: str) -> PolicySource:
    """The policy that is meant; `embedded`, whose name is `made`, where no path is given.

    What a run has trained is written as a model folder under `cache_dir` when weights are needed, and kept. ValueError for what
    is none of these, and for a `task` for which there is no embedded policy.
    """
    policy, revision = choice.path, choice.revision
    load = {"revision": revision, "trust_remote_code": choice.trust_remote_code}
    if policy is None:
        if revision is not None:
            raise ValueError(f"policy.revision is {revision!r}; it goes with a hub id, and policy.path is null")
        folder = embedded.model_path(task)
        mark = fingerprint(folder)
        source = PolicySource(made, made, mark, folder, lambda: folder, load, embedded.dtype, of_task=of_task(embedded))
        return _with_positions(source)
    path = Path(os.path.expanduser(policy))
    if not path.exists() and not policy.startswith((".", "/", "~")) and path.suffix != ".ckpt":
        return _hub(policy, load)
    if revision is not None:
        raise ValueError(f"policy.revision is {revision!r}; it goes with a hub id, and policy.path is {policy!r}")
    if path.suffix == ".ckpt" and path.is_file():
        return _trained(policy, path.absolute().parent.parent, path.absolute(), cache_dir)
    if (path / "config.json").is_file():
        named = folder_name(path.absolute().name)
        return _with_positions(PolicySource(named, policy, fingerprint(path), path, lambda: path, load))
    if (path / "config.yaml").is_file():
        return _trained(policy, path.absolute(), None, cache_dir)
    if (path / "adapter_config.json").is_file():
        raise ValueError(f"policy.path is {policy!r}, an adapter alone; a whole model: python -m bapo.export RUN_DIR OUT")
    raise ValueError(
        f"policy.path is {policy!r}; it must be a model folder (config.json), a run folder, a checkpoint or a hub id"
    )


def of_task(options: PolicyOptions) -> bool:
    """True for a small model made of a task's own characters."""
    return isinstance(options.warm_start, WarmStart | Untrained)


def _with_positions(source: PolicySource) -> PolicySource:
    return replace(source, positions=getattr(_config(source).get_text_config(), "max_position_embeddings", None))


def _config(source: PolicySource) -> Any:
    try:
        return AutoConfig.from_pretrained(str(source.like), **source.load)
    except Exception as error:  # no network, no such model, broken JSON: each with a class of its own
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise ValueError(f"policy.path is {source.path!r}; no model could be loaded from it: {reason}") from error


def _hub(policy: str, load: Mapping[str, Any]) -> PolicySource:
    """A model of the hub at the commit that its revision means now."""
    source = PolicySource(folder_name(policy), policy, "", policy, lambda: policy, load)
    commit = getattr(_config(source), "_commit_hash", None) or load["revision"] or "newest"
    pinned = {**load, "revision": None if commit == "newest" else commit}
    return _with_positions(replace(source, fingerprint=f"{policy}@{commit}", load=pinned))


def _trained(policy: str, run: Path, checkpoint: Path | None, cache_dir: str) -> PolicySource:
    config = policy_config(run)
    options, base = policy_options(config)
    checkpoint = checkpoint or newest_checkpoint(run)
    if checkpoint is None:
        raise ValueError(f"policy.path is {policy!r}; there is no checkpoint in that run folder")
    step = checkpoint_steps(checkpoint.parent).get(checkpoint)
    if step is None:
        step = int(read_checkpoint(checkpoint)["global_step"])
    # A checkpoint of adapters is a policy together with the model below them.
    below = (fingerprint(base) if Path(base).exists() else f"{base}@{options.revision}") if options.lora else None
    mark = digest(file_digest(checkpoint), config["policy"].get("lora"), below, options.dtype)

    def build(folder: Path) -> dict[str, Any]:
        trained = trained_policy(run, config, options, base, checkpoint)
        write_model(trained, options, base, folder)
        return {"run": str(run), "step": step}

    source = PolicySource(
        name=folder_name(f"{run.parent.name}_{run.name}"),
        path=policy,
        fingerprint=mark,
        like=base,
        folder=cache(lambda: kept_folder(cache_dir, f"trained_{mark}", build, "trained policy")),
        load=options.source,
        dtype=options.dtype,
        step=step,
        run=run,
        of_task=of_task(options),
    )
    return _with_positions(source)


def fingerprint(folder: str | Path) -> str:
    """A digest of the files that make a model folder, their names included; notes about it do not count."""
    files = sorted(p for p in Path(folder).iterdir() if p.suffix in MODEL_FILES and p.name != MARK and p.is_file())
    return digest([(path.name, file_digest(path)) for path in files])
