"""From prompts to a pool: generate groups, grade them, turn rewards into advantages, filter, add the policy's log-probs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bapo.protocols import Engine, EngineError, PolicyHandle, Task
from bapo.rollouts.grading import RewardTerm, check_prompts, grade
from bapo.rollouts.groups import Group, extend, new_group, stats_of
from bapo.rollouts.options import RolloutOptions
from bapo.rollouts.pool import Pool, collate, without_truncated
from bapo.rollouts.pool_metrics import mismatch_metrics, partial_metrics, pool_metrics
from bapo.rollouts.preview import preview
from bapo.rollouts.ranks import Ranks
from bapo.rollouts.round_state import RoundState
from bapo.rollouts.schedule import prompt_slots
from bapo.rollouts.seeds import derive_seed
from bapo.types import Batch, Prompt, Sample, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Advantage = Callable[[Tensor, Sequence[str]], Tensor]


@dataclass
class Collector:
    """Collects pools. `seed` and a pool's place in the prompt order decide everything random in it.

    most_staleness: updates that a token of an unfinished group may be behind its round's policy; None: any number.
    """

    engine: Engine
    task: Task
    tokenizer: PreTrainedTokenizerBase
    advantage: Advantage
    options: RolloutOptions
    seed: int
    terms: Mapping[str, RewardTerm] = field(default_factory=dict)
    most_staleness: int | None = None

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
        """ValueError for prompts of a split of `task` (None: the one trained on) that nothing can be generated from."""
        positions = self.engine.max_positions
        check_prompts(task or self.task, split, prompts, self.tokenizer, self.options.prompt, sampling, positions, field)

    def collect(
        self,
        round_index: int,
        before: dict[str, Any],
        policy: PolicyHandle,
        least_rows: int,
        ranks: Ranks,
        unfinished: Sequence[Group] = (),
    ) -> Pool:
        """The pool of a round: `generate`, then `finish`."""
        state = self.generate(round_index, before, policy.version(), least_rows, ranks, unfinished)
        return self.finish(state, before, policy, ranks)

    def generate(
        self,
        round_index: int,
        before: dict[str, Any],
        version: int,
        least_rows: int,
        ranks: Ranks,
        unfinished: Sequence[Group] = (),
    ) -> RoundState:
        """The graded samples of a round, by the engine, which serves the policy of `version`, and the task.

        before: the meta of the round before it ({} for the first); unfinished: the groups that round left. Every rank generates
        a share of the prompts and returns the same whole, with at least `least_rows` responses to train on; with partial
        rollouts it is half a usual pool, if `max_attempts` allow. Raises EngineError when `max_attempts` batches of
        `prompts_per_round` groups hold too few groups with differing rewards.
        """
        start = time.perf_counter()
        options = self.options
        state = RoundState(round_index, version, before.get("next_prompt", 0))
        state.take_up(unfinished, self.most_staleness)
        if options.fill_pool:
            least_rows = max(least_rows, options.prompts_per_round * options.group_size)
        # Where responses take several rounds, the first would else train on the few groups that are short enough.
        usual = options.prompts_per_round * options.group_size // 2
        for attempts_left in reversed(range(options.max_attempts)):
            self._attempt(state, ranks)
            again = options.partial is not None and attempts_left > 0
            if state.samples and not any(s.verified for s in state.samples) and not again:
                raise EngineError(f"round {round_index}: none of {len(state.samples)} responses could be verified")
            trainable, finished = state.trainable(options.mask_truncated), len(state.samples)
            if trainable >= least_rows and (finished >= usual or not again):
                dropped = [(g.prompt, s) for g in state.dropped for s in g.finished(options.sampling.max_tokens)]
                state.dropped_samples = self._grade(dropped, ranks)
                state.seconds = time.perf_counter() - start
                return state
            log.warning(
                "round %d: %d of %d finished responses can be trained on; generating more", round_index, trainable, finished
            )
        raise EngineError(_empty_round(state, trainable, least_rows, options))

    def finish(self, state: RoundState, before: dict[str, Any], policy: PolicyHandle, ranks: Ranks) -> Pool:
        """The pool of generated samples. policy: with the weights that the engine served."""
        assert policy.version() == state.version
        start = time.perf_counter()
        options, kept = self.options, state.kept
        advantages = self.advantage(state.rewards, state.uids)
        rows = kept.nonzero().flatten()
        trained, unfinished = self._with_policy_stats(
            [state.samples[i] for i in rows.tolist()], state.unfinished, policy, ranks
        )
        batch = collate(trained, int(self.tokenizer.pad_token_id), state.rewards[rows], advantages[rows])
        if options.mask_truncated:
            batch = without_truncated(batch, trained)
        state.check_balance()
        metrics = pool_metrics(state, options.group_size) | mismatch_metrics(batch)
        if options.partial:
            metrics |= partial_metrics(state, trained)
        meta = {
            "round": state.round_index,
            "policy_version": state.version,
            "next_prompt": state.position,
            "unfinished": len(unfinished),
            "tokens_total": before.get("tokens_total", 0) + state.tokens,
            "sampling": asdict(options.sampling),
            "tokenizer": self.tokenizer.name_or_path,
            "metrics": metrics,
            "samples": preview(state.samples, kept, self.prompts),
            "timing": {"time/refill": state.seconds + time.perf_counter() - start},
        }
        return Pool(batch, tuple((s.uid, s.sample_index, s.seed) for s in trained), meta, tuple(unfinished))

    def _attempt(self, state: RoundState, ranks: Ranks) -> None:
        """Begins `prompts_per_round` groups, extends all unfinished ones and grades those that are then done."""
        options = self.options
        slots = prompt_slots(len(self.prompts), state.position, options.prompts_per_round, self.seed)
        groups = [*state.unfinished, *(self._new_group(self.prompts[index], data_epoch) for index, data_epoch in slots)]
        tokens = options.partial.tokens_per_round if options.partial else None

        def seed_of(uid: str, index: int, tokens: int) -> int:
            parts: tuple[int | str, ...] = (self.seed, "train", state.round_index, uid, index)
            return derive_seed(*parts, "token", tokens) if tokens else derive_seed(*parts)

        extended = ranks.share(groups, lambda mine: extend(self.engine, mine, options.sampling, seed_of, tokens))
        state.extend(groups, extended, len(slots), options.sampling.max_tokens, options.partial)
        state.samples += self._grade([(group.prompt, sample) for group in state.done for sample in group.samples], ranks)

    def _grade(self, samples: Sequence[tuple[Prompt, Sample]], ranks: Ranks) -> list[Sample]:
        return ranks.share(samples, lambda mine: grade(self.task, self.tokenizer, mine, self.terms))

    def _new_group(self, prompt: Prompt, data_epoch: int) -> Group:
        """A prompt comes back in every data epoch; as a group it is new each time."""
        prompt_ids = self.options.prompt.encode(self.tokenizer, prompt)
        return new_group(f"{prompt.uid}@{data_epoch}", prompt, prompt_ids, self.options.group_size)

    def _with_policy_stats(
        self, trained: Sequence[Sample], unfinished: Sequence[Group], policy: PolicyHandle, ranks: Ranks
    ) -> tuple[list[Sample], list[Group]]:
        """The samples to train on and the unfinished groups, every token with the trainer's own log-probs: the behaviour's.

        An engine's may come from other kernels. A token gets them once, in the round that generated it.
        """
        samples = [*trained, *(sample for group in unfinished for sample in group.samples)]
        batch = collate(samples, int(self.tokenizer.pad_token_id))
        stats = self._policy_stats(batch, policy, ranks)
        complete = {}
        for row, sample in enumerate(samples):
            known, response = stats_of(sample), slice(len(sample.prompt_ids), len(sample.input_ids))
            new = stats[:, row, response][:, known.shape[1] :]
            complete[sample.key] = replace(sample, policy_stats=torch.cat([known, new], dim=1))
        groups = [replace(group, samples=tuple(complete[s.key] for s in group.samples)) for group in unfinished]
        return [complete[sample.key] for sample in trained], groups

    def _policy_stats(self, batch: Batch, policy: PolicyHandle, ranks: Ranks) -> Tensor:
        """Behaviour log-probs, their entropy and reference log-probs, float32 [3, B, T]; ranks share the rows."""
        stats = torch.zeros(3, *batch.input_ids.shape)
        rows = torch.arange(len(batch))[ranks.rank :: ranks.world]
        mine = stats[:, rows]
        if len(rows):
            share = batch.select(rows)
            own = policy.token_stats(share)
            values = torch.stack([own.logprobs, own.entropy, policy.reference_logprobs(share)])
            mine[:, :, : share.input_ids.shape[1]] = values
        for rank, part in enumerate(ranks.gather(mine)):
            stats[:, rank :: ranks.world] = part
        return stats


def _empty_round(state: RoundState, trainable: int, needed: int, options: RolloutOptions) -> str:
    """The message for a round whose attempts have all brought too little to train on."""
    finished, unfinished, dropped = len(state.samples), len(state.unfinished), len(state.dropped)
    message = (
        f"round {state.round_index}: after rollout.max_attempts={options.max_attempts} batches only {trainable} of {finished} "
        f"finished responses are in groups with differing rewards; {needed} are needed."
    )
    if unfinished or dropped:
        message += (
            f" {unfinished} groups are unfinished, {dropped} were dropped: a larger rollout.partial.tokens_per_round, "
            "max_spans or rollout.max_attempts finishes more of them."
        )
    if finished:
        message += " The task is too hard or too easy for this policy: change it, or raise rollout.max_attempts"
        message += "." if options.fill_pool else " or rollout.prompts_per_round."
    return message
