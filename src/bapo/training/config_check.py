"""Everything that can be wrong with a config is said before a model is loaded: unknown keys, wrong types, impossible sizes."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import logging
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from hydra.conf import HydraConf
from hydra.utils import get_object

log = logging.getLogger(__name__)

TOP_LEVEL = {
    "name", "seed", "threads", "resume", "explain", "loss", "objective", "advantage", "policy", "task", "reward", "rollout",
    "schedule", "optimizer", "trainer", "logger", "callbacks",
}  # fmt: skip
COLLECTIONS = {"logger", "callbacks", "reward", "benchmark"}  # groups that hold any number of objects; every other group is one
PLAIN = {"name": str, "seed": int, "threads": int | None, "resume": str | None, "explain": bool}  # at the top: no objects
HYDRA_KEYS = {"_target_", "_partial_", "_convert_", "_recursive_", "_args_"}
MAX_SEED = 2**32 - 1  # the largest that NumPy takes


def check_keys_and_types(config: Mapping[str, Any], top_level: Set[str] = TOP_LEVEL, plain: Mapping[str, Any] = PLAIN) -> None:
    """Every key must be known and every plain value of the right type, or ValueError lists all that is wrong.

    What is known under a key with `_target_` is that callable's signature; elsewhere, at the top, `top_level`, of which
    `plain` are values of the given types.
    """
    errors = [_unknown(key, set(top_level), all_keys(config)) for key in config if key not in top_level]
    errors += [f"{key} is missing" for key in sorted(top_level - config.keys())]
    for name, kind in plain.items():
        if name in config and not fits(config[name], kind):
            errors.append(f"{name} is {config[name]!r}; it must be {_say(kind)}")
    for group in sorted(config.keys() & top_level - plain.keys() - COLLECTIONS):
        if not isinstance(config[group], Mapping) or "_target_" not in config[group]:
            errors.append(f"{group} is {config[group]!r}; it must be {_say(Callable)}")
    for group in sorted(COLLECTIONS & config.keys()):
        errors += _check_collection(group, config[group])
    for path, node in _targets(config, ""):
        errors += _check_call(path, node, config)
    if errors:
        raise ValueError("\n".join(errors))


def _check_collection(group: str, entries: Any) -> list[str]:
    if not isinstance(entries, Mapping):
        return [f"{group} is {entries!r}; it must be a section"]
    return [
        f"{group}.{name} is {entry!r}; it must be {_say(Callable)}, or null, which leaves it out"
        for name, entry in entries.items()
        if entry is not None and (not isinstance(entry, Mapping) or "_target_" not in entry)
    ]


def _targets(node: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(dotted path, node) of every node with a `_target_`."""
    items = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    if isinstance(node, Mapping) and "_target_" in node:
        yield path, node
    for key, value in items:
        yield from _targets(value, f"{path}.{key}" if path else str(key))


def check_sections(config: Mapping[str, Any]) -> None:
    """`check_keys_and_types` for a few sections alone: what has a `_target_` must fit its signature. ValueError in one line."""
    if errors := [error for path, node in _targets(config, "") for error in _check_call(path, node, config)]:
        raise ValueError("; ".join(errors))


def _check_call(path: str, node: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    try:
        target = get_object(node["_target_"])
    except Exception as error:
        reason = " ".join(str(error).splitlines()[:2])
        return [f"{path}._target_ is {node['_target_']!r}, which cannot be imported: {reason}"]
    parameters = inspect.signature(target).parameters
    known = {n for n, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    hints = _hints(target)
    # What is called later may be partial; the rest of Hydra's keys would change how the whole config is built.
    usable = {"_target_", "_partial_"} if path.startswith("logger.") else {"_target_"}
    errors = []
    for key, value in node.items():
        if key in HYDRA_KEYS:
            if key not in usable:
                errors.append(f"{path}.{key} is {value!r}; of Hydra's own keys, only {' and '.join(sorted(usable))} fit here")
        elif key not in known and not open_ended:
            errors.append(_unknown(f"{path}.{key}", {f"{path}.{k}" for k in known}, all_keys(config)))
        elif key in hints and not fits(value, hints[key]):
            errors.append(f"{path}.{key} is {value!r}; it must be {_say(hints[key])}")
    if not node.get("_partial_"):
        required = {n for n in known if parameters[n].default is inspect.Parameter.empty}
        errors += [f"{path}.{key} is missing" for key in sorted(required - node.keys())]
    return errors


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except (NameError, TypeError):  # a library's annotations may name what is not importable
        return {}


def fits(value: Any, hint: Any) -> bool:
    """Is `value`, as YAML gives it, of type `hint`? An object is a section of its own, whose `_target_` is judged apart."""
    origin, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(fits(value, part) for part in parts)
    if origin is typing.Literal:
        return value in parts
    if hint is Any:
        return True
    if hint is types.NoneType or value is None:
        return value is None and hint is types.NoneType
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (str, bool):
        return isinstance(value, hint)
    if origin in (list, tuple, Sequence, Iterable):
        if not isinstance(value, list):
            return False
        fixed = origin is tuple and parts[-1:] != (...,)
        kinds = parts if fixed else parts[:1] * len(value)
        return not parts or (len(kinds) == len(value) and all(map(fits, value, kinds)))
    if dataclasses.is_dataclass(hint):
        return isinstance(value, Mapping) and "_target_" in value
    if origin in (dict, Mapping, Callable):
        return isinstance(value, Mapping)
    return True  # a library's own type: let it judge


def _say(hint: Any) -> str:
    origin, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_say(part) for part in parts)
    if origin is typing.Literal:
        return "one of " + ", ".join(str(choice) for choice in parts)
    if origin is tuple and parts and parts[-1] is not ...:
        return f"[{', '.join(_say(part) for part in parts)}]"
    if origin in (list, tuple, Sequence, Iterable):
        return "a list" + (f" whose every item is {_say(parts[0])}" if parts else "")
    if origin is Callable or dataclasses.is_dataclass(hint):
        return "a section with a _target_"
    names = {float: "a number", int: "an integer", str: "a text", bool: "true or false", types.NoneType: "null"}
    return names.get(hint, "a section" if origin in (dict, Mapping) else str(hint))


def all_keys(node: Any, path: str = "") -> set[str]:
    """Every dotted key of a config."""
    if not isinstance(node, Mapping):
        return set()
    found = set()
    for key, value in node.items():
        dotted = f"{path}.{key}" if path else str(key)
        found |= {dotted} | all_keys(value, dotted)
    return found


def nearest(key: str, known: set[str]) -> str | None:
    """The known dotted key that `key` most likely meant: by its whole, else by its last part."""
    if found := difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.7):
        return found[0]
    last = {k.rpartition(".")[2]: k for k in sorted(known, reverse=True)}
    found = difflib.get_close_matches(key.rpartition(".")[2], sorted(last), n=1, cutoff=0.7)
    return last[found[0]] if found else None


def _unknown(key: str, siblings: set[str], known: set[str]) -> str:
    known = {k for k in known if k != key and not k.startswith(f"{key}.")}
    near = nearest(key, siblings) or nearest(key, known)
    return f"unknown key {key!r}" + (f"; nearest: {near!r}" if near else "") + f"; known here: {', '.join(sorted(siblings))}"


def task_at(message: str, key: str) -> str:
    """`message` of a task, which says `task.path` of a field wherever it stands, with the field's name at `key` of a config."""
    return re.sub(r"(?<![\w.])task\.(?=\w)", f"{key}.", message)


def check_hydra_keys(overrides: Iterable[str]) -> None:
    """Hydra refuses an unknown `hydra.x=1` by itself, but would take `+hydra.x=1` and never use it. Raises ValueError."""
    for override in overrides:
        match = re.match(r"\+\+?(hydra\.[\w.]+)=", override)
        node: Any = HydraConf
        for key in match[1].split(".")[1:] if match else ():
            known = typing.get_type_hints(node) if dataclasses.is_dataclass(node) else {key: Any}
            if match and key not in known:
                raise ValueError(f"unknown key {match[1]!r}; Hydra knows here: {', '.join(sorted(known))}")
            node = known[key]


def check_machine(parts: Mapping[str, Any]) -> None:
    """Whether this machine can train the built objects of a config, whatever they train. Raises ValueError."""
    trainer = parts["trainer"]
    if not 0 <= parts["seed"] <= MAX_SEED:
        raise ValueError(f"seed is {parts['seed']}; it must be in [0, {MAX_SEED}]")
    if parts["threads"] is not None and parts["threads"] < 1:
        raise ValueError(f"threads is {parts['threads']}; it must be >= 1, or null for torch's own choice")
    # A run may be explained on a machine that could not run it.
    if trainer.accelerator == "gpu" and trainer.devices > torch.accelerator.device_count() and not parts.get("explain"):
        found = torch.accelerator.device_count()
        raise ValueError(f"trainer.devices is {trainer.devices} with trainer.accelerator gpu; this machine has {found}")


def _check_splits(task: Any, callbacks: Mapping[str, Any]) -> None:
    """Whether there are prompts to train on and to evaluate, as far as tasks know their splits. Raises ValueError."""
    add = "+task@callbacks.evaluate.benchmarks.NAME=NAME"
    if "train" not in (has := getattr(task, "splits", ("train",))):
        only = ", ".join(has)
        raise ValueError(f"task is {task.name}, which has only {only}: nothing to train on; to be evaluated: {add}")
    for callback in (c for c in callbacks.values() if hasattr(c, "benchmarks") and hasattr(c, "split")):
        for name, asked in (callback.benchmarks or {"": task}).items():
            if callback.split not in (has := getattr(asked, "splits", (callback.split,))):
                where = f"callbacks.evaluate.benchmarks.{name}" if name else f"task {asked.name}"
                other = f"callbacks.evaluate.benchmarks.{name}=null" if name else add
                raise ValueError(
                    f"callbacks.evaluate.split is {callback.split!r}; {where} has only {', '.join(has)}: "
                    f"callbacks.evaluate=null, callbacks.evaluate.split={has[0]} or {other}"
                )


def check_sizes(parts: Mapping[str, Any]) -> None:
    """What fits together and on this machine, over the built objects of a config. Raises ValueError."""
    check_machine(parts)
    _check_splits(parts["task"], parts["callbacks"])
    rollout, schedule = parts["rollout"], parts["schedule"]
    if parts["trainer"].max_rounds is None:
        raise ValueError("trainer.max_rounds is None; it must be >= 1")
    if not parts["explain"] and hasattr(rollout.engine, "require_vllm"):
        rollout.engine.require_vllm()
    if "correctness" in parts["reward"]:
        raise ValueError("reward.correctness is the task's own reward; a term beside it must have another name")
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
    if schedule.lag >= parts["trainer"].max_rounds:
        log.warning(
            "schedule.lag is %d and trainer.max_rounds %d: no round trains on data that old",
            schedule.lag,
            parts["trainer"].max_rounds,
        )
    pool, cut = rollout.prompts_per_round * rollout.group_size, schedule.minibatches_per_epoch
    if pool % cut:
        near = sorted((n for n in range(1, pool + 1) if pool % n == 0), key=lambda n: (abs(n - cut), n))[:4]
        raise ValueError(
            f"schedule.minibatches_per_epoch is {cut}, which does not divide the pool of rollout.prompts_per_round * "
            f"rollout.group_size = {rollout.prompts_per_round} * {rollout.group_size} = {pool} responses; "
            f"{', '.join(str(n) for n in sorted(near))} would"
        )
    lora, engine = parts["policy"].lora, rollout.engine
    if getattr(engine, "lora_sync", "merged") == "native":
        if lora is None:
            raise ValueError("rollout.engine.lora_sync is 'native'; without policy.lora it must be merged")
        if lora.r > engine.max_lora_rank:
            raise ValueError(f"policy.lora.r is {lora.r}; it must be <= rollout.engine.max_lora_rank, {engine.max_lora_rank}")
        if lora.modules_to_save:
            raise ValueError(f"policy.lora.modules_to_save is {lora.modules_to_save}; with lora_sync native it must be empty")
    sampling = rollout.sampling
    if sampling.top_p < 1 or sampling.top_k > 0:
        log.warning("rollout.sampling uses top_p or top_k: sampled and scored distributions differ, so ratios mix the two")
