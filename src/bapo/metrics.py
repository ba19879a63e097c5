"""Every metric this project logs: name, formula, unit, and how its parts combine. The one place that knows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["sum", "token_mean", "max", "global"]
"""The reduction of parts over micro-batches and ranks to one value: their sum; their sum over the trained tokens of the
update; their maximum; or `global`: one part that is already the whole (the same on every rank)."""


@dataclass(frozen=True)
class Metric:
    name: str
    formula: str
    unit: str
    reduction: Reduction


_TABLE: tuple[tuple[str, str, str, Reduction], ...] = (
    ("trainer/global_step", "completed optimizer updates", "updates", "global"),
    ("rollout/round", "index of the pool in training, from 0", "rounds", "global"),
    ("rollout/epoch", "passes over data begun, from 0", "epochs", "global"),
    ("rollout/tokens_total", "response tokens generated since the start", "tokens", "global"),
    ("bounds/clip_low", "lower clip bound on the importance ratio", "ratio", "global"),
    ("bounds/clip_high", "upper clip bound on the importance ratio", "ratio", "global"),
    ("bounds/positive_ratio", "P / (P + N) at the bounds; 1 when N = 0", "share", "global"),
    ("bounds/positive_ratio_start", "P / (P + N) at the start of both ranges", "share", "global"),
    ("bounds/positive_ratio_at_one", "P / (P + N) if every r were 1: the share of positive advantage mass", "share", "global"),
    ("bounds/target", "positive ratio that the search aimed at", "share", "global"),
    ("bounds/target_met", "1 if a candidate reached the target, else 0", "flag", "global"),
    ("bounds/saturated", "1 if both bounds stand at the end of their ranges", "flag", "global"),
    ("bounds/search_effective", "1 if some candidate changes the positive ratio", "flag", "global"),
    ("bounds/positive_mass", "P: mass of tokens with advantage > 0", "mass", "sum"),
    ("bounds/negative_mass", "N: mass of tokens with advantage < 0", "mass", "sum"),
    ("sft/loss", "mean -log p of the response tokens of this update, end of sequence included", "nats", "sum"),
    ("sft/test_loss", "likewise over the held-out demonstrations", "nats", "global"),
    ("sft/epoch", "passes over the demonstrations begun, from 0", "epochs", "global"),
    ("policy/loss", "-sum(objective) / denominator", "objective", "sum"),
    ("policy/grad_norm", "global 2-norm of the gradient before clipping", "norm", "global"),
    ("policy/lr", "learning rate of this update", "rate", "global"),
    ("policy/entropy", "mean of -sum_v p log p at the sampling temperature", "nats", "token_mean"),
    ("policy/logprob_mean", "mean log-prob of the trained tokens under the policy", "nats", "token_mean"),
    (
        "policy/unclipped_advantage_mean",
        "mean of A X; X is 0 for tokens whose gradient is clipped away, else 1",
        "advantage",
        "token_mean",
    ),
    (
        "policy/entropy_clip_cov",
        "Cov[log pi(y), A X] over the trained tokens (Eq. 6: entropy changes by about -lr times it)",
        "nats * advantage",
        "token_mean",
    ),
    ("policy/approx_kl", "mean of r - 1 - log r, behaviour to policy", "nats", "token_mean"),
    ("policy/ratio_mean", "mean importance ratio r", "ratio", "token_mean"),
    ("policy/ratio_max", "largest importance ratio r", "ratio", "max"),
    ("policy/clip_frac", "tokens whose objective is clipped", "share", "token_mean"),
    ("policy/clip_frac_high", "tokens with A > 0 and r > clip_high", "share", "token_mean"),
    ("policy/clip_frac_low", "tokens with A < 0 and r < clip_low", "share", "token_mean"),
    ("policy/clip_frac_dual", "tokens with A < 0 and r > the dual clip", "share", "token_mean"),
    ("policy/weight_mean", "mean weight of a trained token's objective", "weight", "token_mean"),
    ("policy/kept_token_frac", "tokens left by the entropy filter", "share", "token_mean"),
    ("policy/reference_kl", "mean KL estimate, policy to reference policy", "nats", "token_mean"),
    ("policy/negative_token_frac", "tokens with A < 0", "share", "token_mean"),
    ("policy/log_ratio_clamped_frac", "tokens with |log r| > 20, clamped before exp", "share", "token_mean"),
    ("policy/skipped_updates", "updates skipped for a non-finite loss or gradient, since the start", "updates", "global"),
    ("rollout/reward_mean", "mean reward over every generated response", "reward", "global"),
    ("rollout/reward/correctness", "mean reward of the task alone, over every generated response", "reward", "global"),
    (
        "rollout/verify_timeout_frac",
        "responses that could not be verified (too long, too large, failed); reward 0",
        "share",
        "global",
    ),
    ("rollout/reward_std", "standard deviation of reward over every generated response", "reward", "global"),
    ("rollout/zero_std_frac", "groups whose rewards are all equal (dropped)", "share", "global"),
    ("rollout/groups_generated", "groups generated for this pool", "groups", "global"),
    ("rollout/groups_lost", "groups dropped because the engine left out one of their responses", "groups", "global"),
    ("rollout/groups_kept", "groups left to train on", "groups", "global"),
    ("rollout/response_length_mean", "mean response length", "tokens", "global"),
    ("rollout/response_length_correct_mean", "mean length of responses with reward > 0; 0 if none", "tokens", "global"),
    ("rollout/response_length_incorrect_mean", "mean length of responses with reward <= 0; 0 if none", "tokens", "global"),
    ("rollout/truncated_frac", "responses cut by max_tokens", "share", "global"),
    ("rollout/unique_frac", "distinct responses of a group over its size, mean over groups", "share", "global"),
    ("partial/unfinished_groups", "groups with unfinished responses", "groups", "global"),
    ("partial/dropped_groups", "groups dropped: too many spans, or too stale", "groups", "global"),
    ("partial/dropped_length_mean", "mean length so far of the responses of dropped groups; 0 if none", "tokens", "global"),
    ("partial/dropped_reward_mean", "mean reward of those of them that were finished; absent if none", "reward", "global"),
    ("partial/trained_length_mean", "mean length of the responses to train on", "tokens", "global"),
    ("partial/spans_mean", "mean number of policies that generated a response to train on", "spans", "global"),
    ("partial/spans_max", "largest number of policies that generated a response to train on", "spans", "global"),
    ("replay/groups", "groups of earlier rounds that are trained on once more", "groups", "global"),
    ("replay/row_frac", "responses of earlier rounds among those to train on", "share", "global"),
    ("mismatch/correction_mean", "mean correction factor, 1 without correction", "weight", "token_mean"),
    ("mismatch/corrected_frac", "tokens whose correction factor was truncated or masked", "share", "token_mean"),
    ("mismatch/kl_k3", "mean of x - 1 - log x, x = behaviour prob / sampler prob", "nats", "global"),
    ("mismatch/logp_abs_diff_mean", "mean |behaviour_logprobs - sampler_logprobs|", "nats", "global"),
    ("mismatch/logp_abs_diff_max", "largest |behaviour_logprobs - sampler_logprobs|", "nats", "global"),
    (
        "mismatch/probe_max_diff",
        "largest |log-prob of trainer - of engine| over the tokens of the sync check",
        "nats",
        "global",
    ),
    ("staleness/mean", "mean over trained tokens of updates since their weights", "updates", "token_mean"),
    ("staleness/max", "largest number of updates since a trained token's weights", "updates", "max"),
    ("time/refill", "wall time of collecting this pool", "s", "global"),
    (
        "time/wait",
        "wall time that training waited for this pool, generated in the background; part of time/refill",
        "s",
        "global",
    ),
    ("time/sync", "wall time of handing weights to the engine", "s", "global"),
    ("time/train", "wall time of this update", "s", "global"),
    ("time/eval", "wall time of the evaluation", "s", "global"),
    ("perf/tokens_per_s", "trained tokens of this update over its wall time", "tokens/s", "global"),
)

_PATTERNS: tuple[tuple[re.Pattern[str], Metric], ...] = (
    (
        re.compile(r"bounds/cf/[\w.-]+/(clip_low|clip_high)"),
        Metric("bounds/cf/<choice>/clip_low, clip_high", "bound that another order or target had chosen", "ratio", "global"),
    ),
    (
        re.compile(r"bounds/cf/[\w.-]+/positive_ratio"),
        Metric("bounds/cf/<choice>/positive_ratio", "P / (P + N) at those bounds", "share", "global"),
    ),
    (
        re.compile(r"rollout/reward/[\w-]+"),
        Metric("rollout/reward/<term>", "mean of a term that is added to correctness", "reward", "global"),
    ),
    (
        re.compile(r"eval/[\w-]+/avg@\d+"),
        Metric("eval/<set>/avg@k", "mean reward over k samples of every problem", "reward", "global"),
    ),
    (
        re.compile(r"eval/[\w-]+/avg@\d+_stderr"),
        Metric("eval/<set>/avg@k_stderr", "standard error of avg@k over problems; absent for a single one", "reward", "global"),
    ),
    (
        re.compile(r"eval/[\w-]+/pass@\d+"),
        Metric("eval/<set>/pass@k", "problems of whose k samples one is right, mean over problems", "share", "global"),
    ),
    (
        re.compile(r"eval/[\w-]+/maj@\d+"),
        Metric(
            "eval/<set>/maj@k",
            "problems whose most frequent answer of k is right; ties count in part",
            "share",
            "global",
        ),
    ),
    (
        re.compile(r"eval/[\w-]+/response_length_mean"),
        Metric("eval/<set>/response_length_mean", "mean response length", "tokens", "global"),
    ),
    (
        re.compile(r"eval/[\w-]+/truncated_frac"),
        Metric("eval/<set>/truncated_frac", "responses cut by max_tokens", "share", "global"),
    ),
    (
        re.compile(r"eval/[\w-]+/no_answer_frac"),
        Metric("eval/<set>/no_answer_frac", "responses that give no answer", "share", "global"),
    ),
    (
        re.compile(r"eval/[\w-]+/unverified_frac"),
        Metric("eval/<set>/unverified_frac", "responses that could not be verified; reward 0", "share", "global"),
    ),
)

COVARIANCES = {"policy/entropy_clip_cov": ("policy/logprob_mean", "policy/unclipped_advantage_mean")}
"""Metrics whose parts are sums of products: from their token mean the product of these two means is taken away."""

METRICS: dict[str, Metric] = {name: Metric(name, formula, unit, reduction) for name, formula, unit, reduction in _TABLE}
WALL_CLOCK_PREFIXES = ("time/", "perf/", "DeviceStatsMonitor")
"""Metrics that no seed can repeat."""


def lookup(name: str) -> Metric | None:
    """The known metric called `name`; None for a name of a user's own, which passes as it is."""
    if name in METRICS:
        return METRICS[name]
    return next((metric for pattern, metric in _PATTERNS if pattern.fullmatch(name)), None)


def reduction_of(name: str) -> Reduction:
    """Reduction of the metric's parts; those of an unknown one are token sums, as a loss gives them."""
    metric = lookup(name)
    return "token_mean" if metric is None else metric.reduction


class MetricParts:
    """Adds up the parts of metrics over micro-batches, then over ranks, each as its `reduction` says.

    A `global` metric that comes in parts (the bounds of each micro-batch) becomes their mean, weighted by `weight`.
    """

    def __init__(self) -> None:
        self.parts: dict[str, Tensor] = {}

    def add(self, parts: Mapping[str, Tensor], weight: Tensor | float = 1.0) -> None:
        for name, part in parts.items():
            part = part.detach().double() * weight
            if name not in self.parts:
                self.parts[name] = part
            elif reduction_of(name) == "max":
                self.parts[name] = torch.maximum(self.parts[name], part)
            else:
                self.parts[name] = self.parts[name] + part

    def reduce(self, gather: Callable[[Tensor], Tensor], tokens: float) -> dict[str, float]:
        """`gather`: [n] -> [ranks, n]; `tokens`: trained tokens of the update. Every rank holds the same names."""
        names = sorted(self.parts)
        gathered = gather(torch.stack([self.parts[name] for name in names])).cpu()
        sums, largest = gathered.sum(dim=0).tolist(), gathered.amax(dim=0).tolist()
        row = {}
        for name, total, peak in zip(names, sums, largest, strict=True):
            reduction = reduction_of(name)
            row[name] = peak if reduction == "max" else total if reduction == "sum" else total / max(1, tokens)
        for name in COVARIANCES.keys() & row.keys():
            one, other = COVARIANCES[name]
            row[name] -= row[one] * row[other]
        return row
