"""Base classes of what a user may bring: tasks, engines, losses; and what the data side may ask of the policy in training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from bapo.types import Adapter, Batch, ClipBounds, LossInputs, LossOutput, Prompt, Sample, SamplingParams, TokenStats

Split = Literal["train", "test"]


class Task:
    """Prompts, no two of a split with the same uid, and the grader of their answers.

    alphabet, eos: the characters of prompts and responses, and the one that ends a response; a tiny model that is trained on
    the task's demonstrations has a token for each.
    """

    alphabet: ClassVar[str] = ""
    eos: ClassVar[str] = ""

    @property
    def name(self) -> str:
        """The task's name in messages and metrics."""
        return type(self).__name__

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits that `prompts` takes."""
        return ("train", "test")

    @property
    def source(self) -> tuple[str, str | None] | None:
        """Path or hub id of the data, and their revision; None for generated prompts."""
        return None

    def prompts(self, split: Split) -> Sequence[Prompt]:
        raise NotImplementedError

    def verify(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Sequence[float | None]:
        """Rewards of response texts (special tokens removed), each to the prompt at its place: finite numbers.

        None: could not be verified. It counts as 0, and apart from what is wrong.
        """
        raise NotImplementedError

    def answer(self, response: str) -> str | None:
        """The answer that a response gives, in one spelling, for majority votes; None or empty if it gives none."""
        return response.strip()

    @property
    def has_demonstrations(self) -> bool:
        return type(self).demonstrations is not Task.demonstrations

    def demonstrations(self, n: int, seed: int) -> Sequence[tuple[str, str]]:
        """`n` pairs (prompt text, response text without `eos`) for a warm start; `seed` decides them."""
        raise NotImplementedError


class EngineError(RuntimeError):
    """The rollouts failed, teach nothing, or cannot be trusted. What the trainer holds is whole and worth a checkpoint."""


class Engine:
    """Generates responses. Every response carries the version of the weights that made it.

    dtype: of the weights it computes with. max_positions: the most tokens of prompt and response together, None if unknown.
    takes_adapter: a LoRA policy arrives by `load_adapter`. shared: one engine serves all ranks: rank 0 loads it, the others are
    told by `set_version`.
    """

    dtype: torch.dtype = torch.float32
    max_positions: int | None = None
    takes_adapter: bool = False
    shared: bool = False

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        raise NotImplementedError

    def load_adapter(self, adapter: Adapter, version: int) -> None:
        raise NotImplementedError

    def set_version(self, version: int) -> None:
        """Another rank has loaded the shared engine with the weights of this version."""

    def generate(self, samples: Sequence[Sample], sampling: SamplingParams) -> list[Sample]:
        """Each sample extended by at most sampling.max_tokens tokens, in any order; one that failed for good is left out.

        Raises EngineError if nothing could be generated.
        """
        raise NotImplementedError

    def sleep(self) -> None:
        """Nothing will be generated until the next weights: GPU memory may be freed."""

    def close(self) -> None:
        """Ends the engine's processes. Idempotent."""


class EngineOptions:
    """Settings of an engine, checked when they are made; called with a model, they start it.

    dtype: of the weights, None for the policy's. max_model_len: tokens of prompt and response, None for the model's positions.
    max_num_seqs: samples generated at once. gpu_memory_utilization: of a GPU, 0 if the engine reserves no share. lora_sync
    "native": a LoRA policy arrives as an adapter of rank <= max_lora_rank, not merged. sync_dir: None for shared memory.
    """

    dtype: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 1
    gpu_memory_utilization: float = 0.0
    tensor_parallel_size: int = 1
    lora_sync: Literal["merged", "native"] = "merged"
    max_lora_rank: int = 64
    weight_sync: Literal["files", "ipc", "nccl"] = "files"
    sync_dir: str | None = None

    def require(self) -> None:
        """Raises ValueError if a package or a device that this engine needs is missing here."""

    def __call__(self, model_path: str | Path, dtype: torch.dtype = torch.float32, **source: Any) -> Engine:
        """Starts the engine. dtype: the policy's; source: revision and trust_remote_code of a hub model."""
        raise NotImplementedError


class Loss:
    """A policy loss: tally every micro-batch, sum the tallies, choose bounds once per update, then call on every micro-batch.

    adaptive: the bounds depend on the tally; if not, no pass is spent on it. bounds_scope: what a tally is summed over.
    """

    adaptive: bool = False
    bounds_scope: Literal["update", "micro_batch"] = "update"

    def tally(self, inputs: LossInputs) -> Tensor:
        """A float64 vector that adds up over micro-batches and ranks. No autograd graph, no host synchronisation."""
        return inputs.logprobs.new_zeros(0, dtype=torch.float64)

    def choose(self, tally: Tensor) -> ClipBounds:
        """The bounds of this update from the summed tally."""
        raise NotImplementedError

    def __call__(self, inputs: LossInputs, bounds: ClipBounds, denominator: Tensor) -> LossOutput:
        """Loss of one micro-batch: its weighted token sum over `denominator`, a count over the whole update (0-dim)."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """State that a learning loss keeps in a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class PolicyHandle(Protocol):
    """The side of the policy in training that the data side may use."""

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Every weight of the whole model, one at a time, an adapter merged into it."""
        ...

    def adapter(self) -> Adapter | None:
        """The adapter in training, for an engine that applies one itself; None for a policy trained whole."""
        ...

    def token_stats(self, batch: Batch) -> TokenStats:
        """Log-probs and entropies without a graph, on the CPU, whatever the size of `batch`."""
        ...

    def reference_logprobs(self, batch: Batch) -> Tensor:
        """Log-probs under the frozen reference policy, float32 [B, T] on the CPU; zeros if there is none."""
        ...

    def version(self) -> int:
        """Completed optimizer updates."""
        ...

    def snapshot(self) -> PolicyHandle:
        """This policy with the weights it has now, whatever training makes of it."""
        ...
