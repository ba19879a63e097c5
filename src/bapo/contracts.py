"""What tasks, rollout engines and the policy in training have to offer to those who use them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from bapo.types import Adapter, Batch, Prompt, Request, Rollout, SamplingParams, Scores


class Task(Protocol):
    """Prompts, of which no two of a split share their uid, and the judge of their answers.

    A further method it may have: `answer(response) -> str | None`, the answer that a response gives, in one spelling, for
    majority votes. Without it that is the stripped response.
    """

    def prompts(self, split: Literal["train", "test"]) -> Sequence[Prompt]: ...

    def verify(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Sequence[float | None]:
        """Rewards of responses' texts, special tokens removed, each to the prompt at its place: finite numbers.

        None: could not be verified. It counts as 0, and apart from what is wrong.
        """
        ...


class EngineError(RuntimeError):
    """The rollouts failed, teach nothing, or cannot be trusted. What the trainer holds is whole and worth a checkpoint."""


class RolloutEngine(Protocol):
    """Draws responses. Every response carries the version of the weights that made it.

    Further attributes an engine may have: `max_positions`, the most tokens of prompt and response together, checked first;
    `takes_adapter`, true if it is given a LoRA policy by `load_adapter(adapter, version)`; `shared`, true if one engine serves
    all ranks, so that rank 0 alone loads it and the others are told by `set_version(version)`; `sleep()`, called when nothing
    will be drawn until the next weights come; `counters`, metrics of its last `generate`.
    """

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights it computes with."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None: ...

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Rollout]:
        """One rollout per request, in any order; join by (uid, sample_index). One that failed for good is left out.

        Raises EngineError if nothing could be drawn.
        """
        ...

    def close(self) -> None: ...


class PolicyHandle(Protocol):
    """What the data side may ask of the policy in training."""

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Every weight of the whole model, one at a time, an adapter merged into it."""
        ...

    def adapter(self) -> Adapter | None:
        """The adapter in training, for an engine that applies one itself; None for a policy trained whole."""
        ...

    def score(self, batch: Batch) -> Scores:
        """Log-probs and entropies without a graph, on the CPU, whatever the size of `batch`."""
        ...

    def reference_logprobs(self, batch: Batch) -> Tensor:
        """Log-probs under the frozen reference policy, float32 [B, T] on the CPU; zeros if there is none."""
        ...

    def version(self) -> int:
        """Completed optimizer updates."""
        ...

    def as_it_is(self) -> PolicyHandle:
        """This policy with the weights it has now, whatever training makes of it."""
        ...
