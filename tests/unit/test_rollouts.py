"""From prompts to a pool: groups, order, seeds, files."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest
import torch
from support import FixedPolicy, ScriptedEngine
from support.tasks import Echo

from bapo.advantages import GroupRelativeAdvantage
from bapo.protocols import EngineError
from bapo.rollouts.collector import Collector
from bapo.rollouts.options import RolloutOptions
from bapo.rollouts.pool import load_meta, load_pool
from bapo.rollouts.ranks import Ranks
from bapo.rollouts.schedule import Schedule, deal_minibatches, prompt_slots
from bapo.rollouts.seeds import derive_seed
from bapo.types import Prompt, SamplingParams

VERSION = 5


def collector(engine, tokenizer, task=None, **options) -> Collector:
    fields = {"prompts_per_round": 4, "group_size": 4, "max_attempts": 2} | options
    rollout = RolloutOptions(engine=lambda: engine, sampling=SamplingParams(max_tokens=4), **fields)
    return Collector(engine, task or Echo(), tokenizer, GroupRelativeAdvantage(), rollout, seed=3)


def right_if(condition, tokenizer):
    """Answers with the prompt's own digit where `condition(request)`, else with `x`; both end by EOS."""

    def answer(request) -> list[int]:
        digit = tokenizer.decode(request.prompt_ids)[1]
        return [*tokenizer(digit if condition(request) else "x")["input_ids"], tokenizer.eos_token_id]

    return answer


def collect(engine, tokenizer, round_index=0, before=None, policy=None, **options):
    engine.load_weights([], VERSION)
    made = collector(engine, tokenizer, **options)
    return made.collect(round_index, before or {}, policy or FixedPolicy(VERSION), 4, Ranks())


def test_a_pool_holds_the_generated_ids_with_advantages_joined_by_id(tokenizer):
    answers_backwards = ScriptedEngine(right_if(lambda r: r.sample_index == 0, tokenizer), order=lambda r: r[::-1])
    pool = collect(answers_backwards, tokenizer)
    assert len(pool.batch) == 16
    for row, (uid, index, seed) in enumerate(pool.rows):
        number = uid.split("/")[1].split("@")[0]
        expected = tokenizer(f"a{number}=" + (number if index == 0 else "x"))["input_ids"] + [tokenizer.eos_token_id]
        assert pool.batch.input_ids[row].tolist() == expected
        assert pool.batch.response_mask[row].tolist() == [False] * 3 + [True] * 2
        assert float(pool.batch.rewards[row]) == float(index == 0)
        assert float(pool.batch.advantages[row]) == pytest.approx(1.5 if index == 0 else -0.5)
        assert seed == derive_seed(3, "train", 0, uid, index)
    assert pool.batch.policy_version[pool.batch.response_mask].unique().tolist() == [VERSION]
    assert pool.batch.behaviour_logprobs[pool.batch.response_mask].unique().tolist() == [-2.0]  # the trainer's
    assert pool.batch.sampler_logprobs[pool.batch.response_mask].unique().tolist() == [-1.0]  # the engine's
    assert pool.meta["metrics"]["mismatch/logp_abs_diff_max"] == 1.0
    assert pool.meta["metrics"]["rollout/reward_mean"] == 0.25
    assert pool.meta["metrics"]["rollout/unique_frac"] == 0.5
    assert pool.meta["tokens_total"] == 32


def test_text_is_never_encoded_again(tokenizer):
    pieces = tokenizer("12")["input_ids"]
    engine = ScriptedEngine(lambda r: [*pieces, tokenizer.eos_token_id] if r.sample_index else [pieces[0]])

    class OnlyPrompts:
        eos_token_id, pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        decode, name_or_path = tokenizer.decode, tokenizer.name_or_path

        def __call__(self, text, **kwargs):
            assert text.startswith("a"), "something other than a prompt is tokenised"
            return tokenizer(text, **kwargs)

    class LikesOne(Echo):
        def verify(self, prompts, responses):
            return [float(response == "1") for response in responses]

    pool = collect(engine, OnlyPrompts(), task=LikesOne())
    rows = [pool.batch.input_ids[i][pool.batch.response_mask[i]].tolist() for i in range(4)]
    assert rows == [[pieces[0]]] + [[*pieces, tokenizer.eos_token_id]] * 3


def test_groups_that_teach_nothing_are_dropped_whole_and_counted(tokenizer):
    odd = lambda r: int(r.uid.split("/")[1].split("@")[0]) % 2 == 1 and r.sample_index == 0  # noqa: E731
    pool = collect(ScriptedEngine(right_if(odd, tokenizer)), tokenizer, prompts_per_round=10)
    assert len(pool.batch) == 20
    assert {uid.split("@")[0] for uid, _, _ in pool.rows} == {f"echo/{i}" for i in (1, 3, 5, 7, 9)}
    metrics = pool.meta["metrics"]
    assert metrics["rollout/zero_std_frac"] == 0.5
    assert (metrics["rollout/groups_generated"], metrics["rollout/groups_kept"]) == (10, 5)
    assert metrics["rollout/reward_mean"] == 5 / 40
    assert metrics["rollout/response_length_correct_mean"] == 2


def test_rows_with_equal_text_are_two_groups(tokenizer):
    twins = Echo(2, text=lambda i: "a1=")
    first_row_right = lambda r: r.uid.startswith("echo/1") and r.sample_index < 2  # noqa: E731
    pool = collect(ScriptedEngine(right_if(first_row_right, tokenizer)), tokenizer, task=twins, prompts_per_round=2)
    assert {uid for uid, _, _ in pool.rows} == {"echo/1@0"}


def test_too_few_differing_groups_generate_more_then_fail_with_the_numbers(tokenizer):
    late = lambda r: len(engine.requests) > 16 and r.sample_index == 0  # noqa: E731
    engine = ScriptedEngine(right_if(late, tokenizer))
    pool = collect(engine, tokenizer)
    assert engine.calls == 2
    assert pool.meta["next_prompt"] == 8
    assert pool.meta["tokens_total"] == 64  # the first attempt counts
    engine = ScriptedEngine(right_if(lambda r: False, tokenizer))
    with pytest.raises(RuntimeError, match=r"round 0: after rollout.max_attempts=2 batches only 0 of 32 finished responses"):
        collect(engine, tokenizer)
    assert engine.calls == 2


def test_a_missing_response_drops_its_whole_group_and_is_counted(tokenizer, caplog):
    engine = ScriptedEngine(right_if(lambda r: r.sample_index == 0, tokenizer), order=lambda r: r[:-1])
    pool = collect(engine, tokenizer)
    assert "returned 15 of 16 responses; 1 of 4 groups are incomplete" in caplog.text
    assert (pool.meta["metrics"]["rollout/groups_lost"], pool.meta["metrics"]["rollout/groups_generated"]) == (1, 3)
    missing = engine.requests[-1].uid
    assert len(pool.rows) == 12
    assert missing not in {uid for uid, _, _ in pool.rows}


def test_a_response_nobody_asked_for_is_an_error(tokenizer):
    engine = ScriptedEngine(right_if(lambda r: True, tokenizer), order=lambda r: [*r, replace(r[0], uid="stranger")])
    with pytest.raises(EngineError, match=r"nobody asked for, such as \('stranger', 0"):
        collect(engine, tokenizer)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "task Fixed, split 'train': it has 0 prompts"),
        ([Prompt("twin", "a1=", "1"), Prompt("twin", "a2=", "2")], "split 'train': 2 prompts have the uid 'twin'"),
        ([Prompt("p", "a1=", "1"), Prompt("mute", "", "")], "prompt 'mute' has the text ''; it must hold at least one token"),
        ([Prompt("long", "a12345=", "1")], "rollout.sampling.max_tokens is 4; it must be <= 3: the model has 10 positions, and "
                                           r"the longest prompt takes 7 \(task Fixed, split 'train'\)"),
    ],
)  # fmt: skip
def test_unusable_prompts_are_refused_before_any_request(tokenizer, rows, message):
    class Fixed(Echo):
        def prompts(self, split):
            return rows

    engine = ScriptedEngine(right_if(lambda r: True, tokenizer))
    engine.max_positions = 10
    collector(engine, tokenizer, task=Echo(10, text=lambda i: f"a1234{i % 10}"))  # 6 + 4 tokens just fit
    with pytest.raises(ValueError, match=message):
        collector(engine, tokenizer, task=Fixed())
    assert engine.calls == 0


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "1", [1.0]])
def test_a_reward_that_is_no_finite_number_is_named(tokenizer, reward):
    class Odd(Echo):
        def verify(self, prompts, responses):
            return [reward if prompt.uid == "echo/7" else 1 for prompt in prompts]

    engine = ScriptedEngine(right_if(lambda r: True, tokenizer))
    with pytest.raises(
        ValueError, match=rf"reward for prompt 'echo/7' is {re.escape(repr(reward))}; it must be a finite number"
    ):
        collect(engine, tokenizer, task=Odd(), prompts_per_round=10)


def test_what_could_not_be_verified_counts_as_zero_and_apart(tokenizer):
    class Unsure(Echo):
        def verify(self, prompts, responses):
            return [
                None if prompt.uid == "echo/2" else reward
                for prompt, reward in zip(prompts, Echo.verify(self, prompts, responses), strict=True)
            ]

    engine = ScriptedEngine(right_if(lambda r: r.sample_index == 0, tokenizer))
    pool = collect(engine, tokenizer, task=Unsure(), prompts_per_round=10)
    metrics = pool.meta["metrics"]
    assert metrics["rollout/verify_timeout_frac"] == 0.1
    assert metrics["rollout/reward_mean"] == metrics["rollout/reward/correctness"] == 9 / 40
    assert not any(uid.startswith("echo/2@") for uid, _, _ in pool.rows)

    class Broken(Echo):
        def verify(self, prompts, responses):
            return [None] * len(responses)

    with pytest.raises(RuntimeError, match=r"round 0: none of 40 responses could be verified"):
        collect(engine, tokenizer, task=Broken(), prompts_per_round=10)

    class Short(Echo):
        def verify(self, prompts, responses):
            return [1.0]

    with pytest.raises(ValueError, match="the task gave 1 rewards for 16 responses"):
        collect(engine, tokenizer, task=Short())

    class OneByOne(Echo):
        def verify(self, prompt, response):
            return 1.0

    with pytest.raises(ValueError, match=r"the task's verify gives 1.0; it takes a batch and must give a list"):
        collect(engine, tokenizer, task=OneByOne())


def test_terms_add_to_the_reward_and_are_logged_by_name(tokenizer):
    engine = ScriptedEngine(right_if(lambda r: r.sample_index == 0, tokenizer))
    engine.load_weights([], VERSION)
    made = collector(engine, tokenizer, task=Echo(4, text=lambda i: f"a{i}="))
    made.terms = {
        "length": lambda rollout, text: -0.25 * len(rollout.response_ids),
        "odd": lambda rollout, text: 0.5 * (text == "1"),
    }
    pool = made.collect(0, {}, FixedPolicy(VERSION), 4, Ranks())
    reward_of = {row[:2]: reward for row, reward in zip(pool.rows, pool.batch.rewards.tolist(), strict=True)}
    expected = {(f"echo/{i}@0", k): -0.5 + (k == 0) + 0.5 * (k == 0 and i == 1) for i in range(4) for k in range(4)}
    assert reward_of == expected
    metrics = pool.meta["metrics"]
    assert metrics["rollout/reward/length"] == -0.5
    assert metrics["rollout/reward/odd"] == 0.5 / 16
    assert metrics["rollout/reward/correctness"] == 4 / 16
    assert metrics["rollout/reward_mean"] == 4 / 16 - 0.5 + 0.5 / 16
    assert metrics["rollout/response_length_correct_mean"] == 2  # right is what the task says


def test_a_few_groups_are_kept_as_text_the_dropped_ones_too(tokenizer):
    odd = lambda r: int(r.uid.split("/")[1].split("@")[0]) % 2 == 1 and r.sample_index == 2  # noqa: E731
    pool = collect(ScriptedEngine(right_if(odd, tokenizer)), tokenizer, prompts_per_round=10)
    shown = pool.meta["samples"]
    groups = list(dict.fromkeys(row["uid"] for row in shown))
    assert len(groups) == 8
    for row in shown:
        digit = row["uid"].removeprefix("echo/").removesuffix("@0")
        right = row["sample_index"] == 2 and int(digit) % 2 == 1
        assert row == {
            "uid": f"echo/{digit}@0",
            "sample_index": row["sample_index"],
            "prompt": f"a{digit}=",
            "answer": digit,
            "response": digit if right else "x",
            "reward": float(right),
            "correctness": float(right),
            "length": 2,
            "finish_reason": "stop",
            "policy_version": VERSION,
            "kept": int(digit) % 2 == 1,
        }
    assert {row["uid"]: row["reward"] for row in shown if row["reward"]} == {uid: 1.0 for uid in groups if int(uid[5]) % 2}


def test_seeds_are_distinct_and_repeat_with_the_run(tokenizer):
    def seeds():
        engine = ScriptedEngine(right_if(lambda r: r.sample_index == 0, tokenizer))
        first = collect(engine, tokenizer, group_size=8)
        collect(engine, tokenizer, 1, first.meta, group_size=8)
        return [r.seed for r in engine.requests]

    once = seeds()
    assert len(once) == 64 == len(set(once))
    assert once == seeds()


def test_two_ranks_end_with_the_pool_of_one(tokenizer):
    """Two threads play the ranks; real processes do in test_distributed."""
    answer = right_if(lambda r: r.sample_index == 0, tokenizer)
    alone = collect(ScriptedEngine(answer), tokenizer)
    barrier, slots = Barrier(2), [None, None]

    class Thread2(Ranks):
        def gather(self, item):
            slots[self.rank] = item
            barrier.wait(timeout=10)
            items = list(slots)
            barrier.wait(timeout=10)
            return items

    def play(rank):
        engine = ScriptedEngine(answer)
        engine.load_weights([], VERSION)
        pool = collector(engine, tokenizer).collect(0, {}, FixedPolicy(VERSION), 4, Thread2(rank, 2))
        return pool, engine.requests

    with ThreadPoolExecutor(2) as threads:
        (first, asked), (second, asked_too) = threads.map(play, range(2))
    assert len(asked) == len(asked_too) == 8
    for pool in (first, second):
        assert pool.rows == alone.rows
        for name, value in vars(alone.batch).items():
            assert torch.equal(getattr(pool.batch, name), value), name


def test_a_pool_file_gives_back_the_same_pool(tokenizer, tmp_path):
    pool = collect(ScriptedEngine(right_if(lambda r: r.sample_index == 0, tokenizer)), tokenizer)
    assert load_pool(tmp_path, 0) is None
    pool.save(tmp_path)
    loaded = load_pool(tmp_path, 0)
    assert loaded.rows == pool.rows
    assert loaded.meta.items() >= pool.meta.items()
    for name, value in vars(pool.batch).items():
        assert torch.equal(getattr(loaded.batch, name), value), name
    assert load_meta(tmp_path, 0)["sampling"] == {"temperature": 1.0, "max_tokens": 4, "top_p": 1.0, "top_k": 0}
    (tmp_path / "round_00000.json").unlink()  # a kill before the last rename
    assert load_pool(tmp_path, 0) is None
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(("prompts", "rounds", "per_round"), [(10, 5, 4), (3, 4, 4)])
def test_the_prompt_order_visits_each_prompt_once_per_data_epoch(prompts, rounds, per_round):
    torch.manual_seed(prompts)  # the ambient state must not matter
    whole = prompt_slots(prompts, 0, rounds * per_round, seed=1)
    in_parts = [slot for r in range(rounds) for slot in prompt_slots(prompts, r * per_round, per_round, seed=1)]
    assert whole == in_parts
    epochs = [[index for index, e in whole if e == epoch] for epoch in range(rounds * per_round // prompts)]
    assert all(sorted(e) == list(range(prompts)) for e in epochs)
    assert len(set(whole)) == len(whole)
    if prompts == 10:
        assert epochs[0] != epochs[1]
        assert prompt_slots(prompts, 0, 10, seed=2) != whole[:10]


def test_minibatches_hold_every_row_once_and_differ_between_epochs():
    parts = deal_minibatches(10, 4, seed=0, epoch=0)
    assert [len(p) for p in parts] == [3, 3, 2, 2]
    assert sorted(torch.cat(parts).tolist()) == list(range(10))
    again, next_epoch = deal_minibatches(10, 4, 0, 0), deal_minibatches(10, 4, 0, 1)
    assert torch.equal(torch.cat(parts), torch.cat(again))
    assert not torch.equal(torch.cat(parts), torch.cat(next_epoch))


def test_rounds_follow_from_epochs():
    schedule = Schedule(epochs_per_round=2, minibatches_per_epoch=3)
    assert [schedule.round_of(e) for e in range(6)] == [0, 0, 1, 1, 2, 2]
    assert schedule.updates_per_round == 6
    with pytest.raises(ValueError, match=r"schedule.epochs_per_round is 0; it must be >= 1"):
        Schedule(epochs_per_round=0)


def test_pool_metadata_is_plain_json(tokenizer, tmp_path):
    pool = collect(ScriptedEngine(right_if(lambda r: r.sample_index == 0, tokenizer)), tokenizer)
    pool.save(tmp_path)
    header = json.loads(Path(tmp_path / "round_00000.json").read_text())
    assert header["policy_version"] == VERSION
    assert len(header["rows"]) == 16
