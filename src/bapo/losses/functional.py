"""Bounds and loss in one call, for other trainers: tensors in, `ClipBounds` or a loss out. Needs torch alone.

    bounds = search_clip_bounds(
        logprobs=new, behaviour_logprobs=old, advantages=advantages, response_mask=mask, preset="bapo_reference"
    )
    loss, bounds = bapo_loss(logprobs=new, behaviour_logprobs=old, advantages=advantages, response_mask=mask, mass="surrogate")

Bounds belong to a whole optimizer update. If it is cut into micro-batches or over ranks, search once over all of it and give
`bapo_loss` those bounds and the token count of the whole; or add up `PRESETS[name].tally` of the parts and call `choose` once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from bapo.losses.bapo import BapoLoss
from bapo.losses.clip_bounds import BoundRange
from bapo.types import ClipBounds, LossInputs

_PAPER = BapoLoss(0.4, BoundRange(0.6, 0.9, 0.02), BoundRange(1.2, 3.0, 0.05))
_REFERENCE = BapoLoss(
    target_positive_ratio=0.5,
    clip_low=BoundRange(0.6, 0.8, 0.05),
    clip_high=BoundRange(1.2, 2.0, 0.05),
    search_order="low_first",
    mass="surrogate",
    dual_clip=3.0,
    dual_clip_in_search=False,
)

PRESETS: dict[str, BapoLoss] = {
    "bapo": _PAPER,
    "bapo_eq8": replace(_PAPER, mass="surrogate", weight="behaviour_prob"),
    "bapo_octothinker": replace(
        _PAPER, target_positive_ratio=0.45, clip_low=BoundRange(0.8, 0.9, 0.02), clip_high=BoundRange(1.2, 2.0, 0.05)
    ),
    "bapo_trinity": replace(_PAPER, dual_clip=3.0),
    "bapo_reference": _REFERENCE,
    "bapo_reference_script": replace(
        _REFERENCE,
        target_positive_ratio=1 / 3,
        clip_low=BoundRange(0.8, 0.95, 0.05),
        clip_high=BoundRange(1.2, 2.0, 0.1),
    ),
    "bapo_reference_readme": replace(_REFERENCE, clip_low=BoundRange(0.6, 0.9, 0.05), clip_high=BoundRange(1.2, 3.0, 0.05)),
}
"""conf/loss/<name>.yaml as objects. The YAML files own the numbers and say their sources; a test keeps these equal to them."""


OPTIONS = tuple(f.name for f in fields(BapoLoss) if f.name != "bounds_scope")
"""Arguments that replace values of a preset; see `BapoLoss`. A range is (start, stop, step), (value, value) or a number."""


def search_clip_bounds(
    *,
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    weights: Tensor | None = None,
    preset: str = "bapo",
    **options: Any,
) -> ClipBounds:
    """The clip bounds that `preset`, with `options` instead of its values, chooses for one update. 0-dim tensors, no graph.

    logprobs, behaviour_logprobs: [B, T], nats, at the sampling temperature; advantages: [B] or [B, T];
    response_mask: [B, T], bool, integer or float, trained where it is not 0; weights: [B, T] or None, a token's weight >= 0.
    Nothing is read back to the host: `.clip_low`, `.clip_high` and `.positive_ratio` are tensors, `.metrics` a dict of them.
    Errors: ValueError for shapes that do not fit, log-probs in half precision, an unknown preset or option, a bad value.
    """
    inputs = _loss_inputs(logprobs, behaviour_logprobs, advantages, response_mask, weights)
    loss = _configured(preset, options)
    return loss.choose(loss.tally(inputs))


def bapo_loss(
    *,
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    weights: Tensor | None = None,
    bounds: ClipBounds | None = None,
    denominator: Tensor | float | None = None,
    preset: str = "bapo",
    **options: Any,
) -> tuple[Tensor, ClipBounds]:
    """(loss, bounds): the clipped surrogate at the searched bounds, 0-dim, differentiable in `logprobs`.

    Arguments and errors as for `search_clip_bounds`. bounds: those of the whole update; None: searched on these tokens.
    denominator: the count >= 1 that the token sum is divided by; None: the number of these tokens that are trained.
    """
    inputs = _loss_inputs(logprobs, behaviour_logprobs, advantages, response_mask, weights)
    loss = _configured(preset, options)
    if bounds is None:
        bounds = loss.choose(loss.tally(inputs))
    if isinstance(denominator, int | float) and not 1 <= denominator < math.inf:
        raise ValueError(f"denominator is {denominator}; it must be a finite count >= 1")
    if isinstance(denominator, Tensor) and denominator.dim():
        raise ValueError(f"denominator has shape {tuple(denominator.shape)}; it must be 0-dim")
    count = inputs.response_mask.sum() if denominator is None else torch.as_tensor(denominator, device=logprobs.device)
    return loss(inputs, bounds, count).loss, bounds


def _configured(preset: str, options: dict[str, Any]) -> BapoLoss:
    if preset not in PRESETS:
        raise ValueError(f"preset is {preset!r}; it must be one of {', '.join(PRESETS)}")
    if unknown := sorted(options.keys() - set(OPTIONS)):
        raise ValueError(f"{unknown[0]} is not an option; it must be one of {', '.join(OPTIONS)}")
    changes = dict(options)
    for name in ("clip_low", "clip_high"):
        if name in changes and not isinstance(changes[name], BoundRange):
            changes[name] = _bound_range(name, changes[name])
    for name, value in changes.items():
        wanted = type(getattr(_PAPER, name))
        fits = isinstance(value, int | float) and not isinstance(value, bool) if wanted is float else isinstance(value, wanted)
        if not fits and wanted in (float, bool, str):
            raise ValueError(f"{name} is {value!r}; it must be of type {wanted.__name__}")
    return replace(PRESETS[preset], **changes)


def _bound_range(name: str, values: Sequence[float] | float) -> BoundRange:
    if isinstance(values, int | float):
        values = (values, values)
    if isinstance(values, str) or len(values) not in (2, 3):
        raise ValueError(f"{name} is {values!r}; it must be (start, stop, step), or a number to pin it")
    try:
        return BoundRange(*values)
    except ValueError as error:
        raise ValueError(f"{name}.{error}") from None


def _loss_inputs(
    logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, response_mask: Tensor, weights: Tensor | None
) -> LossInputs:
    """Checked tensors, all [B, T]; only `logprobs` keeps its graph: a behaviour policy with one would cancel the gradient."""
    if logprobs.dim() != 2:
        raise ValueError(f"logprobs has shape {tuple(logprobs.shape)}; it must be [B, T]")
    shape = tuple(logprobs.shape)
    others = {"behaviour_logprobs": behaviour_logprobs, "response_mask": response_mask, "weights": weights}
    for name, value in others.items():
        if value is not None and tuple(value.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be {shape}, the shape of logprobs")
    if tuple(advantages.shape) not in (shape, shape[:1]):
        raise ValueError(f"advantages has shape {tuple(advantages.shape)}; it must be {shape[:1]} or {shape}")
    for name, value in {"logprobs": logprobs, "behaviour_logprobs": behaviour_logprobs}.items():
        if value.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{name} is {value.dtype}; it must be torch.float32 or torch.float64: a ratio needs their digits")
    per_token = advantages if advantages.dim() == 2 else advantages[:, None].expand(shape)
    return LossInputs(
        logprobs=logprobs,
        behaviour_logprobs=behaviour_logprobs.detach(),
        advantages=per_token.detach().to(logprobs.dtype),
        response_mask=response_mask != 0,
        weights=None if weights is None else weights.detach(),
    )
