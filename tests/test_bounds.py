"""The table search against golden values, public numbers and a token-by-token transcription of Algorithm 1."""

import json
import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bapo.losses import BapoLoss, BoundRange, is_clipped
from bapo.losses.clip_bounds import mass_table, positive_ratio, search_path, tally_masses
from bapo.losses.surrogate import clip_counts
from bapo.types import ClipBounds, LossInputs

CASES = json.loads((Path(__file__).parent / "data" / "bound_search.json").read_text())["cases"]
PAPER_LOW, PAPER_HIGH = BoundRange(0.6, 0.9, 0.02), BoundRange(1.2, 3.0, 0.05)
INF = math.inf


def tokens(ratios: list[float], advantages: list[float], dtype: torch.dtype = torch.float64) -> LossInputs:
    """One sequence of the given importance ratios."""
    logprobs = torch.tensor([ratios], dtype=torch.float64).log().to(dtype)
    mask = torch.ones(1, len(ratios), dtype=torch.bool)
    return LossInputs(logprobs, torch.zeros_like(logprobs), torch.tensor([advantages], dtype=dtype), mask)


def golden_inputs(case: dict) -> LossInputs:
    names = ("logprobs", "behaviour_logprobs", "advantages")
    return LossInputs(*(torch.tensor(case[n], dtype=torch.float64) for n in names), torch.tensor(case["response_mask"]).bool())


def search(loss: BapoLoss, inputs: LossInputs) -> ClipBounds:
    return loss.choose(loss.tally(inputs))


def pair(bounds: ClipBounds) -> tuple[float, float]:
    return round(bounds.clip_low.item(), 10), round(bounds.clip_high.item(), 10)


# --- golden values ---------------------------------------------------------------------------------------------------

PAPER = {
    "paper_gradient": BapoLoss(0.4, PAPER_LOW, PAPER_HIGH),
    "paper_gradient_rho05": BapoLoss(0.5, PAPER_LOW, PAPER_HIGH),
    "surrogate_unweighted": BapoLoss(0.4, PAPER_LOW, PAPER_HIGH, mass="surrogate"),
}
REFERENCE = {
    "reference_yaml": BapoLoss(0.5, BoundRange(0.6, 0.8, 0.05), BoundRange(1.2, 2.0, 0.05), "low_first", "surrogate"),
    "reference_script": BapoLoss(1 / 3, BoundRange(0.8, 0.95, 0.05), BoundRange(1.2, 2.0, 0.1), "low_first", "surrogate"),
}


@pytest.mark.parametrize("case", CASES, ids=[str(i) for i in range(len(CASES))])
@pytest.mark.parametrize("name", [*PAPER, *REFERENCE])
def test_golden_bounds(name: str, case: dict) -> None:
    expected = case["expect"][name]
    bounds = search((PAPER | REFERENCE)[name], golden_inputs(case))
    assert bounds.clip_low.item() == pytest.approx(expected["clip_low"], abs=1e-9)
    assert bounds.clip_high.item() == pytest.approx(expected["clip_high"], abs=1e-9)
    if name in PAPER:
        assert bounds.positive_ratio.item() == pytest.approx(expected["positive_ratio"], abs=1e-6)
    else:  # the reference reports P / N
        share = bounds.positive_ratio.item()
        assert share / (1 - share) == pytest.approx(expected["pos_neg_ratio"], rel=1e-6, abs=1e-6)


# --- public numbers --------------------------------------------------------------------------------------------------

FOUR = tokens([2.5, 0.5, 1, 1], [1, -1, -1, -1])


def test_public_example_high_first() -> None:
    bounds = search(BapoLoss(0.4, PAPER_LOW, PAPER_HIGH, mass="surrogate"), FOUR)
    assert pair(bounds) == (0.6, 1.75)
    assert bounds.positive_ratio.item() == pytest.approx(1.75 / 4.35, abs=1e-12)
    assert bounds.positive_ratio_start.item() == pytest.approx(1.2 / 3.8, abs=1e-12)
    assert (bounds.target_met.item(), bounds.saturated.item(), bounds.search_effective.item()) == (1, 0, 1)


def test_public_example_low_first() -> None:
    bounds = search(BapoLoss(0.4, PAPER_LOW, PAPER_HIGH, "low_first", "surrogate"), FOUR)
    assert pair(bounds) == (0.9, 1.95)
    assert bounds.positive_ratio.item() == pytest.approx(1.95 / 4.85, abs=1e-12)


def test_public_example_target_out_of_reach() -> None:
    bounds = search(BapoLoss(0.5, PAPER_LOW, PAPER_HIGH, mass="surrogate"), FOUR)
    assert pair(bounds) == (0.9, 3.0)
    assert (bounds.target_met.item(), bounds.saturated.item()) == (0, 1)


def test_surrogate_mass_raising_clip_low_lowers_the_ratio() -> None:
    low, high = BoundRange(0.6, 0.9, 0.1), BoundRange(1.2, 1.2)
    inputs = tokens([3.5, 0.1, 0.1, 0.1, 2, 2, 2], [1, -1, -1, -1, -1, -1, -1])
    table = mass_table(tally_masses(inputs, low, high, "surrogate"), low, high)
    ratios = positive_ratio(table.positive_mass, table.negative_mass)
    assert ratios.tolist() == pytest.approx([1.2 / 9, 1.2 / 9.3, 1.2 / 9.6, 1.2 / 9.9], abs=1e-12)


def test_gradient_mass_by_hand() -> None:
    """A clipped token weighs nothing; an unclipped one r|A|."""
    low, high = BoundRange(0.5, 0.7, 0.1), BoundRange(1.5, 2.5, 0.5)
    inputs = tokens([1.4, 1.8, 2.2, 9.0, 0.4, 0.55, 0.65, 3.0], [1, 2, 1, 1, -1, -1, -2, -1])
    tally = tally_masses(inputs, low, high, "gradient")
    assert tally.tolist() == pytest.approx([1.4, 1.4 + 3.6, 1.4 + 3.6 + 2.2, 0.55 + 1.3 + 3, 1.3 + 3, 3], abs=1e-12)


# --- ranges ----------------------------------------------------------------------------------------------------------


def test_paper_ranges_hold_37_and_16_values_and_end_exactly() -> None:
    high, low = PAPER_HIGH.candidates(), PAPER_LOW.candidates()
    assert (len(high), len(low)) == (37, 16) == (len(PAPER_HIGH), len(PAPER_LOW))
    assert (high[0].item(), high[-1].item(), low[0].item(), low[-1].item()) == (1.2, 3.0, 0.6, 0.9)
    assert low[:-1].tolist() == pytest.approx([0.6 + 0.02 * k for k in range(15)], abs=1e-15)


@pytest.mark.parametrize(
    ("bounds", "values"),
    [
        (BoundRange(0.6, 0.75, 0.1), [0.6, 0.7, 0.75]),
        (BoundRange(0.8, 0.8), [0.8]),
        (BoundRange(0.8, 0.8, 0.02), [0.8]),
        (BoundRange(1.2, 1.25, 0.5), [1.2, 1.25]),
    ],
)
def test_candidates_of_partial_and_pinned_ranges(bounds: BoundRange, values: list[float]) -> None:
    assert bounds.candidates().tolist() == pytest.approx(values, abs=1e-12)
    assert bounds.candidates()[-1].item() == bounds.stop


def test_a_pinned_range_leaves_the_other_one_moving() -> None:
    inputs = tokens([2.5, 0.5, 1, 1], [1, -1, -1, -1])
    assert pair(search(BapoLoss(0.99, BoundRange(0.6, 0.6), PAPER_HIGH), inputs)) == (0.6, 3.0)
    assert pair(search(BapoLoss(0.99, PAPER_LOW, BoundRange(1.2, 1.2)), inputs)) == (0.9, 1.2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.9, 0.6, 0.02), r"start is 0.9; it must be <= stop, which is 0.6"),
        ((0.6, 0.9, 0.0), r"step is 0.0; it must be > 0"),
        ((0.6, 0.9, -0.02), r"step is -0.02; it must be > 0"),
        ((0.6, 0.9, math.nan), r"step is nan; it must be > 0"),
        ((1.2, INF, 0.05), r"stop is inf; both must be finite"),
    ],
)
def test_range_errors(arguments: tuple[float, float, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BoundRange(*arguments)


# --- degenerate batches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mass", ["gradient", "surrogate"])
@pytest.mark.parametrize("order", ["high_first", "low_first"])
@pytest.mark.parametrize(
    ("inputs", "ratio", "bounds", "met"),
    [
        (tokens([2.0, 0.5], [1, 1]), 1.0, (0.6, 1.2), 1),
        (tokens([2.0, 1.0], [-1, -1]), 0.0, (0.9, 3.0), 0),
        (tokens([2.0, 0.5], [0, 0]), 1.0, (0.6, 1.2), 1),
        (LossInputs(*[torch.full((2, 3), math.nan)] * 3, torch.zeros(2, 3, dtype=torch.bool)), 1.0, (0.6, 1.2), 1),
        (LossInputs(*[torch.zeros(0, 0)] * 3, torch.zeros(0, 0, dtype=torch.bool)), 1.0, (0.6, 1.2), 1),
    ],
    ids=["no negative", "no positive", "zero advantages", "empty mask", "no tokens"],
)
def test_degenerate_batches(inputs: LossInputs, ratio: float, bounds: tuple, met: int, order: str, mass: str) -> None:
    found = search(BapoLoss(0.4, PAPER_LOW, PAPER_HIGH, order, mass), inputs)
    assert pair(found) == bounds
    assert found.positive_ratio.item() == found.positive_ratio_start.item() == ratio
    assert (found.target_met.item(), found.search_effective.item()) == (met, 0)


def test_on_policy_no_bound_changes_the_ratio() -> None:
    bounds = search(BapoLoss(0.5, PAPER_LOW, PAPER_HIGH), tokens([1.0] * 4, [1, -1, -1, -1]))
    assert bounds.search_effective.item() == 0
    assert bounds.positive_ratio.item() == 0.25
    assert pair(bounds) == (0.9, 3.0)


def test_summation_order_does_not_decide_a_tie_with_the_target() -> None:
    """P = N = 0.1 + 0.2 + 0.3, summed in two orders that differ in the last bit."""
    inputs = tokens([1.0] * 6, [0.1, 0.2, 0.3, -0.3, -0.2, -0.1])
    loss = BapoLoss(0.5, PAPER_LOW, PAPER_HIGH)
    assert pair(search(loss, inputs)) == (0.6, 1.2)
    assert pair(search(loss, LossInputs(*(getattr(inputs, n).flip(1) for n in LossInputs.__annotations__)))) == (0.6, 1.2)


# --- one rule for "is clipped" ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sign", [1.0, -1.0, 0.0])
def test_search_and_loss_agree_on_every_tie(dtype: torch.dtype, sign: float) -> None:
    """Ratios exactly on a candidate, one ulp below and one above, against every candidate: r > bound or r < bound, strictly."""
    lows, highs = PAPER_LOW.candidates(), PAPER_HIGH.candidates()
    bounds = torch.cat([lows, highs]).to(dtype)
    ratio = torch.cat([bounds, torch.nextafter(bounds, bounds * 0), torch.nextafter(bounds, bounds * 9)])
    advantages = torch.full_like(ratio, sign)
    counts = clip_counts(ratio, advantages, lows, highs)
    own = highs if sign > 0 else lows
    per_bound = torch.stack(
        [is_clipped(ratio, advantages, b if sign < 0 else lows[0], b if sign > 0 else highs[0]) for b in own]
    )
    assert torch.equal(per_bound.sum(0), counts)
    literal = {1.0: ratio > own[:, None].to(dtype), -1.0: ratio < own[:, None].to(dtype), 0.0: torch.zeros_like(per_bound)}
    assert torch.equal(per_bound, literal[sign])


# --- Algorithm 1, token by token -------------------------------------------------------------------------------------


def literal_values(start: int, stop: int, step: int) -> list[float]:
    """The range in hundredths, stepped in exact arithmetic."""
    values, value = [], Fraction(start, 100)
    while value < Fraction(stop, 100):
        values.append(float(value))
        value += Fraction(step, 100)
    return [*values, stop / 100]


def literal_mass(r: float, a: float, low: float, high: float, mass: str) -> float:
    if mass == "surrogate":
        return abs(min(r * a, min(max(r, low), high) * a))
    clipped = (a > 0 and r > high) or (a < 0 and r < low)
    return 0.0 if clipped else r * abs(a)


def literal_search(rs, advantages, lows, highs, target, order, mass) -> tuple[float, float, float]:
    if order == "high_first":
        path = [(lows[0], high) for high in highs] + [(low, highs[-1]) for low in lows[1:]]
    else:
        path = [(low, highs[0]) for low in lows] + [(lows[-1], high) for high in highs[1:]]
    for low, high in path:
        masses = [literal_mass(r, a, low, high, mass) for r, a in zip(rs, advantages, strict=True)]
        positive = math.fsum(m for m, a in zip(masses, advantages, strict=True) if a > 0)
        negative = math.fsum(m for m, a in zip(masses, advantages, strict=True) if a < 0)
        ratio = 1.0 if negative == 0 else positive / (positive + negative)
        if ratio >= target - 1e-12:
            return low, high, ratio
    return low, high, ratio


advantage = st.one_of(st.sampled_from([-1.0, 0.0, 1.0]), st.floats(0.01, 3).flatmap(lambda x: st.sampled_from([x, -x])))
token_lists = st.lists(st.tuples(st.floats(-3, 3), advantage), min_size=1, max_size=12)
low_range = st.tuples(st.integers(10, 95), st.integers(0, 40), st.integers(1, 13)).map(
    lambda x: (x[0], min(x[0] + x[1], 99), x[2])
)
high_range = st.tuples(st.integers(101, 150), st.integers(0, 200), st.integers(3, 30)).map(lambda x: (x[0], x[0] + x[1], x[2]))
masses, orders = st.sampled_from(["gradient", "surrogate"]), st.sampled_from(["high_first", "low_first"])


def hundredths(bounds: tuple[int, int, int]) -> BoundRange:
    return BoundRange(bounds[0] / 100, bounds[1] / 100, bounds[2] / 100)


def from_log_ratios(rows: list[tuple[float, float]], dtype: torch.dtype = torch.float64) -> LossInputs:
    logprobs = torch.tensor([[x for x, _ in rows]], dtype=dtype)
    advantages = torch.tensor([[a for _, a in rows]], dtype=dtype)
    return LossInputs(logprobs, torch.zeros_like(logprobs), advantages, torch.ones_like(logprobs, dtype=torch.bool))


@settings(max_examples=200, deadline=None)
@given(token_lists, low_range, high_range, st.floats(0.05, 0.95), orders, masses)
def test_table_search_is_algorithm_1(rows, low, high, target, order, mass) -> None:
    inputs = from_log_ratios(rows)
    found = search(BapoLoss(target, hundredths(low), hundredths(high), order, mass), inputs)
    ratios = inputs.logprobs.exp()[0].tolist()
    expected = literal_search(ratios, [a for _, a in rows], literal_values(*low), literal_values(*high), target, order, mass)
    actual = (found.clip_low.item(), found.clip_high.item(), found.positive_ratio.item())
    assert actual == pytest.approx(expected, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(token_lists, low_range, high_range, orders)
def test_gradient_mass_no_move_lowers_the_ratio(rows, low, high, order) -> None:
    low, high = hundredths(low), hundredths(high)
    table = mass_table(tally_masses(from_log_ratios(rows), low, high, "gradient"), low, high)
    low_index, high_index = search_path(table, order)
    ratios = positive_ratio(table.positive_mass[high_index], table.negative_mass[low_index])
    assert (ratios.diff() >= -1e-12).all()


# --- what must not matter --------------------------------------------------------------------------------------------


def random_inputs(seed: int, rows: int = 8, width: int = 9, dtype: torch.dtype = torch.float64) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)
    logprobs, behaviour, advantages = torch.randn(3, rows, width, generator=generator, dtype=torch.float64).to(dtype).unbind()
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    return LossInputs(logprobs, behaviour, advantages, torch.arange(width) < lengths)


def rearrange(inputs: LossInputs, change) -> LossInputs:
    return LossInputs(*(change(getattr(inputs, name)) for name in LossInputs.__annotations__))


def padded(value: Tensor) -> Tensor:
    fill: float = 0 if value.dtype == torch.bool else math.nan
    return torch.cat([value, value.new_full((len(value), 5), fill)], dim=1)


@pytest.mark.parametrize("mass", ["gradient", "surrogate"])
@pytest.mark.parametrize("seed", range(5))
def test_micro_batches_padding_and_order_do_not_matter(seed: int, mass: str) -> None:
    inputs = random_inputs(seed)
    loss = BapoLoss(0.55, PAPER_LOW, PAPER_HIGH, mass=mass)
    whole = loss.tally(inputs)
    bounds = loss.choose(whole)
    permutation = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    others = [loss.tally(rearrange(inputs, padded)), loss.tally(rearrange(inputs, lambda x: x[permutation]))]
    for size in (1, 2, 4):  # 8 x 1, 4 x 2, 2 x 4
        others.append(sum(loss.tally(rearrange(inputs, lambda x, i=i, n=size: x[i : i + n])) for i in range(0, 8, size)))
    for other in others:
        assert torch.allclose(other, whole, rtol=1e-12, atol=0)
        assert pair(loss.choose(other)) == pair(bounds)
        assert loss.choose(other).positive_ratio.item() == pytest.approx(bounds.positive_ratio.item(), abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_float32_inputs_are_summed_in_float64(seed: int) -> None:
    loss = BapoLoss(0.55, PAPER_LOW, PAPER_HIGH)
    single, double = loss.tally(random_inputs(seed, dtype=torch.float32)), loss.tally(random_inputs(seed))
    assert single.dtype == torch.float64
    assert torch.allclose(single, double, rtol=1e-5)


def test_a_masked_slot_has_no_say() -> None:
    loss, inputs = BapoLoss(0.55, PAPER_LOW, PAPER_HIGH), random_inputs(0)
    clean = loss.tally(inputs)
    for garbage in (math.nan, INF, -INF, 1e30):
        dirty = [torch.where(inputs.response_mask, getattr(inputs, n), garbage) for n in LossInputs.__annotations__][:3]
        assert torch.equal(loss.tally(LossInputs(*dirty, inputs.response_mask)), clean)


def test_the_search_keeps_no_graph() -> None:
    inputs = random_inputs(0)
    inputs.logprobs.requires_grad_()
    loss = BapoLoss(0.55, PAPER_LOW, PAPER_HIGH)
    tally = loss.tally(inputs)
    bounds = loss.choose(tally)
    assert not tally.requires_grad
    assert all(not value.requires_grad and value.dim() == 0 for value in vars(bounds).values())
