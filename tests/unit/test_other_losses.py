"""CISPO, GSPO, SAPO, DPPO, M2PO and the adaptive width: hand-computed values, gradients, limits, and what all losses owe."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch import Tensor

from bapo.losses import FixedClipLoss
from bapo.losses.adaptive_ratio import AdaptiveRatioLoss
from bapo.losses.cispo import CispoLoss
from bapo.losses.dppo import DppoLoss
from bapo.losses.gspo import GspoLoss
from bapo.losses.m2po import M2poLoss
from bapo.losses.sapo import SapoLoss
from bapo.metrics import lookup
from bapo.types import ClipBounds, LossInputs, LossOutput

MAKE: dict[str, Callable[[], Any]] = {
    "cispo": lambda: CispoLoss(0.0, 1.2),
    "gspo": lambda: GspoLoss(0.9, 1.2),
    "sapo": SapoLoss,
    "dppo": lambda: DppoLoss(0.15),
    "m2po": lambda: M2poLoss(0.04),
    "adaptive_ratio": AdaptiveRatioLoss,
}
GRADIENT_MASS = [name for name in MAKE if name != "adaptive_ratio"]
every_loss = pytest.mark.parametrize("name", MAKE)


def table(ratios: Sequence[Any], advantages: Sequence[Any], behaviour: float = -1.0, mask: Any = None) -> LossInputs:
    """Tokens of the given importance ratios, float64; a flat list is one response."""
    r, a = (torch.atleast_2d(torch.tensor(x, dtype=torch.float64)) for x in (ratios, advantages))
    kept = torch.ones_like(r, dtype=torch.bool) if mask is None else torch.atleast_2d(torch.tensor(mask, dtype=torch.bool))
    return LossInputs((r.log() + behaviour).requires_grad_(), torch.full_like(r, behaviour), a, kept)


def random_inputs(seed: int, rows: int = 8, width: int = 7, spread: float = 0.4, weighted: bool = True) -> LossInputs:
    """Responses of various lengths with one advantage each, float64."""
    generator = torch.Generator().manual_seed(seed)
    noise, behaviour = torch.randn(2, rows, width, generator=generator, dtype=torch.float64)
    behaviour = -behaviour.abs() - 0.1
    mask = torch.arange(width) < torch.randint(1, width + 1, (rows, 1), generator=generator)
    advantages = torch.randn(rows, 1, generator=generator, dtype=torch.float64).expand(rows, width)
    weights = torch.rand(rows, width, generator=generator, dtype=torch.float64) * 2 if weighted else None
    return LossInputs((behaviour + spread * noise).requires_grad_(), behaviour, advantages, mask, weights)


def run(loss: Any, inputs: LossInputs, denominator: float | None = None) -> tuple[LossOutput, Tensor]:
    """Output and gradient of the log-probs at the loss's own bounds; the denominator is the token count unless given."""
    count = inputs.response_mask.sum() if denominator is None else torch.tensor(denominator)
    output = loss(inputs, loss.choose(loss.tally(inputs)), count)
    (gradient,) = torch.autograd.grad(output.loss, inputs.logprobs)
    return output, gradient


def cut(inputs: LossInputs, size: int) -> list[LossInputs]:
    fields = [inputs.logprobs, inputs.behaviour_logprobs, inputs.advantages, inputs.response_mask, inputs.weights]
    rows = range(0, len(inputs.logprobs), size)
    return [LossInputs(*(None if f is None else f[i : i + size] for f in fields)) for i in rows]


def part(output: LossOutput, *names: str) -> list[float]:
    return [output.metrics[name].item() for name in names]


CLIP = ("policy/clip_frac", "policy/clip_frac_high", "policy/clip_frac_low")
MASS = ("bounds/positive_mass", "bounds/negative_mass")


# --- each loss by hand -----------------------------------------------------------------------------------------------


def test_cispo_by_hand() -> None:
    """Weights are cut to [0.6, 1.2]; every token keeps its gradient, weight * A."""
    ratios, advantages = [1.5, 0.3, 1.5, 0.3, 5.0, 2.0], [1.0, -1.0, -1.0, 1.0, 0.0, -2.0]
    weights = [1.2, 0.6, 1.2, 0.6, 1.2, 1.2]
    inputs = table(ratios, advantages)
    output, gradient = run(CispoLoss(0.6, 1.2), inputs)
    assert gradient[0].tolist() == pytest.approx([-1.2 / 6, 0.6 / 6, 1.2 / 6, -0.6 / 6, 0, 2.4 / 6], abs=1e-12)
    value = sum(w * a * (math.log(r) - 1) for w, a, r in zip(weights, advantages, ratios, strict=True))
    assert output.loss.item() == pytest.approx(-value / 6, abs=1e-12)
    assert part(output, *CLIP) == [5, 1, 1]
    assert part(output, *MASS, "policy/ratio_mean") == pytest.approx([1.8, 4.2, 10.6])


def test_gspo_by_hand() -> None:
    """Sequence ratios sqrt(.75) and 2^(1/3) are clipped, sqrt(1.32) is not: three rows of A = -1, 1, 2 and one of -1."""
    s = math.sqrt(1.32)
    ratios = [[1.5, 0.5, 7.0], [2.0, 2.0, 0.5], [1.1, 1.2, 7.0], [1.2, 1.1, 7.0]]
    mask = [[1, 1, 0], [1, 1, 1], [1, 1, 0], [1, 1, 0]]
    inputs = table(ratios, [[-1.0] * 3, [1.0] * 3, [2.0] * 3, [-1.0] * 3], mask=mask)
    inputs = replace(inputs, weights=torch.tensor([[0.5] * 3, [1 / 3] * 3, [0.5] * 3, [0.5] * 3], dtype=torch.float64))
    output, gradient = run(GspoLoss(0.9, 1.2), inputs, denominator=4)
    assert output.loss.item() == pytest.approx(-(-0.9 + 1.2 + 2 * s - s) / 4, abs=1e-12)
    assert gradient[:2].tolist() == [[0.0] * 3] * 2
    assert gradient[2].tolist() == pytest.approx([-s / 4, -s / 4, 0])
    assert gradient[3].tolist() == pytest.approx([s / 8, s / 8, 0])
    assert part(output, *CLIP) == [5, 3, 2]
    assert part(output, *MASS) == pytest.approx([2 * s, s])


def test_gspo_gradient_is_that_of_the_sequence_objective() -> None:
    """An oracle with one ratio per row in the graph, for weights 1 / length."""
    inputs = random_inputs(0, spread=0.2, weighted=False)
    mask = inputs.response_mask
    lengths = mask.sum(dim=1)
    log_ratio = torch.where(mask, inputs.logprobs - inputs.behaviour_logprobs, 0).sum(dim=1) / lengths
    s, a = log_ratio.exp(), inputs.advantages[:, 0]
    literal = -torch.minimum(s * a, s.clamp(0.9, 1.2) * a).mean()
    (expected,) = torch.autograd.grad(literal, inputs.logprobs)
    output, gradient = run(GspoLoss(0.9, 1.2), replace(inputs, weights=mask.double() / lengths[:, None]), denominator=8)
    assert output.loss.item() == pytest.approx(literal.item(), abs=1e-12)
    assert torch.allclose(gradient, expected, atol=1e-14)


def test_gspo_of_one_token_is_ppo() -> None:
    inputs = random_inputs(1, rows=64, width=1, spread=5e-4)
    gspo, ppo = (run(loss, inputs) for loss in (GspoLoss(0.9997, 1.0004), FixedClipLoss(0.9997, 1.0004)))
    assert gspo[0].loss.item() == pytest.approx(ppo[0].loss.item(), abs=1e-15)
    assert torch.allclose(gspo[1], ppo[1], atol=1e-15)
    assert {k: v.item() for k, v in gspo[0].metrics.items()} == pytest.approx({k: v.item() for k, v in ppo[0].metrics.items()})
    assert gspo[0].metrics["policy/clip_frac"] > 0


def test_sapo_by_hand() -> None:
    """sigmoid(1) = .7310585786; sigmoid(1.05 * -.5) and sigmoid(1.05 * 1) for the negative tokens."""
    low, high = 1 / (1 + math.exp(0.525)), 1 / (1 + math.exp(-1.05))
    output, gradient = run(SapoLoss(1.0, 1.05), table([2.0, 0.5, 2.0], [1.0, -1.0, -3.0]), denominator=1)
    assert output.loss.item() == pytest.approx(-(4 * 0.7310585786300049 - 4 / 1.05 * low - 12 / 1.05 * high), abs=1e-12)
    expected = [2 * 0.7864477329659274, 2 * low * (1 - low), 24 * high * (1 - high)]
    assert gradient[0].tolist() == pytest.approx([-expected[0], *expected[1:]], abs=1e-12)
    assert part(output, *MASS) == pytest.approx([expected[0], sum(expected[1:])])


def test_the_gate_of_sapo_is_half_open_at_the_logged_bounds() -> None:
    loss = SapoLoss(2.0, 4.0)
    bounds = loss.choose(torch.zeros(0, dtype=torch.float64))
    low, high = bounds.clip_low.item(), bounds.clip_high.item()
    assert (low, high) == pytest.approx((1 - 1.7627471740390859 / 4, 1 + 1.7627471740390859 / 2))
    _, gradient = run(loss, table([high, low], [1.0, -1.0]), denominator=1)
    assert gradient[0].tolist() == pytest.approx([-high / 2, low / 2])
    output, _ = run(loss, table([high + 1e-6, high - 1e-6, low - 1e-6, low + 1e-6, high + 1], [1.0, 1.0, -1.0, -1.0, -1.0]))
    assert part(output, *CLIP) == [2, 1, 1]
    assert SapoLoss().choose(torch.zeros(0)).clip_low.item() == 0.0


def test_dppo_by_hand() -> None:
    """(mu, p, A): masked are those beyond 0.2 in probability that move on; a rare token may have any ratio."""
    rows = [(0.1, 0.35, 1.0, True), (0.1, 0.25, 1.0, False), (0.9, 0.6, -1.0, True), (0.9, 0.75, -1.0, False)]
    rows += [
        (0.9, 0.6, 1.0, False),
        (0.1, 0.35, -1.0, False),
        (1e-6, 1e-3, 2.0, False),
        (0.5, 0.8, 0.0, False),
        (0.5, 0.65, 2.0, False),
    ]
    mu, p, advantages, masked = (torch.tensor([column], dtype=torch.float64) for column in zip(*rows, strict=True))
    inputs = LossInputs(p.log().requires_grad_(), mu.log(), advantages, torch.ones(1, 9, dtype=torch.bool))
    output, gradient = run(DppoLoss(0.2), inputs, denominator=1)
    objective = (1 - masked) * p / mu * advantages
    assert output.loss.item() == pytest.approx(-objective.sum().item(), abs=1e-9)
    assert torch.allclose(gradient, -objective, atol=1e-9)
    assert part(output, *CLIP) == [2, 1, 1]
    assert part(output, *MASS) == pytest.approx([2.5 + 0.6 / 0.9 + 2000 + 2.6, 0.75 / 0.9 + 3.5])


def test_m2po_by_hand() -> None:
    """Squares .01 .04 .09 .16: the mean of all is .075, of three .0467, of two .025 <= .04. Two tokens are not looked at."""
    logs = [0.1, -0.2, 0.3, -0.4, -1.0, 1.0]
    advantages = [1.0, -1.0, 1.0, -1.0, 1.0, -1.0]
    loss, inputs = M2poLoss(0.04), table([math.exp(x) for x in logs], advantages)
    bounds = loss.choose(loss.tally(inputs))
    width = bounds.clip_high.log().item()
    assert 0.3 / 1.01 < width < 0.3
    assert bounds.clip_low.log().item() == pytest.approx(-width)
    output, gradient = run(loss, inputs, denominator=1)
    kept = [True, True, False, False, True, True]
    objective = [k * a * math.exp(x) for k, a, x in zip(kept, advantages, logs, strict=True)]
    assert output.loss.item() == pytest.approx(-sum(objective), abs=1e-12)
    assert gradient[0].tolist() == pytest.approx([-o for o in objective], abs=1e-12)
    assert part(output, *CLIP) == [2, 1, 1]


def literal_m2po(inputs: LossInputs, threshold: float) -> Tensor:
    """Takes the farthest looked-at token away until the mean of the rest fits; bool [B, T], the tokens masked."""
    log_ratio = inputs.logprobs.detach() - inputs.behaviour_logprobs
    looked_at = (inputs.advantages * log_ratio > 0) & inputs.response_mask
    rest = looked_at.clone()
    while rest.any() and log_ratio[rest].square().mean() > threshold:
        far = torch.where(rest, log_ratio.abs(), -1)
        rest &= far < far.max()
    return looked_at & ~rest


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1e-4, 0.01, 0.04, 0.5]), st.sampled_from([0.01, 0.3, 2.0, 12.0]))
def test_m2po_masks_what_the_literal_algorithm_masks(seed: int, threshold: float, spread: float) -> None:
    inputs = random_inputs(seed, spread=spread, weighted=False)
    loss = M2poLoss(threshold)
    bounds = loss.choose(loss.tally(inputs))
    log_ratio = (inputs.logprobs.detach() - inputs.behaviour_logprobs).clamp(-20, 20)
    looked_at = (inputs.advantages * log_ratio > 0) & inputs.response_mask
    masked = looked_at & ((log_ratio.exp() > bounds.clip_high) | (log_ratio.exp() < bounds.clip_low))
    literal = literal_m2po(replace(inputs, logprobs=inputs.behaviour_logprobs + log_ratio), threshold)
    assert (masked | ~literal).all()
    if (kept := looked_at & ~masked).any():
        assert log_ratio[kept].square().mean() <= threshold * (1 + 1e-9)
    if (beyond := masked & ~literal).any():
        assert log_ratio[beyond].abs().min() > log_ratio[literal].abs().min() / 1.01
    output, _ = run(loss, inputs)
    assert output.metrics["policy/clip_frac"].item() == masked.sum()


def test_m2po_gradient_is_ppo_at_its_bounds() -> None:
    inputs = random_inputs(3)
    loss = M2poLoss(0.02)
    bounds = loss.choose(loss.tally(inputs))
    count = inputs.response_mask.sum()
    output, gradient = run(loss, inputs)
    (ppo,) = torch.autograd.grad(FixedClipLoss(0.8, 1.2)(inputs, bounds, count).loss, inputs.logprobs)
    assert torch.equal(gradient, ppo)
    assert 0 < output.metrics["policy/clip_frac"] < count


def test_m2po_that_needs_no_mask_makes_none() -> None:
    """One token beyond the clamp, its square 400, among 20000 near ones: mean .02."""
    logs = torch.full((1, 20001), 1e-6, dtype=torch.float64)
    logs[0, 0] = 25.0
    inputs = LossInputs(logs.requires_grad_(), torch.zeros_like(logs), torch.ones_like(logs), torch.ones_like(logs).bool())
    output, _ = run(M2poLoss(0.04), inputs)
    assert output.metrics["policy/clip_frac"].item() == 0
    output, _ = run(M2poLoss(0.019), inputs)
    assert output.metrics["policy/clip_frac"].item() == 1


def test_m2po_of_an_undefined_tally_masks_the_most() -> None:
    loss = M2poLoss(0.04)
    tally = loss.tally(table([1.5, math.nan], [1.0, 1.0]))
    assert loss.choose(tally * math.nan).clip_high.log().item() == pytest.approx(1e-3)


def test_m2po_does_not_look_at_tokens_of_weight_zero() -> None:
    inputs = table([math.exp(0.1), math.exp(3.0)], [1.0, 1.0])
    loss = M2poLoss(0.04)
    assert loss.choose(loss.tally(inputs)).clip_high.log() < 3
    weighted = replace(inputs, weights=torch.tensor([[1.0, 0.0]], dtype=torch.float64))
    assert loss.choose(loss.tally(weighted)).clip_high.log() > 20


# --- the adaptive width ----------------------------------------------------------------------------------------------


def masses(positive: float, negative: float) -> Tensor:
    return torch.tensor([positive, negative], dtype=torch.float64)


def test_adaptive_width_by_hand() -> None:
    """P, N -> bounds of this update, width of the next one."""
    loss = AdaptiveRatioLoss()
    steps = [
        ((1.0, 2.0), (1 - 0.2 * 2, 1.2), 0.22),  # g = 2: negative tokens get .2 (1 + 2 / 2)
        ((1.0, 0.0), (0.78, 1.22), 0.198),
        ((4.0, 3.0), (0.802, 1.198), 0.198),  # .5 <= g <= 1: as it is
        ((1.0, 1.0), (0.802, 1.198), 0.198),
        ((1.0, 0.4), (0.802, 1.198), 0.1782),
        ((0.0, 1.0), (0.0, 1.1782), 0.19602),  # no positive mass: no lower bound
        ((0.0, 0.0), (0.80398, 1.19602), 0.19602),  # no mass: nothing to learn from
    ]
    for tally, bounds, width in steps:
        chosen = loss.choose(masses(*tally))
        assert (chosen.clip_low.item(), chosen.clip_high.item()) == pytest.approx(bounds)
        assert loss.state_dict() == pytest.approx({"width": width})
    assert loss.choose(masses(3.0, 1.0)).metrics["bounds/positive_ratio_start"].item() == 0.75


def test_adaptive_width_stays_within_its_ends() -> None:
    loss = AdaptiveRatioLoss()
    for tally, end in ((masses(1.0, 3.0), 0.5), (masses(1.0, 0.0), 0.1)):
        for _ in range(30):
            loss.choose(tally)
        assert loss.state_dict() == {"width": end}


def test_adaptive_width_decides_the_masses() -> None:
    """At width .2 a positive token of r = 2 weighs 1.2, a negative one of r = .1 weighs .8; at .5 they weigh 1.5 and .5."""
    inputs = table([2.0, 0.1, 1.0], [1.0, -1.0, 0.0])
    assert AdaptiveRatioLoss().tally(inputs).tolist() == pytest.approx([1.2, 0.8])
    assert AdaptiveRatioLoss(width=0.5).tally(inputs).tolist() == pytest.approx([1.5, 0.5])
    weighted = replace(inputs, weights=torch.tensor([[2.0, 3.0, 1.0]], dtype=torch.float64))
    assert AdaptiveRatioLoss().tally(weighted).tolist() == pytest.approx([2.4, 2.4])


def test_adaptive_width_is_saved_and_moved_by_choose_alone() -> None:
    loss = AdaptiveRatioLoss()
    loss.choose(masses(1.0, 2.0))
    run_on = AdaptiveRatioLoss()
    run_on.load_state_dict(json.loads(json.dumps(loss.state_dict())))
    before = loss.state_dict()
    inputs = random_inputs(4)
    for _ in range(3):
        loss(inputs, loss.choose(masses(4.0, 3.0)), torch.tensor(3.0))
        loss.tally(inputs)
    assert loss.state_dict() == before == run_on.state_dict()
    assert torch.equal(loss.choose(loss.tally(inputs)).clip_low, run_on.choose(run_on.tally(inputs)).clip_low)
    with pytest.raises(ValueError, match=r"width is 0.7; it must be in \[0.1, 0.5\]"):
        loss.load_state_dict({"width": 0.7})


def test_adaptive_loss_is_ppo_at_its_bounds() -> None:
    inputs, loss = random_inputs(5), AdaptiveRatioLoss()
    bounds = loss.choose(loss.tally(inputs))
    count = inputs.response_mask.sum()
    assert torch.equal(loss(inputs, bounds, count).loss, FixedClipLoss(0.8, 1.2)(inputs, bounds, count).loss)


def test_adaptive_masses_are_those_it_decides_by() -> None:
    inputs, loss = random_inputs(5), AdaptiveRatioLoss()
    tally = loss.tally(inputs)
    at_start = ClipBounds(torch.tensor(0.8, dtype=torch.float64), torch.tensor(1.2, dtype=torch.float64))
    assert part(loss(inputs, at_start, torch.tensor(1.0)), *MASS) == pytest.approx(tally.tolist())


# --- what all of them owe --------------------------------------------------------------------------------------------


@every_loss
def test_at_ratio_one_the_gradient_is_that_of_reinforce(name: str) -> None:
    inputs = random_inputs(6, spread=0.0)
    _, gradient = run(MAKE[name](), inputs, denominator=5)
    assert inputs.weights is not None
    expected = torch.where(inputs.response_mask, -inputs.weights * inputs.advantages / 5, 0)
    assert torch.allclose(gradient, expected, atol=1e-15)


@pytest.mark.parametrize("name", GRADIENT_MASS)
@pytest.mark.parametrize("spread", [0.1, 1.5])
def test_masses_are_the_gradient(name: str, spread: float) -> None:
    inputs = random_inputs(7, spread=spread)
    output, gradient = run(MAKE[name](), inputs, denominator=1)
    expected = [gradient.abs()[inputs.advantages > 0].sum().item(), gradient.abs()[inputs.advantages < 0].sum().item()]
    assert part(output, *MASS) == pytest.approx(expected, abs=1e-12)


@every_loss
def test_metrics_are_those_of_every_loss(name: str) -> None:
    inputs = random_inputs(8)
    output, _ = run(MAKE[name](), inputs)
    reference, _ = run(FixedClipLoss(0.8, 1.2), inputs)
    assert output.metrics.keys() == reference.metrics.keys()
    for key, value in output.metrics.items():
        assert lookup(key).name == key
        assert (value.dim(), value.dtype, value.requires_grad) == (0, torch.float64, False)
    same = {"policy/approx_kl", "policy/negative_token_frac", "policy/weight_mean", "policy/log_ratio_clamped_frac"}
    assert {k: output.metrics[k].item() for k in same} == {k: reference.metrics[k].item() for k in same}
    assert output.metrics["policy/loss"].item() == output.loss.item()


@every_loss
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_a_masked_slot_has_no_influence(name: str, garbage: float) -> None:
    clean = random_inputs(9)
    mask = clean.response_mask
    fields = {
        key: torch.where(mask, value, fill)
        for key, value in vars(clean).items()
        if key != "response_mask"
        for fill in (garbage,)
    }
    dirty = LossInputs(**{**fields, "logprobs": fields["logprobs"].detach().requires_grad_()}, response_mask=mask)
    results = []
    for inputs in (clean, dirty):
        output, gradient = run(MAKE[name](), inputs)
        results.append([output.loss.detach(), gradient, *output.metrics.values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not results[0][1][~mask].any()


@every_loss
def test_an_all_masked_batch_is_harmless(name: str) -> None:
    nan = torch.full((2, 3), math.nan)
    inputs = LossInputs(nan.clone().requires_grad_(), nan, nan, torch.zeros(2, 3, dtype=torch.bool), nan)
    output, gradient = run(MAKE[name](), inputs)
    assert output.loss.item() == 0.0
    assert torch.equal(gradient, torch.zeros(2, 3))
    assert {value.item() for value in output.metrics.values()} == {0.0}


@every_loss
@pytest.mark.parametrize("size", [1, 2, 8])
def test_bounds_loss_and_gradient_do_not_depend_on_the_cut(name: str, size: int) -> None:
    inputs = random_inputs(10, spread=0.5)
    loss = MAKE[name]()
    count = inputs.response_mask.sum()
    parts = cut(inputs, size)
    whole = loss.tally(inputs)
    summed = torch.stack([loss.tally(micro) for micro in parts]).sum(dim=0)
    assert summed.dtype == torch.float64
    assert torch.allclose(summed, whole, rtol=1e-13)
    bounds, of_parts = MAKE[name]().choose(whole), MAKE[name]().choose(summed)
    assert of_parts.clip_low.item() == pytest.approx(bounds.clip_low.item(), abs=1e-13)
    assert of_parts.clip_high.item() == pytest.approx(bounds.clip_high.item(), abs=1e-13)
    output = loss(inputs, bounds, count)
    outputs = [loss(micro, of_parts, count) for micro in parts]
    (gradient,) = torch.autograd.grad(output.loss, inputs.logprobs)
    (added,) = torch.autograd.grad(sum(o.loss for o in outputs), inputs.logprobs)
    assert torch.allclose(added, gradient, atol=1e-14)
    for key, value in output.metrics.items():
        values = torch.stack([o.metrics[key] for o in outputs])
        combined = values.max() if lookup(key).reduction == "max" else values.sum()
        assert combined.item() == pytest.approx(value.item(), abs=1e-12)


@every_loss
def test_a_weight_of_two_is_the_same_response_twice(name: str) -> None:
    inputs = random_inputs(11, weighted=False)
    twice = LossInputs(*(torch.cat([value, value[:2]]) for value in list(vars(inputs).values())[:4]))
    weights = torch.ones_like(inputs.behaviour_logprobs)
    weights[:2] = 2
    once, again = run(MAKE[name](), replace(inputs, weights=weights), 3), run(MAKE[name](), twice, 3)
    assert once[0].loss.item() == pytest.approx(again[0].loss.item(), abs=1e-13)
    assert part(once[0], *MASS) == pytest.approx(part(again[0], *MASS))


@every_loss
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
def test_exp_cannot_overflow(name: str, advantage: float, log_ratio: float) -> None:
    logprobs = torch.tensor([[min(0.0, log_ratio), -1.0]], requires_grad=True)
    behaviour, advantages = torch.tensor([[min(0.0, -log_ratio), -1.0]]), torch.tensor([[advantage, 1.0]])
    output, gradient = run(MAKE[name](), LossInputs(logprobs, behaviour, advantages, torch.ones(1, 2, dtype=torch.bool)))
    assert output.loss.isfinite()
    assert gradient.isfinite().all()
    assert all(value.isfinite() for value in output.metrics.values())
    assert output.metrics["policy/log_ratio_clamped_frac"].item() == 1


@every_loss
def test_an_undefined_ratio_shows_in_the_loss(name: str) -> None:
    logprobs = torch.tensor([[-math.inf, -1.0]], requires_grad=True)
    inputs = LossInputs(logprobs, logprobs.detach(), torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool))
    output, _ = run(MAKE[name](), inputs)
    assert not output.loss.isfinite()


@every_loss
def test_no_value_is_read_back_to_the_host(name: str) -> None:
    """Tensors on the meta device have no values: reading one raises."""
    loss = MAKE[name]()
    logprobs, other = (torch.zeros(2, 3, device="meta", requires_grad=grad) for grad in (True, False))
    inputs = LossInputs(logprobs, other, other, torch.ones(2, 3, dtype=torch.bool, device="meta"), other)
    bounds = loss.choose(loss.tally(inputs))
    output = loss(inputs, bounds, torch.ones((), device="meta"))
    output.loss.backward()
    assert {value.device.type for value in (bounds.clip_low, bounds.clip_high, *output.metrics.values())} == {"meta"}


@every_loss
def test_the_tally_has_no_graph_and_only_some_losses_need_it(name: str) -> None:
    loss = MAKE[name]()
    tally = loss.tally(random_inputs(12))
    assert not tally.requires_grad
    assert loss.bounds_scope == "update"
    assert loss.adaptive == (len(tally) > 0) == (name in ("m2po", "adaptive_ratio"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CispoLoss(1.0, 1.2), r"clip_low is 1.0; it must be in \[0, 1\)"),
        (lambda: CispoLoss(-0.1, 1.2), "clip_low is -0.1"),
        (lambda: CispoLoss(0.0, 0.28), "clip_high is 0.28; it must be > 1"),
        (lambda: GspoLoss(3e-4, 1.0), "clip_high is 1.0; it must be > 1"),
        (lambda: GspoLoss(0.0, 1.1), r"clip_low is 0.0; it must be in \(0, 1\)"),
        (lambda: SapoLoss(tau_pos=0.0), "tau_pos is 0.0; it must be > 0"),
        (lambda: SapoLoss(tau_neg=math.nan), "tau_neg is nan; it must be > 0"),
        (lambda: DppoLoss(0.0), r"threshold is 0.0; it must be in \(0, 1\)"),
        (lambda: DppoLoss(1.0), r"threshold is 1.0; it must be in \(0, 1\)"),
        (lambda: M2poLoss(1e-6), "m2_threshold is 1e-06; it must be > 1e-06"),
        (lambda: M2poLoss(math.nan), "m2_threshold is nan"),
        (lambda: AdaptiveRatioLoss(width=0.6), r"width is 0.6; it must be in \[0.1, 0.5\]"),
        (lambda: AdaptiveRatioLoss(narrowest=0.0), "narrowest is 0.0; it must be > 0"),
        (lambda: AdaptiveRatioLoss(widest=1.0), "widest is 1.0; it must be < 1"),
        (lambda: AdaptiveRatioLoss(grow=0.9), "grow is 0.9; it must be >= 1"),
        (lambda: AdaptiveRatioLoss(shrink=1.1), r"shrink is 1.1; it must be in \(0, 1\]"),
    ],
)
def test_values_out_of_bounds_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("cispo", CispoLoss(0.0, 5.0)),
        ("gspo", GspoLoss(0.9997, 1.0004)),
        ("sapo", SapoLoss(1.0, 1.05)),
        ("dppo", DppoLoss(0.15)),
        ("m2po", M2poLoss(0.04)),
        ("adaptive_ratio", AdaptiveRatioLoss(0.2, 0.1, 0.5, 1.1, 0.9)),
        ("dual_clip", FixedClipLoss(0.8, 1.2, dual_clip=3.0)),
    ],
)
def test_the_files_of_conf_hold_the_numbers_of_their_sources(name: str, loss: object) -> None:
    file = OmegaConf.load(Path(__file__).parents[2] / "conf" / "loss" / f"{name}.yaml")
    values = dict(OmegaConf.to_container(file.get("loss", file)))  # type: ignore[arg-type]
    assert values.pop("_target_") == f"bapo.losses.{type(loss).__name__}"
    assert type(loss)(**values) == loss
