"""Search and loss in one call, as another trainer uses them."""

from dataclasses import fields, replace

import pytest
import torch
from support.losses import CASES, golden_inputs, random_inputs
from torch import Tensor

from bapo.losses import PRESETS, BapoLoss, BoundRange, bapo_loss, search_clip_bounds
from bapo.losses.functional import OPTIONS
from bapo.types import ClipBounds, LossInputs


def as_arguments(inputs: LossInputs) -> dict[str, Tensor]:
    return {field.name: getattr(inputs, field.name) for field in fields(inputs)}


def same(one: ClipBounds, other: ClipBounds) -> bool:
    values = [[b.clip_low, b.clip_high, b.positive_ratio, *b.metrics.values()] for b in (one, other)]
    return one.metrics.keys() == other.metrics.keys() and all(map(torch.equal, *values))


FOUR = {
    "logprobs": torch.tensor([[2.5, 0.5, 1, 1]], dtype=torch.float64).log(),
    "behaviour_logprobs": torch.zeros(1, 4, dtype=torch.float64),
    "advantages": torch.tensor([[1.0, -1, -1, -1]]),
    "response_mask": torch.ones(1, 4),
}


def test_public_example() -> None:
    bounds = search_clip_bounds(
        **FOUR,
        target_positive_ratio=0.4,
        clip_low=(0.6, 0.9, 0.02),
        clip_high=(1.2, 3.0, 0.05),
        search_order="high_first",
        mass="surrogate",
    )
    assert (bounds.clip_low.item(), bounds.clip_high.item()) == pytest.approx((0.6, 1.75), abs=1e-12)
    assert bounds.positive_ratio is not None
    assert bounds.positive_ratio.item() == pytest.approx(0.4022988506, abs=1e-9)
    signed = search_clip_bounds(**FOUR, mass="surrogate", balance="signed")
    assert (signed.clip_low.item(), signed.clip_high.item()) == (0.6, 1.2)
    assert signed.positive_ratio is not None
    assert signed.positive_ratio.item() == pytest.approx(1.2 / 1.4, abs=1e-9)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_searches_and_loses_as_its_loss_does(name: str) -> None:
    for case in CASES[::4]:
        inputs, loss = golden_inputs(case), PRESETS[name]
        bounds = loss.choose(loss.tally(inputs))
        assert same(search_clip_bounds(**as_arguments(inputs), preset=name), bounds)
        value, found = bapo_loss(**as_arguments(inputs), preset=name)
        assert same(found, bounds)
        assert torch.equal(value, loss(inputs, bounds, inputs.response_mask.sum()).loss)


def test_golden_loss_of_the_authors_code() -> None:
    for case in CASES:
        value, _ = bapo_loss(**as_arguments(golden_inputs(case)), preset="bapo_reference")
        assert value.item() == pytest.approx(case["expect"]["reference_yaml"]["loss"], abs=1e-6)


def test_without_a_preset_options_change_the_papers_values() -> None:
    inputs = random_inputs(0)
    assert same(search_clip_bounds(**as_arguments(inputs)), search_clip_bounds(**as_arguments(inputs), preset="bapo"))
    loss = BapoLoss(0.55, BoundRange(0.7, 0.7), BoundRange(1.1, 1.9, 0.2), "low_first", dual_clip=2.0)
    found = search_clip_bounds(
        **as_arguments(inputs),
        target_positive_ratio=0.55,
        clip_low=(0.7, 0.7),
        clip_high=BoundRange(1.1, 1.9, 0.2),
        search_order="low_first",
        dual_clip=2.0,
    )
    assert same(found, loss.choose(loss.tally(inputs)))


def test_the_options_are_those_of_the_loss() -> None:
    assert set(OPTIONS) == {field.name for field in fields(BapoLoss)} - {"bounds_scope"}
    options = {name: getattr(PRESETS["bapo_reference"], name) for name in OPTIONS}
    assert same(search_clip_bounds(**FOUR, **options), search_clip_bounds(**FOUR, preset="bapo_reference"))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.uint8])
def test_masks_of_any_type_and_advantages_per_sequence(dtype: torch.dtype) -> None:
    inputs = random_inputs(2)
    per_sequence = inputs.advantages[:, 0]
    expected = replace(inputs, advantages=per_sequence[:, None].expand_as(inputs.logprobs))
    arguments = as_arguments(inputs) | {"advantages": per_sequence, "response_mask": inputs.response_mask.to(dtype)}
    assert same(search_clip_bounds(**arguments), search_clip_bounds(**as_arguments(expected)))
    assert torch.equal(bapo_loss(**arguments)[0], bapo_loss(**as_arguments(expected))[0])


def test_micro_batches_with_the_bounds_and_count_of_the_whole_add_up() -> None:
    inputs = random_inputs(3)
    arguments = as_arguments(inputs)
    whole, bounds = bapo_loss(**arguments)
    count = inputs.response_mask.sum()
    halves = [{k: v[rows] for k, v in arguments.items()} for rows in (slice(0, 3), slice(3, 8))]
    parts = [bapo_loss(**half, bounds=bounds, denominator=count) for half in halves]
    assert sum(loss for loss, _ in parts).item() == pytest.approx(whole.item(), abs=1e-12)
    assert all(found is bounds for _, found in parts)
    tally = sum(PRESETS["bapo"].tally(LossInputs(**half)) for half in halves)
    summed = PRESETS["bapo"].choose(tally)
    assert (summed.clip_low, summed.clip_high) == (bounds.clip_low, bounds.clip_high)
    assert summed.positive_ratio.item() == pytest.approx(bounds.positive_ratio.item(), abs=1e-12)


def test_the_gradient_reaches_the_log_probs_alone() -> None:
    """A behaviour policy that still hangs on the graph would cancel it."""
    inputs = random_inputs(4)
    logprobs = inputs.logprobs.clone().requires_grad_()
    arguments = as_arguments(inputs) | {"logprobs": logprobs, "behaviour_logprobs": logprobs + 0}
    loss, bounds = bapo_loss(**arguments)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    weights = inputs.weights.where(inputs.response_mask, 0)
    assert torch.allclose(gradient, -weights * inputs.advantages / inputs.response_mask.sum())  # every ratio is 1
    assert not any(value.requires_grad for value in (bounds.clip_low, bounds.clip_high, bounds.positive_ratio))


def test_nothing_is_read_back_to_the_host() -> None:
    """Tensors on the meta device have no values to read."""
    zeros = torch.zeros(2, 3, device="meta")
    arguments = {"logprobs": zeros, "behaviour_logprobs": zeros, "advantages": zeros[:, 0], "response_mask": zeros}
    loss, bounds = bapo_loss(**arguments, preset="bapo_reference")
    assert {loss.device.type, bounds.clip_low.device.type} == {"meta"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": torch.zeros(4)}, r"logprobs has shape \(4,\); it must be \[B, T\]"),
        ({"behaviour_logprobs": torch.zeros(1, 3)}, r"behaviour_logprobs has shape \(1, 3\); it must be \(1, 4\)"),
        ({"response_mask": torch.ones(4)}, r"response_mask has shape \(4,\); it must be \(1, 4\)"),
        ({"weights": torch.ones(1, 1)}, r"weights has shape \(1, 1\); it must be \(1, 4\)"),
        ({"advantages": torch.ones(4)}, r"advantages has shape \(4,\); it must be \(1,\) or \(1, 4\)"),
        ({"logprobs": torch.zeros(1, 4).bfloat16()}, r"logprobs is torch.bfloat16; it must be torch.float32 or torch.float64"),
        ({"behaviour_logprobs": torch.zeros(1, 4).half()}, r"behaviour_logprobs is torch.float16"),
        ({"preset": "bapo_paper"}, r"preset is 'bapo_paper'; it must be one of bapo, bapo_eq8"),
        ({"target": 0.4}, r"target is not an option; it must be one of target_positive_ratio, clip_low"),
        ({"target_positive_ratio": 40}, r"target_positive_ratio is 40; it must be in \(0, 1\)"),
        ({"clip_low": (0.9, 0.6, 0.02)}, r"clip_low.start is 0.9; it must be <= stop, which is 0.6"),
        ({"clip_high": (1.2,)}, r"clip_high is \(1.2,\); it must be \(start, stop, step\)"),
        ({"dual_clip": 0.5}, r"dual_clip is 0.5; it must be > 1"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
@pytest.mark.parametrize("call", [search_clip_bounds, bapo_loss])
def test_what_cannot_be_is_refused(call, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**(FOUR | changes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": "0.8"}, r"clip_low is '0.8'; it must be \(start, stop, step\), or a number to pin it"),
        ({"target_positive_ratio": "0.4"}, r"target_positive_ratio is '0.4'; it must be of type float"),
        ({"counterfactuals": "no"}, r"counterfactuals is 'no'; it must be of type bool"),
        ({"mass": 3}, r"mass is 3; it must be of type str"),
        ({"target_margin": 0.1}, r"target_margin is 0.1; it must be 0 unless target_mode is 'relative'"),
        ({"counterfactual_targets": (1 / 3, 0.333333)}, r"counterfactual_targets is .*name"),
        ({"clip_high": (1.2, 3.0, 1e-7)}, r"clip_high.step is 1e-07; it must be > 0 \(and >= 0.00018\)"),
        ({"clip_high": (1.2, 3.0, float("inf"))}, r"clip_high.step is inf"),
    ],
)
def test_options_of_a_wrong_kind_are_refused_by_name(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        search_clip_bounds(**FOUR, **options)


@pytest.mark.parametrize("denominator", [0, 0.5, -1.0, float("nan"), float("inf"), torch.ones(2)])
def test_a_denominator_that_is_no_count_is_refused(denominator: object) -> None:
    with pytest.raises(ValueError, match="denominator"):
        bapo_loss(**FOUR, denominator=denominator)


def test_a_number_pins_a_bound() -> None:
    bounds = search_clip_bounds(**FOUR, clip_low=0.8, clip_high=1.2)
    assert (bounds.clip_low.item(), bounds.clip_high.item()) == (0.8, 1.2)
