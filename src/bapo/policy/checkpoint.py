"""A checkpoint holds the weights that training changes; the frozen ones come from the model that the policy was made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def without_base(module: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Takes the frozen weights of `module` out of `checkpoint["state_dict"]`; `checkpoint["base"]` is their fingerprint."""
    if frozen := _frozen(module):
        checkpoint["state_dict"] = {name: value for name, value in checkpoint["state_dict"].items() if name not in frozen}
        checkpoint["base"] = fingerprint(frozen)


def with_base(module: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Puts the frozen weights of `module` into `checkpoint["state_dict"]`, which then is whole.

    Raises ValueError unless the checkpoint holds exactly the other weights of `module` and was made over the same frozen ones.
    """
    frozen, saved = _frozen(module), checkpoint["state_dict"]
    own = {name: value for name, value in module.state_dict().items() if name not in frozen}
    faults = [
        f"only in the {where}: {', '.join(sorted(names)[:3])} ({len(names)} in all)"
        for where, names in (("checkpoint", saved.keys() - own.keys()), ("policy", own.keys() - saved.keys()))
        if names
    ]
    resized = [name for name in sorted(saved.keys() & own.keys()) if saved[name].shape != own[name].shape]
    for name in resized[:1]:
        shapes = f"{list(saved[name].shape)} in the checkpoint and {list(own[name].shape)} in the policy"
        faults.append(f"{name} is {shapes} ({len(resized)} such)")
    if not faults and frozen and checkpoint.get("base") != fingerprint(frozen):
        faults = ["its adapter was trained on other base weights than the policy's"]
    if faults:
        raise ValueError(f"the checkpoint does not fit the policy: {'; '.join(faults)}")
    checkpoint["state_dict"] = saved | {name: value for name, value in module.state_dict().items() if name in frozen}


def _frozen(module: nn.Module) -> dict[str, nn.Parameter]:
    named = module.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in named if not parameter.requires_grad}


@torch.no_grad()
def fingerprint(parameters: dict[str, nn.Parameter]) -> int:
    """A number that depends on the parameters' names and bits, not on the device nor on the order inside a parameter."""
    total = 0
    for name in sorted(parameters):
        raw = parameters[name].contiguous().view(-1).view(torch.uint8)
        raw = raw.clone() if raw.storage_offset() % 8 else raw
        words = raw.numel() // 8 * 8  # eight bytes at a time is fast, and a flipped bit still changes the sum
        bits = int(raw[:words].view(torch.int64).sum()) + int(raw[words:].sum())
        total = (total * 1_000_003 + bits) % 2**61
    return total
