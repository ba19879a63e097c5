"""Adapters: what is trained, log-probs, merged weights, files, checkpoints."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import lightning as L
import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from support import random_batch
from support.updates import BAPO, adamw, behaviour_of, fit
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from bapo.engines.hf import HFEngine
from bapo.losses.objective import Objective
from bapo.module import BapoModule
from bapo.policy.causal_lm import CausalLMPolicy, check_head, checkpoint_gradients, load_model
from bapo.policy.checkpoint import fingerprint, with_base, without_base
from bapo.policy.lora import Lora
from bapo.policy.options import PolicyOptions
from bapo.policy.tiny_qwen3 import tiny_qwen3

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16,
}  # fmt: skip


def gpt2() -> GPT2LMHeadModel:
    """Tied, with Conv1D layers, whose matrices are [in, out]."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=15, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=1,
                resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0,
            )
        )  # fmt: skip


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "untied": lambda: tiny_qwen3(15, 1, 0, **SIZES),
    "tied": lambda: tiny_qwen3(15, 1, 0, **SIZES, tie_word_embeddings=True),
    "gpt2": gpt2,
}
ATTENTION = Lora(4, 8, target_modules=["q_proj", "v_proj"])
CASES = {
    "untied": ("untied", Lora(4, 8)),
    "untied, attention": ("untied", ATTENTION),
    "untied, head saved": ("untied", Lora(4, 8, modules_to_save=["lm_head"])),
    "untied, head and embedding saved": ("untied", Lora(4, 8, modules_to_save=["lm_head", "embed_tokens", "norm"])),
    "untied, head and embedding adapted": ("untied", Lora(4, 8, target_modules=["lm_head", "embed_tokens", "o_proj"])),
    "tied": ("tied", Lora(4, 8)),
    "tied, head saved": ("tied", Lora(4, 8, modules_to_save=["lm_head"])),
    "tied, embedding saved": ("tied", Lora(4, 8, modules_to_save=["embed_tokens"])),
    "gpt2": ("gpt2", Lora(4, 8, target_modules=["c_attn", "c_proj"])),
    "gpt2, all": ("gpt2", Lora(4, 8)),
    "gpt2, embedding saved": ("gpt2", Lora(4, 8, target_modules=["c_fc"], modules_to_save=["wte"])),
}
every_case = pytest.mark.parametrize(("family", "lora"), CASES.values(), ids=CASES)
IDS = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 10, 2, 11]])


def trained(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def adapted(family: str, lora: Lora, folder: Path | None = None, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model with an adapter that has learnt something: its trained weights are moved at random. Its base goes to `folder`."""
    model = MODELS[family]().to(dtype)
    if folder is not None:
        model.save_pretrained(folder)
        model = load_model(folder, str(dtype).removeprefix("torch."))
    lora.apply(model, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trained(model).values():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits.float()


# What an adapter is.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"r": 0}, "policy.lora.r is 0; it must be >= 1"),
        ({"alpha": 0}, "policy.lora.alpha is 0; it must be > 0 and finite"),
        ({"alpha": float("inf")}, "policy.lora.alpha is inf; it must be > 0 and finite"),
        ({"alpha": float("nan")}, "policy.lora.alpha is nan; it must be > 0 and finite"),
        ({"dropout": 1}, "policy.lora.dropout is 1; it must be in [0, 1)"),
        ({"dropout": -0.1}, "policy.lora.dropout is -0.1; it must be in [0, 1)"),
        ({"target_modules": []}, "policy.lora.target_modules is []; it must be a list of module names, or all-linear"),
        ({"target_modules": "all"}, "policy.lora.target_modules is 'all'; it must be a list of module names, or all-linear"),
        (
            {"target_modules": ["lm_head", "q_proj"], "modules_to_save": ["lm_head"]},
            "policy.lora.modules_to_save is ['lm_head']; it must be without lm_head, which target_modules has",
        ),
    ],
    ids=str,
)
def test_values_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Lora(**({"r": 4, "alpha": 8} | options))


@pytest.mark.parametrize(
    ("family", "lora", "message"),
    [
        (
            "untied",
            Lora(4, 8, target_modules=["q_proj", "qproj"]),
            "policy.lora.target_modules has 'qproj', which this model does not have; it has down_proj, embed_tokens, "
            "gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj",
        ),
        ("untied", Lora(4, 8, target_modules=["proj"]), "target_modules has 'proj', which this model does not have"),
        (
            "untied",
            Lora(4, 8, target_modules=["mlp"]),
            "target_modules has 'mlp', which cannot be used for it; it has down_proj",
        ),
        ("untied", Lora(4, 8, modules_to_save=["head"]), "modules_to_save has 'head', which this model does not have; it has"),
        ("untied", Lora(4, 8, modules_to_save=["self_attn"]), "modules_to_save has 'self_attn', which cannot be used for it"),
        (
            "gpt2",
            ATTENTION,
            "target_modules has 'q_proj', which this model does not have; it has c_attn, c_fc, c_proj, lm_head",
        ),
        (
            "tied",
            Lora(4, 8, target_modules=["lm_head"]),
            "head and embedding of this model share one weight, which an adapter on",
        ),
        ("tied", Lora(4, 8, target_modules=["embed_tokens"]), "either would split: put it into policy.lora.modules_to_save"),
        ("gpt2", Lora(4, 8, target_modules=["wte", "c_attn"]), "policy.lora.target_modules is ['wte', 'c_attn']; head and"),
        (
            "untied",
            Lora(4, 8, target_modules=["q_proj"], modules_to_save=["self_attn.q_proj"]),
            "policy.lora does not fit this model: No modules were targeted for adaptation",
        ),
    ],
    ids=str,
)
def test_modules_that_the_model_does_not_have_are_named(family, lora, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        lora.apply(MODELS[family](), seed=0)


@every_case
def test_a_new_adapter_changes_nothing_and_the_seed_alone_decides_it(family, lora):
    state = torch.get_rng_state()
    models = []
    for seed in (0, 0, 1):
        torch.rand(seed + len(models))
        before = torch.get_rng_state()
        models.append(MODELS[family]())
        lora.apply(models[-1], seed)
        assert torch.equal(torch.get_rng_state(), before)
    torch.set_rng_state(state)
    assert torch.equal(logits(models[0]), logits(MODELS[family]()))
    first, again, other = (trained(model) for model in models)
    assert all(torch.equal(first[name], again[name]) for name in first)
    random = [name for name in first if "lora_A" in name or "lora_embedding_B" in name]
    assert random
    assert not any(torch.equal(first[name], other[name]) for name in random)


def test_only_the_adapter_is_trained_in_float32_over_a_bfloat16_model():
    lora = Lora(4, 8, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"])
    model = adapted("untied", lora, dtype=torch.bfloat16)
    policy = CausalLMPolicy(model)
    module = BapoModule(policy, BAPO, Objective(), adamw(1e-3), 100, total_updates=1)
    (group,) = module.configure_optimizers()["optimizer"].param_groups
    assert {id(p) for p in group["params"]} == {id(p) for p in policy.parameters() if p.requires_grad}
    assert [(name, tuple(p.shape)) for name, p in trained(model).items() if "lora_" not in name] == [
        ("model.embed_tokens.modules_to_save.default.weight", (15, 32)),
        ("lm_head.modules_to_save.default.weight", (15, 32)),
    ]
    pairs = [tuple(p.shape) for name, p in trained(model).items() if "lora_" in name]
    assert pairs == [(4, 32), (32, 4)] * 2
    assert {p.dtype for p in trained(model).values()} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    policy(random_batch(3)).logprobs.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 and p.grad.norm() > 0 for p in trained(model).values())
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_dropout_of_an_adapter_is_switched_off(caplog):
    policy = CausalLMPolicy(adapted("untied", Lora(4, 8, dropout=0.5))).train()
    batch = random_batch(4)
    assert torch.equal(policy(batch).logprobs, policy(batch).logprobs)
    assert "dropout is set to 0" in caplog.text
    assert policy.adapter().config["lora_dropout"] == 0.0


# Scoring and merging.


@every_case
def test_scores_are_those_of_the_models_own_logits(family, lora):
    model = adapted(family, lora)
    check_head(model, "model")
    batch = random_batch(5)
    own = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()).logits[:, :-1] / 0.7
    expected = own.log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)
    mask = batch.response_mask
    scores = CausalLMPolicy(model, temperature=0.7)(batch)
    torch.testing.assert_close(scores.logprobs[mask], expected[mask[:, 1:]], atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["untied", "tied"])
def test_a_saved_head_is_scored_through_its_trained_copy(family):
    policy = CausalLMPolicy(adapted(family, Lora(4, 8, modules_to_save=["lm_head"])))
    batch = random_batch(3)
    before = policy(batch).logprobs
    head = policy.model.get_output_embeddings()
    with torch.no_grad():
        head.original_module.weight.mul_(2)
    assert torch.equal(policy(batch).logprobs, before)
    with torch.no_grad():
        head.modules_to_save["default"].weight.mul_(2)
    assert not torch.allclose(policy(batch).logprobs, before, atol=1e-3)


@every_case
def test_merged_weights_are_a_plain_model_that_says_the_same(family, lora, tmp_path):
    model = adapted(family, lora)
    plain = MODELS[family]()
    plain.save_pretrained(tmp_path)
    weights = dict(CausalLMPolicy(model).named_weights())
    assert list(weights) == [name for name, _ in plain.named_parameters()]
    assert float((logits(model) - logits(plain)).abs().max()) > 1e-3
    missing, unexpected = plain.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == ([] if family == "untied" else ["lm_head.weight"], [])
    torch.testing.assert_close(logits(plain), logits(model), atol=1e-5, rtol=0)
    engine = HFEngine(tmp_path)  # raises for a name that it does not know, and for one that is missing
    engine.load_weights(CausalLMPolicy(model).named_weights(), version=0)
    torch.testing.assert_close(logits(engine.model), logits(model), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("family", "name", "transposed"),
    [("untied", "model.layers.1.self_attn.q_proj", False), ("gpt2", "transformer.h.1.mlp.c_fc", True)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_matrix_is_w_plus_scaled_ba_in_float32_rounded_once(family, name, transposed, dtype):
    model = adapted(family, Lora(4, 6, target_modules=[name]), dtype=dtype)
    layer = model.get_submodule(name)
    update = 1.5 * (layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double())
    expected = layer.base_layer.weight.double() + (update.T if transposed else update)
    merged = dict(CausalLMPolicy(model).named_weights())
    assert {weight.dtype for weight in merged.values()} == {dtype}
    bound = 1e-6 if dtype == torch.float32 else 2**-8 * expected.abs() + 1e-6  # half a unit in the last of 8 bits
    assert bool(((merged[f"{name}.weight"].double() - expected).abs() <= bound).all())
    with torch.autocast("cpu", dtype=torch.bfloat16):  # as in a training step under mixed precision
        assert torch.equal(dict(CausalLMPolicy(model).named_weights())[f"{name}.weight"], merged[f"{name}.weight"])
    others = {n: w for n, w in MODELS[family]().to(dtype).named_parameters() if n != f"{name}.weight"}
    assert all(torch.equal(merged[n], w) for n, w in others.items())


def test_syncs_leave_a_bfloat16_policy_bitwise_unchanged(tmp_path):
    lora = Lora(4, 8, modules_to_save=["lm_head"])
    policy = CausalLMPolicy(adapted("untied", lora, tmp_path, torch.bfloat16))
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    first = {name: value.clone() for name, value in policy.named_weights()}
    engine = HFEngine(tmp_path, dtype=torch.bfloat16)
    for version in range(20):
        engine.load_weights(policy.named_weights(), version)
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    assert all(torch.equal(value, first[name]) for name, value in policy.named_weights())


def test_handing_out_weights_does_not_switch_gradients_off():
    for _ in CausalLMPolicy(adapted("untied", Lora(4, 8))).named_weights():
        assert torch.is_grad_enabled()


# The adapter by itself.


@every_case
def test_the_files_of_an_adapter_load_in_peft_and_say_the_same(family, lora, tmp_path):
    model = adapted(family, lora, tmp_path / "base")
    adapter = CausalLMPolicy(model).adapter()
    (tmp_path / "adapter").mkdir()
    save_file(adapter.weights, tmp_path / "adapter" / "adapter_model.safetensors")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(adapter.config))
    base = load_model(tmp_path / "base")
    plain = logits(base)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # so PEFT says that a key is missing
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-5, rtol=0)
    assert float((logits(loaded) - plain).abs().max()) > 1e-3


def test_an_adapter_has_pefts_names_and_plain_values():
    adapter = CausalLMPolicy(adapted("untied", Lora(4, 8, target_modules=["q_proj"], modules_to_save=["lm_head"]))).adapter()
    layers = [f"base_model.model.model.layers.{index}.self_attn.q_proj.lora_{part}.weight" for index in (0, 1) for part in "AB"]
    assert sorted(adapter.weights) == ["base_model.model.lm_head.weight", *layers]
    assert json.loads(json.dumps(adapter.config)) == adapter.config
    expected = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    assert expected.items() <= adapter.config.items()
    assert adapter.config["modules_to_save"] == ["lm_head"]
    assert CausalLMPolicy(MODELS["untied"]()).adapter() is None


def test_the_tensors_of_an_adapter_follow_the_policy():
    policy = CausalLMPolicy(adapted("tied", ATTENTION))
    adapter = policy.adapter()
    with torch.no_grad():
        for parameter in trained(policy.model).values():
            parameter.add_(1)
    assert all(torch.equal(value, adapter.weights[name]) for name, value in policy.adapter().weights.items())


# Gradient checkpointing.


def count_calls(model: PreTrainedModel) -> list[int]:
    calls = []
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, index=index: calls.append(index))
    return calls


@pytest.mark.parametrize("lora", [None, ATTENTION, Lora(4, 8, modules_to_save=["embed_tokens"])], ids=str)
def test_gradients_are_the_same_with_activations_computed_again(lora):
    gradients, calls = [], []
    batch = random_batch(4)
    for again in (False, True):
        model = (MODELS["untied"]() if lora is None else adapted("untied", lora)).eval()
        if again:
            checkpoint_gradients(model)
        calls.append(count_calls(model))
        policy = CausalLMPolicy(model)
        policy(batch).logprobs.sum().backward()
        assert {p.requires_grad for p in model.parameters()} == ({True} if lora is None else {True, False})
        gradients.append({name: p.grad for name, p in trained(model).items()})
        with torch.no_grad():
            policy(batch)
    assert calls == [[0, 1, 0, 1], [0, 1, 1, 0, 0, 1]]  # forward, again in backward, and once without a graph
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-6, rtol=1e-6)
        assert gradient.norm() > 0, name


def test_a_model_that_is_not_made_for_it_is_named(monkeypatch):
    model = MODELS["untied"]()
    monkeypatch.setattr(type(model), "supports_gradient_checkpointing", False)
    with pytest.raises(ValueError, match=r"policy.gradient_checkpointing is true; Qwen3ForCausalLM does not support"):
        checkpoint_gradients(model)


def options(folder: Path, **chosen) -> PolicyOptions:
    return PolicyOptions(path=str(folder), **chosen)


def test_a_policy_and_its_reference_are_what_the_options_say(model_folder):
    chosen = options(model_folder, lora=ATTENTION, gradient_checkpointing=True, chunk_tokens=7)
    policy, reference = chosen.load(model_folder, 0.7, seed=3), chosen.load_reference(model_folder, 0.7)
    expected = load_model(model_folder)
    ATTENTION.apply(expected, seed=3)
    assert all(torch.equal(value, policy.model.state_dict()[name]) for name, value in expected.state_dict().items())
    assert reference.adapter() is None
    assert (policy.model.is_gradient_checkpointing, reference.model.is_gradient_checkpointing) == (True, False)
    assert {(p.temperature, p.chunk_tokens) for p in (policy, reference)} == {(0.7, 7)}


def test_after_one_update_every_b_has_moved_and_the_base_has_not(model_folder):
    """Through Lightning, with activations computed again."""
    policy = options(model_folder, lora=Lora(4, 8), gradient_checkpointing=True).load(model_folder, 1.0, seed=0)
    calls = count_calls(policy.model)
    base = {name: p.clone() for name, p in policy.named_parameters() if not p.requires_grad}
    batch = behaviour_of(model_folder, random_batch(8))
    fit(model_folder, [[batch]], policy=policy)
    assert calls == [0, 0]
    moved = {name: p for name, p in policy.named_parameters() if "lora_B" in name}
    assert len(moved) == 7
    assert all(p.norm() > 0 for p in moved.values())
    assert all(torch.equal(p, base[name]) for name, p in policy.named_parameters() if not p.requires_grad)


# Checkpoints.


class Saved(L.Callback):
    """Keeps the checkpoint of the last epoch as a file."""

    def __init__(self, path: Path):
        self.path = path

    def on_train_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.path)


def fitted(folder: Path, target: Path, lora: Lora | None) -> tuple[BapoModule, dict]:
    policy = options(folder, lora=lora).load(folder, 1.0, seed=0)
    batch = behaviour_of(folder, random_batch(8))
    module, _, _ = fit(folder, [[batch]], policy=policy, callbacks=[Saved(target)])
    return module, torch.load(target, weights_only=True)


@pytest.fixture(scope="module")
def larger_folder(tmp_path_factory) -> Path:
    """A model whose base is large beside an adapter."""
    folder = tmp_path_factory.mktemp("larger")
    sizes = SIZES | {"hidden_size": 256, "intermediate_size": 512}
    tiny_qwen3(15, 1, 0, **sizes).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("lora", [ATTENTION, Lora(4, 8, target_modules=["q_proj"], modules_to_save=["lm_head"])], ids=str)
def test_a_checkpoint_holds_what_is_trained_and_not_the_base(larger_folder, tmp_path, lora):
    module, checkpoint = fitted(larger_folder, tmp_path / "a.ckpt", lora)
    expected = {f"policy.model.{name}": p for name, p in trained(module.policy.model).items()}
    assert checkpoint["state_dict"].keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in checkpoint["state_dict"].items())
    bytes_trained = sum(4 * p.numel() for p in expected.values())
    base = sum(4 * p.numel() for p in module.parameters()) - bytes_trained
    assert base > 20 * bytes_trained
    assert (tmp_path / "a.ckpt").stat().st_size < 2 * 3 * bytes_trained  # the weights, and two moments of each
    assert len(checkpoint["optimizer_states"][0]["state"]) == len(expected)


def test_a_checkpoint_without_an_adapter_is_whole(model_folder, tmp_path):
    module, checkpoint = fitted(model_folder, tmp_path / "a.ckpt", None)
    assert checkpoint["state_dict"].keys() == module.state_dict().keys()
    assert "base" not in checkpoint


def test_a_checkpoint_goes_back_into_a_new_policy(model_folder, tmp_path):
    module, checkpoint = fitted(model_folder, tmp_path / "a.ckpt", Lora(4, 8, modules_to_save=["lm_head"]))
    fresh = nn.ModuleDict(
        {"policy": options(model_folder, lora=Lora(4, 8, modules_to_save=["lm_head"])).load(model_folder, 1.0, 5)}
    )
    with_base(fresh, checkpoint)
    fresh.load_state_dict(checkpoint["state_dict"])
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in fresh.state_dict().items())


LAYER = "policy.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("lora", "lost", "message"),
    [
        (ATTENTION, f"{LAYER}.lora_B.default.weight", f"only in the policy: {LAYER}.lora_B.default.weight (1 in all)"),
        (
            Lora(8, 8, target_modules=["q_proj", "v_proj"]),
            None,
            f"{LAYER}.lora_A.default.weight is [4, 32] in the checkpoint and [8, 32] in the policy (4 such)",
        ),
        (
            Lora(4, 8, target_modules=["q_proj", "k_proj"]),
            None,
            "only in the checkpoint: policy.model.model.layers.0.self_attn.v_proj.lora_A.default.weight, "
            "policy.model.model.layers.0.self_attn.v_proj.lora_B.default.weight (2 in all); only in the policy: "
            "policy.model.model.layers.0.self_attn.k_proj.lora_A.default.weight",
        ),
        (None, None, f"only in the checkpoint: {LAYER}.lora_A.default.weight, {LAYER}.lora_B.default.weight"),
    ],
    ids=["a key is lost", "another rank", "other modules", "no adapter"],
)
def test_a_checkpoint_that_does_not_fit_says_what_each_side_has(model_folder, tmp_path, lora, lost, message):
    _, checkpoint = fitted(model_folder, tmp_path / "a.ckpt", ATTENTION)
    if lost:
        del checkpoint["state_dict"][lost]
        torch.save(checkpoint, tmp_path / "a.ckpt")
    module = BapoModule(options(model_folder, lora=lora).load(model_folder, 1.0, 0), BAPO, Objective(), adamw(1e-2), 100, 9)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match=re.escape(message)):
        trainer.fit(module, torch.utils.data.DataLoader([0]), ckpt_path=tmp_path / "a.ckpt", weights_only=True)


def test_an_adapter_over_another_base_is_refused(model_folder):
    policy = options(model_folder, lora=ATTENTION).load(model_folder, 1.0, 0)
    checkpoint = {"state_dict": dict(policy.state_dict())}
    without_base(policy, checkpoint)
    saved = dict(checkpoint)
    with_base(policy, checkpoint)
    assert checkpoint["state_dict"].keys() == policy.state_dict().keys()
    with torch.no_grad():
        policy.model.model.norm.weight[0] += 1e-6
    with pytest.raises(ValueError, match="its adapter was trained on other base weights than the policy's"):
        with_base(policy, saved)


def test_the_fingerprint_of_a_model_knows_a_single_bit_and_every_dtype():
    found = set()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        parameters = {n: nn.Parameter(torch.ones(3, 2, dtype=dtype)) for n in ("a", "b")}
        found.add(fingerprint(parameters))
        with torch.no_grad():
            parameters["b"][2, 1] = torch.nextafter(torch.ones((), dtype=dtype), torch.zeros((), dtype=dtype))
        found.add(fingerprint(parameters))
        found.add(fingerprint({"a": parameters["b"], "b": parameters["a"]}))
    assert len(found) == 9


def test_a_section_without_its_target_is_refused():
    with pytest.raises(ValueError, match=r"policy.lora is {'r': 8}, without a _target_; \+policy/lora=default makes it"):
        PolicyOptions(path="hub/model", lora={"r": 8})
