"""Everything that can be wrong with a config is said before a model is loaded: unknown keys, wrong types, impossible sizes."""

from __future__ import annotations

import difflib
import inspect
import logging
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hydra.utils import get_object

log = logging.getLogger(__name__)

TOP_LEVEL = {
    "name", "seed", "threads", "resume", "loss", "advantage", "policy", "task", "rollout", "schedule", "optimizer", "trainer",
    "logger", "callbacks",
}  # fmt: skip
HYDRA_KEYS = {"_target_", "_partial_", "_convert_", "_recursive_", "_args_"}


def check_keys_and_types(config: Mapping[str, Any]) -> None:
    """Every key must be known and every plain value of the right type, or ValueError lists all that is wrong.

    What is known under a key with `_target_` is that callable's signature; elsewhere, at the top, `TOP_LEVEL`.
    """
    errors = [_unknown(key, TOP_LEVEL, all_keys(config)) for key in config if key not in TOP_LEVEL]
    for name, kind in (("name", str), ("seed", int), ("threads", int | None), ("resume", str | None)):
        if not fits(config.get(name), kind):
            errors.append(f"{name} is {config.get(name)!r}; it must be {_say(kind)}")
    for path, node in _targets(config, ""):
        errors += _check_call(path, node, config)
    if errors:
        raise ValueError("\n".join(errors))


def _targets(node: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(dotted path, node) of every node with a `_target_`."""
    items = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    if isinstance(node, Mapping) and "_target_" in node:
        yield path, node
    for key, value in items:
        yield from _targets(value, f"{path}.{key}" if path else str(key))


def _check_call(path: str, node: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    try:
        target = get_object(node["_target_"])
    except Exception as error:
        return [f"{path}._target_ is {node['_target_']!r}, which cannot be imported: {error}"]
    parameters = inspect.signature(target).parameters
    known = {n for n, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    hints = _hints(target)
    errors = []
    for key, value in node.items():
        if key in HYDRA_KEYS:
            continue
        if key not in known and not open_ended:
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
    """Is `value`, as YAML gives it, of type `hint`? Only plain types are judged; what they are nested in is let through."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return any(fits(value, part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    if hint is None or hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (str, bool):
        return isinstance(value, hint)
    return value is None or not isinstance(value, str | bool | int | float) or hint not in _containers(hint)


def _containers(hint: Any) -> tuple[Any, ...]:
    return (hint,) if typing.get_origin(hint) in (tuple, list, dict) or hint in (tuple, list, dict) else ()


def _say(hint: Any) -> str:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " or ".join(_say(part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(str(choice) for choice in typing.get_args(hint))
    names = {float: "a number", int: "an integer", str: "a text", bool: "true or false", type(None): "null", None: "null"}
    return names.get(hint, str(hint))


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


def check_sizes(parts: Mapping[str, Any]) -> None:
    """What fits together, over the built objects of a config. Raises ValueError."""
    rollout, schedule = parts["rollout"], parts["schedule"]
    if rollout.group_size < 2:
        raise ValueError(
            f"rollout.group_size is {rollout.group_size}; a group-relative advantage compares responses to one prompt: >= 2"
        )
    pool, cut = rollout.prompts_per_round * rollout.group_size, schedule.minibatches_per_epoch
    if pool % cut:
        near = sorted((n for n in range(1, pool + 1) if pool % n == 0), key=lambda n: (abs(n - cut), n))[:4]
        raise ValueError(
            f"schedule.minibatches_per_epoch is {cut}, which does not divide the pool of rollout.prompts_per_round * "
            f"rollout.group_size = {rollout.prompts_per_round} * {rollout.group_size} = {pool} responses; "
            f"{', '.join(str(n) for n in sorted(near))} would"
        )
    sampling = rollout.sampling
    if sampling.top_p < 1 or sampling.top_k > 0:
        log.warning("rollout.sampling uses top_p or top_k: sampled and scored distributions differ, so ratios mix the two")
