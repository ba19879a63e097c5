"""A few responses of a round as text, for people to read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bapo.types import Prompt, Sample

GROUPS = 8
"""Groups of a round whose texts are stored."""


def preview(samples: Sequence[Sample], kept: Tensor, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """The responses with the lowest and the highest reward of the first groups generated, kept or not."""
    by_uid = {prompt.uid: prompt for prompt in prompts}
    groups: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.uid, []).append(index)
    rows = []
    for uid, indices in itertools.islice(groups.items(), GROUPS):
        prompt = by_uid[uid.rpartition("@")[0]]
        ranked = sorted(indices, key=lambda index: samples[index].reward)
        for index in dict.fromkeys((ranked[0], ranked[-1])):
            rows.append(_row(prompt, samples[index]) | {"kept": bool(kept[index])})
    return rows


def _row(prompt: Prompt, sample: Sample) -> dict[str, Any]:
    return {
        "uid": sample.uid,
        "sample_index": sample.sample_index,
        "prompt": prompt.text,
        "answer": prompt.answer,
        "response": sample.text,
        "reward": sample.reward,
        "correctness": sample.correctness or 0.0,
        "length": len(sample.response_ids),
        "finish_reason": sample.finish_reason,
        "policy_version": sample.policy_version,
    }
