"""Groups on their way: drawn in one round, or, with a token budget per round, span by span in several (paper, Fig. 12).

What is unfinished waits with everything that is known of its tokens: who drew each of them, and what the trainer's weights of
that time said of it.
"""

from __future__ import annotations

import json
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bapo.protocols import Engine, EngineError
from bapo.types import Prompt, Request, Sample, SamplingParams

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PartialRollouts:
    """A response gets at most `tokens_per_round` tokens in a round; what is unfinished goes on in later ones.

    A group is trained on when all its responses are finished. It is given up whole when one of them is unfinished after
    spans by `max_spans` policies (None: no such limit), or when its oldest token would be trained on later than
    `schedule.max_staleness`.
    """

    tokens_per_round: int
    max_spans: int | None = None

    def __post_init__(self) -> None:
        if self.tokens_per_round < 1:
            raise ValueError(f"rollout.partial.tokens_per_round is {self.tokens_per_round}; it must be >= 1")
        if self.max_spans is not None and self.max_spans < 2:
            raise ValueError(
                f"rollout.partial.max_spans is {self.max_spans}; it must be >= 2: with 1 nothing is ever gone on with"
            )


@dataclass(frozen=True)
class Member:
    """A response of a group, so far.

    scores: float32 [3, n], behaviour log-prob, entropy and reference log-prob of its first n tokens, n <= its length.
    """

    rollout: Sample
    scores: Tensor

    @property
    def spans(self) -> int:
        """Policies that drew it."""
        return len(set(self.rollout.versions))

    def is_finished(self, max_tokens: int) -> bool:
        return self.rollout.finish_reason == "stop" or len(self.rollout.response_ids) >= max_tokens


@dataclass(frozen=True)
class Group:
    """G responses to one prompt, by sample index."""

    uid: str
    prompt: Prompt
    members: tuple[Member, ...]

    def finished(self, max_tokens: int) -> list[Member]:
        return [member for member in self.members if member.is_finished(max_tokens)]

    def is_finished(self, max_tokens: int) -> bool:
        return len(self.finished(max_tokens)) == len(self.members)

    @property
    def size(self) -> int:
        """Tokens of its responses so far."""
        return sum(len(member.rollout.response_ids) for member in self.members)

    @property
    def oldest(self) -> int:
        """The policy version of its oldest token."""
        return min(member.rollout.policy_version for member in self.members)

    @property
    def newest(self) -> int:
        """Likewise of its newest; -1 if it has none."""
        return max((version for member in self.members for version in member.rollout.versions), default=-1)

    @property
    def spans(self) -> int:
        return max(member.spans for member in self.members)


def new_group(uid: str, prompt: Prompt, prompt_ids: tuple[int, ...], samples: int) -> Group:
    """A group of which nothing is drawn yet."""
    blank = [Sample(uid, index, -1, prompt_ids, (), (), "length", -1) for index in range(samples)]
    return Group(uid, prompt, tuple(Member(rollout, torch.zeros(3, 0)) for rollout in blank))


def extend(
    engine: Engine,
    groups: Sequence[Group],
    sampling: SamplingParams,
    seed_of: Callable[[str, int, int], int],
    tokens: int | None = None,
) -> list[Group]:
    """`groups` with at most `tokens` more tokens (None: all that `sampling` allows) for each response that is unfinished.

    seed_of: of (uid, sample index, tokens before). Whatever order the engine answers in, a span is joined to its response by
    (uid, sample index). A group of which the engine lost a response is left out whole.
    """
    asked: dict[int, list[Request]] = defaultdict(list)  # by how many tokens they may bring
    for group in groups:
        for member in group.members:
            if not member.is_finished(sampling.max_tokens):
                r = member.rollout
                room = sampling.max_tokens - len(r.response_ids)
                seed = seed_of(r.uid, r.sample_index, len(r.response_ids))
                request = Request(r.uid, r.sample_index, seed, r.prompt_ids + r.response_ids)
                asked[room if tokens is None else min(room, tokens)].append(request)
    drawn: dict[tuple[str, int], Sample] = {}
    count = 0
    for limit, requests in asked.items():
        answers = engine.generate(requests, replace(sampling, max_tokens=limit))
        if long := [r.uid for r in answers if len(r.response_ids) > limit]:
            raise EngineError(f"the engine gave {long[0]!r} more than the {limit} tokens that were asked for")
        drawn |= {(r.uid, r.sample_index): r for r in answers}
        count += len(answers)
    wanted = {(r.uid, r.sample_index) for requests in asked.values() for r in requests}
    if stray := drawn.keys() - wanted:
        raise EngineError(f"the engine returned responses that nobody asked for, such as {min(stray)}")
    if count > len(drawn):
        raise EngineError(f"the engine returned {count} responses, and only {len(drawn)} different ones were asked for")
    lost = {uid for uid, _ in wanted - drawn.keys()}
    if lost:
        log.warning(
            "the engine returned %d of %d responses; %d of %d groups are incomplete and dropped",
            len(drawn), len(wanted), len(lost), len(groups),
        )  # fmt: skip
    whole = (group for group in groups if group.uid not in lost)
    return [replace(group, members=tuple(_extended(member, drawn) for member in group.members)) for group in whole]


def _extended(member: Member, drawn: dict[tuple[str, int], Sample]) -> Member:
    span = drawn.get((member.rollout.uid, member.rollout.sample_index))
    if span is None:
        return member
    return Member(member.rollout.continued(span) if member.rollout.response_ids else span, member.scores)


def save_groups(groups: Sequence[Group], path: Path) -> None:
    """Two files beside each other, `path` with .safetensors and .json; the JSON is renamed into place last."""
    members = [member for group in groups for member in group.members]
    tensors = {
        "prompt_ids": _joined(torch.int64, [m.rollout.prompt_ids for m in members]),
        "response_ids": _joined(torch.int64, [m.rollout.response_ids for m in members]),
        "versions": _joined(torch.int64, [m.rollout.versions for m in members]),
        "sampler_logprobs": _joined(torch.float64, [m.rollout.sampler_logprobs for m in members]),
        "scores": torch.cat([m.scores.flatten() for m in members]) if members else torch.zeros(0),
    }
    rows = [
        {
            "uid": group.uid,
            "prompt": vars(group.prompt),
            "members": [
                {
                    "sample_index": m.rollout.sample_index,
                    "seed": m.rollout.seed,
                    "finish_reason": m.rollout.finish_reason,
                    "policy_version": m.rollout.policy_version,
                    "sizes": [len(m.rollout.prompt_ids), len(m.rollout.response_ids), m.scores.shape[1]],
                }
                for m in group.members
            ],
        }
        for group in groups
    ]
    for suffix, write in ((".safetensors", lambda to: save_file(tensors, str(to))), (".json", lambda to: _dump(rows, to))):
        partial = path.with_suffix(".partial")
        write(partial)
        os.replace(partial, path.with_suffix(suffix))


def load_groups(path: Path) -> list[Group]:
    """What `save_groups` wrote; none if it wrote nothing. Raises ValueError for a damaged file."""
    if not path.with_suffix(".json").is_file():
        return []
    try:
        rows = json.loads(path.with_suffix(".json").read_text())
        tensors = load_file(str(path.with_suffix(".safetensors")))
        return [_group(row, tensors, at) for at in [dict.fromkeys(("prompt", "response", "score"), 0)] for row in rows]
    except Exception as error:
        raise ValueError(f"{path}.safetensors or .json is damaged: {error}") from error


def _group(row: dict[str, Any], tensors: dict[str, Tensor], at: dict[str, int]) -> Group:
    """The next group in the joined tensors; `at` says where it begins and is moved behind it."""
    members = []
    for m in row["members"]:
        prompt, response, scored = m["sizes"]
        here = slice(at["response"], at["response"] + response)
        rollout = Sample(
            row["uid"],
            m["sample_index"],
            m["seed"],
            tuple(tensors["prompt_ids"][at["prompt"] : at["prompt"] + prompt].tolist()),
            tuple(tensors["response_ids"][here].tolist()),
            tuple(tensors["sampler_logprobs"][here].tolist()),
            m["finish_reason"],
            m["policy_version"],
            tuple(tensors["versions"][here].tolist()),
        )
        scores = tensors["scores"][at["score"] : at["score"] + 3 * scored].reshape(3, scored)
        members.append(Member(rollout, scores))
        at |= {"prompt": at["prompt"] + prompt, "response": at["response"] + response, "score": at["score"] + 3 * scored}
    return Group(row["uid"], Prompt(**row["prompt"]), tuple(members))


def _joined(dtype: torch.dtype, parts: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor([value for part in parts for value in part], dtype=dtype)


def _dump(rows: Any, to: Path) -> None:
    to.write_text(json.dumps(rows) + "\n")
