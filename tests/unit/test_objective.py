"""Aggregation, mismatch correction, the entropy filter and the regularisers: by hand, as laws, and under any cut."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import random_batch
from torch import Tensor

from bapo.losses import FixedClipLoss
from bapo.losses.objective import Objective, entropy_filter, entropy_histogram, entropy_threshold, mismatch_factor
from bapo.losses.regularisers import kl_estimate, regularised
from bapo.metrics import lookup
from bapo.types import LossInputs, LossOutput, TokenStats

AGGREGATIONS = [Objective("token_mean"), Objective("sequence_mean"), Objective("sequence_sum", 10)]
MASK = torch.tensor([[1, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]]).bool()


def aggregated(objective: Objective, values: Tensor, mask: Tensor) -> float:
    """sum(scale * values) / count, for values that are finite where masked."""
    return ((objective.scale(mask) * values).sum() / objective.count(mask).clamp(min=1)).item()


# --- aggregation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("objective", "count", "value"), zip(AGGREGATIONS, (5, 2, 2), (20 / 5, 12.5 / 2, 2 / 2), strict=True))
def test_aggregation_by_hand(objective: Objective, count: int, value: float) -> None:
    """Responses (1, 2, 3, 4) and (10), and one without a trained token."""
    values = torch.tensor([[1.0, 2, 3, 4], [99, 10, 99, 99], [99, 99, 99, 99]])
    counted = objective.count(MASK)
    assert (counted.item(), counted.dim(), counted.dtype) == (count, 0, torch.float64)
    assert aggregated(objective, values, MASK) == pytest.approx(value)
    assert torch.equal(objective.weights(MASK, values, values)[0], objective.scale(MASK))


def test_the_scales() -> None:
    by_token, by_sequence, by_sum = (objective.scale(MASK).tolist() for objective in AGGREGATIONS)
    assert by_token == MASK.float().tolist()
    assert by_sequence == [[0.25] * 4, [0, 1, 0, 0], [0] * 4]
    assert by_sum[0] == pytest.approx([0.1] * 4)
    assert by_sum[1] == pytest.approx([0, 0.1, 0, 0])


@pytest.mark.parametrize("objective", AGGREGATIONS[:2])
def test_a_masked_response_leaves_sum_and_count_alike(objective: Objective) -> None:
    """Two responses of four tokens with loss 1 each, one cut by max_tokens and masked: 1.0, not 0.5."""
    mask = torch.tensor([[True], [False]]).expand(2, 4)
    assert aggregated(objective, torch.ones(2, 4), mask) == 1.0


@pytest.mark.parametrize("objective", AGGREGATIONS)
def test_nothing_to_train_on(objective: Objective) -> None:
    nan = torch.full((2, 3), math.nan)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    weights, metrics = objective.weights(mask, nan, nan)
    assert torch.equal(weights, torch.zeros(2, 3))
    assert objective.count(mask).item() == 0
    assert {value.item() for value in metrics.values()} == {0.0}


# --- mismatch correction ---------------------------------------------------------------------------------------------

RATIOS = torch.tensor([[1.0, 3.0, 0.25, 2.0], [0.5, 0.5, 9.0, 0.9]])
"""Behaviour over sampler probability; the 9 is masked. By response: 1.5 and 0.225."""
KEPT = torch.tensor([[True] * 4, [True, True, False, True]])


@pytest.mark.parametrize(
    ("correction", "factors", "corrected"),
    [
        ("none", [[1, 1, 1, 1], [1, 1, 1, 1]], 0),
        ("token_tis", [[1, 2, 0.25, 2], [0.5, 0.5, 1, 0.9]], 1),
        ("token_mis", [[1, 0, 0, 2], [0.5, 0.5, 1, 0.9]], 2),
        ("sequence_tis", [[1.5] * 4, [0.225, 0.225, 1, 0.225]], 0),
        ("sequence_mis", [[1.5] * 4, [0, 0, 1, 0]], 3),
    ],
)
def test_correction_by_hand(correction: Any, factors: list, corrected: int) -> None:
    """Cap 2, low 0.5: both ends belong to the range."""
    sampler = torch.full((2, 4), -5.0, dtype=torch.float64)
    behaviour = sampler + RATIOS.double().log() + torch.tensor([[0, 0, 0, -1e-9], [1e-9, 1e-9, 0, 0]])
    factor, changed = mismatch_factor(KEPT, behaviour, sampler, correction, 2.0, 0.5)
    expected = torch.tensor(factors, dtype=torch.float64)
    assert torch.allclose(factor, expected, atol=1e-7)
    weights, metrics = Objective(correction=correction).weights(KEPT, behaviour, sampler)
    assert torch.allclose(weights, expected * KEPT, atol=1e-7)
    assert changed.sum().item() == metrics["mismatch/corrected_frac"].item() == corrected
    assert metrics["mismatch/correction_mean"].item() == pytest.approx(expected[KEPT].sum().item(), abs=1e-6)


def test_a_sequence_product_beyond_the_cap() -> None:
    behaviour = torch.tensor([[0.5, 0.5, 0.5]])  # product e^1.5 = 4.48
    sampler = torch.zeros(1, 3)
    mask = torch.ones(1, 3, dtype=torch.bool)
    weights, metrics = Objective(correction="sequence_tis").weights(mask, behaviour, sampler)
    assert weights.tolist() == [[2.0] * 3]
    assert metrics["mismatch/corrected_frac"].item() == 3
    weights, _ = Objective(correction="sequence_tis", correction_cap=5.0).weights(mask, behaviour, sampler)
    assert weights[0].tolist() == pytest.approx([math.exp(1.5)] * 3)
    weights, _ = Objective(correction="token_tis").weights(mask, behaviour, sampler)
    assert weights[0].tolist() == pytest.approx([math.exp(0.5)] * 3)


@pytest.mark.parametrize("correction", ["none", "token_tis", "sequence_tis", "token_mis", "sequence_mis"])
def test_matching_policies_need_no_correction(correction: Any) -> None:
    logprobs = -torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) * 9
    weights, metrics = Objective(correction=correction).weights(MASK, logprobs, logprobs)
    assert torch.equal(weights, MASK.float())
    assert [metrics[f"mismatch/{key}"].item() for key in ("correction_mean", "corrected_frac")] == [5, 0]


@pytest.mark.parametrize("correction", ["none", "token_tis", "sequence_tis", "token_mis", "sequence_mis"])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_masked_slots_cannot_matter(correction: Any, garbage: float) -> None:
    objective = Objective("sequence_mean", correction=correction)
    behaviour, sampler = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    dirty = [torch.where(MASK, values, garbage) for values in (behaviour, sampler)]
    weights, metrics = objective.weights(MASK, behaviour.requires_grad_(), sampler)
    again, same = objective.weights(MASK, *dirty)
    assert torch.equal(weights, again)
    assert not weights[~MASK].any()
    assert not weights.requires_grad
    assert metrics == same


def test_the_metrics_are_registered_token_sums() -> None:
    _, metrics = Objective().weights(MASK, MASK.float(), MASK.float(), MASK)
    assert metrics.keys() == {"policy/kept_token_frac", "mismatch/correction_mean", "mismatch/corrected_frac"}
    for name, value in metrics.items():
        assert lookup(name).reduction == "token_mean"
        assert (value.dim(), value.dtype) == (0, torch.float64)


# --- the entropy filter ----------------------------------------------------------------------------------------------


def test_the_filter_by_hand() -> None:
    """Ten bins of 0.1; of five tokens 0.95 is the highest; 0.55 and 0.5 share a bin."""
    entropy = torch.tensor([[0.05, 0.95, 0.5], [0.55, 0.31, math.nan]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    histogram = entropy_histogram(entropy, mask, upper=1.0, bins=10)
    assert (histogram.dtype, histogram.tolist()) == (torch.float64, [1, 0, 0, 1, 0, 2, 0, 0, 0, 1])
    thresholds = {frac: entropy_threshold(histogram, frac, 1.0).item() for frac in (0.2, 0.21, 0.6, 0.61, 1.0)}
    assert thresholds == pytest.approx({0.2: 0.9, 0.21: 0.5, 0.6: 0.5, 0.61: 0.3, 1.0: -math.inf})
    kept = entropy_filter(entropy, mask, torch.tensor(thresholds[0.21], dtype=torch.float64))
    assert kept.tolist() == [[False, True, True], [True, False, False]]


def test_filtered_tokens_weigh_nothing_and_stay_in_the_count() -> None:
    """arXiv 2506.01939 divides by all response tokens."""
    kept = torch.tensor([[True, False, False, False], [True, True, False, False], [False] * 4])
    weights, metrics = Objective("sequence_mean").weights(MASK, MASK.float(), MASK.float(), kept)
    assert weights.tolist() == [[0.25, 0, 0, 0], [0, 1, 0, 0], [0] * 4]
    assert metrics["policy/kept_token_frac"].item() == 2
    assert metrics["mismatch/correction_mean"].item() == 5
    assert Objective("sequence_mean").count(MASK).item() == 2


entropies = st.lists(st.floats(-0.125, 3.25, width=32), min_size=1, max_size=60)


@settings(deadline=None)
@given(entropies, st.floats(0.01, 1.0), st.integers(1, 50))
def test_at_least_the_asked_share_is_kept_and_one_bin_less_would_not_do(values: list, frac: float, bins: int) -> None:
    entropy = torch.tensor([values])
    mask = torch.rand(entropy.shape, generator=torch.Generator().manual_seed(len(values))) < 0.8
    histogram = entropy_histogram(entropy, mask, 3.0, bins)
    assert histogram.sum() == mask.sum()
    threshold = entropy_threshold(histogram, frac, 3.0)
    kept = entropy_filter(entropy, mask, threshold)
    assert kept.sum() >= frac * mask.sum()
    exact = torch.cat([entropy[mask].double().sort(descending=True).values, torch.tensor([-math.inf])])
    quantile = exact[max(0, math.ceil(frac * int(mask.sum())) - 1)]
    assert threshold <= quantile.clamp(max=3.0)
    if threshold > -math.inf and mask.any():
        assert quantile.clamp(max=3.0) <= threshold + 3.0 / bins + 1e-9


def test_all_is_kept_at_one_and_a_nan_is_never_hidden() -> None:
    entropy = torch.tensor([[-1e-7, 0.0, 5.0, math.nan]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    histogram = entropy_histogram(entropy, mask, 3.0)
    assert (len(histogram), histogram.sum().item()) == (4096, 4)
    assert entropy_filter(entropy, mask, entropy_threshold(histogram, 1.0, 3.0)).all()
    assert entropy_filter(entropy, mask, entropy_threshold(histogram, 0.25, 3.0))[0].tolist() == [False, False, True, True]


def test_no_value_is_read_back_to_the_host() -> None:
    values, mask = torch.zeros(2, 3, device="meta"), torch.ones(2, 3, dtype=torch.bool, device="meta")
    kept = entropy_filter(values, mask, entropy_threshold(entropy_histogram(values, mask, 3.0), 0.2, 3.0))
    for correction in ("none", "token_tis", "sequence_mis"):
        weights, _ = Objective("sequence_mean", correction=correction).weights(mask, values, values, kept)
        assert weights.device.type == "meta"
    assert Objective().count(mask).device.type == "meta"


# --- any cut gives the same ------------------------------------------------------------------------------------------


def update(objective: Objective, size: int) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, gradient and metric sums of eight responses trained on in micro-batches of `size`, each cut to its own width."""
    generator = torch.Generator().manual_seed(2)
    policy, behaviour, sampler, reference, entropy = torch.randn(5, 8, 9, generator=generator, dtype=torch.float64)
    policy = (behaviour + 0.3 * policy).requires_grad_()
    advantages = torch.randn(8, 1, generator=generator, dtype=torch.float64).expand(8, 9)
    lengths = torch.randint(1, 10, (8, 1), generator=generator)
    mask = torch.arange(9) < lengths
    mask[3] = False
    micro = [(slice(i, i + size), slice(0, int(lengths[i : i + size].max()))) for i in range(0, 8, size)]

    histogram = torch.stack([entropy_histogram(entropy[m].abs(), mask[m], 4.0) for m in micro]).sum(dim=0)
    threshold = entropy_threshold(histogram, objective.top_entropy_frac, 4.0)
    count = torch.stack([objective.count(mask[m]) for m in micro]).sum()
    with_terms = replace(objective, reference_kl=0.1, entropy_bonus=0.01)
    total, sums = torch.zeros((), dtype=torch.float64), dict[str, float]()
    for m in micro:
        kept = entropy_filter(entropy[m].abs(), mask[m], threshold)
        weights, metrics = objective.weights(mask[m], behaviour[m], sampler[m], kept)
        loss = FixedClipLoss(0.8, 1.2)
        inputs = LossInputs(policy[m], behaviour[m], advantages[m], mask[m], weights)
        output = loss(inputs, loss.choose(loss.tally(inputs)), count)
        extra, extra_metrics = terms(with_terms, policy[m], reference[m], policy[m].square(), mask[m], count)
        total = total + output.loss + extra
        for name, value in (metrics | extra_metrics).items():
            sums[name] = sums.get(name, 0.0) + value.item()
    (gradient,) = torch.autograd.grad(total, policy)
    return total.item(), gradient, sums


@pytest.mark.parametrize(
    "objective",
    [
        *AGGREGATIONS,
        Objective("sequence_mean", correction="sequence_tis", top_entropy_frac=0.2),
        Objective("token_mean", correction="token_mis", top_entropy_frac=0.5, kl_estimator="k2"),
        Objective("sequence_sum", 7, correction="sequence_mis", correction_low=0.0, correction_cap=50.0),
    ],
    ids=lambda objective: f"{objective.aggregation}-{objective.correction}-{objective.top_entropy_frac}",
)
@pytest.mark.parametrize("size", [1, 2])
def test_the_cut_changes_nothing(objective: Objective, size: int) -> None:
    whole, parts = update(objective, 8), update(objective, size)
    assert parts[0] == pytest.approx(whole[0], abs=1e-12)
    assert torch.allclose(parts[1], whole[1], atol=1e-13)
    assert parts[2] == pytest.approx(whole[2], abs=1e-9)
    assert whole[1].abs().sum() > 0
    assert not whole[1][3].any()


# --- regularisers ----------------------------------------------------------------------------------------------------


def terms(
    objective: Objective, logprobs: Tensor, reference: Tensor, entropy: Tensor, mask: Tensor, count: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The regularisers alone, beside a policy loss of 0."""
    batch = replace(random_batch(1), response_mask=mask, reference_logprobs=reference)
    return regularised(LossOutput(torch.zeros(()), {}), TokenStats(logprobs, entropy), batch, objective, count)


def test_kl_estimates_by_hand() -> None:
    """d = log 2 and -log 2, a clamped 30, and a masked NaN."""
    logprobs = torch.tensor([[math.log(2.0), -math.log(2.0), 30.0, math.nan]], dtype=torch.float64, requires_grad=True)
    reference, mask = torch.zeros(1, 4, dtype=torch.float64), torch.tensor([[True, True, True, False]])
    log2 = math.log(2)
    expected = {
        "k1": ([log2, -log2, 20.0, 0], [1, 1, 0, 0]),
        "k2": ([log2**2 / 2, log2**2 / 2, 200.0, 0], [log2, -log2, 0, 0]),
        "k3": ([0.5 - 1 + log2, 2 - 1 - log2, math.exp(-20) + 19, 0], [0.5, -1, 0, 0]),
    }
    for name, (values, gradients) in expected.items():
        estimate = kl_estimate(logprobs, reference, mask, name)  # type: ignore[arg-type]
        (gradient,) = torch.autograd.grad(estimate.sum(), logprobs)
        assert estimate[0].tolist() == pytest.approx(values, abs=1e-12)
        assert gradient[0].tolist() == pytest.approx(gradients, abs=1e-12)
        assert estimate[0, 3].item() == 0.0


def test_terms_by_hand() -> None:
    logprobs = torch.tensor([[1.0, 2.0, math.nan]], requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    objective = Objective("sequence_mean", reference_kl=0.5, kl_estimator="k2")
    kl, metrics = terms(objective, logprobs, torch.zeros(1, 3), logprobs, mask, torch.tensor(4.0))
    assert kl.item() == pytest.approx(0.5 * (0.5 + 2.0) / 2 / 4)
    assert {name: value.item() for name, value in metrics.items()} == {"policy/reference_kl": 2.5}
    assert not metrics["policy/reference_kl"].requires_grad
    objective = Objective("sequence_mean", entropy_bonus=0.01)
    bonus, metrics = terms(objective, logprobs, torch.zeros(1, 3), logprobs, mask, torch.tensor(4.0))
    assert bonus.item() == pytest.approx(-0.01 * 1.5 / 4)
    assert metrics == {}
    (gradient,) = torch.autograd.grad(kl + bonus, logprobs)
    assert gradient[0].tolist() == pytest.approx([0.5 / 8 - 0.01 / 8, 1.0 / 8 - 0.01 / 8, 0.0])


def test_terms_of_no_token_are_zero_with_zero_gradients() -> None:
    nan = torch.full((1, 2), math.nan, requires_grad=True)
    mask = torch.zeros(1, 2, dtype=torch.bool)
    loss, _ = terms(Objective(reference_kl=1.0, entropy_bonus=1.0), nan, nan.detach(), nan, mask, torch.zeros(()))
    loss.backward()
    assert nan.grad is not None
    assert (loss.item(), nan.grad.tolist()) == (0.0, [[0.0, 0.0]])


def test_the_gradients_of_the_estimators_are_those_of_the_divergences() -> None:
    """Over a whole vocabulary, each word weighted by its probability: the mean over samples of the policy itself."""
    generator = torch.Generator().manual_seed(3)
    logits, other = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    policy, reference = logits.log_softmax(0), other.log_softmax(0)
    probability, mask = policy.detach().exp(), torch.ones(1, 6, dtype=torch.bool)
    kl = (policy.exp() * (policy - reference)).sum()
    reversed_kl = (reference.exp() * (reference - policy)).sum()

    def mean(estimator: Any) -> Tensor:
        return (probability * kl_estimate(policy[None], reference[None], mask, estimator)[0]).sum()

    def gradient(value: Tensor) -> Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    assert mean("k1").item() == pytest.approx(kl.item(), abs=1e-12)
    assert mean("k3").item() == pytest.approx(kl.item(), abs=1e-12)
    assert torch.allclose(gradient(mean("k1")), torch.zeros(6, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(gradient(mean("k2")), gradient(kl), atol=1e-12)
    assert torch.allclose(gradient(mean("k3")), gradient(reversed_kl), atol=1e-12)


# --- construction ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"aggregation": "mean"}, "aggregation is 'mean'; it must be one of token_mean, sequence_mean, sequence_sum"),
        ({"aggregation": "sequence_sum"}, "sequence_constant is None; aggregation sequence_sum divides by it: >= 1"),
        ({"aggregation": "sequence_sum", "sequence_constant": 0}, "sequence_constant is 0; it must be >= 1"),
        ({"correction": "tis"}, "correction is 'tis'; it must be one of none, token_tis, sequence_tis"),
        ({"correction_cap": 0.9}, "correction_cap is 0.9; it must be >= 1"),
        ({"correction_cap": math.inf}, "correction_cap is inf"),
        ({"correction_low": 1.1}, r"correction_low is 1.1; it must be in \[0, 1\]"),
        ({"correction_low": math.nan}, "correction_low is nan"),
        ({"top_entropy_frac": 0.0}, r"top_entropy_frac is 0.0; it must be in \(0, 1\]"),
        ({"top_entropy_frac": 20}, "top_entropy_frac is 20"),
        ({"entropy_bonus": -0.01}, "entropy_bonus is -0.01; it must be >= 0"),
        ({"reference_kl": math.nan}, "reference_kl is nan; it must be >= 0"),
        ({"kl_estimator": "k4"}, "kl_estimator is 'k4'; it must be one of k1, k2, k3"),
    ],
)
def test_an_objective_out_of_bounds_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(**changes)
