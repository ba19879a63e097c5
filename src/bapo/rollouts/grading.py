"""Generation and grading: requests go to the engine, response texts to the task; each sample comes back with its reward."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import TYPE_CHECKING, Any

from bapo.protocols import Engine, Task
from bapo.rollouts.groups import extend, new_group
from bapo.rollouts.prompt_format import PromptFormat
from bapo.types import Prompt, Sample, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RewardTerm = Callable[[Sample, str], float]
"""The addition to the reward of a sample with this text."""


def generate_graded(
    engine: Engine,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    prompt_format: PromptFormat,
    prompts: Sequence[tuple[str, Prompt]],
    sampling: SamplingParams,
    samples: int,
    seed_of: Callable[[str, int], int],
    terms: Mapping[str, RewardTerm] | None = None,
) -> list[Sample]:
    """`samples` graded responses to each (group uid, prompt), ordered by prompt, then sample index.

    A group with a response that the engine left out is dropped whole. Only texts go to the task; training sees
    the ids that were generated.
    """
    groups = [new_group(uid, prompt, prompt_format.encode(tokenizer, prompt), samples) for uid, prompt in prompts]
    whole = extend(engine, groups, sampling, lambda uid, index, tokens: seed_of(uid, index))
    return grade(task, tokenizer, [(group.prompt, sample) for group in whole for sample in group.samples], terms or {})


def grade(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    samples: Sequence[tuple[Prompt, Sample]],
    terms: Mapping[str, RewardTerm],
) -> list[Sample]:
    """The samples with text, correctness and reward terms, in order; the task sees all of them at once."""
    if not samples:
        return []
    texts: list[Any] = [tokenizer.decode(list(s.response_ids), skip_special_tokens=True) for _, s in samples]
    rewards: Sequence[Any] = task.verify([prompt for prompt, _ in samples], texts)
    if not isinstance(rewards, Sequence):
        raise ValueError(f"the task's verify gives {rewards!r}; it takes a batch and must give a list, a reward per response")
    if len(rewards) != len(samples):
        raise ValueError(f"the task gave {len(rewards)} rewards for {len(samples)} responses; it must give as many")
    graded = []
    for (prompt, sample), text, reward in zip(samples, texts, rewards, strict=True):
        if reward is not None and (not isinstance(reward, Real) or not math.isfinite(reward)):
            raise ValueError(f"the task's reward for prompt {prompt.uid!r} is {reward!r}; it must be a finite number, or None")
        added = {}
        for name, term in terms.items():
            value: Any = term(sample, text)
            if not isinstance(value, Real) or not math.isfinite(value):
                raise ValueError(f"reward.{name} gives {value!r} for a response to {prompt.uid!r}; it must be a finite number")
            added[name] = float(value)
        correctness = None if reward is None else float(reward)
        graded.append(replace(sample, text=text, correctness=correctness, terms=added))
    return graded


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
    """ValueError for prompts of a split that nothing can be generated from: none, two of one uid, one unreadable or too long.

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
