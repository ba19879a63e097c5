"""Drawing and judging: requests go to the engine, responses to the task, and each comes back as a sample with its reward."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any

from bapo.protocols import Engine, Task
from bapo.rollouts.groups import extend, new_group
from bapo.rollouts.prompt_format import PromptFormat
from bapo.types import Prompt, Sample, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RewardTerm = Callable[[Sample, str], float]
"""Of a rollout and its text, what is added to its reward."""


@dataclass(frozen=True)
class GradedSample:
    """A judged response.

    text: without special tokens. correctness: the task's reward, 0 where it could not verify. terms: what is added to it.
    """

    rollout: Sample
    text: str
    correctness: float
    verified: bool = True
    terms: Mapping[str, float] = field(default_factory=dict)

    @property
    def reward(self) -> float:
        return self.correctness + sum(self.terms.values())


def draw(
    engine: Engine,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    prompt_format: PromptFormat,
    prompts: Sequence[tuple[str, Prompt]],
    sampling: SamplingParams,
    samples: int,
    seed_of: Callable[[str, int], int],
    terms: Mapping[str, RewardTerm] | None = None,
) -> list[GradedSample]:
    """`samples` judged responses to each (group uid, prompt), ordered by prompt, then sample index.

    A group of which the engine lost a response is left out whole. Only texts go to the task; training sees the very ids that
    were drawn.
    """
    groups = [new_group(uid, prompt, prompt_format.encode(tokenizer, prompt), samples) for uid, prompt in prompts]
    whole = extend(engine, groups, sampling, lambda uid, index, tokens: seed_of(uid, index))
    return judge(task, tokenizer, [(group.prompt, m.rollout) for group in whole for m in group.members], terms or {})


def judge(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    asked: Sequence[tuple[Prompt, Sample]],
    terms: Mapping[str, RewardTerm],
) -> list[GradedSample]:
    """A sample for each (prompt, rollout), in order; the task sees all of them at once, and is not asked about none."""
    if not asked:
        return []
    texts: list[Any] = [tokenizer.decode(list(r.response_ids), skip_special_tokens=True) for _, r in asked]
    rewards: Sequence[Any] = task.verify([prompt for prompt, _ in asked], texts)
    if not isinstance(rewards, Sequence):
        raise ValueError(f"the task's verify gives {rewards!r}; it takes a batch and must give a list, a reward per response")
    if len(rewards) != len(asked):
        raise ValueError(f"the task gave {len(rewards)} rewards for {len(asked)} responses; it must give as many")
    judged = []
    for (prompt, rollout), text, reward in zip(asked, texts, rewards, strict=True):
        if reward is not None and (not isinstance(reward, Real) or not math.isfinite(reward)):
            raise ValueError(f"the task's reward for prompt {prompt.uid!r} is {reward!r}; it must be a finite number, or None")
        added = {}
        for name, term in terms.items():
            value: Any = term(rollout, text)
            if not isinstance(value, Real) or not math.isfinite(value):
                raise ValueError(f"reward.{name} gives {value!r} for a response to {prompt.uid!r}; it must be a finite number")
            added[name] = float(value)
        judged.append(GradedSample(rollout, text, float(reward or 0.0), reward is not None, added))
    return judged


def check_prompts(
    task: Task,
    split: str,
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    prompt_format: PromptFormat,
    sampling: SamplingParams,
    positions: int | None,
    field: str,
) -> None:
    """ValueError for prompts of a split from which nothing can be drawn: none, two of one uid, one unreadable or too long.

    positions: the most tokens of prompt and response together, None if unknown. field: where the config holds `sampling`.
    """
    where = f"task {type(task).__name__}, split {split!r}"
    if not prompts:
        raise ValueError(f"{where}: it has 0 prompts; it must have at least one")
    uid, count = Counter(prompt.uid for prompt in prompts).most_common(1)[0]
    if count > 1:
        raise ValueError(f"{where}: {count} prompts have the uid {uid!r}; every uid must differ")
    try:
        longest = max(len(prompt_format.encode(tokenizer, prompt)) for prompt in prompts)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if positions is not None and longest + sampling.max_tokens > positions:
        raise ValueError(
            f"{field}.max_tokens is {sampling.max_tokens}; it must be <= {positions - longest}: the model has {positions} "
            f"positions, and the longest prompt takes {longest} ({where})"
        )
