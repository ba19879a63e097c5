"""Unknown keys and wrong types of a config, named before anything is built."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from hydra.conf import HydraConf
from hydra.utils import get_object

from bapo.training.trainer import read_trainer, unknown_flags

TOP_LEVEL = {
    "name", "tags", "seed", "threads", "resume", "resume_from", "allow_changes", "explain", "optimized_metric", "loss",
    "objective", "advantage", "policy", "task", "reward", "rollout", "schedule", "optimizer", "lr_schedule", "trainer",
    "logger", "callbacks",
}  # fmt: skip
COLLECTIONS = {"logger", "callbacks", "reward", "benchmark"}  # groups that hold any number of objects; every other group is one
HEAVY = {"callbacks", "lr_schedule", "logger", "trainer"}  # their classes take seconds to import: checked and built last
CALLED_LATER = {"optimizer", "lr_schedule"}  # groups of one class each, whose files differ in all their keys
OPTIONAL = {"lr_schedule"}  # groups that may be null
PLAIN = {
    "name": str, "tags": list[str], "seed": int, "threads": int | None, "resume": str | None, "explain": bool,
    "resume_from": int | str | None, "allow_changes": bool, "optimized_metric": str | None,
}  # fmt: skip
"""Keys at the top that are values, not objects."""
HYDRA_KEYS = {"_target_", "_partial_", "_convert_", "_recursive_", "_args_"}
FILLED_IN = {"save_dir", "dirpath", "resume_step"}  # of a logger or callback: the run folder and the checkpoint's step


def check_keys_and_types(config: Mapping[str, Any], top_level: Set[str] = TOP_LEVEL, plain: Mapping[str, Any] = PLAIN) -> None:
    """Every key must be known and every plain value of the right type, or ValueError lists all that is wrong.

    Keys under a `_target_` must fit that callable's signature; those of `HEAVY` sections follow in `check_heavy_calls`.
    """
    errors = [_unknown(key, set(top_level), all_keys(config)) for key in config if key not in top_level]
    errors += [f"{key} is missing" for key in sorted(top_level - config.keys())]
    for name, kind in plain.items():
        if name in config and not fits(config[name], kind):
            errors.append(f"{name} is {config[name]!r}; it must be {_say(kind)}")
    for group in sorted(config.keys() & top_level - plain.keys() - COLLECTIONS):
        if not _is_call(config[group]) and not (group in OPTIONAL and config[group] is None):
            errors.append(f"{group} is {config[group]!r}; it must be {_say(Callable)}")
    for group in sorted(COLLECTIONS & config.keys()):
        errors += _check_collection(group, config[group])
    if _is_call(config.get("trainer")):
        try:
            read_trainer(config["trainer"])
        except (TypeError, ValueError) as error:
            errors.append(str(error))
    errors += _check_calls(config, light=True)
    if errors:
        raise ValueError("\n".join(errors))


def check_heavy_calls(config: Mapping[str, Any]) -> None:
    """ValueError for keys that do not fit the signature of a library's or a user's own callable, or of a callback."""
    if errors := _check_calls(config, light=False):
        raise ValueError("\n".join(errors))


def _check_calls(config: Mapping[str, Any], light: bool) -> list[str]:
    errors = []
    for path, node in _targets(config, ""):
        section = path.split(".")[0]
        if section != "trainer" and (section not in HEAVY) is light:  # the trainer's flags have a check of their own
            errors += _check_call(path, node, config)
    return errors


def check_trainer_flags(flags: Mapping[str, Any]) -> None:
    """ValueError for flags of `trainer` that its class does not know."""
    unknown, known = unknown_flags(flags)
    if unknown:
        siblings = {f"trainer.{name}" for name in known}
        raise ValueError("\n".join(_unknown(f"trainer.{name}", siblings, siblings) for name in sorted(unknown)))


def _is_call(node: Any) -> bool:
    return isinstance(node, Mapping) and "_target_" in node


def _check_collection(group: str, entries: Any) -> list[str]:
    if not isinstance(entries, Mapping):
        return [f"{group} is {entries!r}; it must be a section"]
    return [
        f"{group}.{name} is {entry!r}; it must be {_say(Callable)}, or null, which leaves it out"
        for name, entry in entries.items()
        if entry is not None and not _is_call(entry)
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
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return []
    known = {n for n, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    hints = _hints(target)
    errors = []
    for key, value in node.items():
        if key == "_partial_" and value and str(node["_target_"]).startswith("bapo."):
            errors.append(f"{path}._partial_ is {value!r}; {node['_target_']} is built whole")
        if key in HYDRA_KEYS:
            continue
        if key not in known and not open_ended and path in CALLED_LATER:
            hint = f"another file of conf/{path} has the keys of its class, or ~{path}.{key} removes it"
            errors.append(f"{path}.{key} is {value!r}; {node['_target_']} takes {', '.join(sorted(known))}: {hint}")
        elif key not in known and not open_ended:
            errors.append(_unknown(f"{path}.{key}", {f"{path}.{k}" for k in known}, all_keys(config)))
        elif key in hints and not fits(value, hints[key]):
            errors.append(f"{path}.{key} is {value!r}; it must be {_say(hints[key])}")
    if not node.get("_partial_") and "_args_" not in node:
        required = {n for n in known if parameters[n].default is inspect.Parameter.empty} - FILLED_IN
        errors += [f"{path}.{key} is missing" for key in sorted(required - node.keys())]
    return errors


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except (NameError, TypeError):  # a library's annotations may name what is not importable
        return {}


def fits(value: Any, hint: Any) -> bool:
    """True if `value`, as YAML gives it, can be of type `hint`; a library's own types are left to the library."""
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
    return True  # a library's own type checks itself


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
