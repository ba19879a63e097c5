"""The clipped surrogate by hand, against golden values, and at the edges of floating point."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.losses import CASES, golden_inputs, padded, random_inputs, rearrange
from torch import Tensor

from bapo.losses import PRESETS, BapoLoss, BoundRange, FixedClipLoss, clipped_objective, importance_ratio, is_clipped
from bapo.metrics import lookup
from bapo.types import ClipBounds, LossInputs, LossOutput

LOW, HIGH = BoundRange(0.6, 0.9, 0.02), BoundRange(1.2, 3.0, 0.05)
PAPER = BapoLoss(0.4, LOW, HIGH)


def make(logprobs: list, behaviour: list, advantages: list, mask: list | None = None, weights: list | None = None, dtype=None):
    """One sequence; its log-probs want a gradient. float32 unless `dtype` says otherwise."""
    values = [torch.tensor([x], dtype=dtype or torch.float32) for x in (logprobs, behaviour, advantages)]
    kept = torch.ones_like(values[0], dtype=torch.bool) if mask is None else torch.tensor([mask], dtype=torch.bool)
    weighted = None if weights is None else torch.tensor([weights], dtype=values[0].dtype)
    return LossInputs(values[0].requires_grad_(), values[1], values[2], kept, weighted)


def at(low: float, high: float) -> ClipBounds:
    return ClipBounds(torch.tensor(low, dtype=torch.float64), torch.tensor(high, dtype=torch.float64))


def run(inputs: LossInputs, low: float, high: float, dual_clip: float | None = None) -> tuple[LossOutput, Tensor]:
    """Output and gradient of the log-probs, with this batch's own token count as the denominator."""
    output = FixedClipLoss(low, high, dual_clip)(inputs, at(low, high), inputs.response_mask.sum())
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
            "policy/clip_frac_dual": 0,
            "policy/weight_mean": 6,
            "policy/negative_token_frac": 3,
            "policy/log_ratio_clamped_frac": 0,
            "bounds/positive_mass": 0.3,
            "bounds/negative_mass": 1.5 + 4,
            "policy/logprob_mean": sum(map(math.log, ratios)),
            "policy/unclipped_advantage_mean": -1 + 1 - 2,
            "policy/entropy_clip_cov": -math.log(1.5) + math.log(0.3) - 2 * math.log(2),
        },
        abs=1e-12,
    )


def test_every_metric_is_registered_detached_and_a_float64_scalar() -> None:
    output, _ = run(make([0.1, -0.2], [0.0, 0.0], [1.0, -1.0]), 0.6, 1.2)
    for name, part in output.metrics.items():
        assert lookup(name).name == name
        assert (part.dim(), part.dtype, part.requires_grad) == (0, torch.float64, False)


def test_weights_multiply_objective_and_mass_but_no_other_metric() -> None:
    ratios, advantages, weights = [1.5, 0.3, 1.5, 0.3], [1.0, -1.0, -1.0, 1.0], [2.0, 3.0, 0.5, 0.0]
    inputs = make([math.log(r) for r in ratios], [0.0] * 4, advantages, weights=weights, dtype=torch.float64)
    output, gradient = run(inputs, 0.6, 1.2)
    assert output.loss.item() == pytest.approx(-(2 * 1.2 - 3 * 0.6 - 0.5 * 1.5) / 4, abs=1e-12)
    assert gradient[0].tolist() == pytest.approx([0, 0, 0.5 * 1.5 / 4, 0], abs=1e-12)
    plain, _ = run(replace(inputs, weights=None), 0.6, 1.2)
    changed = {
        name: part.item() for name, part in output.metrics.items() if part.item() != pytest.approx(plain.metrics[name].item())
    }
    expected = {"policy/loss": 0.0375, "policy/weight_mean": 5.5, "bounds/positive_mass": 0, "bounds/negative_mass": 0.75}
    assert changed == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "dual"), [(10, -1.0, 3.0, 1), (10, 1.0, -1.2, 0), (2, -1.0, 2.0, 0), (0.3, -1.0, 0.8, 0)]
)
def test_dual_clip_is_a_floor_for_negative_advantages_only(ratio: float, advantage: float, loss: float, dual: int) -> None:
    output, gradient = run(make([math.log(ratio)], [0.0], [advantage], dtype=torch.float64), 0.8, 1.2, dual_clip=3.0)
    assert output.loss.item() == pytest.approx(loss, abs=1e-12)
    clipped = ratio != 2
    assert (gradient.item() == 0.0) == clipped
    high, low = clipped and advantage > 0, clipped and advantage < 0 and not dual
    counts = [output.metrics[f"policy/clip_frac{part}"].item() for part in ("", "_dual", "_high", "_low")]
    assert counts == [clipped, dual, high, low]


def test_a_ratio_equal_to_the_dual_clip_is_not_clipped() -> None:
    ratio = torch.tensor([[2.9, 3.0, 3.1]])
    bounds = at(0.8, 1.2)
    assert is_clipped(ratio, -torch.ones(1, 3), bounds.clip_low, bounds.clip_high, 3.0).tolist() == [[False, False, True]]


@pytest.mark.parametrize(("ratio", "advantage", "loss"), [(1.5, 1.0, -1.2), (0.3, -1.0, 0.6)])
def test_clipping_is_used_and_counted(ratio: float, advantage: float, loss: float) -> None:
    output, gradient = run(make([math.log(ratio)], [0.0], [advantage]), 0.6, 1.2)
    assert output.loss.item() == pytest.approx(loss, abs=1e-6)
    assert gradient.item() == 0.0
    assert output.metrics["policy/clip_frac"].item() == 1


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mass_metrics_are_the_search_table_at_the_bounds(name: str, dtype: torch.dtype) -> None:
    inputs, loss = random_inputs(1, rows=16, width=16, dtype=dtype), PRESETS[name]
    tally = loss.tally(inputs)
    bounds = loss.choose(tally)
    metrics = loss(inputs, bounds, inputs.response_mask.sum()).metrics
    positive, negative = tally.split([len(loss.clip_high), len(loss.clip_low) + 2])
    at_high = (loss.clip_high.candidates() == bounds.clip_high).nonzero().item()
    at_low = (loss.clip_low.candidates() == bounds.clip_low).nonzero().item()
    assert metrics["bounds/positive_mass"].item() == pytest.approx(positive[at_high].item(), rel=1e-6)
    assert metrics["bounds/negative_mass"].item() == pytest.approx(negative[at_low].item(), rel=1e-6)


# --- golden values ---------------------------------------------------------------------------------------------------

GOLDEN = {
    "grpo": FixedClipLoss(0.8, 1.2),
    "grpo_dual3": FixedClipLoss(0.8, 1.2, 3.0),
    "clip_higher": FixedClipLoss(0.8, 1.28),
    "clip_higher_dual3": FixedClipLoss(0.8, 1.28, 3.0),
    "reference_yaml": PRESETS["bapo_reference"],
    "reference_script": PRESETS["bapo_reference_script"],
}


@pytest.mark.parametrize("case", CASES, ids=[str(i) for i in range(len(CASES))])
@pytest.mark.parametrize("name", GOLDEN)
def test_golden_losses(name: str, case: dict) -> None:
    inputs, loss, expected = golden_inputs(case), GOLDEN[name], case["expect"][name]
    count = inputs.response_mask.sum()
    output = loss(inputs, loss.choose(loss.tally(inputs)), count)
    assert output.loss.item() == pytest.approx(expected["loss"], abs=1e-6)
    dual = (output.metrics["policy/clip_frac_dual"] / count).item()
    if "clip_frac" in expected:  # the reference counts tokens beyond the dual clip apart
        assert (output.metrics["policy/clip_frac"] / count).item() - dual == pytest.approx(expected["clip_frac"], abs=1e-6)
    if "clip_frac_dual" in expected:
        assert dual == pytest.approx(expected["clip_frac_dual"], abs=1e-6)
        _, log_ratio = importance_ratio(inputs.logprobs, inputs.behaviour_logprobs, inputs.response_mask)
        assert (-log_ratio.sum() / count).item() == pytest.approx(expected["ppo_kl"], abs=1e-6)


def test_every_golden_expectation_is_tested() -> None:
    assert len(CASES) == 24
    bounds_only = {"paper_gradient", "paper_gradient_rho05", "trinity", "eq8_abs", "surrogate_unweighted"}
    assert all(case["expect"].keys() == GOLDEN.keys() | bounds_only for case in CASES)


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
@pytest.mark.parametrize("loss", [FixedClipLoss(0.8, 1.2, 3.0), *(PRESETS[n] for n in ("bapo", "bapo_eq8", "bapo_trinity"))])
def test_a_masked_slot_has_no_influence(garbage: float, loss: FixedClipLoss | BapoLoss) -> None:
    mask = [True, False, True, True, False]
    rows = ((0.5, -0.9, 0.2), (0.0, 0.0, 0.0), (1.0, -1.0, -0.5), (1.0, 2.0, 0.5))
    clean, dirty = (
        make(*columns[:3], mask, columns[3])
        for columns in ([[x, slot, y, z, slot] for x, y, z in rows] for slot in (0.0, garbage))
    )
    results = []
    for inputs in (clean, dirty):
        output = loss(inputs, loss.choose(loss.tally(inputs)), torch.tensor(3))
        (gradient,) = torch.autograd.grad(output.loss, inputs.logprobs)
        results.append([output.loss.detach(), gradient, *output.metrics.values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def whole_update(
    loss: FixedClipLoss | BapoLoss, micro_batches: list[LossInputs]
) -> tuple[ClipBounds, LossOutput, list[Tensor]]:
    """Bounds, summed loss and metrics, and the gradients of the log-probs: what a trainer makes of one update."""
    for inputs in micro_batches:
        inputs.logprobs.requires_grad_()
    bounds = loss.choose(sum(loss.tally(inputs) for inputs in micro_batches))
    count = sum(inputs.response_mask.sum() for inputs in micro_batches)
    outputs = [loss(inputs, bounds, count) for inputs in micro_batches]
    total = sum(output.loss for output in outputs)
    gradients = torch.autograd.grad(total, [inputs.logprobs for inputs in micro_batches])
    metrics = {}
    for name in outputs[0].metrics:
        values = torch.stack([output.metrics[name] for output in outputs])
        metrics[name] = values.max() if lookup(name).reduction == "max" else values.sum()
    return bounds, LossOutput(total.detach(), metrics), list(gradients)


@pytest.mark.parametrize("name", ["grpo", "grpo_dual3", *PRESETS])
@pytest.mark.parametrize("seed", range(2))
def test_an_update_does_not_depend_on_how_it_is_cut_padded_or_ordered(name: str, seed: int) -> None:
    loss, inputs = (GOLDEN | PRESETS)[name], random_inputs(seed)
    bounds, output, (gradient,) = whole_update(loss, [rearrange(inputs, Tensor.clone)])
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    ways = {f"micro-batches of {n}": [slice(i, i + n) for i in range(0, 8, n)] for n in (1, 2)} | {"permuted": [order]}
    cuts = {way: [rearrange(inputs, lambda x, rows=rows: x[rows].clone()) for rows in cut] for way, cut in ways.items()}
    cuts["padded"] = [rearrange(inputs, padded)]
    for way, micro_batches in cuts.items():
        other_bounds, other, gradients = whole_update(loss, micro_batches)
        assert torch.equal(other_bounds.clip_low, bounds.clip_low), way
        assert torch.equal(other_bounds.clip_high, bounds.clip_high), way
        assert other.loss.item() == pytest.approx(output.loss.item(), abs=1e-12), way
        expected = gradient[order] if way == "permuted" else gradient
        assert torch.allclose(torch.cat(gradients)[:, : gradient.shape[1]], expected, rtol=0, atol=1e-15), way
        for key, value in output.metrics.items():
            assert other.metrics[key].item() == pytest.approx(value.item(), abs=1e-10), (way, key)


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
@given(
    rows,
    st.floats(0.1, 0.95),
    st.floats(1.05, 3.0),
    st.one_of(st.none(), st.floats(1.1, 5)),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_pinned_ranges_are_ppo_clipping(tokens, low, high, dual_clip, dtype) -> None:
    columns = [list(column) for column in zip(*tokens, strict=True)]
    fixed = FixedClipLoss(low, high, dual_clip)
    bapo = BapoLoss(0.4, BoundRange(low, low), BoundRange(high, high), dual_clip=dual_clip)
    results = []
    for loss in (fixed, bapo):
        inputs = make(*columns, dtype=dtype)
        output = loss(inputs, loss.choose(loss.tally(inputs)), inputs.response_mask.sum())
        (gradient,) = torch.autograd.grad(output.loss, inputs.logprobs)
        results.append([output.loss.detach(), gradient, *output.metrics.values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    inputs = make(*columns, dtype=dtype)
    ratio = (inputs.logprobs - inputs.behaviour_logprobs).exp()
    objective = torch.min(ratio * inputs.advantages, ratio.clamp(low, high) * inputs.advantages)
    if dual_clip is not None:
        objective = torch.where(inputs.advantages < 0, objective.max(dual_clip * inputs.advantages), objective)
    expected = -objective[inputs.response_mask].sum() / inputs.response_mask.sum().clamp(min=1)
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
        ({"weight": "prob"}, r"weight is 'prob'; it must be one of none, behaviour_prob"),
        ({"balance": "abs"}, r"balance is 'abs'; it must be one of share, signed"),
        ({"bounds_scope": "rank"}, r"bounds_scope is 'rank'; it must be one of update, micro_batch"),
        ({"target_mode": "auto"}, r"target_mode is 'auto'; it must be one of absolute, relative"),
        ({"target_margin": 1.0}, r"target_margin is 1.0; it must be in \(-1, 1\)"),
        ({"target_mode": "relative", "balance": "signed"}, r"balance is 'signed'; it must be 'share' where target_mode"),
        ({"counterfactual_targets": [0.3, 1.0]}, r"counterfactual_targets is 1.0; it must be in \(0, 1\)"),
        ({"dual_clip": 1.0}, r"dual_clip is 1.0; it must be > 1"),
        ({"dual_clip": math.nan}, r"dual_clip is nan; it must be > 1"),
        ({"dual_clip": math.inf}, r"dual_clip is inf; it must be > 1 and finite"),
    ],
)
def test_bapo_refuses(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BapoLoss(**({"target_positive_ratio": 0.4, "clip_low": LOW, "clip_high": HIGH} | changes))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 1.2), "clip_low is 0.0"),
        ((1.0, 1.2), "clip_low is 1.0"),
        ((0.8, 1.0), "clip_high is 1.0"),
        ((0.8, 1.2, 0.5), "dual_clip is 0.5; it must be > 1"),
    ],
)
def test_fixed_clip_refuses(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FixedClipLoss(*arguments)


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


@pytest.mark.parametrize("loss", [*PRESETS.values(), replace(PAPER, target_mode="relative"), FixedClipLoss(0.8, 1.2, 3.0)])
def test_no_value_is_read_back_to_the_host(loss: BapoLoss | FixedClipLoss) -> None:
    """Tensors on the meta device have no values: reading one (`.item()`, a branch, a mask of unknown size) raises."""
    logprobs, other = (torch.zeros(2, 3, device="meta", requires_grad=grad) for grad in (True, False))
    inputs = LossInputs(logprobs, other, other, torch.ones(2, 3, dtype=torch.bool, device="meta"), other)
    bounds = loss.choose(loss.tally(inputs))
    output = loss(inputs, bounds, torch.ones((), device="meta"))
    output.loss.backward()
    assert logprobs.grad is not None
    values = [bounds.clip_low, bounds.clip_high, *bounds.metrics.values(), *output.metrics.values()]
    assert {value.device.type for value in values} == {"meta"}
