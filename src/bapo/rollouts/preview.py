"""A few responses of a round as text, for people to read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bapo.rollouts.grading import GradedSample
from bapo.types import Prompt

GROUPS = 8
"""Groups of a round of which texts are kept."""


def shown(samples: Sequence[GradedSample], kept: Tensor, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """Of the first groups drawn, kept or not, the responses with the lowest and the highest reward."""
    by_uid = {prompt.uid: prompt for prompt in prompts}
    groups: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.rollout.uid, []).append(index)
    rows = []
    for uid, members in itertools.islice(groups.items(), GROUPS):
        prompt = by_uid[uid.rpartition("@")[0]]
        ranked = sorted(members, key=lambda index: samples[index].reward)
        for index in dict.fromkeys((ranked[0], ranked[-1])):
            rows.append(_row(prompt, samples[index]) | {"kept": bool(kept[index])})
    return rows


def _row(prompt: Prompt, sample: GradedSample) -> dict[str, Any]:
    rollout = sample.rollout
    return {
        "uid": rollout.uid,
        "sample_index": rollout.sample_index,
        "prompt": prompt.text,
        "answer": prompt.answer,
        "response": sample.text,
        "reward": sample.reward,
        "correctness": sample.correctness,
        "length": len(rollout.response_ids),
        "finish_reason": rollout.finish_reason,
        "policy_version": rollout.policy_version,
    }
