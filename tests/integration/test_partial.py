"""Partial rollouts: spans of one response by several policies, and bookkeeping that must balance."""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import SMALL, FixedPolicy, run_experiment
from support.tasks import Echo

from bapo.advantages import GroupRelativeAdvantage
from bapo.module import BapoModule
from bapo.protocols import Engine, EngineError
from bapo.rollouts.collector import Collector
from bapo.rollouts.groups import Group, PartialRollouts, extend, load_groups, save_groups
from bapo.rollouts.options import RolloutOptions
from bapo.rollouts.pool import load_pool, load_unfinished
from bapo.rollouts.ranks import Ranks
from bapo.rollouts.schedule import prompt_slots
from bapo.types import Sample, SamplingParams, TokenStats

MAX_TOKENS = 12


class SpanEngine(Engine):
    """Response (uid, index) is `length(request)` tokens long, its last one EOS; token t of it is 2 + t % 10."""

    def __init__(self, length, eos: int):
        self.length, self.eos, self.version = length, eos, -1
        self.asked: list[tuple[Sample, int]] = []

    def load_weights(self, weights, version):
        self.version = version

    def generate(self, requests, sampling: SamplingParams):
        self.asked += [(r, sampling.max_tokens) for r in requests]
        rollouts = []
        for r in requests:
            begin = len(r.response_ids)
            total = self.length(r)
            ids = [2 + t % 10 for t in range(begin, min(total, begin + sampling.max_tokens))]
            stops = begin + len(ids) == total
            if stops:
                ids[-1] = self.eos
            logprobs = [-self.version - t / 100 for t in range(begin, begin + len(ids))]
            rollouts.append(r.extended(ids, logprobs, "stop" if stops else "length", self.version))
        return rollouts[::-1]

    def close(self): ...


class VersionPolicy(FixedPolicy):
    """Gives every token minus its version as log-prob."""

    def token_stats(self, batch):
        return TokenStats(
            torch.where(batch.response_mask, -float(self.at), 0.0), torch.where(batch.response_mask, float(self.at), 0.0)
        )


class Length(Echo):
    """The longer of two texts is better; counts how often it judges a response."""

    def __init__(self, n: int = 10):
        super().__init__(n)
        self.judged: Counter[str] = Counter()

    def verify(self, prompts, responses):
        self.judged.update(f"{p.uid} {r}" for p, r in zip(prompts, responses, strict=True))
        return [float(len(r)) for r in responses]


def collector(engine, tokenizer, task, partial: PartialRollouts | None, **options) -> Collector:
    fields = {"prompts_per_round": 2, "group_size": 2, "max_attempts": 4} | options
    rollout = RolloutOptions(engine=lambda: engine, sampling=SamplingParams(max_tokens=MAX_TOKENS), partial=partial, **fields)
    return Collector(engine, task, tokenizer, GroupRelativeAdvantage(), rollout, seed=3)


def test_a_response_of_two_spans_keeps_what_each_policy_said(tokenizer):
    eos = tokenizer.eos_token_id
    engine = SpanEngine(lambda r: 7 if r.sample_index == 1 else 2, eos)
    task = Length()
    made = collector(engine, tokenizer, task, PartialRollouts(tokens_per_round=4), max_attempts=1)
    engine.load_weights([], 3)
    with pytest.raises(RuntimeError, match=r"only 0 of 0 finished responses .* 2 groups are unfinished, 0 were dropped"):
        made.collect(0, {}, VersionPolicy(3), 2, Ranks())

    engine.asked.clear()
    made = collector(engine, tokenizer, task, PartialRollouts(tokens_per_round=4), max_attempts=1, prompts_per_round=3)
    every = {f"echo/{i}@0" for i in range(10)}
    uids = []

    def length(r):
        if r.uid not in uids:
            uids.append(r.uid)
        return {0: 2, 1: 7}[r.sample_index] if uids.index(r.uid) < 2 else {0: 2, 1: 3}[r.sample_index]

    engine.length, engine.origin = length, {}
    first = made.collect(0, {}, VersionPolicy(3), 2, Ranks())
    assert {uid for uid, _, _ in first.rows} == {uids[2]}  # the finished group; of the others not even the finished response
    assert [group.uid for group in first.unfinished] == uids[:2]
    assert set(uids) <= every
    assert {limit for _, limit in engine.asked} == {4}
    assert not any(key.startswith(uids[0].split("@")[0] + " ") for key in task.judged)
    assert first.meta["metrics"]["partial/unfinished_groups"] == 2

    engine.load_weights([], 5)
    engine.asked.clear()
    second = made.collect(1, first.meta, VersionPolicy(5), 2, Ranks(), first.unfinished)
    resumed = [r for r, _ in engine.asked if r.uid == uids[0]]
    assert len(resumed) == 1  # its other response is finished
    (row,) = [i for i, (uid, index, _) in enumerate(second.rows) if (uid, index) == (uids[0], 1)]
    batch, mask = second.batch, second.batch.response_mask[row]
    prompt = batch.input_ids[row][batch.attention_mask[row] & ~mask].tolist()
    assert list(resumed[0].input_ids) == [*prompt, 2, 3, 4, 5]
    assert batch.input_ids[row][mask].tolist() == [2, 3, 4, 5, 6, 7, eos]
    assert batch.policy_version[row][mask].tolist() == [3, 3, 3, 3, 5, 5, 5]
    logprobs = torch.tensor([-3 - t / 100 for t in range(4)] + [-5 - t / 100 for t in range(4, 7)])
    assert torch.equal(batch.sampler_logprobs[row][mask], logprobs)
    assert batch.behaviour_logprobs[row][mask].tolist() == [-3.0] * 4 + [-5.0] * 3
    assert batch.behaviour_entropy[row][mask].tolist() == [3.0] * 4 + [5.0] * 3
    assert max(task.judged.values()) == 1
    assert len({s for _, _, s in second.rows}) == len(second.rows)
    assert second.meta["metrics"]["partial/spans_max"] == 2


def test_the_last_span_asks_for_what_is_left_only(tokenizer):
    engine = SpanEngine(lambda r: 100 if r.sample_index else 1, tokenizer.eos_token_id)
    made = collector(engine, tokenizer, Length(), PartialRollouts(tokens_per_round=5))
    engine.load_weights([], 0)
    pool = made.collect(0, {}, VersionPolicy(0), 4, Ranks())
    by_length = Counter((len(r.response_ids), limit) for r, limit in engine.asked if r.sample_index == 1)
    assert by_length == {(0, 5): 6, (5, 5): 4, (10, 2): 2}  # two groups are begun with every attempt
    lengths = pool.batch.response_mask.sum(dim=1)
    assert sorted(lengths.tolist()) == [1, 1, 12, 12]
    assert len({r.seed for r, _ in engine.asked}) == len(engine.asked)


def test_tokens_of_one_policy_are_one_span_however_many_requests_they_take(tokenizer):
    engine = SpanEngine(lambda r: 11 if r.sample_index else 10, tokenizer.eos_token_id)
    engine.load_weights([], 0)
    pool = collector(engine, tokenizer, Length(), PartialRollouts(4, max_spans=2)).collect(0, {}, VersionPolicy(0), 4, Ranks())
    assert len(engine.asked) == 4 + 8 + 12  # two more groups of two with every attempt
    assert pool.meta["metrics"]["partial/spans_max"] == 1
    assert pool.meta["metrics"]["partial/dropped_groups"] == 0
    assert len(pool.rows) == 4


def test_every_round_begins_as_many_groups_and_none_trains_on_the_shortest_alone(tokenizer):
    """Nine of ten responses take three spans: the first round generates until it has half of a usual pool."""
    engine = SpanEngine(
        lambda r: 2 + r.sample_index if r.uid.startswith("echo/3@") else 9 + r.sample_index, tokenizer.eos_token_id
    )
    made = collector(engine, tokenizer, Length(), PartialRollouts(4), prompts_per_round=10, max_attempts=5)
    before, unfinished, counts = {}, (), []
    for round_index in range(5):
        engine.load_weights([], 4 * round_index)
        pool = made.collect(round_index, before, VersionPolicy(4 * round_index), 2, Ranks(), unfinished)
        before, unfinished = pool.meta, pool.unfinished
        counts.append((before["next_prompt"], len(pool.rows) // 2, len(unfinished)))
    # (begun so far, trained on, unfinished): three attempts for the first pool; then as many are trained on as are begun.
    assert counts == [(30, 12, 18), (40, 10, 18), (50, 10, 18), (60, 10, 18), (70, 10, 18)]


def test_a_group_that_is_unfinished_after_too_many_policies_is_dropped(tokenizer):
    """Round 0 has a group of short responses and one of long ones; two policies give a long one eight tokens."""
    short: list[str] = []

    def length(r):
        short[:] = short or [r.uid]
        return (2 if r.sample_index else 3) if r.uid == short[0] or r.uid not in first_uids else 11

    first_uids: list[str] = []
    engine = SpanEngine(length, tokenizer.eos_token_id)
    made = collector(engine, tokenizer, Length(), PartialRollouts(4, max_spans=2))
    first_uids += [made._new_group(made.prompts[i], e).uid for i, e in prompt_slots(len(made.prompts), 0, 2, made.seed)]
    engine.load_weights([], 0)
    first = made.collect(0, {}, VersionPolicy(0), 2, Ranks())
    assert (len(first.rows), len(first.unfinished), first.meta["metrics"]["partial/dropped_groups"]) == (2, 1, 0)
    engine.load_weights([], 4)
    second = made.collect(1, first.meta, VersionPolicy(4), 2, Ranks(), first.unfinished)
    assert second.meta["metrics"]["partial/dropped_groups"] == 1
    assert second.meta["metrics"]["partial/dropped_length_mean"] == 8
    assert second.meta["metrics"]["partial/trained_length_mean"] == 2.5  # dropping favours short answers
    assert "partial/dropped_reward_mean" not in second.meta["metrics"]  # none of them was finished
    assert second.unfinished == ()


@pytest.mark.parametrize(("version", "limit", "dropped"), [(7, 2, [4]), (7, 0, [4, 5, 6]), (7, None, [])])
def test_groups_that_are_too_stale_are_dropped_whole(tokenizer, version, limit, dropped):
    engine = SpanEngine(lambda r: 6 if r.sample_index else 2, tokenizer.eos_token_id)
    made = collector(engine, tokenizer, Length(), PartialRollouts(tokens_per_round=4), prompts_per_round=1)
    made.most_staleness = limit
    unfinished: list[Group] = []
    for at, old in enumerate((4, 5, 6, 7)):
        engine.load_weights([], old)
        begun = begun_group(made, at, engine)
        unfinished.append(begun)
    engine.load_weights([], version)
    made.options = replace(made.options, prompts_per_round=4)
    pool = made.collect(1, {"next_prompt": 4}, VersionPolicy(version), 2, Ranks(), unfinished)
    oldest = {
        uid: int(pool.batch.policy_version[i][pool.batch.response_mask[i]].min())
        for i, (uid, k, _) in enumerate(pool.rows)
        if k
    }
    kept = sorted(oldest[group.uid] for group in unfinished if group.uid in oldest)
    assert kept == [v for v in (4, 5, 6, 7) if v not in dropped]
    assert pool.meta["metrics"]["partial/dropped_groups"] == len(dropped)
    assert pool.meta["metrics"]["partial/dropped_length_mean"] == (3 if dropped else 0)  # (2 + 4) / 2
    # Of a dropped group one response was finished: two tokens, a text and EOS, for which `Length` gives its length.
    text = tokenizer.decode([2], skip_special_tokens=True)
    assert pool.meta["metrics"].get("partial/dropped_reward_mean") == (len(text) if dropped else None)


def begun_group(made: Collector, position: int, engine) -> Group:
    new = made._new_group(made.prompts[position], 7)
    (group,) = extend(engine, [new], made.options.sampling, lambda uid, index, tokens: 1000 * position + index, 4)
    return group


def test_groups_come_back_from_their_file_as_they_were(tokenizer, tmp_path):
    engine = SpanEngine(lambda r: 9 if r.sample_index else 2, tokenizer.eos_token_id)
    engine.load_weights([], 3)
    made = collector(engine, tokenizer, Length(), PartialRollouts(tokens_per_round=4))
    groups = [begun_group(made, position, engine) for position in range(3)]
    groups = [
        replace(g, samples=tuple(replace(s, policy_stats=torch.rand(3, len(s.response_ids))) for s in g.samples))
        for g in groups
    ]
    save_groups(groups, tmp_path / "unfinished_00001")
    back = load_groups(tmp_path / "unfinished_00001")
    assert [g.samples for g in back] == [g.samples for g in groups]
    assert [(g.uid, g.prompt, [s.spans for s in g.samples]) for g in back] == [(g.uid, g.prompt, [1, 1]) for g in groups]
    for one, other in zip(back, groups, strict=True):
        assert all(torch.equal(a.policy_stats, b.policy_stats) for a, b in zip(one.samples, other.samples, strict=True))
    assert load_groups(tmp_path / "unfinished_00002") == []
    (tmp_path / "unfinished_00001.json").write_text("[{")
    with pytest.raises(ValueError, match=r"unfinished_00001.* is damaged"):
        load_groups(tmp_path / "unfinished_00001")


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    tokens=st.integers(1, 6),
    max_spans=st.none() | st.integers(2, 4),
    most_staleness=st.none() | st.integers(0, 8),
    loses=st.booleans(),
)
def test_every_group_begun_is_trained_filtered_dropped_incomplete_or_unfinished(
    tokenizer, seed, tokens, max_spans, most_staleness, loses
):
    """`RoundState.check_balance` asserts it in every round; here over random lengths and losses, counted again."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 16, (10, 3), generator=rng).tolist()
    engine = SpanEngine(lambda r: lengths[int(r.uid.split("/")[1].split("@")[0])][r.sample_index], tokenizer.eos_token_id)
    honest = engine.generate
    if loses:
        engine.generate = lambda requests, sampling: honest(requests, sampling)[int(torch.randint(0, 2, (), generator=rng)) :]
    made = collector(
        engine,
        tokenizer,
        Length(),
        PartialRollouts(tokens, max_spans),
        prompts_per_round=5,
        group_size=3,
        max_attempts=20,
    )
    made.most_staleness = most_staleness
    before, unfinished, seen = {}, (), Counter()
    fate: Counter[str] = Counter()
    for round_index in range(4):
        engine.load_weights([], 4 * round_index)
        try:
            pool = made.collect(round_index, before, VersionPolicy(4 * round_index), 3, Ranks(), unfinished)
        except RuntimeError:  # a round is never empty in silence
            assert max_spans is not None or most_staleness is not None or loses
            return
        metrics = pool.meta["metrics"]
        trained = {uid for uid, _, _ in pool.rows}
        seen.update(trained)
        assert all(n == 3 for n in Counter(uid for uid, _, _ in pool.rows).values())  # never split
        assert not trained & {group.uid for group in pool.unfinished}
        fate["trained"] += len(trained)
        fate["filtered"] += int(metrics["rollout/groups_generated"]) - len(trained)
        fate["dropped"] += int(metrics["partial/dropped_groups"])
        fate["incomplete"] += int(metrics["rollout/groups_lost"])
        before, unfinished = pool.meta, pool.unfinished
    assert max(seen.values()) == 1
    assert sum(fate.values()) + len(unfinished) == before["next_prompt"]


def test_truncated_responses_can_count_in_their_group_without_being_trained_on(tokenizer):
    engine = SpanEngine(lambda r: 50 if r.sample_index else 2, tokenizer.eos_token_id)
    engine.load_weights([], 0)
    made = collector(engine, tokenizer, Length(), None, mask_truncated=True)
    pool = made.collect(0, {}, VersionPolicy(0), 2, Ranks())
    cut = torch.tensor([index == 1 for _, index, _ in pool.rows])
    assert pool.batch.response_mask.sum(dim=1)[cut].tolist() == [0, 0]
    assert pool.batch.response_mask.sum(dim=1)[~cut].tolist() == [2, 2]
    assert (pool.batch.advantages[~cut] < 0).all()  # because of the longer one
    assert (pool.batch.policy_version[cut] == -1).all()
    assert (pool.batch.behaviour_logprobs[cut] == 0).all()


def test_a_pool_of_truncated_responses_alone_teaches_nothing(tokenizer):
    engine = SpanEngine(lambda r: 50 + r.sample_index, tokenizer.eos_token_id)
    engine.load_weights([], 0)
    task = Length()
    task.verify = lambda prompts, responses: [float(index % 2) for index, _ in enumerate(responses)]
    with pytest.raises(EngineError, match=r"only 0 of 16 finished responses are in groups .* The task is too hard or too easy"):
        collector(engine, tokenizer, task, None, mask_truncated=True).collect(0, {}, VersionPolicy(0), 2, Ranks())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda answers: [*answers, answers[0]], "returned 5 responses to 4 different requests"),
        (lambda answers: [replace(r, versions=(99,) * len(r.versions)) for r in answers], "newer weights than the version 3"),
        (lambda answers: [grown(r, 20) for r in answers], "more than the 12 tokens that were asked for"),
    ],
)
def test_an_engine_whose_answers_cannot_be_right_is_not_believed(spoil, message, tokenizer):
    engine = SpanEngine(lambda r: 3 + r.sample_index, tokenizer.eos_token_id)
    engine.load_weights([], 3)
    honest = engine.generate
    engine.generate = lambda requests, sampling: spoil(honest(requests, sampling))
    with pytest.raises(EngineError, match=message):
        collector(engine, tokenizer, Length(), None).collect(0, {}, VersionPolicy(3), 2, Ranks())


def grown(rollout: Sample, tokens: int) -> Sample:
    return replace(rollout, response_ids=(2,) * tokens, sampler_logprobs=(-1.0,) * tokens, versions=(0,) * tokens)


def test_a_file_of_unfinished_groups_that_is_gone_is_noticed(small, tmp_path):
    run_experiment(tmp_path, *small)
    count = len(load_unfinished(tmp_path / "rounds", 2))
    assert count > 0
    (tmp_path / "rounds" / "unfinished_00002.json").unlink()
    with pytest.raises(ValueError, match=r"unfinished_00002.json is missing; round 2 was filed with it"):
        load_unfinished(tmp_path / "rounds", 2)


def test_a_pool_is_filled_with_groups_that_teach(tokenizer):
    engine = SpanEngine(
        lambda r: 3 + (r.sample_index if int(r.uid.split("/")[1].split("@")[0]) % 2 else 0), tokenizer.eos_token_id
    )
    engine.load_weights([], 0)
    pool = collector(engine, tokenizer, Length(), None).collect(0, {}, VersionPolicy(0), 2, Ranks())
    filled = collector(engine, tokenizer, Length(), None, fill_pool=True, max_attempts=9).collect(
        0, {}, VersionPolicy(0), 2, Ranks()
    )
    assert len({uid for uid, _, _ in pool.rows}) < 2 <= len({uid for uid, _, _ in filled.rows})


@pytest.fixture
def small(cache_dir, monkeypatch) -> tuple[str, ...]:
    monkeypatch.setattr("bapo.analysis.report.write_report", lambda folder: folder / "report.html")  # its pictures take longest
    partial = ("+rollout/partial=default", "rollout.partial.tokens_per_round=3", "rollout.max_attempts=6")
    return (*SMALL, *partial, f"policy.warm_start.cache_dir={cache_dir}", "callbacks.evaluate=null", "trainer.max_rounds=4")


def test_a_run_with_partial_rollouts_trains_and_goes_on_in_the_middle_of_a_response(small, tmp_path, monkeypatch):
    run_experiment(tmp_path / "whole", *small)
    pools = [load_pool(tmp_path / "whole" / "rounds", n) for n in range(4)]
    spans = [
        len(set(row[mask].tolist()))
        for p in pools
        for row, mask in zip(p.batch.policy_version, p.batch.response_mask, strict=True)
    ]
    assert max(spans) >= 2
    for round_index, pool in enumerate(pools):
        versions = pool.batch.policy_version[pool.batch.response_mask]
        assert set(versions.tolist()) <= {4 * n for n in range(round_index + 1)}
        assert pool.batch.response_mask.any(dim=1).all()
    with (tmp_path / "whole" / "metrics.csv").open() as file:
        staleness = [float(row["staleness/max"]) for row in csv.DictReader(file)]
    assert max(staleness) > 3  # beyond the updates of one round

    log_row = BapoModule.log_row

    def stop_at_six(self, row):
        log_row(self, row)
        if self.global_step == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(BapoModule, "log_row", stop_at_six)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(tmp_path / "cut", *small, "callbacks.checkpoint.every_n_updates=2")
    monkeypatch.setattr(BapoModule, "log_row", log_row)
    assert load_groups(tmp_path / "cut" / "rounds" / "unfinished_00001")
    run_experiment(tmp_path / "cut", f"resume={tmp_path / 'cut'}")
    assert (tmp_path / "cut" / "metrics.csv").read_text() == (tmp_path / "whole" / "metrics.csv").read_text()


def test_a_budget_that_no_response_exceeds_is_refused(small, tmp_path):
    with pytest.raises(
        ValueError, match=r"rollout.partial.tokens_per_round is 10; it must be < rollout.sampling.max_tokens, 10"
    ):
        run_experiment(tmp_path, *small, "rollout.partial.tokens_per_round=10")
    for bad, message in (
        ("tokens_per_round=0", "tokens_per_round is 0; it must be >= 1"),
        ("max_spans=1", "max_spans is 1; it must be >= 2"),
    ):
        with pytest.raises(ValueError, match=message):
            run_experiment(tmp_path, *small, f"rollout.partial.{bad}")


def test_versions_of_a_rollout_are_per_token_and_the_oldest_decides():
    first = Sample("u", 0, 9, (1,)).extended((5, 6), (-1.0, -2.0), "length", 3)
    whole = first.extended((7,), (-3.0,), "stop", 5)
    assert whole == Sample("u", 0, 9, (1,), (5, 6, 7), (-1.0, -2.0, -3.0), (3, 3, 5), "stop")
    assert (first.policy_version, whole.policy_version, whole.spans, whole.input_ids) == (3, 3, 2, (1, 5, 6, 7))
    with pytest.raises(AssertionError):
        replace(first, sampler_logprobs=(-1.0,))
