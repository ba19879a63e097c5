"""The table search against golden values, public numbers and a token-by-token transcription of Algorithm 1."""

import math
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.losses import CASES, golden_inputs, padded, random_inputs, rearrange

from bapo.losses import PRESETS, BapoLoss, BoundRange, MassRule, is_clipped
from bapo.losses.clip_bounds import mass_table, positive_ratio, search_path, tally_masses
from bapo.losses.surrogate import clip_counts
from bapo.metrics import lookup
from bapo.types import ClipBounds, LossInputs

PAPER_LOW, PAPER_HIGH = BoundRange(0.6, 0.9, 0.02), BoundRange(1.2, 3.0, 0.05)
INF = math.inf


def tokens(ratios: list[float], advantages: list[float], weights: list[float] | None = None) -> LossInputs:
    """One sequence of the given importance ratios, float64."""
    logprobs = torch.tensor([ratios], dtype=torch.float64).log()
    mask = torch.ones(1, len(ratios), dtype=torch.bool)
    weighted = None if weights is None else torch.tensor([weights], dtype=torch.float64)
    return LossInputs(logprobs, torch.zeros_like(logprobs), torch.tensor([advantages], dtype=torch.float64), mask, weighted)


def search(loss: BapoLoss, inputs: LossInputs) -> ClipBounds:
    return loss.choose(loss.tally(inputs))


def pair(bounds: ClipBounds) -> tuple[float, float]:
    return round(bounds.clip_low.item(), 10), round(bounds.clip_high.item(), 10)


def metrics_of(bounds: ClipBounds, *names: str) -> tuple[float, ...]:
    """Values of the search's own metrics."""
    return tuple(bounds.metrics[f"bounds/{name}"].item() for name in names)


# --- golden values ---------------------------------------------------------------------------------------------------

PAPER = {
    "paper_gradient": PRESETS["bapo"],
    "paper_gradient_rho05": replace(PRESETS["bapo"], target_positive_ratio=0.5),
    "surrogate_unweighted": replace(PRESETS["bapo"], mass="surrogate"),
    "trinity": PRESETS["bapo_trinity"],
    "eq8_abs": PRESETS["bapo_eq8"],
}
REFERENCE = {"reference_yaml": PRESETS["bapo_reference"], "reference_script": PRESETS["bapo_reference_script"]}


@pytest.mark.parametrize("case", CASES, ids=[str(i) for i in range(len(CASES))])
@pytest.mark.parametrize("name", [*PAPER, *REFERENCE])
def test_golden_bounds(name: str, case: dict) -> None:
    expected = case["expect"][name]
    bounds = search((PAPER | REFERENCE)[name], golden_inputs(case))
    assert bounds.positive_ratio is not None
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
    assert metrics_of(bounds, "positive_ratio_start", "positive_ratio_at_one", "target") == pytest.approx(
        (1.2 / 3.8, 0.25, 0.4)
    )
    assert metrics_of(bounds, "target_met", "saturated", "search_effective") == (1, 0, 1)


def test_public_example_low_first() -> None:
    bounds = search(BapoLoss(0.4, PAPER_LOW, PAPER_HIGH, "low_first", "surrogate"), FOUR)
    assert pair(bounds) == (0.9, 1.95)
    assert bounds.positive_ratio.item() == pytest.approx(1.95 / 4.85, abs=1e-12)


def test_public_example_positive_over_negative_of_one() -> None:
    bounds = search(BapoLoss(0.5, PAPER_LOW, PAPER_HIGH, mass="surrogate"), FOUR)
    assert pair(bounds) == (0.9, 3.0)
    assert metrics_of(bounds, "target_met", "saturated") == (0, 1)


def test_public_example_eq_8_with_its_bars_around_a_signed_sum() -> None:
    """P / |P - N| = 1.2 / |1.2 - 2.6|: met at the start. The metrics stay shares."""
    bounds = search(BapoLoss(0.4, PAPER_LOW, PAPER_HIGH, mass="surrogate", balance="signed"), FOUR)
    assert pair(bounds) == (0.6, 1.2)
    assert bounds.positive_ratio.item() == pytest.approx(1.2 / 1.4, abs=1e-12)
    assert metrics_of(bounds, "positive_ratio", "target_met") == pytest.approx((1.2 / 3.8, 1))


@pytest.mark.parametrize(("negative", "ratio"), [(3.0, 1.0), (1.5, INF), (1.0, 3.0), (0.0, 1.0)])
def test_signed_ratio_can_exceed_one_and_is_infinite_at_balance(negative: float, ratio: float) -> None:
    masses = torch.tensor([1.5, negative], dtype=torch.float64)
    assert positive_ratio(masses[0], masses[1], "signed").item() == ratio


def test_surrogate_mass_raising_clip_low_lowers_the_ratio() -> None:
    low, high = BoundRange(0.6, 0.9, 0.1), BoundRange(1.2, 1.2)
    inputs = tokens([3.5, 0.1, 0.1, 0.1, 2, 2, 2], [1, -1, -1, -1, -1, -1, -1])
    table = mass_table(tally_masses(inputs, low, high, MassRule("surrogate")), low, high)
    ratios = positive_ratio(table.positive_mass, table.negative_mass)
    assert ratios.tolist() == pytest.approx([1.2 / 9, 1.2 / 9.3, 1.2 / 9.6, 1.2 / 9.9], abs=1e-12)


HAND_LOW, HAND_HIGH = BoundRange(0.5, 0.7, 0.1), BoundRange(1.5, 2.5, 0.5)
EIGHT = ([1.4, 1.8, 2.2, 9.0, 0.4, 0.55, 0.65, 3.0], [1, 2, 1, 1, -1, -1, -2, -1])


def test_gradient_mass_by_hand() -> None:
    """A clipped token weighs nothing; an unclipped one r|A|. The last two numbers are the sums of |A|."""
    tally = tally_masses(tokens(*EIGHT), HAND_LOW, HAND_HIGH, MassRule())
    expected = [1.4, 1.4 + 3.6, 1.4 + 3.6 + 2.2, 0.55 + 1.3 + 3, 1.3 + 3, 3, 5, 5]
    assert tally.tolist() == pytest.approx(expected, abs=1e-12)


def test_dual_clip_in_the_masses_by_hand() -> None:
    """Negative tokens beyond c = 2.5 weigh 0 as gradients and c|A| as surrogates; positive ones do not feel it."""
    gradient = tally_masses(tokens(*EIGHT), HAND_LOW, HAND_HIGH, MassRule("gradient", dual_clip=2.5))
    assert gradient.tolist() == pytest.approx([1.4, 5, 7.2, 0.55 + 1.3, 1.3, 0, 5, 5], abs=1e-12)
    surrogate = tally_masses(tokens(*EIGHT), HAND_LOW, HAND_HIGH, MassRule("surrogate", dual_clip=2.5))
    negative = [0.5 + 0.55 + 1.3 + 2.5, 0.6 + 0.6 + 1.3 + 2.5, 0.7 + 0.7 + 1.4 + 2.5]
    assert surrogate[3:].tolist() == pytest.approx([*negative, 5, 5], abs=1e-12)


def test_masses_follow_token_weights_and_the_behaviour_probability() -> None:
    ratios, advantages = [1.4, 9.0, 0.4, 0.65], [1, 1, -1, -2]
    inputs = tokens(ratios, advantages, weights=[2, 0.5, 1, 3])
    tally = tally_masses(inputs, HAND_LOW, HAND_HIGH, MassRule())
    assert tally.tolist() == pytest.approx([2.8, 2.8, 2.8, 3.9, 3.9, 0, 2.5, 7], abs=1e-12)
    behaviour = torch.tensor([[0.5, 0.1, 0.25, 0.2]], dtype=torch.float64).log()
    inputs = replace(inputs, logprobs=inputs.logprobs + behaviour, behaviour_logprobs=behaviour)
    tally = tally_masses(inputs, HAND_LOW, HAND_HIGH, MassRule("gradient", "behaviour_prob"))
    assert tally.tolist() == pytest.approx([1.4, 1.4, 1.4, 0.78, 0.78, 0, 1 + 0.05, 0.25 + 1.2], abs=1e-12)


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
@pytest.mark.parametrize("aim", [{}, {"balance": "signed"}, {"target_mode": "relative", "target_margin": 0.1}], ids=str)
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
def test_degenerate_batches(inputs: LossInputs, ratio: float, bounds: tuple, met: int, aim: dict, order, mass) -> None:
    found = search(BapoLoss(0.4, PAPER_LOW, PAPER_HIGH, order, mass, **aim), inputs)
    assert pair(found) == bounds
    assert {found.positive_ratio.item(), *metrics_of(found, "positive_ratio_start", "positive_ratio_at_one")} == {ratio}
    assert metrics_of(found, "target_met", "search_effective") == (met, 0)
    assert all(value.isfinite() for value in found.metrics.values())


def test_on_policy_no_bound_changes_the_ratio() -> None:
    bounds = search(BapoLoss(0.5, PAPER_LOW, PAPER_HIGH), tokens([1.0] * 4, [1, -1, -1, -1]))
    assert metrics_of(bounds, "search_effective") == (0,)
    assert bounds.positive_ratio.item() == 0.25
    assert pair(bounds) == (0.9, 3.0)


def test_summation_order_does_not_decide_a_tie_with_the_target() -> None:
    """P = N = 0.1 + 0.2 + 0.3, summed in two orders that differ in the last bit."""
    inputs = tokens([1.0] * 6, [0.1, 0.2, 0.3, -0.3, -0.2, -0.1])
    loss = BapoLoss(0.5, PAPER_LOW, PAPER_HIGH)
    assert pair(search(loss, inputs)) == (0.6, 1.2)
    assert pair(search(loss, rearrange(inputs, lambda x: x.flip(1)))) == (0.6, 1.2)


# --- what the search aims at ------------------------------------------------------------------------------------------


def test_a_relative_target_is_the_share_at_one_plus_a_margin() -> None:
    relative = BapoLoss(0.9, PAPER_LOW, PAPER_HIGH, mass="surrogate", target_mode="relative", target_margin=0.15)
    bounds = search(relative, FOUR)  # a quarter of the advantage mass is positive
    assert metrics_of(bounds, "positive_ratio_at_one", "target") == pytest.approx((0.25, 0.4))
    assert pair(bounds) == (0.6, 1.75) == pair(search(BapoLoss(0.4, PAPER_LOW, PAPER_HIGH, mass="surrogate"), FOUR))
    weighted = search(relative, replace(FOUR, weights=torch.tensor([[3.0, 1, 1, 1]], dtype=torch.float64)))
    assert metrics_of(weighted, "positive_ratio_at_one", "target") == pytest.approx((0.5, 0.65))


@pytest.mark.parametrize(("margin", "target"), [(0.9, 0.99), (-0.9, 0.01), (0.0, 0.25)])
def test_a_relative_target_stays_inside_its_limits(margin: float, target: float) -> None:
    loss = BapoLoss(0.4, PAPER_LOW, PAPER_HIGH, target_mode="relative", target_margin=margin)
    assert metrics_of(search(loss, FOUR), "target") == pytest.approx((target,))


def test_counterfactuals_are_what_other_runs_had_chosen() -> None:
    bounds = search(BapoLoss(0.4, PAPER_LOW, PAPER_HIGH, mass="surrogate"), FOUR)
    expected = {
        "high_first": (0.6, 1.75, 1.75 / 4.35),
        "low_first": (0.9, 1.95, 1.95 / 4.85),
        "target_0.3": (0.6, 1.2, 1.2 / 3.8),
        "target_0.4": (0.6, 1.75, 1.75 / 4.35),
        "target_0.5": (0.9, 3.0, 2.5 / 5.4),
    }
    for name, values in expected.items():
        found = metrics_of(bounds, *(f"cf/{name}/{part}" for part in ("clip_low", "clip_high", "positive_ratio")))
        assert found == pytest.approx(values, abs=1e-12), name
    assert {name.split("/")[2] for name in bounds.metrics if "/cf/" in name} == set(expected)


@pytest.mark.parametrize("seed", range(3))
def test_counterfactuals_equal_separate_searches(seed: int) -> None:
    inputs, loss = random_inputs(seed), BapoLoss(0.55, PAPER_LOW, PAPER_HIGH, "low_first", counterfactual_targets=(0.45, 0.65))
    bounds = search(loss, inputs)
    others = {name: replace(loss, search_order=name) for name in ("high_first", "low_first")}
    others |= {f"target_{t}": replace(loss, target_positive_ratio=t) for t in (0.45, 0.65)}
    for name, other in others.items():
        separate = search(other, inputs)
        found = metrics_of(bounds, *(f"cf/{name}/{part}" for part in ("clip_low", "clip_high", "positive_ratio")))
        assert found == (separate.clip_low.item(), separate.clip_high.item(), separate.positive_ratio.item())


def test_names_of_metrics_do_not_depend_on_data_or_options_and_are_registered() -> None:
    options = [
        {},
        {"search_order": "low_first", "mass": "surrogate", "weight": "behaviour_prob", "dual_clip": 3.0},
        {"balance": "signed"},
        {"target_mode": "relative", "bounds_scope": "micro_batch"},
    ]
    batches = [FOUR, tokens([1.0], [0]), tokens([1.0], [-1]), random_inputs(0)]
    names = {frozenset(search(replace(PRESETS["bapo"], **o), inputs).metrics) for o in options for inputs in batches}
    assert len(names) == 1
    assert all(lookup(name).reduction == "global" for name in next(iter(names)))
    assert not any("/cf/" in name for name in search(replace(PRESETS["bapo"], counterfactuals=False), FOUR).metrics)


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


@dataclass(frozen=True)
class Token:
    r: float
    a: float
    p: float  # probability under the behaviour policy
    w: float


def literal_mass(token: Token, low: float, high: float, loss: BapoLoss) -> float:
    r, a = token.r, token.a
    c = loss.dual_clip if loss.dual_clip is not None and loss.dual_clip_in_search else INF
    if loss.mass == "surrogate":
        objective = min(r * a, min(max(r, low), high) * a)
        mass = abs(max(objective, c * a) if a < 0 else objective)
    else:
        mass = 0.0 if (a > 0 and r > high) or (a < 0 and (r < low or r > c)) else r * abs(a)
    return mass * token.w * (token.p if loss.weight == "behaviour_prob" else 1)


def literal_ratio(positive: float, negative: float, balance: str) -> float:
    if negative == 0:
        return 1.0
    if balance == "share":
        return positive / (positive + negative)
    return INF if positive == negative else positive / abs(positive - negative)


def literal_search(batch: list[Token], lows: list[float], highs: list[float], loss: BapoLoss) -> tuple[float, float, float]:
    if loss.search_order == "high_first":
        path = [(lows[0], high) for high in highs] + [(low, highs[-1]) for low in lows[1:]]
    else:
        path = [(low, highs[0]) for low in lows] + [(lows[-1], high) for high in highs[1:]]
    for low, high in path:
        positive = math.fsum(literal_mass(t, low, high, loss) for t in batch if t.a > 0)
        negative = math.fsum(literal_mass(t, low, high, loss) for t in batch if t.a < 0)
        ratio = literal_ratio(positive, negative, loss.balance)
        if ratio >= loss.target_positive_ratio - 1e-12:
            return low, high, ratio
    return low, high, ratio


advantage = st.one_of(st.sampled_from([-1.0, 0.0, 1.0]), st.floats(0.01, 3).flatmap(lambda x: st.sampled_from([x, -x])))
weight = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.1, 3))
token_lists = st.lists(st.tuples(st.floats(-3, 3), advantage, st.floats(-3, 0), weight), min_size=1, max_size=12)
low_range = st.tuples(st.integers(10, 95), st.integers(0, 40), st.integers(1, 13)).map(
    lambda x: (x[0], min(x[0] + x[1], 99), x[2])
)
high_range = st.tuples(st.integers(101, 150), st.integers(0, 200), st.integers(3, 30)).map(lambda x: (x[0], x[0] + x[1], x[2]))
orders = st.sampled_from(["high_first", "low_first"])
readings = st.fixed_dictionaries(
    {
        "mass": st.sampled_from(["gradient", "surrogate"]),
        "weight": st.sampled_from(["none", "behaviour_prob"]),
        "balance": st.sampled_from(["share", "signed"]),
        "dual_clip": st.one_of(st.none(), st.floats(1.05, 6)),
        "dual_clip_in_search": st.booleans(),
    }
)


def hundredths(bounds: tuple[int, int, int]) -> BoundRange:
    return BoundRange(bounds[0] / 100, bounds[1] / 100, bounds[2] / 100)


def from_log_ratios(rows: list[tuple[float, float, float, float]]) -> LossInputs:
    """Rows of (log r, A, behaviour log-prob, weight), float64."""
    log_ratio, advantages, behaviour, weights = torch.tensor(rows, dtype=torch.float64).T[:, None]
    return LossInputs(behaviour + log_ratio, behaviour, advantages, torch.ones_like(advantages, dtype=torch.bool), weights)


@settings(max_examples=100, deadline=None)
@given(token_lists, low_range, high_range, st.floats(0.05, 0.95), orders, readings)
def test_table_search_is_algorithm_1(rows, low, high, target, order, reading) -> None:
    inputs = from_log_ratios(rows)
    loss = BapoLoss(target, hundredths(low), hundredths(high), order, counterfactuals=False, **reading)
    ratios = (inputs.logprobs - inputs.behaviour_logprobs).exp()[0].tolist()
    batch = [Token(r, a, math.exp(b), w) for r, (_, a, b, w) in zip(ratios, rows, strict=True)]
    *bounds, ratio = literal_search(batch, literal_values(*low), literal_values(*high), loss)
    found = search(loss, inputs)
    assert (found.clip_low.item(), found.clip_high.item()) == pytest.approx(bounds, abs=1e-9)
    assert min(found.positive_ratio.item(), 1e3) == pytest.approx(min(ratio, 1e3), rel=1e-9)  # infinite where P = N


@settings(max_examples=100, deadline=None)
@given(token_lists, low_range, high_range, orders, readings)
def test_gradient_mass_no_move_lowers_the_ratio(rows, low, high, order, reading) -> None:
    loss = BapoLoss(0.4, hundredths(low), hundredths(high), order, **(reading | {"mass": "gradient", "balance": "share"}))
    table = mass_table(loss.tally(from_log_ratios(rows)), loss.clip_low, loss.clip_high)
    low_index, high_index = search_path(table, order)
    ratios = positive_ratio(table.positive_mass[high_index], table.negative_mass[low_index])
    assert (ratios.diff() >= -1e-12).all()


# --- what must not matter --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*PRESETS, "signed", "relative"])
@pytest.mark.parametrize("seed", range(3))
def test_micro_batches_padding_and_order_do_not_matter(seed: int, name: str) -> None:
    more = {
        "signed": replace(PRESETS["bapo_eq8"], balance="signed"),
        "relative": replace(PRESETS["bapo"], target_mode="relative", target_margin=0.05),
    }
    inputs, loss = random_inputs(seed), (PRESETS | more)[name]
    whole = loss.tally(inputs)
    bounds = loss.choose(whole)
    permutation = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    others = [loss.tally(rearrange(inputs, padded)), loss.tally(rearrange(inputs, lambda x: x[permutation]))]
    for size in (1, 2, 4):  # 8 x 1, 4 x 2, 2 x 4
        others.append(sum(loss.tally(rearrange(inputs, lambda x, i=i, n=size: x[i : i + n])) for i in range(0, 8, size)))
    for other in others:
        assert torch.allclose(other, whole, rtol=1e-12, atol=0)
        assert pair(loss.choose(other)) == pair(bounds)
        for key, value in loss.choose(other).metrics.items():
            assert value.item() == pytest.approx(bounds.metrics[key].item(), abs=1e-12), key


@pytest.mark.parametrize("seed", range(5))
def test_float32_inputs_are_summed_in_float64(seed: int) -> None:
    loss = BapoLoss(0.55, PAPER_LOW, PAPER_HIGH)
    single, double = loss.tally(random_inputs(seed, dtype=torch.float32)), loss.tally(random_inputs(seed))
    assert single.dtype == torch.float64
    assert torch.allclose(single, double, rtol=1e-5)


@pytest.mark.parametrize("name", ["bapo", "bapo_eq8", "bapo_trinity"])
def test_a_masked_slot_has_no_say(name: str) -> None:
    loss, inputs = PRESETS[name], random_inputs(0)
    clean = loss.tally(inputs)
    for garbage in (math.nan, INF, -INF, 1e30):
        dirty = rearrange(inputs, lambda x, g=garbage: x if x.dtype == torch.bool else x.where(inputs.response_mask, g))
        assert torch.equal(loss.tally(dirty), clean)


def test_no_weights_are_weights_of_one() -> None:
    inputs, loss = random_inputs(1), PRESETS["bapo"]
    ones = replace(inputs, weights=torch.ones_like(inputs.logprobs))
    assert torch.equal(loss.tally(replace(inputs, weights=None)), loss.tally(ones))
    assert not torch.equal(loss.tally(inputs), loss.tally(ones))


def test_the_search_keeps_no_graph() -> None:
    inputs = random_inputs(0)
    inputs.logprobs.requires_grad_()
    loss = BapoLoss(0.55, PAPER_LOW, PAPER_HIGH)
    tally = loss.tally(inputs)
    bounds = loss.choose(tally)
    assert not tally.requires_grad
    values = [bounds.clip_low, bounds.clip_high, bounds.positive_ratio, *bounds.metrics.values()]
    assert all(not value.requires_grad and value.dim() == 0 and value.dtype == torch.float64 for value in values)
