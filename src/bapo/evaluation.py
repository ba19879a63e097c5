"""Scoring a policy on held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from bapo.rollouts.collector import Ranks, Sample, draw
from bapo.rollouts.seeds import derive_seed
from bapo.types import Prompt, RolloutEngine, SamplingParams, Task


def evaluate(
    engine: RolloutEngine,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    samples: int,
    seed: int,
    ranks: Ranks | None = None,
) -> dict[str, float]:
    """`avg@k` (mean reward of k = `samples` responses to each prompt), mean length in tokens and truncated share.

    Ranks share the prompts; every (prompt, sample) is scored exactly once. The random numbers depend on `seed`, the prompt's
    uid and the sample index alone, so training is not disturbed and each evaluation asks the same question.
    """
    ranks = ranks or Ranks()
    mine = [(p.uid, p) for p in prompts[ranks.rank :: ranks.world]]
    seed_of: Callable[[str, int], int] = lambda uid, index: derive_seed(seed, "eval", uid, index)  # noqa: E731
    drawn = draw(engine, task, tokenizer, mine, sampling, samples, seed_of) if mine else []
    scored: list[Sample] = [sample for part in ranks.gather(drawn) for sample in part]
    assert len(scored) == len(prompts) * samples
    return {
        f"avg@{samples}": sum(s.reward for s in scored) / len(scored),
        "response_length_mean": sum(len(s.rollout.response_ids) for s in scored) / len(scored),
        "truncated_frac": sum(s.rollout.finish_reason == "length" for s in scored) / len(scored),
    }
