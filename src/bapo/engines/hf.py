"""Rollouts by transformers' own `generate`: no extra service, any device, a seed of its own for every sample."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bapo.engines.options import eos_ids
from bapo.protocols import Engine, EngineError, EngineOptions
from bapo.types import Sample, SamplingParams


class SeededSampler:
    """A logits processor that samples each row's next token with the row's own random numbers and keeps its log-prob.

    `generate` offers one random stream for a whole batch, so a sample would depend on its neighbours. Here row i uses one
    uniform number per step from a generator seeded for that row alone, and inverts the cumulative distribution with it.
    The scores that it returns allow that token only, so `generate` in greedy mode must take it.
    """

    def __init__(self, seeds: Sequence[int], sampling: SamplingParams):
        from transformers import TopKLogitsWarper, TopPLogitsWarper

        self.temperature = sampling.temperature
        self.uniform = torch.stack(
            [torch.rand(sampling.max_tokens, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in seeds]
        )
        self.warpers: list[Any] = []
        if sampling.top_k:
            self.warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self.warpers.append(TopPLogitsWarper(sampling.top_p))
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.float() / (self.temperature or 1.0)
        for warper in self.warpers:
            scores = warper(input_ids, scores)
        logprobs = scores.log_softmax(dim=-1)
        if self.temperature == 0:
            token = logprobs.argmax(dim=-1, keepdim=True)
        else:
            cumulative = logprobs.double().exp().cumsum(dim=-1)
            point = self.uniform[:, len(self.logprobs), None].to(scores.device) * cumulative[:, -1:]
            # The first token whose cumulative probability exceeds the point; a token of probability 0 never does so first.
            token = torch.searchsorted(cumulative, point, right=True).clamp(max=scores.shape[-1] - 1)
        self.logprobs.append(logprobs.gather(-1, token).squeeze(-1))
        return torch.full_like(scores, -torch.inf).scatter(-1, token, 0.0)


@dataclass(frozen=True)
class HFRollouts(EngineOptions):
    """Called with a model: its engine. batch_size: samples generated at once; device auto: this rank's GPU, if any."""

    batch_size: int = 512
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; it must be >= 1")
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        usable = ["auto", "cpu"]
        if accelerator is not None:
            usable += [accelerator.type, *(f"{accelerator.type}:{n}" for n in range(torch.accelerator.device_count()))]
        if self.device not in usable:
            raise ValueError(f"device is {self.device!r}; on this machine it must be one of {', '.join(usable)}")

    @property
    def max_num_seqs(self) -> int:  # type: ignore[override]
        return self.batch_size

    def __call__(self, model_path: str | Path, dtype: torch.dtype = torch.float32, **source: Any) -> HFEngine:
        device = self.device
        if device == "auto":
            device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
        return HFEngine(model_path, self.batch_size, device, dtype, **source)


class HFEngine(Engine):
    """Engine on a transformers model of its own, loaded from `model_path` and updated by `load_weights`.

    The end-of-sequence ids come from the model's generation config; its sampling defaults (temperature, ...) are not used.
    """

    def __init__(
        self,
        model_path: str | Path,
        batch_size: int = 512,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ):
        from transformers import AutoModelForCausalLM, GenerationConfig

        source: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        self.batch_size = batch_size
        self.dtype = dtype
        self.version = -1  # no version yet: `generate` needs a `load_weights` first
        self.closed = False
        self.eos_ids = frozenset(eos_ids(model_path, **source))
        model: Any = AutoModelForCausalLM.from_pretrained(str(model_path), dtype=dtype, **source)
        self.model = model.to(device).eval()
        pad = self.model.generation_config.pad_token_id
        self.pad_id = min(self.eos_ids) if pad is None else pad
        self.model.generation_config = GenerationConfig()  # the model's own sampling defaults must not creep in
        self.max_positions = getattr(self.model.config, "max_position_embeddings", None)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        missing = dict(self.model.named_parameters())
        self.version = -1  # half-loaded weights serve nobody
        for name, value in weights:
            if name not in missing:
                raise KeyError(f"weight {name!r} is unknown to the engine's model")
            missing.pop(name).copy_(value)
        if missing:
            raise KeyError(f"weights missing from the update: {', '.join(sorted(missing)[:5])} ({len(missing)} in all)")
        self.version = version

    def generate(self, samples: Sequence[Sample], sampling: SamplingParams) -> list[Sample]:
        if self.version < 0:
            raise RuntimeError("the engine holds no complete set of weights: call load_weights first")
        extended: list[Sample] = []
        for start in range(0, len(samples), self.batch_size):
            extended += self._generate(samples[start : start + self.batch_size], sampling)
        return extended

    @torch.no_grad()
    def _generate(self, samples: Sequence[Sample], sampling: SamplingParams) -> list[Sample]:
        from transformers import GenerationConfig, LogitsProcessorList

        width = max(len(sample.input_ids) for sample in samples)
        if self.max_positions and width + sampling.max_tokens > self.max_positions:
            raise ValueError(
                f"a prompt of {width} tokens and max_tokens={sampling.max_tokens} exceed "
                f"the model's {self.max_positions} positions"
            )
        ids = torch.full((len(samples), width), self.pad_id)
        mask = torch.zeros_like(ids)
        for row, sample in enumerate(samples):  # prompts end together, so they are padded on the left
            ids[row, width - len(sample.input_ids) :] = torch.tensor(sample.input_ids)
            mask[row, width - len(sample.input_ids) :] = 1
        sampler = SeededSampler([sample.seed for sample in samples], sampling)
        output = self.model.generate(
            input_ids=ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            generation_config=GenerationConfig(
                max_new_tokens=sampling.max_tokens, do_sample=False, eos_token_id=sorted(self.eos_ids), pad_token_id=self.pad_id
            ),
            logits_processor=LogitsProcessorList([self._stop_if_closed, sampler]),
        )
        responses, logprobs = output[:, width:].tolist(), torch.stack(sampler.logprobs, dim=1).tolist()
        return [self._extended(*parts) for parts in zip(samples, responses, logprobs, strict=True)]

    def _extended(self, sample: Sample, ids: list[int], logprobs: list[float]) -> Sample:
        end = next((t + 1 for t, token in enumerate(ids) if token in self.eos_ids), None)
        return sample.extended(ids[:end], logprobs[:end], "stop" if end else "length", self.version)

    def _stop_if_closed(self, ids: Tensor, scores: Tensor) -> Tensor:
        if self.closed:
            raise EngineError("the engine was closed while it generated")
        return scores

    def close(self) -> None:
        """Stop a `generate` in another thread at its next token; nothing outlives the object."""
        self.closed = True
