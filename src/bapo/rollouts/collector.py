"""From prompts to a pool: draw groups, judge them, turn rewards into advantages, drop what teaches nothing, score the rest."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bapo.advantages import zero_variance
from bapo.rollouts.pool import Pool, collate
from bapo.rollouts.schedule import prompt_slots
from bapo.rollouts.seeds import derive_seed
from bapo.types import Batch, PolicyHandle, Prompt, Request, Rollout, RolloutEngine, SamplingParams, Task

log = logging.getLogger(__name__)

Advantage = Callable[[Tensor, Sequence[str]], Tensor]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Ranks:
    """This process among the data-parallel ones."""

    rank: int = 0
    world: int = 1

    def gather(self, item: Item) -> list[Item]:
        """The item of every rank, in rank order, on every rank."""
        if self.world == 1:
            return [item]
        items: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(items, item)
        return items


@dataclass(frozen=True)
class Sample:
    rollout: Rollout
    reward: float


def encode(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> tuple[int, ...]:
    """The ids of a prompt, at least one."""
    ids = tuple(tokenizer(prompt.text, add_special_tokens=False)["input_ids"])
    if not ids:
        raise ValueError(f"prompt {prompt.uid!r} has the text {prompt.text!r}; it must hold at least one token")
    return ids


def draw(
    engine: RolloutEngine,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[tuple[str, Prompt]],
    sampling: SamplingParams,
    samples: int,
    seed_of: Callable[[str, int], int],
) -> list[Sample]:
    """`samples` judged responses to each (group uid, prompt), ordered by prompt, then sample index.

    Whatever order the engine answers in, a response is joined to its prompt by (uid, sample index). Only its text goes to the
    task; training sees the very ids that were drawn.
    """
    requests = []
    for uid, prompt in prompts:
        ids = encode(tokenizer, prompt)
        requests += [Request(uid, index, seed_of(uid, index), ids) for index in range(samples)]
    drawn = {(r.uid, r.sample_index): r for r in engine.generate(requests, sampling)}
    if missing := len(requests) - len(drawn):
        raise RuntimeError(f"the engine returned {len(drawn)} of {len(requests)} responses ({missing} missing)")
    judged = []
    for uid, prompt in prompts:
        for index in range(samples):
            rollout = drawn[uid, index]
            text: Any = tokenizer.decode(list(rollout.response_ids), skip_special_tokens=True)
            reward: Any = task.verify(prompt, text)
            if not isinstance(reward, Real) or not math.isfinite(reward):
                raise ValueError(f"the task's reward for prompt {prompt.uid!r} is {reward!r}; it must be a finite number")
            judged.append(Sample(rollout, float(reward)))
    return judged


@dataclass(frozen=True)
class RolloutOptions:
    """`prompts_per_round` groups of `group_size` (G) responses, drawn by `engine(model_path=...)`, make a pool.

    If too few groups have differing rewards to fill the mini-batches, further prompts are drawn, `max_attempts` times in all.
    """

    engine: Callable[..., RolloutEngine]
    sampling: SamplingParams
    prompts_per_round: int = 64
    group_size: int = 8
    max_attempts: int = 3

    def __post_init__(self) -> None:
        for name, least in (("prompts_per_round", 1), ("group_size", 1), ("max_attempts", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"rollout.{name} is {getattr(self, name)}; it must be >= {least}")
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

    def __post_init__(self) -> None:
        self.prompts = self.task.prompts("train")
        self.check("train", self.prompts, self.options.sampling, "rollout.sampling")

    def check(self, split: str, prompts: Sequence[Prompt], sampling: SamplingParams, field: str) -> None:
        """ValueError for prompts of a split from which nothing can be drawn. `field`: where the config holds `sampling`."""
        where = f"task {type(self.task).__name__}, split {split!r}"
        if not prompts:
            raise ValueError(f"{where}: it has 0 prompts; it must have at least one")
        uid, count = Counter(prompt.uid for prompt in prompts).most_common(1)[0]
        if count > 1:
            raise ValueError(f"{where}: {count} prompts have the uid {uid!r}; every uid must differ")
        longest = max(len(encode(self.tokenizer, prompt)) for prompt in prompts)
        positions = getattr(self.engine, "max_positions", None)
        if positions is not None and longest + sampling.max_tokens > positions:
            raise ValueError(
                f"{field}.max_tokens is {sampling.max_tokens}; it must be <= {positions - longest}: the model has {positions} "
                f"positions, and the longest prompt takes {longest} ({where})"
            )

    def collect(self, round_index: int, before: dict[str, Any], policy: PolicyHandle, least_rows: int, ranks: Ranks) -> Pool:
        """The pool of a round. `before`: the meta of the round before it ({} for the first).

        Every rank draws a share of the prompts and returns the same whole pool of at least `least_rows` rows.
        Raises RuntimeError when `max_attempts` draws of `prompts_per_round` groups hold too few groups with differing rewards.
        """
        start = time.perf_counter()
        position = before.get("next_prompt", 0)
        samples: list[Sample] = []
        for _ in range(self.options.max_attempts):
            samples += self._draw(round_index, position, ranks)
            position += self.options.prompts_per_round
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
        meta = {
            "round": round_index,
            "policy_version": policy.version(),
            "next_prompt": position,
            "tokens_total": before.get("tokens_total", 0) + sum(len(s.rollout.response_ids) for s in samples),
            "sampling": asdict(self.options.sampling),
            "tokenizer": self.tokenizer.name_or_path,
            "metrics": pool_metrics(samples, rewards, kept, self.options.group_size) | mismatch_metrics(batch),
            "timing": {"time/refill": time.perf_counter() - start},
        }
        return Pool(batch, tuple((r.uid, r.sample_index, r.seed) for r in trained), meta)

    def _draw(self, round_index: int, position: int, ranks: Ranks) -> list[Sample]:
        slots = prompt_slots(len(self.prompts), position, self.options.prompts_per_round, self.seed)
        # A prompt comes back in every data epoch; as a group it is new each time.
        groups = [(f"{self.prompts[index].uid}@{data_epoch}", self.prompts[index]) for index, data_epoch in slots]
        mine = draw(
            self.engine,
            self.task,
            self.tokenizer,
            groups[ranks.rank :: ranks.world],
            self.options.sampling,
            self.options.group_size,
            lambda uid, index: derive_seed(self.seed, "train", round_index, uid, index),
        )
        by_id = {(s.rollout.uid, s.rollout.sample_index): s for part in ranks.gather(mine) for s in part}
        return [by_id[uid, index] for uid, _ in groups for index in range(self.options.group_size)]

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


def pool_metrics(samples: Sequence[Sample], rewards: Tensor, kept: Tensor, group_size: int) -> dict[str, float]:
    """`rollout/*` over every response drawn, kept or not."""
    lengths = torch.tensor([len(s.rollout.response_ids) for s in samples], dtype=torch.float64)
    right = rewards > 0
    texts: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for sample in samples:
        texts[sample.rollout.uid].add(sample.rollout.response_ids)

    def mean(values: Tensor) -> float:
        return float(values.double().mean()) if len(values) else 0.0

    return {
        "rollout/reward_mean": mean(rewards),
        "rollout/reward_std": float(rewards.double().std(correction=0)),
        "rollout/zero_std_frac": 1.0 - mean(kept),
        "rollout/groups_drawn": float(len(texts)),
        "rollout/groups_kept": float(int(kept.sum()) // group_size),
        "rollout/response_length_mean": mean(lengths),
        "rollout/response_length_correct_mean": mean(lengths[right]),
        "rollout/response_length_incorrect_mean": mean(lengths[~right]),
        "rollout/truncated_frac": mean(torch.tensor([s.rollout.finish_reason == "length" for s in samples])),
        "rollout/unique_frac": sum(len(t) for t in texts.values()) / len(samples),
    }


def mismatch_metrics(batch: Batch) -> dict[str, float]:
    """`mismatch/*`: the engine's log-probs of the drawn tokens against the trainer's."""
    gap = (batch.behaviour_logprobs - batch.sampler_logprobs)[batch.response_mask].double()
    return {
        "mismatch/kl_k3": float((gap.exp() - 1 - gap).mean()),
        "mismatch/logp_abs_diff_mean": float(gap.abs().mean()),
        "mismatch/logp_abs_diff_max": float(gap.abs().max()),
    }
