"""The values that travel from prompt to gradient.

Shapes: B sequences, T tokens, V vocabulary, G responses per prompt (group). Slot t of every [B, T] tensor speaks of token t of
`input_ids`; rows are [prompt | response | padding], padded on the right. Log-probs and entropies are in nats, float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """One question. `uid` is its identity: two rows with equal text are two prompts."""

    uid: str
    text: str
    answer: str


@dataclass(frozen=True)
class SamplingParams:
    """How an engine draws tokens. `temperature` 0 means greedy (evaluation only)."""

    temperature: float = 1.0
    max_tokens: int = 1024
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}; it must be >= 0 and finite")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be >= 1")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be in (0, 1]")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be >= 0 (0 keeps every token)")


@dataclass(frozen=True)
class Request:
    """One response to draw. (`uid`, `sample_index`) identifies it; `seed` alone decides its random numbers."""

    uid: str
    sample_index: int
    seed: int
    prompt_ids: tuple[int, ...]

    def answered(
        self, ids: Sequence[int], logprobs: Sequence[float], finish_reason: Literal["stop", "length"], policy_version: int
    ) -> Sample:
        """The rollout of this request with these response ids and the engine's log-probs of them."""
        drawn: dict[str, Any] = {"response_ids": tuple(ids), "sampler_logprobs": tuple(logprobs)}
        return Sample(**vars(self), **drawn, finish_reason=finish_reason, policy_version=policy_version)

    extended = answered

    @property
    def input_ids(self) -> tuple[int, ...]:
        return self.prompt_ids

    @property
    def key(self) -> tuple[str, int]:
        return self.uid, self.sample_index


@dataclass(frozen=True)
class Sample:
    """One drawn response as token ids, with the engine's log-prob of every token (temperature applied).

    `response_ids` holds the end-of-sequence token when the response ended by itself (`finish_reason` "stop"). versions: of the
    weights that drew each token; an engine gives the one `policy_version`. That of a response drawn in several spans is the
    oldest.
    """

    uid: str
    sample_index: int
    seed: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    policy_version: int
    versions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.versions:
            object.__setattr__(self, "versions", (self.policy_version,) * len(self.response_ids))
        assert len(self.response_ids) == len(self.sampler_logprobs) == len(self.versions), self.uid

    def continued(self, span: Sample) -> Sample:
        """This response and, after it, the tokens of `span`, whose prompt ended with this one's ids."""
        assert span.prompt_ids == self.prompt_ids + self.response_ids, self.uid
        assert (span.uid, span.sample_index) == (self.uid, self.sample_index)
        return replace(
            self,
            response_ids=self.response_ids + span.response_ids,
            sampler_logprobs=self.sampler_logprobs + span.sampler_logprobs,
            versions=self.versions + span.versions,
            finish_reason=span.finish_reason,
            policy_version=min(self.versions + span.versions),
        )


@dataclass(frozen=True)
class Batch:
    """Sequences to train on: a pool, a mini-batch or a micro-batch.

    input_ids, policy_version: int64 [B, T]; attention_mask, response_mask: bool [B, T];
    behaviour_logprobs, sampler_logprobs, behaviour_entropy, reference_logprobs: float32 [B, T], 0 outside the response
    (reference_logprobs everywhere, without a reference policy); advantages, rewards: float32 [B].
    policy_version is the number of optimizer updates behind the weights that drew the token, -1 outside the response.
    """

    input_ids: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    behaviour_logprobs: Tensor
    sampler_logprobs: Tensor
    behaviour_entropy: Tensor
    reference_logprobs: Tensor
    policy_version: Tensor
    advantages: Tensor
    rewards: Tensor

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def lengths(self) -> Tensor:
        """Tokens of each row without padding, int64 [B]."""
        return self.attention_mask.sum(dim=1)

    def ages(self, version: int) -> Tensor:
        """Updates from the weights that drew each trained token to those of `version`, int64 [N]."""
        return (version - self.policy_version)[self.response_mask]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        moved: dict[str, Any] = {f.name: getattr(self, f.name).to(device, non_blocking=non_blocking) for f in fields(self)}
        return Batch(**moved)

    def select(self, rows: Tensor) -> Batch:
        """The given rows, in the given order, cut to the longest of them."""
        width = int(self.lengths()[rows].max()) if len(rows) else 0
        parts: dict[str, Tensor] = {}
        for f in fields(self):
            value = getattr(self, f.name)[rows]
            parts[f.name] = value[:, :width] if value.dim() == 2 else value
        return Batch(**parts)


@dataclass(frozen=True)
class MiniBatch:
    """The data of one optimizer update, and what its row of the log should say of where they come from.

    places: where each sequence is on disk, as `Pool.places` has it, on the CPU; None where nobody asks.
    """

    sequences: Batch
    metrics: dict[str, float]
    places: Tensor | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MiniBatch:
        return replace(self, sequences=self.sequences.to(device, non_blocking))


@dataclass(frozen=True)
class TokenStats:
    """`logprobs` of given tokens under the policy, and its `entropy` there; [B, T], float32, exactly 0 outside the response."""

    logprobs: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class LossInputs:
    """A micro-batch as a loss gets it; all [B, T]. `response_mask` is bool; masked slots may hold anything.

    weights: >= 0, of a token's objective and mass alike (aggregation, mismatch correction, token filter); None: all 1.
    """

    logprobs: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor
    response_mask: Tensor
    weights: Tensor | None = None

    def detached(self) -> LossInputs:
        """The same values without a graph."""
        return replace(self, logprobs=self.logprobs.detach())


@dataclass(frozen=True)
class ClipBounds:
    """Bounds on the importance ratio itself (0.8, 1.2), never an epsilon; 0-dim tensors.

    positive_ratio: at these bounds, on the tally they were chosen from; metrics: of the search, by names of `bapo.metrics`.
    None and empty for a loss that does not search.
    """

    clip_low: Tensor
    clip_high: Tensor
    positive_ratio: Tensor | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class LossOutput:
    """`loss` to differentiate, and this micro-batch's part of each metric, detached.

    Parts combine over micro-batches and ranks by the metric's `reduction` in `bapo.metrics`. ratio, clipped: [B, T], without a
    graph, for records of single tokens: the ratio that is compared with the bounds, and the tokens that `policy/clip_frac`
    counts; None: r itself, and PPO's rule.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    ratio: Tensor | None = None
    clipped: Tensor | None = None


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter as PEFT's files have it: `config` is adapter_config.json, `weights` are adapter_model.safetensors."""

    config: dict[str, Any]
    weights: dict[str, Tensor]


def check_choices(options: Any) -> None:
    """Raises ValueError unless every Literal field of the dataclass `options` holds one of its choices."""
    for name, hint in get_type_hints(type(options)).items():
        if get_origin(hint) is Literal and getattr(options, name) not in get_args(hint):
            raise ValueError(f"{name} is {getattr(options, name)!r}; it must be one of {', '.join(get_args(hint))}")
