"""Scoring a policy on held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from bapo.rollouts.draw import Sample, draw
from bapo.rollouts.prompt_format import PLAIN, PromptFormat
from bapo.rollouts.ranks import Ranks
from bapo.rollouts.seeds import derive_seed
from bapo.types import EngineError, Prompt, RolloutEngine, SamplingParams, Task


def evaluate(
    engine: RolloutEngine,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    samples: int,
    seed: int,
    ranks: Ranks | None = None,
    prompt_format: PromptFormat = PLAIN,
) -> dict[str, float]:
    """`avg@k` (mean reward of k = `samples` responses to each prompt), mean length in tokens and truncated share.

    Ranks share the prompts; every (prompt, sample) is scored exactly once. The random numbers depend on `seed`, the prompt's
    uid and the sample index alone, so training is not disturbed and each evaluation asks the same question.
    """
    ranks = ranks or Ranks()
    mine = [(p.uid, p) for p in prompts[ranks.rank :: ranks.world]]
    seed_of: Callable[[str, int], int] = lambda uid, index: derive_seed(seed, "eval", uid, index)  # noqa: E731
    drawn = lambda: draw(engine, task, tokenizer, prompt_format, mine, sampling, samples, seed_of) if mine else []  # noqa: E731
    scored: list[Sample] = [sample for part in ranks.gather_from(drawn) for sample in part]
    if len(scored) != len(prompts) * samples:  # a mean over what happened to arrive would be another benchmark
        raise EngineError(f"the engine answered {len(scored)} of {len(prompts) * samples} requests of an evaluation")
    return {
        f"avg@{samples}": sum(s.reward for s in scored) / len(scored),
        "response_length_mean": sum(len(s.rollout.response_ids) for s in scored) / len(scored),
        "truncated_frac": sum(s.rollout.finish_reason == "length" for s in scored) / len(scored),
    }
