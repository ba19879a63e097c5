"""From prompts to a pool: draw groups, judge them, turn rewards into advantages, drop what teaches nothing, score the rest."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bapo.advantages import zero_variance
from bapo.contracts import PolicyHandle, RolloutEngine, Task
from bapo.rollouts.draw import RewardTerm, Sample, check_prompts, draw
from bapo.rollouts.pool import Pool, collate
from bapo.rollouts.pool_metrics import mismatch_metrics, pool_metrics
from bapo.rollouts.prompt_format import PLAIN, PromptFormat
from bapo.rollouts.ranks import Ranks
from bapo.rollouts.schedule import prompt_slots
from bapo.rollouts.seeds import derive_seed
from bapo.types import Batch, Prompt, SamplingParams

log = logging.getLogger(__name__)

Advantage = Callable[[Tensor, Sequence[str]], Tensor]
SHOWN_GROUPS = 8
"""Groups of a round of which texts are kept."""


@dataclass(frozen=True)
class RolloutOptions:
    """`prompts_per_round` groups of `group_size` (G) responses, drawn by `engine(model_path=...)`, make a pool.

    If too few groups have differing rewards to fill the mini-batches, further prompts are drawn, `max_attempts` times in all.
    `prompt`: what a question looks like to the model, in training and evaluation. Training prompts of more than
    `max_prompt_tokens` tokens are left out. probe_tolerance: nats by which engine and trainer may differ after a sync; None:
    what `bapo.rollouts.probe` allows for their precision.
    """

    engine: Callable[..., RolloutEngine]
    sampling: SamplingParams
    prompts_per_round: int = 64
    group_size: int = 8
    max_attempts: int = 3
    prompt: PromptFormat = PLAIN
    max_prompt_tokens: int | None = None
    probe_tolerance: float | None = None

    def __post_init__(self) -> None:
        if self.probe_tolerance is not None and not 0 < self.probe_tolerance < math.inf:
            raise ValueError(f"rollout.probe_tolerance is {self.probe_tolerance}; it must be > 0 and finite, or null")
        for name in ("prompts_per_round", "group_size", "max_attempts", "max_prompt_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"rollout.{name} is {value}; it must be >= 1")
        if self.sampling.temperature <= 0:
            raise ValueError(f"rollout.sampling.temperature is {self.sampling.temperature}; training needs > 0")


@dataclass
class Collector:
    """Draws pools. `seed` and a pool's place in the prompt order decide everything random in it."""

    engine: RolloutEngine
    task: Task
    tokenizer: PreTrainedTokenizerBase
    advantage: Advantage
    options: RolloutOptions
    seed: int
    terms: Mapping[str, RewardTerm] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prompts = self._short_enough(self.task.prompts("train"))
        self.check("train", self.prompts, self.options.sampling, "rollout.sampling")

    def _short_enough(self, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
        """The training prompts of at most `max_prompt_tokens` tokens, as the model reads them; ValueError if there is none."""
        most = self.options.max_prompt_tokens
        if most is None:
            return prompts
        sizes = [len(self.options.prompt.encode(self.tokenizer, prompt)) for prompt in prompts]
        kept = [prompt for prompt, size in zip(prompts, sizes, strict=True) if size <= most]
        if prompts and not kept:
            raise ValueError(f"rollout.max_prompt_tokens is {most}; it must be >= {min(sizes)}, the shortest training prompt")
        if left_out := [prompt.uid for prompt, size in zip(prompts, sizes, strict=True) if size > most]:
            some = ", ".join(left_out[:3]) + (", ..." if len(left_out) > 3 else "")
            log.warning(
                "%d of %d training prompts are left out: longer than rollout.max_prompt_tokens=%d (%s)",
                len(left_out), len(prompts), most, some,
            )  # fmt: skip
        return kept

    def check(
        self, split: str, prompts: Sequence[Prompt], sampling: SamplingParams, field: str, task: Task | None = None
    ) -> None:
        """ValueError for prompts of a split of `task` (None: the one trained on) from which nothing can be drawn."""
        positions = getattr(self.engine, "max_positions", None)
        check_prompts(task or self.task, split, prompts, self.tokenizer, self.options.prompt, sampling, positions, field)

    def collect(self, round_index: int, before: dict[str, Any], policy: PolicyHandle, least_rows: int, ranks: Ranks) -> Pool:
        """The pool of a round. `before`: the meta of the round before it ({} for the first).

        Every rank draws a share of the prompts and returns the same whole pool of at least `least_rows` rows.
        Raises RuntimeError when `max_attempts` draws of `prompts_per_round` groups hold too few groups with differing rewards.
        """
        start = time.perf_counter()
        position = first = before.get("next_prompt", 0)
        samples: list[Sample] = []
        for _ in range(self.options.max_attempts):
            samples += self._draw(round_index, position, ranks)
            position += self.options.prompts_per_round
            if samples and not any(s.verified for s in samples):
                raise RuntimeError(f"round {round_index}: none of {len(samples)} responses could be verified")
            uids = [s.rollout.uid for s in samples]
            rewards = torch.tensor([s.reward for s in samples], dtype=torch.float32)
            kept = ~zero_variance(rewards, uids)
            if int(kept.sum()) >= least_rows:
                break
            log.warning("round %d: %d of %d responses teach something; drawing more", round_index, int(kept.sum()), len(kept))
        else:
            raise RuntimeError(
                f"round {round_index}: after rollout.max_attempts={self.options.max_attempts} draws only {int(kept.sum())} of "
                f"{len(kept)} responses are in groups with differing rewards; {least_rows} are needed. The task is too hard or "
                "too easy for this policy: change the task, raise rollout.prompts_per_round or rollout.max_attempts."
            )
        advantages = self.advantage(rewards, uids)
        rows = kept.nonzero().flatten()
        trained = [samples[i].rollout for i in rows.tolist()]
        pad_id = self.tokenizer.pad_token_id
        batch = collate(trained, rewards[rows], advantages[rows], int(pad_id))
        batch = self._score(batch, policy, ranks)
        drawn = pool_metrics(samples, rewards, kept, self.options.group_size, asked=position - first)
        meta = {
            "round": round_index,
            "policy_version": policy.version(),
            "next_prompt": position,
            "tokens_total": before.get("tokens_total", 0) + sum(len(s.rollout.response_ids) for s in samples),
            "sampling": asdict(self.options.sampling),
            "tokenizer": self.tokenizer.name_or_path,
            "metrics": drawn | mismatch_metrics(batch),
            "samples": self._shown(samples, kept),
            "timing": {"time/refill": time.perf_counter() - start},
        }
        return Pool(batch, tuple((r.uid, r.sample_index, r.seed) for r in trained), meta)

    def _draw(self, round_index: int, position: int, ranks: Ranks) -> list[Sample]:
        slots = prompt_slots(len(self.prompts), position, self.options.prompts_per_round, self.seed)
        # A prompt comes back in every data epoch; as a group it is new each time.
        groups = [(f"{self.prompts[index].uid}@{data_epoch}", self.prompts[index]) for index, data_epoch in slots]
        parts = ranks.gather_from(
            lambda: draw(
                self.engine,
                self.task,
                self.tokenizer,
                self.options.prompt,
                groups[ranks.rank :: ranks.world],
                self.options.sampling,
                self.options.group_size,
                lambda uid, index: derive_seed(self.seed, "train", round_index, uid, index),
                self.terms,
            )
        )
        by_group: dict[str, list[Sample]] = {uid: [] for uid, _ in groups}
        for sample in itertools.chain(*parts):
            by_group[sample.rollout.uid].append(sample)
        return list(itertools.chain(*by_group.values()))  # in the order of the prompts, whoever drew them

    def _shown(self, samples: Sequence[Sample], kept: Tensor) -> list[dict[str, Any]]:
        """For people to read: of the first groups drawn, kept or not, the responses with the lowest and the highest reward."""
        prompts = {prompt.uid: prompt for prompt in self.prompts}
        groups: dict[str, list[int]] = {}
        for index, sample in enumerate(samples):
            groups.setdefault(sample.rollout.uid, []).append(index)
        rows = []
        for uid, members in itertools.islice(groups.items(), SHOWN_GROUPS):
            prompt = prompts[uid.rpartition("@")[0]]
            ranked = sorted(members, key=lambda index: samples[index].reward)
            for index in dict.fromkeys((ranked[0], ranked[-1])):
                rows.append(_row(prompt, samples[index]) | {"kept": bool(kept[index])})
        return rows

    def _score(self, batch: Batch, policy: PolicyHandle, ranks: Ranks) -> Batch:
        """Behaviour log-probs from the trainer itself: the engine's may come from other kernels or another precision."""
        scored = torch.zeros(3, *batch.input_ids.shape)  # behaviour log-probs, their entropy, reference log-probs
        rows = torch.arange(len(batch))[ranks.rank :: ranks.world]
        mine = scored[:, rows]
        if len(rows):
            share = batch.select(rows)
            scores = policy.score(share)
            found = torch.stack([scores.logprobs, scores.entropy, policy.reference_logprobs(share)])
            mine[:, :, : share.input_ids.shape[1]] = found
        for rank, part in enumerate(ranks.gather(mine)):
            scored[:, rank :: ranks.world] = part
        behaviour, entropy, reference = scored
        return replace(batch, behaviour_logprobs=behaviour, behaviour_entropy=entropy, reference_logprobs=reference)


def _row(prompt: Prompt, sample: Sample) -> dict[str, Any]:
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
