"""Held-out scores: estimators by hand, every (problem, sample) once, its own seeds, training undisturbed."""

import csv
import json
import math
from itertools import combinations, product
from types import SimpleNamespace

import pytest
import torch
from support import SMALL, ScriptedEngine, run_experiment
from support.scored import scored

from bapo.analysis.compare import main as compare
from bapo.engines.hf import HFEngine
from bapo.evaluation import Scored, evaluate, metrics, scored_chunks
from bapo.evaluation.callback import Evaluate
from bapo.evaluation.estimators import estimates, majority, pass_at_k, standard_error
from bapo.metrics import lookup
from bapo.protocols import EngineError, Task
from bapo.rollouts.grading import check_prompts
from bapo.rollouts.prompt_format import PLAIN
from bapo.rollouts.ranks import Ranks
from bapo.rollouts.seeds import derive_seed
from bapo.tasks.digit_ops import DigitOps
from bapo.types import Prompt, SamplingParams


class Counting(Task):
    """`aK=` is answered right by K."""

    def __init__(self, n: int):
        self.rows = [Prompt(f"test/{i}", f"a{i % 10}=", str(i % 10)) for i in range(n)]

    def prompts(self, split):
        return self.rows

    def verify(self, prompts, responses):
        return [float(response == prompt.answer) for prompt, response in zip(prompts, responses, strict=True)]


def solves_first(tokenizer):
    """Problem i is solved by its first i samples."""

    def answer(request):
        digit = tokenizer.decode(list(request.prompt_ids))[1]
        text = digit if request.sample_index < int(digit) else "xx"
        return [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]

    return answer


def scripted(tokenizer, **options) -> ScriptedEngine:
    engine = ScriptedEngine(solves_first(tokenizer), **options)
    engine.load_weights([], 3)
    return engine


# Estimators.


@pytest.mark.parametrize(
    ("n", "correct", "k", "expected"),
    [(4, 1, 4, 1.0), (4, 1, 1, 0.25), (4, 1, 2, 0.5), (4, 0, 4, 0.0), (4, 4, 1, 1.0), (5, 2, 2, 0.7), (10, 3, 5, 11 / 12)],
)
def test_pass_at_k(n: int, correct: int, k: int, expected: float) -> None:
    assert pass_at_k(n, correct, k) == pytest.approx(expected, abs=1e-15)
    draws = list(combinations(range(n), k))
    assert pass_at_k(n, correct, k) == pytest.approx(sum(min(draw) < correct for draw in draws) / len(draws))


def test_pass_at_k_needs_no_large_binomial() -> None:
    exact = 1 - math.comb(99_000, 5_000) / math.comb(100_000, 5_000)
    assert pass_at_k(100_000, 1_000, 5_000) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(
    ("n", "correct", "k", "message"),
    [
        (4, 0, 5, r"k is 5; with 4 responses it must be in \[1, 4\]"),
        (4, 4, 5, "k is 5"),  # never 1.0 for want of samples
        (4, 1, 0, "k is 0"),
        (4, 5, 1, "correct is 5"),
    ],
)
def test_what_pass_at_k_cannot_know_is_refused(n: int, correct: int, k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pass_at_k(n, correct, k)


@pytest.mark.parametrize(
    ("answers", "right", "expected"),
    [
        ("7773", "1110", 1.0),
        ("7333", "1000", 0.0),
        ("7733", "1100", 0.5),  # a tie
        ("7351", "1000", 0.25),  # of four
        ("7-33", "1000", 0.0),
        ("7---", "1000", 1.0),  # who gives no answer has no vote
        ("----", "0000", 0.0),
        ("7733", "1000", 0.25),  # one of the two 7s is right, and 7 is one of two winners
    ],
)
def test_the_majority_votes_and_ties_count_in_part(answers: str, right: str, expected: float) -> None:
    assert majority([None if a == "-" else a for a in answers], [r == "1" for r in right]) == expected


def test_standard_error_and_interval_are_over_problems() -> None:
    values = [0.0, 0.5, 1.0, 1.0]
    assert standard_error(values) == pytest.approx(torch.tensor(values).std().item() / 2)
    found = estimates({"a": values, "length": [3.0, 3.0, 3.0, 3.0]})
    assert found["a"].value == 0.625
    # Every draw of four, enumerated.
    every = sorted(sum(d) / 4 for d in product(values, repeat=4))
    assert (found["a"].low, found["a"].high) == (every[round(0.025 * 255)], every[round(0.975 * 255)])
    assert vars(found["length"]) == {"value": 3.0, "stderr": 0.0, "low": 3.0, "high": 3.0}


def test_one_problem_has_no_standard_error_and_none_is_refused() -> None:
    assert standard_error([1.0]) is None
    (one,) = estimates({"a": [0.25]}).values()
    assert vars(one) == {"value": 0.25, "stderr": None, "low": 0.25, "high": 0.25}
    with pytest.raises(ValueError, match="there are 0 problems"):
        estimates({"a": []})


def test_the_interval_leaves_ambient_randomness_alone_and_repeats() -> None:
    values = {"a": [math.sin(i) for i in range(50)]}
    state = torch.get_rng_state()
    first = estimates(values)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert estimates(values) == first
    assert estimates(values, seed=1) != first


# From responses to metrics.


def test_metrics_by_hand() -> None:
    rows = [
        scored("a", 0, "7", 1.0),
        scored("a", 1, "3", 0.0, 6, finish_reason="length"),
        scored("b", 0, None, 0.0, verified=False),
        scored("b", 1, None, 0.0),
    ]
    found = metrics(rows, 2, [1])
    values = {"avg@2": 0.25, "pass@1": 0.25, "pass@2": 0.5, "maj@2": 0.25, "response_length_mean": 3.0}
    values |= {"truncated_frac": 0.25, "no_answer_frac": 0.5, "unverified_frac": 0.25}
    assert {name: one.value for name, one in found.items()} == values
    assert found["avg@2"].stderr == 0.25  # of 0.5 and 0
    assert metrics([scored("a", 0, "7", 0.5)], 1)["pass@1"].value == 0.0  # a part of a point is not right


def test_missing_and_repeated_responses_are_never_averaged_over() -> None:
    rows = [scored("a", 0, "7", 1.0), scored("a", 1, "7", 1.0), scored("b", 0, "7", 1.0)]
    with pytest.raises(ValueError, match="problem 'b' has 1 responses; it must have 2, each once"):
        metrics(rows, 2)
    with pytest.raises(ValueError, match="problem 'b' has 2 responses; it must have 2, each once"):
        metrics([*rows, scored("b", 0, "7", 1.0)], 2)


def test_every_problem_and_sample_is_scored_once_whatever_the_ranks(tokenizer) -> None:
    def on(rank: int, world: int) -> list[Scored]:
        engine, task = scripted(tokenizer), Counting(30)

        class Alone(Ranks):
            def gather_from(self, work):
                return [work()]

        share = task.rows[rank::world]
        chunks = scored_chunks(engine, task, tokenizer, PLAIN, share, SamplingParams(max_tokens=4), 2, 7, Alone())
        return [one for chunk in chunks for one in chunk]

    alone = on(0, 1)
    shares = [on(rank, 4) for rank in range(4)]
    assert [len(share) for share in shares] == [16, 16, 14, 14]
    together = sorted((one for share in shares for one in share), key=lambda one: (int(one.uid[5:]), one.sample_index))
    assert together == alone
    assert len({(one.uid, one.sample_index) for one in together}) == 60
    assert metrics(together, 2) == metrics(alone, 2)


def test_ranks_share_a_batch_and_one_that_has_none_generates_nothing(tokenizer) -> None:
    asked = []

    class Second(Ranks):
        """Rank 1 of 4, told what the others would have drawn."""

        def gather_from(self, work):
            parts = [work()]
            for rank in (0, 2, 3):
                rest = [p for start in range(0, 30, 9) for p in task.rows[start : start + 9][rank::4]]
                parts.append([one for one in everything if one.uid in {p.uid for p in rest}])
            asked.append(len(parts[0]))
            return parts

    engine, task = scripted(tokenizer), Counting(30)
    arguments = (task, tokenizer, PLAIN, task.rows, SamplingParams(max_tokens=4), 1, 7)
    everything = [one for chunk in scored_chunks(scripted(tokenizer), *arguments, Ranks()) for one in chunk]
    chunks = list(scored_chunks(engine, *arguments, Second(1, 4), problems_per_batch=9))
    assert [len(chunk) for chunk in chunks] == [9, 9, 9, 3]
    assert asked == [2, 2, 2, 1]
    assert [one for chunk in chunks for one in chunk] == everything


def test_avg_at_k_is_the_mean_over_every_problem_and_sample(tokenizer) -> None:
    engine, task = scripted(tokenizer, order=lambda r: r[::-1]), Counting(4)
    found = evaluate(engine, task, tokenizer, task.prompts("test"), SamplingParams(max_tokens=4), samples=4, seed=1)
    # Right are 0, 1, 2, 3 of 4; the answers of problem 2 tie.
    expected = {"avg@4": 6 / 16, "pass@4": 3 / 4, "maj@4": 1.5 / 4, "response_length_mean": (6 * 2 + 10 * 3) / 16}
    expected |= {"truncated_frac": 0.0, "no_answer_frac": 0.0, "unverified_frac": 0.0, "avg@4_stderr": (5 / 3) ** 0.5 / 4 / 2}
    assert found == pytest.approx(expected)
    assert len({(r.uid, r.sample_index) for r in engine.requests}) == 16
    assert {r.seed for r in engine.requests} == {derive_seed(1, "eval", f"test/{i}", s) for i in range(4) for s in range(4)}
    for name in found:
        assert lookup(f"eval/a-set_1/{name}")


def test_the_tasks_own_answer_votes_and_what_could_not_be_verified_counts_apart(tokenizer) -> None:
    class Spelled(Counting):
        def verify(self, prompts, responses):
            return [None if r == "xx" else 1.0 for r in responses]

        def answer(self, response):
            return {"xx": None}.get(response, response)

    task = Spelled(3)
    found = evaluate(scripted(tokenizer), task, tokenizer, task.rows, SamplingParams(max_tokens=4), samples=3, seed=1)
    assert found["maj@3"] == pytest.approx(2 / 3)  # a single vote wins where the others give no answer
    assert found["unverified_frac"] == found["no_answer_frac"] == pytest.approx(6 / 9)


def test_lost_responses_are_refused(tokenizer) -> None:
    task = Counting(4)
    engine = scripted(tokenizer, order=lambda rollouts: rollouts[:-1])
    with pytest.raises(EngineError, match="an evaluation lacks 2 of 8 responses"):
        evaluate(engine, task, tokenizer, task.rows, SamplingParams(max_tokens=4), samples=2, seed=1)


def test_the_same_question_is_asked_every_time_and_ambient_randomness_is_left_alone(tokenizer, model_folder) -> None:
    engine = HFEngine(model_folder)
    engine.load_weights(engine.model.named_parameters(), 0)
    task, sampling = Counting(4), SamplingParams(max_tokens=4)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = evaluate(engine, task, tokenizer, task.prompts("test"), sampling, samples=2, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert engine.version == 0
    torch.manual_seed(6)
    assert evaluate(engine, task, tokenizer, task.prompts("test"), sampling, samples=2, seed=1) == first


# The callback.


def test_several_greedy_samples_are_refused() -> None:
    with pytest.raises(ValueError, match=r"callbacks.evaluate.samples is 4 at temperature 0"):
        Evaluate(SamplingParams(temperature=0.0, max_tokens=4), samples=4)
    with pytest.raises(ValueError, match=r"callbacks.evaluate.samples is 0; it must be >= 1"):
        Evaluate(SamplingParams(max_tokens=4), samples=0)
    with pytest.raises(ValueError, match=r"callbacks.evaluate.every_n_rounds is 0; it must be >= 1"):
        Evaluate(SamplingParams(max_tokens=4), every_n_rounds=0)
    with pytest.raises(ValueError, match=r"callbacks.evaluate.benchmarks has 'a/b'; a name holds letters"):
        Evaluate(SamplingParams(max_tokens=4), benchmarks={"a/b": Counting(1)})
    with pytest.raises(ValueError, match=r"callbacks.evaluate.benchmarks.a is {'test_size': 3}; it must be a task"):
        Evaluate(SamplingParams(max_tokens=4), benchmarks={"a": {"test_size": 3}})


def test_what_cannot_be_evaluated_is_refused_before_the_first_pool_is_collected(cache_dir, tmp_path, monkeypatch) -> None:
    small = (*SMALL, f"policy.warm_start.cache_dir={cache_dir}")
    monkeypatch.setattr(HFEngine, "generate", lambda *_: pytest.fail("something was drawn"))
    with pytest.raises(ValueError, match=r"callbacks.evaluate.sampling.max_tokens is 9999; it must be <= \d+: the model has"):
        run_experiment(tmp_path / "long", *small, "callbacks.evaluate.sampling.max_tokens=9999")
    plain = DigitOps.prompts
    monkeypatch.setattr(DigitOps, "prompts", lambda self, split: () if split == "test" else plain(self, split))
    with pytest.raises(ValueError, match=r"task DigitOps, split 'test': it has 0 prompts"):
        run_experiment(tmp_path / "empty", *small)


def test_evaluating_more_often_changes_nothing_that_is_trained(cache_dir, tmp_path) -> None:
    small = (*SMALL, f"policy.warm_start.cache_dir={cache_dir}", "trainer.max_rounds=2")
    often = run_experiment(tmp_path / "often", *small)
    seldom = run_experiment(tmp_path / "seldom", *small, "callbacks.evaluate.every_n_rounds=9")
    sampled = run_experiment(
        tmp_path / "sampled", *small, "callbacks.evaluate.samples=2", "callbacks.evaluate.sampling.temperature=0.5"
    )
    for name in ("policy/loss", "policy/grad_norm", "rollout/reward_mean"):
        assert often[name] == seldom[name] == sampled[name], name
    assert often["eval/test/avg@1"] == seldom["eval/test/avg@1"]  # the last round is always evaluated
    assert {"eval/test/avg@2", "eval/test/pass@2", "eval/test/maj@2", "eval/test/avg@2_stderr"} <= sampled.keys()


def test_evaluation_and_training_each_sample_by_their_own_settings(cache_dir, tmp_path, monkeypatch) -> None:
    asked: dict[str, set] = {"train": set(), "eval": set()}
    plain = HFEngine.generate

    def generate(self, requests, sampling):
        kinds = {"train" if "@" in r.uid else "eval" for r in requests if r.uid != "sync"}
        for kind in kinds:
            asked[kind].add(sampling)
        return plain(self, requests, sampling)

    monkeypatch.setattr(HFEngine, "generate", generate)
    run_experiment(
        tmp_path, *SMALL, f"policy.warm_start.cache_dir={cache_dir}", "trainer.max_rounds=1", "callbacks.evaluate.samples=2",
        "callbacks.evaluate.sampling={temperature:0.6,max_tokens:7,top_p:0.9,top_k:5}", "rollout.sampling.temperature=0.8",
    )  # fmt: skip
    assert asked == {
        "train": {SamplingParams(temperature=0.8, max_tokens=10)},
        "eval": {SamplingParams(temperature=0.6, max_tokens=7, top_p=0.9, top_k=5)},
    }


def test_other_tasks_than_the_one_trained_on_are_evaluated(cache_dir, tmp_path) -> None:
    other = "{_target_:bapo.tasks.digit_ops.DigitOps,digits:3,train_size:5,test_size:6}"
    run_experiment(
        tmp_path, *SMALL, f"policy.warm_start.cache_dir={cache_dir}", "trainer.max_rounds=1",
        f"+callbacks.evaluate.benchmarks.three-digits={other}", "+callbacks.evaluate.benchmarks.same=${task}",
    )  # fmt: skip
    rows = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    assert {name.split("/")[1] for name in rows[0] if name.startswith("eval/")} == {"three-digits", "same"}
    assert float(rows[0]["eval/same/avg@1"]) > float(rows[0]["eval/three-digits/avg@1"])
    plain = run_experiment(tmp_path / "own", *SMALL, f"policy.warm_start.cache_dir={cache_dir}", "trainer.max_rounds=1")
    assert float(rows[-1]["eval/same/avg@1"]) == plain["eval/test/avg@1"]


def test_a_benchmark_is_checked_before_anything_is_generated(tokenizer, model_folder) -> None:
    checked = []
    collector = SimpleNamespace(task=Counting(3), check=lambda *arguments: checked.append(arguments))
    trainer = SimpleNamespace(datamodule=SimpleNamespace(collector=collector))
    sampling, two = SamplingParams(max_tokens=4), Counting(2)
    Evaluate(sampling, benchmarks={"two": two, "none": None}).on_fit_start(trainer, None)
    assert checked == [("test", two.rows, sampling, "callbacks.evaluate.sampling", two)]
    two.rows[1] = Prompt("odd", "a1?", "1")
    unreadable = r"task Counting, split 'test': the tokenizer of .* cannot read prompt 'odd': character '\?' has no token"
    with pytest.raises(ValueError, match=unreadable):
        check_prompts(two, "test", two.rows, tokenizer, PLAIN, sampling, None, "sampling")


# Side by side.


def keep_result(folder, policy: str, benchmark: str, value: float, **settings) -> None:
    folder.mkdir(parents=True)
    shared = {"temperature": 0.6, "top_p": 0.95, "top_k": 0, "max_tokens": 100, "samples": 16, "problems": 30, "split": "test"}
    facts = {
        "policy": {"name": policy, "path": "p", "fingerprint": f"of {policy}", "step": 40 if policy == "trained" else None},
        "benchmark": benchmark,
        "settings": shared | {"template_hash": "t", "data_hash": "d"} | settings,
        "metrics": {
            "avg@16": {"value": value, "stderr": 0.05, "low": 0.0, "high": 1.0},
            "response_length_mean": {"value": 12.25, "stderr": None, "low": 0.0, "high": 1.0},
        },
    }
    (folder / "result.json").write_text(json.dumps(facts))


def test_a_table_per_benchmark_and_a_row_per_evaluation(tmp_path, capsys) -> None:
    keep_result(tmp_path / "eval/base/aime-1", "base", "aime", 0.25)
    keep_result(tmp_path / "eval/base/math-1", "base", "math", 0.5)
    keep_result(tmp_path / "eval/trained/aime-2", "trained", "aime", 0.375)
    compare([str(tmp_path / "eval"), str(tmp_path / "eval/trained/aime-2"), "--csv", str(tmp_path / "table.csv")])
    out, err = capsys.readouterr()
    assert err == ""
    head = "| run | folder | problems | sampling | avg@16 | length |\n| --- | --- | --- | --- | --- | --- |\n"
    drawn = "30 | 16 at T 0.6, top_p 0.95, 100 tokens"
    assert out == (
        f"## aime\n\n{head}"
        f"| base | 1 | {drawn} | 0.250 ± 0.050 | 12.2 |\n"
        f"| trained @ 40 | 2 | {drawn} | 0.375 ± 0.050 | 12.2 |\n"
        f"\n## math\n\n{head}"
        f"| base | 1 | {drawn} | 0.500 ± 0.050 | 12.2 |\n"
    )
    rows = list(csv.DictReader((tmp_path / "table.csv").open()))
    assert [(row["benchmark"], row["run"], row["avg@16"]) for row in rows] == [
        ("aime", "base", "0.25"), ("aime", "trained @ 40", "0.375"), ("math", "base", "0.5"),
    ]  # fmt: skip
    assert (rows[0]["avg@16_stderr"], rows[0]["response_length_mean_stderr"], rows[0]["max_tokens"]) == ("0.05", "", "100")


def test_numbers_that_are_not_comparable_are_warned_of(tmp_path, capsys) -> None:
    keep_result(tmp_path / "aime-a", "base", "aime", 0.25)
    keep_result(tmp_path / "aime-b", "base", "aime", 0.25, max_tokens=50, data_hash="e")  # the same policy: another row
    keep_result(tmp_path / "aime-c", "base", "aime", 0.25, max_tokens=50)
    keep_result(tmp_path / "math-a", "base", "math", 0.25, temperature=1.0)
    compare([str(tmp_path)])
    out, err = capsys.readouterr()
    told = [line.split(" | ")[1:4] for line in out.splitlines() if line.startswith("| base")]
    assert told[:2] == [["a", "30", "16 at T 0.6, top_p 0.95, 100 tokens"], ["b", "30", "16 at T 0.6, top_p 0.95, 50 tokens"]]
    assert err.splitlines() == [
        "warning: aime: max_tokens differs: 100 in base (a); 50 in base (b), base (c)",
        "warning: aime: data_hash differs: d in base (a), base (c); e in base (b)",
    ]


def test_a_training_run_is_compared_by_its_last_scores(cache_dir, tmp_path, capsys) -> None:
    run = tmp_path / "runs" / "one"
    last = run_experiment(run, *SMALL, f"policy.warm_start.cache_dir={cache_dir}", "trainer.max_rounds=1")
    (tmp_path / "runs" / "sft").mkdir()
    (tmp_path / "runs" / "sft" / "config.yaml").write_text("name: sft\n")
    (tmp_path / "runs" / "sft" / "metrics.csv").write_text("trainer/global_step,sft/loss\n1,2.0\n")
    task = {"_target_": "bapo.tasks.digit_ops.DigitOps", "seed": 0, "digits": 3}
    keep_result(tmp_path / "other" / "digit_ops-1", "base", "digit_ops", 0.25, task=task)
    capsys.readouterr()
    compare([str(tmp_path / "runs"), str(tmp_path / "other")])
    out, err = capsys.readouterr()
    shown = f"{last['eval/test/avg@1']:.3f} ± {last['eval/test/avg@1_stderr']:.3f}"
    assert out.splitlines()[0] == "## digit_ops"
    assert out.splitlines()[4].startswith(f"| smoke @ 4 | one | 8 | 1 at T 0, top_p 1, 10 tokens | {shown} |")
    assert out.splitlines()[5].startswith("| base | 1 | 30 | ")
    assert out.count("##") == 1
    assert "warning: digit_ops: temperature differs: 0.0 in smoke @ 4 (one); 0.6 in base (1)\n" in err
    assert "warning: digit_ops: problems differs: 8 in smoke @ 4 (one); 30 in base (1)\n" in err
    assert "warning: digit_ops: task.digits differs: 2 in smoke @ 4 (one); 3 in base (1)\n" in err  # its data have no digest
    assert "task.seed" not in err
    assert err.startswith(f"warning: left out: {tmp_path / 'runs' / 'sft'}: it was never evaluated")


def test_what_cannot_be_compared_is_refused(tmp_path, capsys) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "result.json").write_text("{}")
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "config.yaml").write_text("name: sft\n")
    (tmp_path / "sft" / "metrics.csv").write_text("trainer/global_step,sft/loss\n1,2.0\n")
    for name, message in (
        ("none", "there is neither a result.json nor a run in or below it"),
        ("bad", "it lacks 'policy'"),
        ("sft", "it was never evaluated"),
    ):
        with pytest.raises(SystemExit):
            compare([str(tmp_path / name)])
        assert message in capsys.readouterr().err
