"""Generates and scores the responses of an evaluation: every (problem, sample) exactly once, for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from bapo.evaluation.estimators import Estimate, estimates, majority, pass_at_k
from bapo.protocols import Engine, EngineError, Task
from bapo.rollouts.grading import generate_graded
from bapo.rollouts.prompt_format import PLAIN, PromptFormat
from bapo.rollouts.ranks import Ranks
from bapo.rollouts.seeds import derive_seed
from bapo.types import Prompt, Sample, SamplingParams


@dataclass(frozen=True)
class Scored:
    """One graded response.

    reward: the task's, without anything that training adds to it; 0 where it could not be verified. answer: None if it gives
    none. length: in tokens, the end of sequence included. prompt, gold: the question and its right answer.
    """

    uid: str
    sample_index: int
    seed: int
    answer: str | None
    reward: float
    verified: bool
    length: int
    finish_reason: str
    response: str
    prompt: str
    gold: str

    @property
    def correct(self) -> bool:
        return self.reward >= 1  # a part of a point is not right


def check_samples(samples: int, sampling: SamplingParams, field: str) -> None:
    """ValueError for a number of responses to each problem that means nothing. field: its name in the config."""
    if samples < 1:
        raise ValueError(f"{field} is {samples}; it must be >= 1")
    if samples > 1 and sampling.temperature == 0:
        raise ValueError(f"{field} is {samples} at temperature 0: they would all be the same response")


def scored_chunks(
    engine: Engine,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    prompt_format: PromptFormat,
    problems: Sequence[Prompt],
    sampling: SamplingParams,
    samples: int,
    seed: int,
    ranks: Ranks,
    problems_per_batch: int | None = None,
) -> Iterator[list[Scored]]:
    """The scored responses to `problems_per_batch` problems (all of them: None) at a time, by problem, then sample index.

    Ranks share the problems of a batch, and each gets all responses. The random numbers depend on `seed`, the problem's uid and
    the sample index alone: no ambient state is read or moved, and each evaluation generates the same. Raises EngineError if
    a response is missing: a mean over what happened to arrive would be another benchmark.
    """
    step = problems_per_batch or max(1, len(problems))

    def seed_of(uid: str, index: int) -> int:
        return derive_seed(seed, "eval", uid, index)

    for start in range(0, len(problems), step):
        chunk = problems[start : start + step]
        mine = [(p.uid, p) for p in chunk[ranks.rank :: ranks.world]]

        def work(mine: list[tuple[str, Prompt]] = mine) -> list[Scored]:
            graded = generate_graded(engine, task, tokenizer, prompt_format, mine, sampling, samples, seed_of) if mine else []
            prompts = dict(mine)
            return [_scored(task, prompts[sample.uid], sample) for sample in graded]

        found = {(s.uid, s.sample_index): s for part in ranks.gather_from(work) for s in part}
        wanted = [(p.uid, index) for p in chunk for index in range(samples)]
        if missing := sum(key not in found for key in wanted):
            raise EngineError(
                f"an evaluation lacks {missing} of {len(wanted)} responses, all those of problems with a lost one"
            )
        yield [found[key] for key in wanted]


def _scored(task: Task, prompt: Prompt, sample: Sample) -> Scored:
    return Scored(
        uid=sample.uid,
        sample_index=sample.sample_index,
        seed=sample.seed,
        answer=task.answer(sample.text) or None,
        reward=sample.correctness or 0.0,
        verified=sample.verified,
        length=len(sample.response_ids),
        finish_reason=str(sample.finish_reason),
        response=sample.text,
        prompt=prompt.text,
        gold=prompt.answer,
    )


def metrics(scored: Sequence[Scored], samples: int, passes: Sequence[int] | None = None) -> dict[str, Estimate]:
    """`avg@k`, `pass@k`, `maj@k`, mean length, shares of truncated, answerless and unverified ones, for k = `samples`.

    scored: k responses to every problem. passes: the k of further pass@k. ValueError if a problem has more or fewer responses.
    """
    by_problem: dict[str, list[Scored]] = {}
    for one in scored:
        by_problem.setdefault(one.uid, []).append(one)
    for uid, of_problem in by_problem.items():
        if sorted(one.sample_index for one in of_problem) != list(range(samples)):
            raise ValueError(f"problem {uid!r} has {len(of_problem)} responses; it must have {samples}, each once")
    groups = list(by_problem.values())

    def mean(of: Any) -> list[float]:
        return [sum(of(one) for one in group) / samples for group in groups]

    right = [[one.correct for one in group] for group in groups]
    columns = {f"avg@{samples}": mean(lambda one: one.reward)}
    for k in sorted({samples, *(passes or ())}):
        columns[f"pass@{k}"] = [pass_at_k(samples, sum(flags), k) for flags in right]
    answers = [[one.answer for one in group] for group in groups]
    columns[f"maj@{samples}"] = [majority(given, flags) for given, flags in zip(answers, right, strict=True)]
    columns["response_length_mean"] = mean(lambda one: one.length)
    columns["truncated_frac"] = mean(lambda one: one.finish_reason == "length")
    columns["no_answer_frac"] = mean(lambda one: one.answer is None)
    columns["unverified_frac"] = mean(lambda one: not one.verified)
    return estimates(columns)


def evaluate(
    engine: Engine,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    samples: int,
    seed: int,
    ranks: Ranks | None = None,
    prompt_format: PromptFormat = PLAIN,
) -> dict[str, float]:
    """The values of `metrics` and the standard error of avg@k (left out for a single problem), all generated in one batch."""
    ranks = ranks or Ranks()
    chunks = scored_chunks(engine, task, tokenizer, prompt_format, prompts, sampling, samples, seed, ranks)
    found = metrics([one for chunk in chunks for one in chunk], samples)
    average = found[f"avg@{samples}"]
    stderr = {} if average.stderr is None else {f"avg@{samples}_stderr": average.stderr}
    return {name: estimate.value for name, estimate in found.items()} | stderr
