"""Groups of samples: generated in one round or, with a token budget per round, span by span in several (paper, Fig. 12).

An unfinished group keeps for every token the policy that generated it and the log-probs by the trainer's weights of that round.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bapo.files import write_atomic, write_text_atomic
from bapo.protocols import Engine, EngineError
from bapo.types import Prompt, Sample, SamplingParams

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PartialRollouts:
    """A response gets at most `tokens_per_round` tokens in a round; an unfinished one is continued in later rounds.

    A group is trained on when all its responses are finished. It is dropped whole when one of them is unfinished after spans by
    `max_spans` policies (None: no such limit), or when its oldest token would exceed `schedule.max_staleness`.
    """

    tokens_per_round: int
    max_spans: int | None = None

    def __post_init__(self) -> None:
        if self.tokens_per_round < 1:
            raise ValueError(f"rollout.partial.tokens_per_round is {self.tokens_per_round}; it must be >= 1")
        if self.max_spans is not None and self.max_spans < 2:
            raise ValueError(
                f"rollout.partial.max_spans is {self.max_spans}; it must be >= 2: with 1 nothing is ever continued"
            )


@dataclass(frozen=True)
class Group:
    """G samples of one prompt, by sample index."""

    uid: str
    prompt: Prompt
    samples: tuple[Sample, ...]

    def finished(self, max_tokens: int) -> list[Sample]:
        return [sample for sample in self.samples if sample.is_finished(max_tokens)]

    def is_finished(self, max_tokens: int) -> bool:
        return len(self.finished(max_tokens)) == len(self.samples)

    @property
    def size(self) -> int:
        """Tokens of its responses so far."""
        return sum(len(sample.response_ids) for sample in self.samples)

    @property
    def oldest(self) -> int:
        """The policy version of its oldest token."""
        return min(sample.policy_version for sample in self.samples)

    @property
    def newest(self) -> int:
        """The policy version of its newest token; -1 if it has none."""
        return max((version for sample in self.samples for version in sample.versions), default=-1)

    @property
    def spans(self) -> int:
        return max(sample.spans for sample in self.samples)


def new_group(uid: str, prompt: Prompt, prompt_ids: tuple[int, ...], samples: int) -> Group:
    """A group without a token yet."""
    return Group(uid, prompt, tuple(Sample(uid, index, -1, prompt_ids) for index in range(samples)))


def extend(
    engine: Engine,
    groups: Sequence[Group],
    sampling: SamplingParams,
    seed_of: Callable[[str, int, int], int],
    tokens: int | None = None,
) -> list[Group]:
    """`groups` with at most `tokens` more tokens (None: all that `sampling` allows) for each unfinished response.

    seed_of: of (uid, sample index, tokens before). Answers are joined by (uid, sample_index), in whatever order they come. A
    group with a response that the engine left out is dropped whole.
    """
    requests: dict[int, list[Sample]] = defaultdict(list)  # by how many tokens they may bring
    before: dict[tuple[str, int], Sample] = {}
    for sample in (sample for group in groups for sample in group.samples if not sample.is_finished(sampling.max_tokens)):
        size = len(sample.response_ids)
        room = sampling.max_tokens - size
        before[sample.key] = sample
        requests[room if tokens is None else min(room, tokens)].append(replace(sample, seed=seed_of(*sample.key, size)))
    answers: dict[tuple[str, int], Sample] = {}
    count = 0
    for limit, samples in requests.items():
        batch = engine.generate(samples, replace(sampling, max_tokens=limit))
        _check_answers(batch, before, limit)
        answers |= {answer.key: answer for answer in batch}
        count += len(batch)
    if count > len(answers):
        raise EngineError(f"the engine returned {count} responses to {len(answers)} different requests")
    incomplete = {uid for uid, _ in before.keys() - answers.keys()}
    if incomplete:
        log.warning(
            "the engine returned %d of %d responses; %d of %d groups are incomplete and dropped",
            len(answers), len(before), len(incomplete), len(groups),
        )  # fmt: skip

    def newest(sample: Sample) -> Sample:
        answer = answers.get(sample.key, sample)
        return replace(answer, seed=sample.seed) if sample.response_ids else answer  # the seed of its first span names it

    return [replace(g, samples=tuple(newest(sample) for sample in g.samples)) for g in groups if g.uid not in incomplete]


def _check_answers(answers: Sequence[Sample], before: dict[tuple[str, int], Sample], limit: int) -> None:
    """Raises EngineError for an answer to no request, one that is too long, or one that changes the tokens before it."""
    for answer in answers:
        sample = before.get(answer.key)
        if sample is None:
            raise EngineError(f"the engine returned responses that nobody asked for, such as {answer.key}")
        if len(answer.response_ids) > len(sample.response_ids) + limit:
            raise EngineError(f"the engine gave {answer.uid!r} more than the {limit} tokens that were asked for")
        if answer.input_ids[: len(sample.input_ids)] != sample.input_ids:
            raise EngineError(f"the engine changed the tokens before its own of {answer.uid!r}")


def save_groups(groups: Sequence[Group], path: Path) -> None:
    """Two files, `path` with .safetensors and .json; the JSON is renamed into place last."""
    from safetensors.torch import save_file

    samples = [sample for group in groups for sample in group.samples]
    tensors = {
        "prompt_ids": _joined(torch.int64, [s.prompt_ids for s in samples]),
        "response_ids": _joined(torch.int64, [s.response_ids for s in samples]),
        "versions": _joined(torch.int64, [s.versions for s in samples]),
        "sampler_logprobs": _joined(torch.float64, [s.sampler_logprobs for s in samples]),
        "policy_stats": torch.cat([stats_of(s).flatten() for s in samples]) if samples else torch.zeros(0),
    }
    rows = [
        {
            "uid": group.uid,
            "prompt": vars(group.prompt),
            "samples": [
                {
                    "sample_index": s.sample_index,
                    "seed": s.seed,
                    "finish_reason": s.finish_reason,
                    "sizes": [len(s.prompt_ids), len(s.response_ids), stats_of(s).shape[1]],
                }
                for s in group.samples
            ],
        }
        for group in groups
    ]
    write_atomic(path.with_suffix(".safetensors"), lambda to: save_file(tensors, str(to)))
    write_text_atomic(path.with_suffix(".json"), json.dumps(rows) + "\n")


def stats_of(sample: Sample) -> Tensor:
    """Its `policy_stats`, float32 [3, n]; [3, 0] if there are none."""
    return torch.zeros(3, 0) if sample.policy_stats is None else sample.policy_stats


def load_groups(path: Path) -> list[Group]:
    """The groups of `save_groups`; none if it wrote nothing. Raises ValueError for a damaged file."""
    from safetensors.torch import load_file

    if not path.with_suffix(".json").is_file():
        return []
    try:
        rows = json.loads(path.with_suffix(".json").read_text())
        tensors = load_file(str(path.with_suffix(".safetensors")))
        starts = dict.fromkeys(("prompt", "response", "stats"), 0)
        return [_group(row, tensors, starts) for row in rows]
    except Exception as error:
        raise ValueError(f"{path}.safetensors or .json is damaged: {error}") from error


def _group(row: dict[str, Any], tensors: dict[str, Tensor], starts: dict[str, int]) -> Group:
    """The next group in the joined tensors; `starts` says where it begins and is moved behind it."""
    samples = []
    for fields in row["samples"]:
        prompt, response, known = fields["sizes"]
        here = slice(starts["response"], starts["response"] + response)
        samples.append(
            Sample(
                row["uid"],
                fields["sample_index"],
                fields["seed"],
                prompt_ids=tuple(tensors["prompt_ids"][starts["prompt"] : starts["prompt"] + prompt].tolist()),
                response_ids=tuple(tensors["response_ids"][here].tolist()),
                sampler_logprobs=tuple(tensors["sampler_logprobs"][here].tolist()),
                versions=tuple(tensors["versions"][here].tolist()),
                finish_reason=fields["finish_reason"],
                policy_stats=tensors["policy_stats"][starts["stats"] : starts["stats"] + 3 * known].reshape(3, known),
            )
        )
        for name, size in (("prompt", prompt), ("response", response), ("stats", 3 * known)):
            starts[name] += size
    return Group(row["uid"], Prompt(**row["prompt"]), tuple(samples))


def _joined(dtype: torch.dtype, parts: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor([value for part in parts for value in part], dtype=dtype)
