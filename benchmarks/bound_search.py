"""What the search for clip bounds costs, side by side in one process on the same tensors.

    python benchmarks/bound_search.py        prints two tables and writes benchmarks/results/bound_search.md

Table search: one pass into bins (`BapoLoss.tally`), then `choose`. Against it
(a) every candidate at once: the tokens broadcast against all bounds of both ranges, [K, N], summed over the tokens;
(b) one candidate at a time as a trainer's loop does it: clipped objective, masses, positive ratio read by the host each step;
(c) the same loop at its leanest: each step sums the one mass that its bound changes, nothing else.
And the whole of a training step's loss: log-softmax over a vocabulary, loss, search, backward, against a fixed clip.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from bapo.losses import BapoLoss, BoundRange, FixedClipLoss
from bapo.types import LossInputs

RESULTS = Path(__file__).parent / "results" / "bound_search.md"
REPEATS = 10
SEARCH = BapoLoss(0.999, BoundRange(0.6, 0.9, 0.02), BoundRange(1.2, 3.0, 0.05), counterfactuals=False)
"""A target that no candidate reaches, so that every search runs to its end."""


def random_tokens(count: int, seed: int = 0) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)
    behaviour = -3 * torch.rand(count // 1024, 1024, generator=generator)
    return LossInputs(
        logprobs=behaviour + 0.5 * torch.randn(behaviour.shape, generator=generator),
        behaviour_logprobs=behaviour,
        advantages=torch.randn(count // 1024, 1, generator=generator).expand_as(behaviour),
        response_mask=torch.rand(behaviour.shape, generator=generator) < 0.9,
    )


def table_search(inputs: LossInputs) -> tuple[float, float]:
    bounds = SEARCH.choose(SEARCH.tally(inputs))
    return float(bounds.clip_low), float(bounds.clip_high)


def _candidates() -> list[tuple[float, float]]:
    lows, highs = SEARCH.clip_low.candidates().tolist(), SEARCH.clip_high.candidates().tolist()
    return [(lows[0], high) for high in highs] + [(low, highs[-1]) for low in lows[1:]]


def _first(ratios: Tensor) -> int:
    met = ratios >= SEARCH.target_positive_ratio
    return int(met.int().argmax()) if bool(met.any()) else -1


def every_candidate(inputs: LossInputs) -> tuple[float, float]:
    ratio = (inputs.logprobs - inputs.behaviour_logprobs).exp().flatten()
    advantages = torch.where(inputs.response_mask, inputs.advantages, 0).flatten()
    mass = ratio * advantages
    lows, highs = (bounds.candidates().to(ratio.dtype) for bounds in (SEARCH.clip_low, SEARCH.clip_high))
    positive = torch.where((advantages > 0) & (ratio <= highs[:, None]), mass, 0).sum(1, dtype=torch.float64)
    negative = torch.where((advantages < 0) & (ratio >= lows[:, None]), -mass, 0).sum(1, dtype=torch.float64)
    path = torch.cat([positive / (positive + negative[0]), positive[-1] / (positive[-1] + negative[1:])])
    return _candidates()[_first(path)]


def one_at_a_time(inputs: LossInputs) -> tuple[float, float]:
    ratio, advantages, mask = (inputs.logprobs - inputs.behaviour_logprobs).exp(), inputs.advantages, inputs.response_mask
    for low, high in (path := _candidates()):
        objective = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
        unclipped = objective == ratio * advantages
        mass = torch.where(mask & unclipped, ratio * advantages.abs(), 0)
        positive = torch.where(advantages > 0, mass, 0).sum(dtype=torch.float64)
        negative = torch.where(advantages < 0, mass, 0).sum(dtype=torch.float64)
        if (positive / (positive + negative)).item() >= SEARCH.target_positive_ratio:
            return low, high
    return path[-1]


def leanest_loop(inputs: LossInputs) -> tuple[float, float]:
    ratio = (inputs.logprobs - inputs.behaviour_logprobs).exp()
    advantages = torch.where(inputs.response_mask, inputs.advantages, 0)
    gains, losses = ratio * advantages.clamp(min=0), ratio * -advantages.clamp(max=0)
    last = (0.0, 0.0)
    positive = negative = torch.zeros(())
    for low, high in (path := _candidates()):
        if high != last[1]:
            positive = torch.where(ratio <= high, gains, 0).sum(dtype=torch.float64)
        if low != last[0]:
            negative = torch.where(ratio >= low, losses, 0).sum(dtype=torch.float64)
        if (positive / (positive + negative)).item() >= SEARCH.target_positive_ratio:
            return low, high
        last = (low, high)
    return path[-1]


def training_step(loss: BapoLoss | FixedClipLoss, logits: Tensor, targets: Tensor, inputs: LossInputs) -> float:
    """log-softmax, tally, choose, loss, backward for tokens [1, T] over logits [T, V]."""
    logits = logits.detach().requires_grad_()
    logprobs = logits.log_softmax(-1).gather(-1, targets[:, None]).T
    given = LossInputs(logprobs, inputs.behaviour_logprobs, inputs.advantages, inputs.response_mask)
    detached = LossInputs(logprobs.detach(), inputs.behaviour_logprobs, inputs.advantages, inputs.response_mask)
    bounds = loss.choose(loss.tally(detached))
    output = loss(given, bounds, inputs.response_mask.sum().double())
    output.loss.backward()
    return float(output.loss.detach())


def seconds_of(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of each call; they take turns, so that a slow moment of the machine meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(REPEATS + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn:  # the first turn warms up
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main(many: int = 2**20, tokens: int = 8192, vocabulary: int = 32_000, results: Path = RESULTS) -> None:
    """`many` tokens for the searches; `tokens` over a `vocabulary` for the loss step."""
    inputs = random_tokens(many)
    searches = {
        "table": table_search,
        "(a) every candidate at once": every_candidate,
        "(b) one at a time": one_at_a_time,
        "(c) one at a time, leanest": leanest_loop,
    }
    assert len({search(inputs) for search in searches.values()}) == 1, "the searches must agree before they are timed"
    search = seconds_of({name: lambda f=f: f(inputs) for name, f in searches.items()})  # type: ignore[misc]

    logits, targets = torch.randn(tokens, vocabulary), torch.randint(vocabulary, (tokens,))
    behaviour = logits.log_softmax(-1).gather(-1, targets[:, None]).T + 0.3 * torch.randn(1, tokens)
    signs = torch.randn(1, tokens)
    few = LossInputs(behaviour, behaviour, signs, torch.ones(1, tokens, dtype=torch.bool))
    adaptive = BapoLoss(0.4, SEARCH.clip_low, SEARCH.clip_high)
    losses = {"bapo": adaptive, "fixed clip": FixedClipLoss(0.8, 1.2)}
    step = seconds_of({n: lambda loss=loss: training_step(loss, logits, targets, few) for n, loss in losses.items()})  # type: ignore[misc]

    lines = [
        "# Cost of the bound search",
        "",
        f"`python benchmarks/bound_search.py`: medians of {REPEATS} in one process, taking turns; torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads of {os.cpu_count()} cores, {platform.machine()}.",
        "",
        f"{many:,} tokens, the paper's ranges (52 candidates), a target that none of them reaches:",
        "",
        "| search | ms | times the table search |",
        "|---|---|---|",
        *(f"| {name} | {1e3 * t:.1f} | {t / search['table']:.1f} |" for name, t in search.items()),
        "",
        f"{tokens} tokens over a vocabulary of {vocabulary}: log-softmax, loss, metrics, search, counterfactuals, backward:",
        "",
        "| loss | ms | times fixed clip |",
        "|---|---|---|",
        *(f"| {name} | {1e3 * t:.1f} | {t / step['fixed clip']:.3f} |" for name, t in step.items()),
    ]
    results.parent.mkdir(exist_ok=True)
    results.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
