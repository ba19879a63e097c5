"""Held-out scores: every (problem, sample) once, its own seeds, training undisturbed. FAULTS 54, 55."""

import pytest
import torch
from conftest import SMALL, ScriptedEngine, run_experiment

from bapo.callbacks.evaluate import Evaluate
from bapo.evaluation import evaluate
from bapo.rollouts.hf import HFEngine
from bapo.tasks.digit_ops import DigitOps
from bapo.types import Prompt, SamplingParams


class Counting:
    """`aK=` is answered right by K."""

    def __init__(self, n: int):
        self.rows = [Prompt(f"test/{i}", f"a{i}=", str(i)) for i in range(n)]

    def prompts(self, split):
        return self.rows

    def verify(self, prompt, response):
        return float(response == prompt.answer)


def test_avg_at_k_is_the_mean_over_every_problem_and_sample(tokenizer):
    def answer(request):  # problem i is solved by its first i samples
        digit = tokenizer.decode(list(request.prompt_ids))[1]
        text = digit if request.sample_index < int(digit) else "xx"
        return [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]

    engine = ScriptedEngine(answer, order=lambda r: r[::-1])
    engine.load_weights([], 3)
    task = Counting(4)
    found = evaluate(engine, task, tokenizer, task.prompts("test"), SamplingParams(max_tokens=4), samples=4, seed=1)
    assert found == {"avg@4": 6 / 16, "response_length_mean": (6 * 2 + 10 * 3) / 16, "truncated_frac": 0.0}
    assert len({(r.uid, r.sample_index) for r in engine.requests}) == 16
    assert len({r.seed for r in engine.requests}) == 16


def test_the_same_question_is_asked_every_time_and_ambient_randomness_is_left_alone(tokenizer, model_folder):
    engine = HFEngine(model_folder)
    engine.load_weights(engine.model.named_parameters(), 0)
    task, sampling = Counting(4), SamplingParams(max_tokens=4)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = evaluate(engine, task, tokenizer, task.prompts("test"), sampling, samples=2, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    assert evaluate(engine, task, tokenizer, task.prompts("test"), sampling, samples=2, seed=1) == first


def test_several_greedy_samples_are_refused():
    with pytest.raises(ValueError, match=r"callbacks.evaluate.samples is 4 at temperature 0"):
        Evaluate(SamplingParams(temperature=0.0, max_tokens=4), samples=4)
    with pytest.raises(ValueError, match=r"callbacks.evaluate.every_n_rounds is 0; it must be >= 1"):
        Evaluate(SamplingParams(max_tokens=4), every_n_rounds=0)


def test_what_cannot_be_evaluated_is_refused_before_the_first_pool_is_drawn(cache_dir, tmp_path, monkeypatch):
    small = (*SMALL, f"policy.warm_start.cache_dir={cache_dir}")
    monkeypatch.setattr(HFEngine, "generate", lambda *_: pytest.fail("something was drawn"))
    with pytest.raises(ValueError, match=r"callbacks.evaluate.sampling.max_tokens is 9999; it must be <= \d+: the model has"):
        run_experiment(tmp_path / "long", *small, "callbacks.evaluate.sampling.max_tokens=9999")
    plain = DigitOps.prompts
    monkeypatch.setattr(DigitOps, "prompts", lambda self, split: () if split == "test" else plain(self, split))
    with pytest.raises(ValueError, match=r"task DigitOps, split 'test': it has 0 prompts"):
        run_experiment(tmp_path / "empty", *small)


def test_evaluating_more_often_changes_nothing_that_is_trained(cache_dir, tmp_path):
    small = (*SMALL, f"policy.warm_start.cache_dir={cache_dir}", "trainer.max_rounds=2")
    often = run_experiment(tmp_path / "often", *small)
    seldom = run_experiment(tmp_path / "seldom", *small, "callbacks.evaluate.every_n_rounds=9")
    sampled = run_experiment(
        tmp_path / "sampled", *small, "callbacks.evaluate.samples=2", "callbacks.evaluate.sampling.temperature=0.5"
    )
    for name in ("policy/loss", "policy/grad_norm", "rollout/reward_mean"):
        assert often[name] == seldom[name] == sampled[name], name
    assert often["eval/test/avg@1"] == seldom["eval/test/avg@1"]  # the last round is always evaluated
    assert "eval/test/avg@2" in sampled
