"""From prompts to a pool: draw groups, judge them, turn rewards into advantages, drop what teaches nothing, score the rest."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bapo.protocols import Engine, EngineError, PolicyHandle, Task
from bapo.rollouts.grading import GradedSample, RewardTerm, check_prompts, judge
from bapo.rollouts.groups import Group, Member, PartialRollouts, extend, new_group
from bapo.rollouts.pool import Pool, collate, without_truncated
from bapo.rollouts.pool_metrics import mismatch_metrics, partial_metrics, pool_metrics
from bapo.rollouts.preview import shown
from bapo.rollouts.prompt_format import PLAIN, PromptFormat
from bapo.rollouts.ranks import Ranks
from bapo.rollouts.round_state import Drawn
from bapo.rollouts.schedule import prompt_slots
from bapo.rollouts.seeds import derive_seed
from bapo.types import Batch, Prompt, Sample, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Advantage = Callable[[Tensor, Sequence[str]], Tensor]


@dataclass(frozen=True)
class RolloutOptions:
    """`prompts_per_round` groups of `group_size` (G) responses, drawn by `engine(model_path=...)`, make a pool.

    If too few groups have differing rewards to fill the mini-batches, further prompts are drawn, `max_attempts` times in all;
    with `fill_pool` (DAPO's dynamic sampling, arXiv 2503.14476), until `prompts_per_round` groups have. mask_truncated: a
    response cut by max_tokens counts in its group, and none of its tokens is trained on. partial: responses may take several
    rounds.
    `prompt`: what a question looks like to the model, in training and evaluation. Training prompts of more than
    `max_prompt_tokens` tokens are left out. sync_tolerance: nats by which engine and trainer may differ after a sync; None:
    what `bapo.engines.sync_check` allows for their precision.
    """

    engine: Callable[..., Engine]
    sampling: SamplingParams
    prompts_per_round: int = 64
    group_size: int = 8
    max_attempts: int = 3
    prompt: PromptFormat = PLAIN
    max_prompt_tokens: int | None = None
    sync_tolerance: float | None = None
    fill_pool: bool = False
    mask_truncated: bool = False
    partial: PartialRollouts | None = None

    def __post_init__(self) -> None:
        if self.sync_tolerance is not None and not 0 < self.sync_tolerance < math.inf:
            raise ValueError(f"rollout.sync_tolerance is {self.sync_tolerance}; it must be > 0 and finite, or null")
        for name in ("prompts_per_round", "group_size", "max_attempts", "max_prompt_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"rollout.{name} is {value}; it must be >= 1")
        if self.sampling.temperature <= 0:
            raise ValueError(f"rollout.sampling.temperature is {self.sampling.temperature}; training needs > 0")


@dataclass
class Collector:
    """Draws pools. `seed` and a pool's place in the prompt order decide everything random in it.

    max_age: updates by which a token that waited unfinished may be older than its round's policy; None: any number.
    """

    engine: Engine
    task: Task
    tokenizer: PreTrainedTokenizerBase
    advantage: Advantage
    options: RolloutOptions
    seed: int
    terms: Mapping[str, RewardTerm] = field(default_factory=dict)
    max_age: int | None = None

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

    def collect(
        self,
        round_index: int,
        before: dict[str, Any],
        policy: PolicyHandle,
        least_rows: int,
        ranks: Ranks,
        carried: Sequence[Group] = (),
    ) -> Pool:
        """The pool of a round: `draw`, then `finish`."""
        drawn = self.draw(round_index, before, policy.version(), least_rows, ranks, carried)
        return self.finish(drawn, before, policy, ranks)

    def draw(
        self,
        round_index: int,
        before: dict[str, Any],
        version: int,
        least_rows: int,
        ranks: Ranks,
        carried: Sequence[Group] = (),
    ) -> Drawn:
        """What a round's pool is made of, by the engine, which serves weights of `version`, and the task.

        before: the meta of the round before it ({} for the first); carried: what that left unfinished. Every rank draws a share
        of the prompts and returns the same whole, of which at least `least_rows` responses teach something; with partial
        rollouts it is half a usual pool, if `max_attempts` allow. Raises EngineError when `max_attempts` draws of
        `prompts_per_round` groups hold too few groups with differing rewards.
        """
        start = time.perf_counter()
        options = self.options
        drawn = Drawn(round_index, version, before.get("next_prompt", 0))
        drawn.take_up(carried, self.max_age)
        if options.fill_pool:
            least_rows = max(least_rows, options.prompts_per_round * options.group_size)
        # Where responses take several rounds, the first would else train on the few groups that are short enough.
        usual = options.prompts_per_round * options.group_size // 2
        for attempts_left in reversed(range(options.max_attempts)):
            self._draw(drawn, ranks)
            go_on = options.partial is not None and attempts_left > 0
            if drawn.samples and not any(s.verified for s in drawn.samples) and not go_on:
                raise EngineError(f"round {round_index}: none of {len(drawn.samples)} responses could be verified")
            teach, all_drawn = drawn.teaching(options.mask_truncated), len(drawn.samples)
            if teach >= least_rows and (all_drawn >= usual or not go_on):
                given_up = [
                    (group.prompt, m.rollout) for group in drawn.dropped for m in group.finished(options.sampling.max_tokens)
                ]
                drawn.dropped_samples = self._judge(given_up, ranks)
                drawn.seconds = time.perf_counter() - start
                return drawn
            log.warning("round %d: %d of %d finished responses teach something; drawing more", round_index, teach, all_drawn)
        raise EngineError(_empty_round(drawn, teach, least_rows, options))

    def finish(self, drawn: Drawn, before: dict[str, Any], policy: PolicyHandle, ranks: Ranks) -> Pool:
        """The pool of what was drawn. policy: as it was when the engine got its weights."""
        assert policy.version() == drawn.version
        start = time.perf_counter()
        options, kept = self.options, drawn.kept
        advantages = self.advantage(drawn.rewards, drawn.uids)
        rows = kept.nonzero().flatten()
        trained = [drawn.members[i] for i in rows.tolist()]
        batch, waiting = self._scored(trained, drawn.waiting, policy, ranks)
        batch = replace(batch, rewards=drawn.rewards[rows], advantages=advantages[rows])
        if options.mask_truncated:
            batch = without_truncated(batch, [m.rollout for m in trained])
        drawn.check_accounts()
        found = pool_metrics(drawn.samples, drawn.rewards, kept, options.group_size, drawn.lost)
        if options.partial:
            found |= partial_metrics(drawn, trained)
        meta = {
            "round": drawn.round_index,
            "policy_version": drawn.version,
            "next_prompt": drawn.position,
            "carried": len(waiting),
            "tokens_total": before.get("tokens_total", 0) + drawn.tokens,
            "sampling": asdict(options.sampling),
            "tokenizer": self.tokenizer.name_or_path,
            "metrics": found | mismatch_metrics(batch),
            "samples": shown(drawn.samples, kept, self.prompts),
            "timing": {"time/refill": drawn.seconds + time.perf_counter() - start},
        }
        names = tuple((m.rollout.uid, m.rollout.sample_index, m.rollout.seed) for m in trained)
        return Pool(batch, names, meta, tuple(waiting))

    def _draw(self, drawn: Drawn, ranks: Ranks) -> None:
        """Begins `prompts_per_round` groups, extends all that are unfinished and judges those that are then done."""
        options = self.options
        slots = prompt_slots(len(self.prompts), drawn.position, options.prompts_per_round, self.seed)
        groups = [*drawn.waiting, *(self._new_group(self.prompts[index], data_epoch) for index, data_epoch in slots)]
        tokens = options.partial.tokens_per_round if options.partial else None

        def seed_of(uid: str, index: int, tokens: int) -> int:
            parts: tuple[int | str, ...] = (self.seed, "train", drawn.round_index, uid, index)
            return derive_seed(*parts, "token", tokens) if tokens else derive_seed(*parts)

        extended = ranks.share(groups, lambda mine: extend(self.engine, mine, options.sampling, seed_of, tokens))
        drawn.extend(groups, extended, len(slots), options.sampling.max_tokens, options.partial)
        done = [(group.prompt, member.rollout) for group in drawn.done for member in group.members]
        drawn.samples += self._judge(done, ranks)

    def _judge(self, answers: Sequence[tuple[Prompt, Sample]], ranks: Ranks) -> list[GradedSample]:
        return ranks.share(answers, lambda mine: judge(self.task, self.tokenizer, mine, self.terms))

    def _new_group(self, prompt: Prompt, data_epoch: int) -> Group:
        """A prompt comes back in every data epoch; as a group it is new each time."""
        prompt_ids = self.options.prompt.encode(self.tokenizer, prompt)
        return new_group(f"{prompt.uid}@{data_epoch}", prompt, prompt_ids, self.options.group_size)

    def _scored(
        self, trained: Sequence[Member], waiting: Sequence[Group], policy: PolicyHandle, ranks: Ranks
    ) -> tuple[Batch, list[Group]]:
        """The rows to train on, and the groups that wait, with the trainer's own log-probs.

        An engine's may come from other kernels. A token is scored once, in the round in which it was drawn.
        """
        members = [*trained, *(member for group in waiting for member in group.members)]
        zeros = torch.zeros(len(members))
        batch = collate([m.rollout for m in members], zeros, zeros, int(self.tokenizer.pad_token_id))
        scored = self._score(batch, policy, ranks)
        known = []
        for row, member in enumerate(members):
            begin = len(member.rollout.prompt_ids)
            scored[:, row, begin : begin + member.scores.shape[1]] = member.scores
            known.append(replace(member, scores=scored[:, row, begin : begin + len(member.rollout.response_ids)].clone()))
        behaviour, entropy, reference = scored
        batch = replace(batch, behaviour_logprobs=behaviour, behaviour_entropy=entropy, reference_logprobs=reference)
        rest = iter(known[len(trained) :])
        again = [replace(group, members=tuple(itertools.islice(rest, len(group.members)))) for group in waiting]
        return batch.select(torch.arange(len(trained))), again

    def _score(self, batch: Batch, policy: PolicyHandle, ranks: Ranks) -> Tensor:
        """Behaviour log-probs, their entropy and reference log-probs, float32 [3, B, T]; ranks share the rows."""
        scored = torch.zeros(3, *batch.input_ids.shape)
        rows = torch.arange(len(batch))[ranks.rank :: ranks.world]
        mine = scored[:, rows]
        if len(rows):
            share = batch.select(rows)
            scores = policy.token_stats(share)
            found = torch.stack([scores.logprobs, scores.entropy, policy.reference_logprobs(share)])
            mine[:, :, : share.input_ids.shape[1]] = found
        for rank, part in enumerate(ranks.gather(mine)):
            scored[:, rank :: ranks.world] = part
        return scored


def _empty_round(drawn: Drawn, teach: int, needed: int, options: RolloutOptions) -> str:
    """What is said when all attempts of a round have brought too little to train on."""
    finished, unfinished, dropped = len(drawn.samples), len(drawn.waiting), len(drawn.dropped)
    said = (
        f"round {drawn.round_index}: after rollout.max_attempts={options.max_attempts} draws only {teach} of {finished} "
        f"finished responses are in groups with differing rewards; {needed} are needed."
    )
    if unfinished or dropped:
        said += (
            f" {unfinished} groups are unfinished, {dropped} were given up: a larger rollout.partial.tokens_per_round, "
            "max_spans or rollout.max_attempts finishes more of them."
        )
    if finished:
        said += " The task is too hard or too easy for this policy: change it, or raise rollout.max_attempts"
        said += "." if options.fill_pool else " or rollout.prompts_per_round."
    return said
