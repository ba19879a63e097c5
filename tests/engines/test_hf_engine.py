"""The transformers engine: seeds, temperature, ends, ids."""

from collections import Counter

import pytest
import torch
from support.engines import asked, largest_gap
from transformers import AutoModelForCausalLM

from bapo.engines.hf import HFEngine, HFRollouts, SeededSampler
from bapo.policy.causal_lm import CausalLMPolicy
from bapo.types import SamplingParams


@pytest.fixture
def engine(model_folder):
    engine = HFEngine(model_folder, batch_size=64)
    engine.load_weights(AutoModelForCausalLM.from_pretrained(model_folder).named_parameters(), version=7)
    return engine


def requests(n: int, prompt: tuple[int, ...] = (3, 4, 5)) -> list:
    return [asked(f"p{i}", 0, 1000 + i, prompt) for i in range(n)]


def test_a_sample_depends_on_its_seed_alone_not_on_its_neighbours(engine):
    sampling = SamplingParams(temperature=1.0, max_tokens=8)
    longer = asked("q", 0, 5, (6, 7, 8, 9, 10))
    together = engine.generate([*requests(6), longer], sampling)
    for request in (requests(6)[3], longer):
        (alone,) = engine.generate([request], sampling)
        beside = next(r for r in together if r.uid == request.uid)
        assert alone.response_ids == beside.response_ids
        assert alone.sampler_logprobs == pytest.approx(beside.sampler_logprobs, abs=1e-5)
    same_seed = engine.generate([asked("a", 0, 9, (3, 4)), asked("b", 1, 9, (3, 4))], sampling)
    assert same_seed[0].response_ids == same_seed[1].response_ids
    assert len({r.response_ids for r in together}) > 3


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_reported_logprobs_are_those_of_the_policy_at_the_sampling_temperature(engine, model_folder, temperature):
    samples = engine.generate(
        [*requests(8), *requests(8, (3, 4, 5, 6, 7, 8))], SamplingParams(temperature=temperature, max_tokens=10)
    )
    policy = CausalLMPolicy(AutoModelForCausalLM.from_pretrained(model_folder), temperature)
    assert largest_gap(samples, policy, token_budget=4096) < 1e-5


def test_sampled_tokens_follow_the_distribution():
    logits = torch.tensor([2.0, 1.0, 0.0, -torch.inf])
    sampling = SamplingParams(temperature=0.6, max_tokens=1)
    sampler = SeededSampler(range(20_000), sampling)
    samples = sampler(torch.zeros(20_000, 1), logits.expand(20_000, 4)).argmax(-1)
    counts = Counter(samples.tolist())
    for token, logprob in enumerate([-0.202573, -1.869240, -3.535906]):
        p = torch.tensor(logprob).exp().item()
        assert abs(counts[token] / 20_000 - p) < 4 * (p * (1 - p) / 20_000) ** 0.5
        assert sampler.logprobs[0][samples == token].unique().tolist() == pytest.approx([logprob], abs=1e-5)
    assert counts[3] == 0


def test_top_k_and_top_p_sample_from_the_kept_tokens_renormalised():
    logits = torch.tensor([2.0, 1.0, 0.0]).expand(500, 3)
    for sampling in (SamplingParams(max_tokens=1, top_k=2), SamplingParams(max_tokens=1, top_p=0.8)):
        sampler = SeededSampler(range(500), sampling)
        samples = sampler(torch.zeros(500, 1), logits).argmax(-1)
        assert set(samples.tolist()) == {0, 1}
        assert sampler.logprobs[0][samples == 0][0].item() == pytest.approx(-0.313262, abs=1e-5)  # log(e / (e + 1))


def test_greedy_takes_the_most_likely_token(engine):
    greedy = SamplingParams(temperature=0.0, max_tokens=5)
    first, second = engine.generate([asked("a", 0, 1, (3, 4)), asked("b", 0, 2, (3, 4))], greedy)
    assert first.response_ids == second.response_ids
    logits = engine.model(torch.tensor([[3, 4]])).logits[0, -1]
    assert first.response_ids[0] == int(logits.argmax())


def test_a_response_ends_at_any_end_id_and_keeps_it(engine):
    samples = engine.generate(requests(64), SamplingParams(max_tokens=12))
    plain = max(samples, key=lambda r: len(r.response_ids))
    engine.eos_ids = frozenset({*engine.eos_ids, plain.response_ids[2]})
    for before, after in zip(samples, engine.generate(requests(64), SamplingParams(max_tokens=12)), strict=True):
        ends = [t for t, token in enumerate(before.response_ids) if token in engine.eos_ids]
        expected = before.response_ids[: ends[0] + 1] if ends else before.response_ids
        assert after.response_ids == expected
        assert after.finish_reason == ("stop" if ends else "length")
        assert len(after.sampler_logprobs) == len(after.response_ids)


def test_every_response_carries_the_version_of_the_weights_that_made_it(engine, model_folder):
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    (before,) = engine.generate(requests(1), greedy)
    weights = {
        n: p + 0.3 * torch.randn_like(p) for n, p in AutoModelForCausalLM.from_pretrained(model_folder).named_parameters()
    }
    engine.load_weights(weights.items(), version=8)
    (after,) = engine.generate(requests(1), greedy)
    assert (before.versions[0], after.versions[0]) == (7, 8)
    for name, parameter in engine.model.named_parameters():
        assert torch.equal(parameter, weights[name])


def test_an_incomplete_or_unknown_set_of_weights_leaves_the_engine_unusable(engine, model_folder):
    weights = dict(AutoModelForCausalLM.from_pretrained(model_folder).named_parameters())
    with pytest.raises(KeyError, match="unknown"):
        engine.load_weights([("base_model.x", torch.zeros(1))], version=8)
    with pytest.raises(RuntimeError, match="load_weights"):
        engine.generate(requests(1), SamplingParams(max_tokens=1))
    weights.popitem()
    with pytest.raises(KeyError, match="missing"):
        engine.load_weights(weights.items(), version=8)
    with pytest.raises(RuntimeError, match="load_weights"):
        engine.generate(requests(1), SamplingParams(max_tokens=1))


def test_sampling_defaults_in_the_models_folder_do_not_creep_in(tmp_path, model_folder, engine):
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    model.generation_config.update(do_sample=True, temperature=0.1, top_k=1, top_p=0.1)
    model.save_pretrained(tmp_path)
    other = HFEngine(tmp_path)
    other.load_weights(model.named_parameters(), version=7)
    sampling = SamplingParams(max_tokens=8)
    assert other.generate(requests(8), sampling) == engine.generate(requests(8), sampling)


def test_a_prompt_too_long_for_the_model_is_refused_with_the_numbers(engine):
    positions = engine.max_positions
    with pytest.raises(ValueError, match=f"max_tokens={positions} exceed the model's {positions} positions"):
        engine.generate(requests(1), SamplingParams(max_tokens=positions))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("max_tokens", 0),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
    ],
)
def test_sampling_out_of_bounds_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("found", [None, "cuda", "mps"])
def test_the_device_must_be_there(monkeypatch, found):
    accelerator = found and torch.device(found)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: accelerator)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    here = ["auto", "cpu"] + ([found, f"{found}:0", f"{found}:1"] if found else [])
    for device in here:
        assert HFRollouts(device=device).device == device
    for device in {"cuda", "cuda:0", "cuda:2", "mps", "xpu", "meta", "gpu", ""} - set(here):
        with pytest.raises(ValueError, match=f"device is '{device}'; on this machine it must be one of {', '.join(here)}$"):
            HFRollouts(device=device)
