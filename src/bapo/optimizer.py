"""Optimizer and learning-rate schedule: any of torch's, any of transformers', built and checked."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
MakeSchedule = Callable[..., Any]
"""Called with `optimizer` and, if its signature has it, `num_training_steps`: transformers.get_scheduler, a torch scheduler."""


def build_schedule(make: MakeSchedule | None, optimizer: torch.optim.Optimizer, total_updates: int) -> Any:
    """The learning-rate schedule of a run of `total_updates`; None: a constant rate.

    A schedule of transformers counts from 0, where a warm-up's factor is 0; it is moved to 1 before the first update, so that
    update k of a warm-up over n uses k / n of the rate.
    """
    if make is None:
        return LambdaLR(optimizer, lambda step: 1.0)
    if "num_training_steps" not in inspect.signature(make).parameters:
        return make(optimizer=optimizer)
    schedule = make(optimizer=optimizer, num_training_steps=total_updates + 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        schedule.step()
    return schedule


NUMBERS = ("lr", "betas", "eps", "weight_decay", "momentum")


def check_optimizer(make: Any) -> torch.optim.Optimizer:
    """The optimizer of one parameter. ValueError for arguments that it refuses."""
    if not callable(make):
        raise ValueError("optimizer._partial_ must be true: the parameters come later")
    lr = getattr(make, "keywords", {}).get("lr", 1.0)
    if not isinstance(lr, int | float) or isinstance(lr, bool) or not 0 < lr < math.inf:
        raise ValueError(f"optimizer.lr is {lr!r}; it must be a number > 0 and finite")
    given = getattr(make, "keywords", {})
    for name, value in ((name, given[name]) for name in NUMBERS if name in given):
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, str) or (isinstance(number, float) and not math.isfinite(number)):
                verb = "holds" if isinstance(value, list | tuple) else "is"
                raise ValueError(f"optimizer.{name} {verb} {number!r}; it must be a finite number")
    try:
        return make([torch.nn.Parameter(torch.zeros(1))])
    except (TypeError, ValueError) as error:
        raise ValueError(f"optimizer is refused by {_name(make)}: {error}") from error


def check_schedule(make: Any, optimizer: torch.optim.Optimizer) -> None:
    """ValueError for arguments that the schedule refuses."""
    if not callable(make):
        raise ValueError("lr_schedule._partial_ must be true: the optimizer comes later")
    try:
        build_schedule(make, optimizer, 1)
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(f"lr_schedule is refused by {_name(make)}: {error}") from error


def _name(make: Any) -> str:
    return getattr(getattr(make, "func", make), "__name__", str(make))
