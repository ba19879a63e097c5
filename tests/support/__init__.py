"""What tests share: whole runs in this process, an engine whose answers are scripted, random batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test must not wait for a hub

import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict
from torch import Tensor

from bapo.protocols import Engine
from bapo.training.cli import plain_overlay
from bapo.training.run_folder import register_resolvers
from bapo.training.train import run
from bapo.types import Batch, Sample, SamplingParams, TokenStats

REPOSITORY = Path(__file__).parents[2]


SMALL = ("+experiment=smoke", "callbacks.evaluate.max_prompts=8")
"""Overrides of a whole run that takes about a second, once its warm start is made."""


def run_experiment(
    folder: Path, *overrides: str, config: str = "train", entry: Callable[[DictConfig], dict[str, float]] = run
) -> dict[str, float]:
    """What `python train.py OVERRIDES` does in run folder `folder`, in this process; or another `entry` with its `config`."""
    register_resolvers()
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        cfg = compose(config, overrides=[plain_overlay(o) for o in overrides], return_hydra_config=True)
    with open_dict(cfg):
        cfg.hydra.runtime.output_dir = str(folder)
        cfg.hydra.job.num = 0
        HydraConfig.instance().set_config(cfg)
        del cfg["hydra"]
    return entry(cfg)


class ScriptedEngine(Engine):
    """Answers each request with `answer(request)` token ids; log-probs are -1. Records what it was asked."""

    def __init__(self, answer: Callable[[Sample], Sequence[int]], order: Callable[[list], list] = lambda r: r):
        self.answer = answer
        self.order = order
        self.requests: list[Sample] = []
        self.loaded: list[int] = []
        self.calls = 0
        self.closed = False

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        assert dict(weights) is not None
        self.loaded.append(version)

    def generate(self, requests: Sequence[Sample], sampling: SamplingParams) -> list[Sample]:
        self.calls += 1
        self.requests += requests
        rollouts = []
        for r in requests:
            ids = tuple(self.answer(r))
            rollouts.append(r.extended(ids, (-1.0,) * len(ids), "stop", self.loaded[-1]))
        return self.order(rollouts)

    def close(self) -> None:
        self.closed = True


class FixedPolicy:
    """A PolicyHandle at a given version whose every log-prob is -2."""

    def __init__(self, version: int = 0):
        self.at = version

    def named_weights(self) -> list[tuple[str, Tensor]]:
        return [("w", torch.zeros(1))]

    def token_stats(self, batch: Batch) -> TokenStats:
        return TokenStats(torch.where(batch.response_mask, -2.0, 0.0), torch.zeros_like(batch.behaviour_logprobs))

    def reference_logprobs(self, batch: Batch) -> Tensor:
        return torch.zeros_like(batch.behaviour_logprobs)

    def version(self) -> int:
        return self.at


def random_batch(rows: int, seed: int = 0, vocabulary: int = 15, prompt: int = 3, longest: int = 9, version: int = 0) -> Batch:
    """Rows of random ids with responses of 1..longest tokens and random advantages of both signs."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (rows,), generator=generator)
    width = prompt + int(lengths.max())
    slots = torch.arange(width)
    attention = slots < (prompt + lengths)[:, None]
    response = attention & (slots >= prompt)
    return Batch(
        input_ids=torch.where(attention, torch.randint(2, vocabulary, (rows, width), generator=generator), 0),
        attention_mask=attention,
        response_mask=response,
        behaviour_logprobs=torch.where(response, -3 * torch.rand(rows, width, generator=generator), 0.0),
        sampler_logprobs=torch.zeros(rows, width),
        behaviour_entropy=torch.where(response, 3 * torch.rand(rows, width, generator=generator), 0.0),
        reference_logprobs=torch.zeros(rows, width),
        policy_version=torch.where(response, version, -1),
        advantages=torch.randn(rows, generator=generator),
        rewards=torch.zeros(rows),
    )
