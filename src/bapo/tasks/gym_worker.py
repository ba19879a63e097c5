"""A process that makes and scores the questions of the package reasoning_gym for `bapo.tasks.reasoning_gym`.

A process of its own, since a scorer may run for ever on what a model writes, and since some generators depend on Python's hash
seed, which workers share.

python -m bapo.tasks.gym_worker FD PARENT: as `bapo.tasks.verify_worker`.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

from bapo.tasks.verify_worker import main


def load() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Answers questions of two kinds: make the items [start, stop) of a data set, or score `answer` to item `index`."""
    import reasoning_gym

    @lru_cache(maxsize=8)
    def made(dataset: str, config: str) -> Any:
        return reasoning_gym.create_dataset(dataset, **json.loads(config))

    @lru_cache(maxsize=64)  # a group asks for the same one many times
    def item(dataset: str, config: str, index: int) -> Any:
        return made(dataset, config)[index]

    def reply(question: dict[str, Any]) -> dict[str, Any]:
        which = (question["dataset"], question["config"])
        try:
            made(*which)
        except Exception as error:
            return {"refused": _unknown(question["dataset"], reasoning_gym.factory.DATASETS) or _said(error)}
        try:
            if "index" in question:
                score = made(*which).score_answer(question["answer"], item(*which, question["index"]))
                return {"score": float(score)}
            items = [made(*which)[index] for index in range(question["start"], question["stop"])]
            return {"items": [(one["question"], "" if one["answer"] is None else str(one["answer"])) for one in items]}
        except MemoryError:
            return {"gave_up": "out of memory", "last": True}
        except Exception as error:
            return {"raised": _said(error)}

    return reply


def _unknown(dataset: str, known: Iterable[str]) -> str | None:
    """Which data sets were meant, if there is none of that name."""
    names = sorted(known)
    if dataset in names:
        return None
    near = difflib.get_close_matches(dataset, names, n=3, cutoff=0.5) or [name for name in names if dataset in name][:3]
    return f"reasoning_gym has no data set of that name; nearest: {', '.join(near) or 'none'} ({len(names)} in all)"


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


if __name__ == "__main__":
    try:
        main(Connection(int(sys.argv[1])), int(sys.argv[2]), load, "reasoning_gym")
    except (EOFError, OSError):
        sys.exit()
