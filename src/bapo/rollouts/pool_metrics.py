"""Metrics of a pool: rewards, lengths, mismatch of engine and trainer, unfinished groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from bapo.rollouts.round_state import RoundState
from bapo.types import Batch, Sample


def pool_metrics(state: RoundState, group_size: int) -> dict[str, float]:
    """`rollout/*` over every response that was finished, kept or not."""
    samples, rewards, kept = state.samples, state.rewards, state.kept
    lengths = torch.tensor([len(s.response_ids) for s in samples], dtype=torch.float64)
    correctness = torch.tensor([s.correctness or 0.0 for s in samples])
    right = correctness > 0
    terms = {name: torch.tensor([s.terms[name] for s in samples]) for name in samples[0].terms}
    texts: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for sample in samples:
        texts[sample.uid].add(sample.response_ids)

    def mean(values: Tensor) -> float:
        return float(values.double().mean()) if len(values) else 0.0

    return {
        "rollout/reward_mean": mean(rewards),
        "rollout/reward/correctness": mean(correctness),
        **{f"rollout/reward/{name}": mean(values) for name, values in terms.items()},
        "rollout/verify_timeout_frac": mean(torch.tensor([not s.verified for s in samples])),
        "rollout/reward_std": float(rewards.double().std(correction=0)),
        "rollout/zero_std_frac": 1.0 - mean(kept),
        "rollout/groups_generated": float(len(texts)),
        "rollout/groups_lost": float(state.incomplete),
        "rollout/groups_kept": float(int(kept.sum()) // group_size),
        "rollout/response_length_mean": mean(lengths),
        "rollout/response_length_correct_mean": mean(lengths[right]),
        "rollout/response_length_incorrect_mean": mean(lengths[~right]),
        "rollout/truncated_frac": mean(torch.tensor([s.finish_reason == "length" for s in samples])),
        "rollout/unique_frac": sum(len(t) for t in texts.values()) / len(samples),
    }


def mismatch_metrics(batch: Batch) -> dict[str, float]:
    """`mismatch/*`: the engine's log-probs of the generated tokens against the trainer's."""
    gap = (batch.behaviour_logprobs - batch.sampler_logprobs)[batch.response_mask].double()
    return {
        "mismatch/kl_k3": float((gap.exp() - 1 - gap).mean()),
        "mismatch/logp_abs_diff_mean": float(gap.abs().mean()),
        "mismatch/logp_abs_diff_max": float(gap.abs().max()),
    }


def partial_metrics(state: RoundState, trained: Sequence[Sample]) -> dict[str, float]:
    """`partial/*`: unfinished and dropped groups. Dropping favours short answers, as the lengths show."""
    lengths = [len(s.response_ids) for group in state.dropped for s in group.samples]
    rewards = [sample.reward for sample in state.dropped_samples]
    return {
        "partial/unfinished_groups": float(len(state.unfinished)),
        "partial/dropped_groups": float(len(state.dropped)),
        "partial/dropped_length_mean": sum(lengths) / len(lengths) if lengths else 0.0,
        **({"partial/dropped_reward_mean": sum(rewards) / len(rewards)} if rewards else {}),
        "partial/trained_length_mean": sum(len(s.response_ids) for s in trained) / len(trained),
        "partial/spans_mean": sum(s.spans for s in trained) / len(trained),
        "partial/spans_max": float(max(s.spans for s in trained)),
    }
