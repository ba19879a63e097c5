"""vLLM itself, its CPU build, against transformers: the same weights must give the same log-probs after every sync."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import SMALL, run_experiment
from support.engines import asked, largest_gap

from bapo.data.datamodule import RolloutDataModule
from bapo.engines.sync_check import SyncCheckError, check_sync, sync_gap
from bapo.engines.vllm import LocalVLLM, VLLMRollouts
from bapo.engines.weight_sync import read_header
from bapo.policy.causal_lm import CausalLMPolicy
from bapo.policy.lora import Lora
from bapo.policy.tiny_qwen3 import tiny_qwen3
from bapo.types import Adapter, SamplingParams

pytestmark = pytest.mark.slow
pytest.importorskip("vllm")

TEMPERATURE = 0.6
SAMPLING = SamplingParams(temperature=TEMPERATURE, max_tokens=12)
LORA = Lora(r=4, alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])


def new_model(tokenizer, tied: bool, seed: int = 0, spread: float = 5.0):
    """A random Qwen3; its head is made larger, so that a wrong one shows."""
    model = tiny_qwen3(
        len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, seed=seed, tie_word_embeddings=tied, num_hidden_layers=1
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(spread)
    return model


def start(tmp_path_factory, tokenizer, tied: bool, **options) -> tuple[LocalVLLM, Path]:
    folder = tmp_path_factory.mktemp("model")
    new_model(tokenizer, tied).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return VLLMRollouts(enforce_eager=True, max_num_seqs=32, **options)(folder), folder


@pytest.fixture(scope="module")
def tied(tmp_path_factory, tokenizer) -> Iterator[tuple[LocalVLLM, Path]]:
    made = start(tmp_path_factory, tokenizer, tied=True)
    yield made
    made[0].close()


@pytest.fixture(scope="module")
def untied(tmp_path_factory, tokenizer) -> Iterator[tuple[LocalVLLM, Path]]:
    """An engine of a model with a head of its own that takes adapters; it takes full weights as well."""
    made = start(tmp_path_factory, tokenizer, tied=False, lora_sync="native", max_lora_rank=8)
    yield made
    made[0].close()


class Handle:
    """A policy as the data side sees it."""

    def __init__(self, policy: CausalLMPolicy):
        self.policy = policy

    def token_stats(self, batch):
        return self.policy.token_stats(batch, token_budget=4096)


def requests(tokenizer, count: int = 24) -> list:
    prompts = ["a12345=", "b90=", "a5=", "c777="]
    texts = [prompts[i % 4] for i in range(count)]
    return [asked(f"p{i % 4}", i // 4, 1000 + i, tuple(tokenizer(text)["input_ids"])) for i, text in enumerate(texts)]


def gap(engine: LocalVLLM, policy: CausalLMPolicy, tokenizer, sampling: SamplingParams = SAMPLING) -> float:
    """Largest |log-prob of vLLM - of transformers| over 24 samples of vLLM."""
    samples = engine.generate(requests(tokenizer), sampling)
    assert len(samples) == 24
    return largest_gap(samples, policy, tokenizer.pad_token_id, token_budget=4096)


@pytest.mark.parametrize("which", ["tied", "untied"])
def test_vllm_and_transformers_agree_before_and_after_every_sync(which, request, tokenizer):
    engine, _ = request.getfixturevalue(which)
    first = None
    for version in range(4):
        model = new_model(tokenizer, which == "tied", seed=version)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        policy = CausalLMPolicy(model, TEMPERATURE)
        engine.load_weights(policy.named_weights(), version)
        assert gap(engine, policy, tokenizer) < 1e-4
        assert engine.version == version
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        first = first or policy
    assert gap(engine, first, tokenizer) > 0.1  # the first weights are not the last: the test can tell


def test_the_logprobs_are_those_at_the_sampling_temperature(untied, tokenizer):
    engine, _ = untied
    model = new_model(tokenizer, tied=False)
    engine.load_weights(CausalLMPolicy(model).named_weights(), 1)
    for temperature in (0.6, 1.0, 1.7):
        sampling = SamplingParams(temperature=temperature, max_tokens=6)
        assert gap(engine, CausalLMPolicy(model, temperature), tokenizer, sampling) < 1e-4
    assert gap(engine, CausalLMPolicy(model, 1.0), tokenizer, SAMPLING) > 0.1  # raw log-probs would be these


def test_seeds_alone_decide_the_responses(untied, tokenizer):
    engine, _ = untied
    engine.load_weights(CausalLMPolicy(new_model(tokenizer, tied=False, spread=1.0)).named_weights(), 1)
    samples = requests(tokenizer)
    once = {(r.uid, r.sample_index): r.response_ids for r in engine.generate(samples, SAMPLING)}
    again = {(r.uid, r.sample_index): r.response_ids for r in engine.generate(samples[::-1], SAMPLING)}
    assert once == again
    assert len(set(once.values())) > 20  # 24 seeds, and not 24 clones


def test_a_response_ends_at_an_eos_id_or_is_cut_and_says_so(untied, tokenizer):
    engine, _ = untied
    engine.load_weights(CausalLMPolicy(new_model(tokenizer, tied=False, spread=1.0)).named_weights(), 1)
    responses = engine.generate(requests(tokenizer), SAMPLING)
    eos = tokenizer.eos_token_id
    assert {r.finish_reason for r in responses} == {"stop", "length"}
    for r in responses:
        assert (r.response_ids[-1] == eos) == (r.finish_reason == "stop")
        assert eos not in r.response_ids[:-1]
        assert len(r.response_ids) == len(r.sampler_logprobs) <= SAMPLING.max_tokens
        assert len(r.response_ids) == SAMPLING.max_tokens or r.finish_reason == "stop"


def lora_policy(folder: Path, seed: int) -> CausalLMPolicy:
    from bapo.policy.causal_lm import load_model

    model = load_model(folder)
    LORA.apply(model, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return CausalLMPolicy(model, TEMPERATURE)


def load_base(engine: LocalVLLM, tokenizer) -> None:
    """Full weights of an earlier test away: a native adapter is added to the weights that the engine started with."""
    engine.load_weights(CausalLMPolicy(new_model(tokenizer, tied=False)).named_weights(), 0)


def test_a_merged_adapter_reaches_vllm(untied, tokenizer):
    engine, folder = untied
    policy = lora_policy(folder, seed=1)
    engine.load_weights(policy.named_weights(), 3)
    assert gap(engine, policy, tokenizer) < 1e-4
    base = CausalLMPolicy(new_model(tokenizer, tied=False), TEMPERATURE)
    assert gap(engine, base, tokenizer) > 0.1


def test_an_adapter_reaches_vllm_natively_at_every_version(untied, tokenizer):
    engine, folder = untied
    load_base(engine, tokenizer)
    for version in range(3):
        policy = lora_policy(folder, seed=version)
        adapter = policy.adapter()
        assert adapter is not None
        engine.load_adapter(adapter, version)
        assert gap(engine, policy, tokenizer) < 1e-4
    assert len(list(engine.folder.iterdir())) == 1  # adapters of former versions are gone


def gap_of_the_check(engine, policy: CausalLMPolicy, tokenizer) -> float:
    ids = [r.prompt_ids for r in requests(tokenizer)[:4]]
    return sync_gap(engine, Handle(policy), ids, SAMPLING, tokenizer.pad_token_id)  # type: ignore[arg-type]


def test_the_sync_check_sees_a_base_model_in_place_of_the_adapter(untied, tokenizer):
    engine, folder = untied
    load_base(engine, tokenizer)
    policy = lora_policy(folder, seed=5)
    adapter = policy.adapter()
    assert adapter is not None
    engine.load_adapter(adapter, 8)
    check_sync(gap_of_the_check(engine, policy, tokenizer), 1e-3, TEMPERATURE, 8)
    nothing = Adapter(adapter.config, {n: torch.zeros_like(v) if "lora_B" in n else v for n, v in adapter.weights.items()})
    engine.load_adapter(nothing, 9)
    with pytest.raises(SyncCheckError, match=r"version 9 the engine's log-probs differ .* another model or LoRA adapter"):
        check_sync(gap_of_the_check(engine, policy, tokenizer), 1e-3, TEMPERATURE, 9)


def without_repack(engine: LocalVLLM):
    """Syncs by vLLM's own reload, which leaves a packed copy of a tied head stale."""

    def rpc(method, **arguments):
        if method != "load_policy_weights":
            return engine.llm.collective_rpc(method, kwargs=arguments)
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": arguments["folder"]})
        return [[read_header(Path(arguments["folder"]))[0]]]

    return rpc


def test_a_run_whose_head_goes_stale_stops_in_the_same_round(tied, tokenizer, tmp_path, monkeypatch):
    engine, folder = tied
    overrides = [
        *SMALL,
        "rollout=vllm",
        "policy=hub",
        "policy.warm_start=null",
        f"policy.path={folder}",
        "rollout.sampling.max_tokens=10",
    ]
    overrides += ["optimizer.lr=0.05", "lr_schedule.num_warmup_steps=0", "callbacks.evaluate=null"]
    overrides += ["rollout.max_attempts=20", "callbacks.checkpoint.every_n_updates=1000"]
    monkeypatch.setattr(VLLMRollouts, "__call__", lambda self, **load: engine)
    monkeypatch.setattr(engine, "close", lambda: None)
    monkeypatch.setattr(
        "bapo.tasks.digit_ops.DigitOps.verify", lambda self, prompts, responses: [len(r) % 2 for r in responses]
    )
    monkeypatch.setattr(
        RolloutDataModule, "rest_engine", lambda self: monkeypatch.setattr(engine, "rpc", without_repack(engine))
    )
    with pytest.raises(SyncCheckError, match=r"version 4 .* a stale output head"):
        run_experiment(tmp_path, *overrides)
    assert [path.name for path in sorted((tmp_path / "rounds").glob("*.json"))] == ["round_00000.json"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["update=000004.ckpt"]
