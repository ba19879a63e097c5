"""The clipped surrogate by hand, against golden values, and at the edges of floating point."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bapo.losses import BapoLoss, BoundRange, FixedClipLoss, clipped_objective, importance_ratio
from bapo.metrics import lookup
from bapo.types import ClipBounds, LossInputs, LossOutput

CASES = json.loads((Path(__file__).parent / "data" / "bound_search.json").read_text())["cases"]
LOW, HIGH = BoundRange(0.6, 0.9, 0.02), BoundRange(1.2, 3.0, 0.05)
PAPER = BapoLoss(0.4, LOW, HIGH)


def make(logprobs: list, behaviour: list, advantages: list, mask: list | None = None, dtype=torch.float32) -> LossInputs:
    values = [torch.tensor([x], dtype=dtype) for x in (logprobs, behaviour, advantages)]
    kept = torch.ones_like(values[0], dtype=torch.bool) if mask is None else torch.tensor([mask], dtype=torch.bool)
    return LossInputs(values[0].requires_grad_(), values[1], values[2], kept)


def at(low: float, high: float) -> ClipBounds:
    return ClipBounds(torch.tensor(low, dtype=torch.float64), torch.tensor(high, dtype=torch.float64))


def run(inputs: LossInputs, low: float, high: float) -> tuple[LossOutput, Tensor]:
    """Output and gradient of the log-probs, with this batch's own token count as the denominator."""
    output = FixedClipLoss(low, high)(inputs, at(low, high), inputs.response_mask.sum())
    (gradient,) = torch.autograd.grad(output.loss, inputs.logprobs)
    return output, gradient


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_objective_by_hand() -> None:
    """Bounds are on the ratio: 1.2 means 1.2, neither 1 + 1.2 nor an epsilon."""
    ratio, advantages = torch.tensor([[1.5, 0.3, 1.5, 0.3]]), torch.tensor([[1.0, -1.0, -1.0, 1.0]])
    bounds = at(0.6, 1.2)
    objective = clipped_objective(ratio, advantages, bounds.clip_low, bounds.clip_high)
    assert torch.equal(objective, torch.tensor([[1.2, -0.6, -1.5, 0.3]]))


def test_loss_gradient_and_metrics_by_hand() -> None:
    ratios, advantages = [1.5, 0.3, 1.5, 0.3, 1.0, 2.0], [1.0, -1.0, -1.0, 1.0, 0.0, -2.0]
    inputs = make([math.log(r) for r in ratios], [0.0] * 6, advantages, dtype=torch.float64)
    output, gradient = run(inputs, 0.6, 1.2)
    assert output.loss.item() == pytest.approx(-(1.2 - 0.6 - 1.5 + 0.3 + 0 - 4) / 6, abs=1e-12)
    assert gradient[0].tolist() == pytest.approx([0, 0, 1.5 / 6, -0.3 / 6, 0, 4 / 6], abs=1e-12)
    assert {name: part.item() for name, part in output.metrics.items()} == pytest.approx(
        {
            "policy/loss": 4.6 / 6,
            "policy/approx_kl": sum(r - 1 - math.log(r) for r in ratios),
            "policy/ratio_mean": 6.6,
            "policy/ratio_max": 2.0,
            "policy/clip_frac": 2,
            "policy/clip_frac_high": 1,
            "policy/clip_frac_low": 1,
            "policy/negative_token_frac": 3,
            "policy/log_ratio_clamped_frac": 0,
            "bounds/positive_mass": 0.3,
            "bounds/negative_mass": 1.5 + 4,
        },
        abs=1e-12,
    )


def test_every_metric_is_registered_detached_and_a_float64_scalar() -> None:
    output, _ = run(make([0.1, -0.2], [0.0, 0.0], [1.0, -1.0]), 0.6, 1.2)
    for name, part in output.metrics.items():
        assert lookup(name).name == name
        assert (part.dim(), part.dtype, part.requires_grad) == (0, torch.float64, False)


@pytest.mark.parametrize(("ratio", "advantage", "loss"), [(1.5, 1.0, -1.2), (0.3, -1.0, 0.6)])
def test_clipping_is_used_and_counted(ratio: float, advantage: float, loss: float) -> None:
    output, gradient = run(make([math.log(ratio)], [0.0], [advantage]), 0.6, 1.2)
    assert output.loss.item() == pytest.approx(loss, abs=1e-6)
    assert gradient.item() == 0.0
    assert output.metrics["policy/clip_frac"].item() == 1


@pytest.mark.parametrize("mass", ["gradient", "surrogate"])
def test_mass_metrics_are_the_search_table_at_the_bounds(mass: str) -> None:
    generator = torch.Generator().manual_seed(1)
    logprobs, behaviour, advantages = torch.randn(3, 4, 16, generator=generator)
    inputs = LossInputs(logprobs, behaviour, advantages, torch.rand(4, 16, generator=generator) < 0.7)
    loss = BapoLoss(0.55, LOW, HIGH, mass=mass)
    bounds = loss.choose(loss.tally(inputs))
    metrics = loss(inputs, bounds, inputs.response_mask.sum()).metrics
    positive, negative = metrics["bounds/positive_mass"], metrics["bounds/negative_mass"]
    assert (positive / (positive + negative)).item() == pytest.approx(bounds.positive_ratio.item(), abs=1e-6)


# --- golden values ---------------------------------------------------------------------------------------------------


def golden_inputs(case: dict) -> LossInputs:
    names = ("logprobs", "behaviour_logprobs", "advantages")
    values = (torch.tensor(case[name], dtype=torch.float64) for name in names)
    return LossInputs(*values, torch.tensor(case["response_mask"]).bool())


@pytest.mark.parametrize("case", CASES, ids=[str(i) for i in range(len(CASES))])
@pytest.mark.parametrize(("name", "high"), [("grpo", 1.2), ("clip_higher", 1.28)])
def test_golden_losses(name: str, high: float, case: dict) -> None:
    inputs, loss = golden_inputs(case), FixedClipLoss(0.8, high)
    count = inputs.response_mask.sum()
    output = loss(inputs, loss.choose(loss.tally(inputs)), count)
    assert output.loss.item() == pytest.approx(case["expect"][name]["loss"], abs=1e-6)
    assert (output.metrics["policy/clip_frac"] / count).item() == pytest.approx(case["expect"][name]["clip_frac"], abs=1e-6)


# --- masks and denominators ------------------------------------------------------------------------------------------


def test_a_masked_sequence_leaves_sum_and_count_alike() -> None:
    """Two sequences of four tokens with loss 1 each; one is masked: 1.0, not 0.5."""
    mask = torch.tensor([[True], [False]]).expand(2, 4)
    inputs = LossInputs(torch.zeros(2, 4, requires_grad=True), torch.zeros(2, 4), -torch.ones(2, 4), mask)
    output, gradient = run(inputs, 0.6, 1.2)
    assert output.loss.item() == 1.0
    assert gradient.tolist() == [[0.25] * 4, [0.0] * 4]


@pytest.mark.parametrize("garbage", [0.0, math.nan, math.inf])
def test_an_all_masked_batch_is_harmless(garbage: float) -> None:
    output, gradient = run(make([garbage] * 3, [garbage] * 3, [garbage] * 3, [False] * 3), 0.6, 1.2)
    assert output.loss.item() == 0.0
    assert torch.equal(gradient, torch.zeros(1, 3))
    assert {part.item() for part in output.metrics.values()} == {0.0}


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("loss", [FixedClipLoss(0.8, 1.2), PAPER, BapoLoss(0.4, LOW, HIGH, mass="surrogate")])
def test_a_masked_slot_has_no_influence(garbage: float, loss: FixedClipLoss | BapoLoss) -> None:
    mask = [True, False, True, True, False]
    clean = make([0.5, 0, -0.9, 0.2, 0], [0.0] * 5, [1.0, 0, -1, -0.5, 0], mask)
    dirty = make(*([[x, garbage, y, z, garbage] for x, y, z in ((0.5, -0.9, 0.2), (0.0, 0.0, 0.0), (1.0, -1.0, -0.5))]), mask)
    results = []
    for inputs in (clean, dirty):
        output = loss(inputs, loss.choose(loss.tally(inputs)), torch.tensor(3))
        (gradient,) = torch.autograd.grad(output.loss, inputs.logprobs)
        results.append([output.loss.detach(), gradient, *output.metrics.values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_micro_batches_add_up_to_the_whole(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs, behaviour, advantages = torch.randn(3, 8, 7, generator=generator, dtype=torch.float64)
    mask = torch.arange(7) < torch.randint(1, 8, (8, 1), generator=generator)
    logprobs.requires_grad_()
    count, bounds = mask.sum(), at(0.7, 1.4)
    whole = PAPER(LossInputs(logprobs, behaviour, advantages, mask), bounds, count)
    (gradient,) = torch.autograd.grad(whole.loss, logprobs)
    cuts = [slice(i, i + size) for i in range(0, 8, size)]
    parts = [PAPER(LossInputs(logprobs[c], behaviour[c], advantages[c], mask[c]), bounds, count) for c in cuts]
    (summed,) = torch.autograd.grad(sum(part.loss for part in parts), logprobs)
    assert torch.allclose(summed, gradient, atol=1e-15)
    for name, value in whole.metrics.items():
        values = torch.stack([part.metrics[name] for part in parts])
        combined = values.max() if lookup(name).reduction == "max" else values.sum()
        assert combined.item() == pytest.approx(value.item(), abs=1e-12)


# --- floating point --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("advantage", "loss"), [(1.0, -1.2), (0.0, 0.0), (-1.0, math.exp(20))])
def test_exp_overflow(advantage: float, loss: float) -> None:
    output, gradient = run(make([0.0], [-200.0], [advantage]), 0.6, 1.2)
    assert output.loss.item() == pytest.approx(loss, rel=1e-6)
    assert gradient.item() == 0.0
    assert output.metrics["policy/log_ratio_clamped_frac"].item() == 1
    assert all(part.isfinite() for part in output.metrics.values())


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_undefined_ratio_shows_in_the_loss_and_not_in_the_gradient(advantage: float) -> None:
    """log-prob -inf now and then: the loss must be NaN so that the update can be refused, whatever the sign."""
    output, gradient = run(make([-math.inf, 0.1], [-math.inf, 0.0], [advantage, 1.0]), 0.6, 1.2)
    assert output.loss.isnan()
    assert gradient.isfinite().all()


@given(st.lists(st.tuples(st.floats(-4.5, 4.5, width=32), st.floats(-4.5, 4.5, width=32)), min_size=1, max_size=20))
def test_the_clamp_is_bit_invisible_below_ten(pairs: list[tuple[float, float]]) -> None:
    logprobs, behaviour = torch.tensor(pairs).T[:, None]
    ratio, log_ratio = importance_ratio(logprobs, behaviour, torch.ones_like(logprobs, dtype=torch.bool))
    assert torch.equal(log_ratio, logprobs - behaviour)
    assert torch.equal(ratio, torch.exp(logprobs - behaviour))


# --- BAPO with pinned ranges is PPO ----------------------------------------------------------------------------------

rows = st.lists(
    st.tuples(st.floats(-2, 2, width=32), st.floats(-2, 2, width=32), st.floats(-2, 2, width=32), st.booleans()),
    min_size=1,
    max_size=12,
)


@settings(max_examples=100, deadline=None)
@given(rows, st.floats(0.1, 0.95), st.floats(1.05, 3.0), st.sampled_from([torch.float32, torch.float64]))
def test_pinned_ranges_are_ppo_clipping(tokens, low, high, dtype) -> None:
    columns = [list(column) for column in zip(*tokens, strict=True)]
    fixed, bapo = FixedClipLoss(low, high), BapoLoss(0.4, BoundRange(low, low), BoundRange(high, high))
    results = []
    for loss in (fixed, bapo):
        inputs = make(*columns, dtype=dtype)
        output = loss(inputs, loss.choose(loss.tally(inputs)), inputs.response_mask.sum())
        (gradient,) = torch.autograd.grad(output.loss, inputs.logprobs)
        results.append([output.loss.detach(), gradient, *output.metrics.values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    inputs = make(*columns, dtype=dtype)
    ratio = (inputs.logprobs - inputs.behaviour_logprobs).exp()
    textbook = -torch.min(ratio * inputs.advantages, ratio.clamp(low, high) * inputs.advantages)[inputs.response_mask].sum()
    expected = textbook / inputs.response_mask.sum().clamp(min=1)
    assert results[0][0].item() == pytest.approx(expected.item(), abs=1e-5)


# --- construction ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_positive_ratio": 0.0}, r"target_positive_ratio is 0.0; it must be in \(0, 1\)"),
        ({"target_positive_ratio": 1.0}, r"target_positive_ratio is 1.0"),
        ({"target_positive_ratio": math.nan}, r"target_positive_ratio is nan"),
        ({"clip_low": BoundRange(0.6, 1.0, 0.1)}, r"clip_low.stop is 1.0; it must be < 1"),
        ({"clip_low": BoundRange(0.0, 0.9, 0.1)}, r"clip_low.start is 0.0; it must be > 0"),
        ({"clip_high": BoundRange(1.0, 3.0, 0.1)}, r"clip_high.start is 1.0; it must be > 1"),
        ({"clip_high": BoundRange(0.28, 0.28)}, r"clip_high.start is 0.28; it must be > 1"),
        ({"search_order": "up"}, r"search_order is 'up'; it must be one of high_first, low_first"),
        ({"mass": "token"}, r"mass is 'token'; it must be one of gradient, surrogate"),
    ],
)
def test_bapo_refuses(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BapoLoss(**({"target_positive_ratio": 0.4, "clip_low": LOW, "clip_high": HIGH} | changes))


@pytest.mark.parametrize(
    ("low", "high", "message"), [(0.0, 1.2, "clip_low is 0.0"), (1.0, 1.2, "clip_low is 1.0"), (0.8, 1.0, "clip_high is 1.0")]
)
def test_fixed_clip_refuses(low: float, high: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FixedClipLoss(low, high)


def test_an_unknown_loss_key_is_refused() -> None:
    with pytest.raises(TypeError, match="clip_ratio_c"):
        FixedClipLoss(0.8, 1.2, clip_ratio_c=3.0)


def test_hydra_builds_the_loss_from_nested_targets() -> None:
    from hydra.utils import instantiate

    ranges = {
        name: {"_target_": "bapo.losses.BoundRange", **vars(bounds)}
        for name, bounds in (("clip_low", LOW), ("clip_high", HIGH))
    }
    assert instantiate({"_target_": "bapo.losses.BapoLoss", "target_positive_ratio": 0.4, **ranges}) == PAPER


def test_the_fixed_clip_tally_is_empty() -> None:
    tally = FixedClipLoss(0.8, 1.2).tally(make([0.1], [0.0], [1.0]))
    assert (tally.shape, tally.dtype) == ((0,), torch.float64)
    assert (FixedClipLoss.adaptive, BapoLoss.adaptive) == (False, True)


def test_losses_import_torch_and_nothing_above_it() -> None:
    code = (
        "import sys, bapo.losses; print([m for m in ('lightning', 'transformers', 'hydra', 'omegaconf') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize("loss", [PAPER, BapoLoss(0.4, LOW, HIGH, "low_first", "surrogate"), FixedClipLoss(0.8, 1.2)])
def test_no_value_is_read_back_to_the_host(loss: BapoLoss | FixedClipLoss) -> None:
    """Tensors on the meta device have no values: reading one (`.item()`, a branch, a mask of unknown size) raises."""
    logprobs, other = (torch.zeros(2, 3, device="meta", requires_grad=grad) for grad in (True, False))
    inputs = LossInputs(logprobs, other, other, torch.ones(2, 3, dtype=torch.bool, device="meta"))
    bounds = loss.choose(loss.tally(inputs))
    output = loss(inputs, bounds, torch.ones((), device="meta"))
    output.loss.backward()
    assert logprobs.grad is not None
    assert {value.device.type for value in (bounds.clip_low, bounds.clip_high, *output.metrics.values())} == {"meta"}
