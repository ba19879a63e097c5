"""Short words of evaluate.py's command line, such as `policy=PATH`, spelled out for Hydra."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from bapo.training.cli import CONF

NEEDS_PATH = "hub"
"""The file of conf/policy that makes nothing by itself."""


def spelled_out(overrides: Sequence[str]) -> list[str]:
    """A command line with `policy=PATH` as `policy.path=PATH`, `policy=NAME` of a policy made here as the embedded one, and
    `revision=` as `policy.revision=`.

    A path with a `=` in it, as a checkpoint's, is quoted for Hydra.
    """
    long = []
    for override in overrides:
        if match := re.fullmatch(r"(\+*)(policy|policy\.path)=(.*)", override):
            if match[2] == "policy" and match[3] in _names():
                long.append(f"policy@embedded={match[3]}")
                continue
            quoted = "=" in match[3] and not re.search(r"[\"',$\[\]{}]", match[3])
            override = f"policy.path={json.dumps(match[3], ensure_ascii=False) if quoted else match[3]}"
        long.append(re.sub(r"^\+*revision=", "policy.revision=", override))
    return long


def check_words(overrides: Sequence[str]) -> None:
    """ValueError for what belongs to other entry points, over a command line that is spelled out."""
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        if key in ("policy@embedded", "policy.path") and value == NEEDS_PATH:
            raise ValueError(f"policy is {value!r}, which names no model; here it is policy=PATH_OR_HUB_ID itself")
        if re.match(r"task(\.|$)", key):
            name = value if key == "task" and value else "NAME"
            keys = f"benchmark={name} benchmark.{name}.KEY=..."
            raise ValueError(
                f"{override} is of train.py; what is evaluated here is a benchmark, whose keys are the task's: {keys}"
            )


def _names() -> set[str]:
    return {path.stem for path in (CONF / "policy").glob("*.yaml")} - {NEEDS_PATH}
