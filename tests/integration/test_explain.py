"""explain=true: numbers by hand, nothing loaded, nothing left behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import REPOSITORY
from support.configs import CONF, parts_of
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from bapo.engines.options import VLLMOptions
from bapo.policy.smollm2 import SmolLM2
from bapo.sft.warm_start import WarmStart
from bapo.training import explain as report
from bapo.training.explain import (
    Line,
    data_lines,
    engine_lines,
    explain,
    model_config,
    policy_sizes,
    source_lines,
    trainer_lines,
)

QWEN3_06B = Qwen3Config(
    vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960, tie_word_embeddings=True,
)  # fmt: skip
LLAMA_3B = LlamaConfig(
    vocab_size=128_256, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=131_072, tie_word_embeddings=True,
)  # fmt: skip
QWEN2_7B = Qwen2Config(
    vocab_size=152_064, hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28, num_attention_heads=28,
    num_key_value_heads=4, max_position_embeddings=131_072, tie_word_embeddings=False,
)  # fmt: skip
QWEN2_32B = Qwen2Config(
    vocab_size=152_064, hidden_size=5120, intermediate_size=27_648, num_hidden_layers=64, num_attention_heads=40,
    num_key_value_heads=8, max_position_embeddings=131_072, tie_word_embeddings=False,
)  # fmt: skip
PUBLIC = {
    "bapo_qwen06b": QWEN3_06B,
    "bapo_qwen06b_lora": QWEN3_06B,
    "bapo_octothinker_3b": LLAMA_3B,
    "bapo_r1_distill_7b": QWEN2_7B,
    "bapo_r1_distill_32b": QWEN2_32B,
}
"""The public configs of the models of the experiments that need a hub."""
GIB = 2**30


def values(lines: list[Line]) -> dict[str, int | str]:
    return {line.name: line.value for line in lines}


@pytest.fixture(autouse=True)
def vllm_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VLLMOptions, "require", lambda self: None)


def explained(*overrides: str) -> dict[str, Any]:
    return parts_of("explain=true", *overrides)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading, making or drawing fails the test."""

    def fail(*args: Any, **kwargs: Any) -> None:
        pytest.fail("something was loaded")

    for owner, name in (
        (transformers.AutoModelForCausalLM, "from_pretrained"),
        (transformers.AutoTokenizer, "from_pretrained"),
        (WarmStart, "__call__"),
    ):
        monkeypatch.setattr(owner, name, fail)


TINY = (
    "rollout.prompts_per_round=6", "rollout.group_size=4", "rollout.sampling.max_tokens=10", "rollout.max_prompt_tokens=8",
    "rollout.engine.batch_size=12", "rollout.max_attempts=2", "schedule.epochs_per_round=3", "schedule.minibatches_per_epoch=4",
    "trainer.max_rounds=5", "trainer.micro_batch_tokens=30", "policy.chunk_tokens=16", "policy.warm_start.model.hidden_size=8",
    "policy.warm_start.model.intermediate_size=10", "policy.warm_start.model.num_hidden_layers=2",
    "policy.warm_start.model.num_attention_heads=2", "policy.warm_start.model.num_key_value_heads=1",
    "policy.warm_start.model.head_dim=6",
)  # fmt: skip


@pytest.mark.usefixtures("no_model")
def test_data_and_updates_of_a_tiny_run_by_hand() -> None:
    assert values(data_lines(explained(*TINY))) == {
        "responses per round": 24,
        "responses generated for it": 48,
        "response tokens per round": 240,
        "updates per round": 12,
        "responses per update": 6,
        "response tokens per update": 60,
        "staleness, in updates": "0 .. 11",
        "rounds": 5,
        "updates": 60,
        "responses": 120,
    }


@pytest.mark.usefixtures("no_model")
def test_staleness_with_every_option_set() -> None:
    stale = ("schedule.lag=2", "+schedule/replay=default", "schedule.replay.groups=3", "schedule.replay.rounds=2")
    stale += ("+rollout/partial=default", "rollout.partial.tokens_per_round=4", "rollout.partial.max_spans=3")
    found = values(data_lines(explained(*TINY, *stale, "schedule.max_staleness=50")))
    assert found["responses per update"] == (6 + 3) * 4 // 4
    assert [found[name] for name in found if name.startswith(("staleness", "  "))] == [
        "24 .. 35",
        "0 .. 11",
        "up to 59",
        "higher",
        50,
    ]


@pytest.mark.usefixtures("no_model")
def test_memory_of_a_tiny_run_by_hand() -> None:
    """Vocabulary 20: digits, six operations, "=", "x", EOS and padding. Embedding and head are two matrices here."""
    parts = explained(*TINY)
    sizes = policy_sizes(parts["policy"], model_config(parts["policy"], parts["task"]))
    attention = 8 * 12 + 2 * 8 * 6 + 12 * 8 + 6 + 6  # q, k and v, o, and the norms of q and k
    mlp, norms = 3 * 8 * 10, 2 * 8
    parameters = 2 * 20 * 8 + 2 * (attention + mlp + norms) + 8
    assert parameters == 1440
    assert (sizes.parameters, sizes.trained, sizes.layers, sizes.kv_width) == (parameters, parameters, 2, 6)
    layer = 48 * 12 + 16 * 10  # the heads together, 12, are wider than the residual stream, 8
    assert values(trainer_lines(parts, sizes)) == {
        "weights": 4 * 1440,
        "gradients": 4 * 1440,
        "AdamW states": 8 * 1440,
        "largest logits chunk": 4 * 16 * 20,
        "copies of it": 4 * 4 * 16 * 20,
        "activations": 30 * 2 * layer,  # 30 tokens: the budget; the longest sequence has 18
        "together": 16 * 1440 + 5 * 4 * 16 * 20 + 30 * 2 * layer,
    }
    assert values(engine_lines(parts, sizes)) == {
        "weights": 4 * 1440,
        "KV cache of a token": 2 * 2 * 6 * 4,
        "KV cache of a sequence": 96 * 18,
        "KV cache of all at once": 96 * 18 * 12,
    }


@pytest.mark.usefixtures("no_model")
def test_what_is_added_shows() -> None:
    more = (
        "objective.reference_kl=0.1",
        "trainer.devices=2",
        "trainer.precision=bf16-mixed",
        "policy.gradient_checkpointing=true",
    )
    parts = explained(*TINY, *more)
    sizes = policy_sizes(parts["policy"], model_config(parts["policy"], parts["task"]))
    lines = values(trainer_lines(parts, sizes))
    assert lines["reference model"] == lines["buckets of DDP"] == 4 * 1440
    assert lines["bfloat16 copies"] == 2 * 1440
    assert lines["activations"] == 30 * (2 * 4 * 8 + 41 * 12 + 8 * 10)


@pytest.mark.usefixtures("no_model")
def test_numbers_of_qwen3_06b_by_hand() -> None:
    parts = explained("+experiment=bapo_qwen06b")
    sizes = policy_sizes(parts["policy"], QWEN3_06B)
    layer = 1024 * 2048 + 2 * 1024 * 1024 + 2048 * 1024 + 2 * 128 + 3 * 1024 * 3072 + 2 * 1024
    assert sizes.parameters == 596_049_920 == 151_936 * 1024 + 28 * layer + 1024
    lines = values(trainer_lines(parts, sizes))
    assert (lines["weights"], lines["gradients"], lines["AdamW states"]) == (2_384_199_680, 2_384_199_680, 4_768_399_360)
    assert lines["largest logits chunk"] == 1024 * 151_936 * 4
    engine = values(engine_lines(parts, sizes))
    assert engine["weights"] == engine["files of a sync"] == 1_192_099_840
    assert engine["KV cache of a token"] == 114_688
    assert engine["KV cache of a sequence"] == 114_688 * 1536
    assert engine["KV cache of all at once"] == 114_688 * 1536 * 128


@pytest.mark.usefixtures("no_model")
def test_lora_counts_adapters_alone_where_only_they_are_trained() -> None:
    parts = explained("+experiment=bapo_qwen06b_lora")
    sizes = policy_sizes(parts["policy"], QWEN3_06B)
    q, kv, o, gate, down = 1024 + 2048, 1024 + 1024, 2048 + 1024, 1024 + 3072, 3072 + 1024
    adapters = 16 * 28 * (q + 2 * kv + o + 2 * gate + down)
    assert sizes.trained == adapters == 10_092_544
    assert sizes.parameters == 596_049_920
    lines = values(trainer_lines(parts, sizes))
    assert lines["weights"] == 2 * 596_049_920 + 4 * adapters  # bfloat16, with adapters in float32
    assert (lines["gradients"], lines["AdamW states"]) == (4 * adapters, 8 * adapters)
    assert values(engine_lines(parts, sizes))["files of a sync"] == 4 * adapters
    merged = explained("+experiment=bapo_qwen06b_lora", "rollout.engine.lora_sync=merged")
    assert values(engine_lines(merged, sizes))["files of a sync"] == 2 * 596_049_920


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("name", [*PUBLIC, "bapo_smollm2"])
def test_the_header_of_an_experiment_says_what_explain_says(name: str) -> None:
    text = (CONF / "experiment" / f"{name}.yaml").read_text()
    header = re.sub(r"\s*\n# ?", " ", text.split("defaults:")[0])
    parts = explained(f"+experiment={name}")
    sizes = policy_sizes(parts["policy"], PUBLIC.get(name) or SmolLM2().config(None))
    lines = values(trainer_lines(parts, sizes))
    (said,) = re.findall(r"trainer ([\d.]+) GiB", header)
    assert float(said) == round(int(lines["together"]) / GIB, 1)
    counts = {int(found.replace(",", "")) for found in re.findall(r"\d+(?:,\d{3}){2,}", header)}
    assert counts <= {sizes.parameters, sizes.trained}
    assert counts or name == "bapo_smollm2"
    assert all(len(line) <= 128 for line in text.splitlines())


def test_the_estimate_of_activations_is_near_what_a_layer_keeps() -> None:
    """Counted: every tensor that autograd keeps, weights aside, per token and layer of Qwen3 models."""
    for hidden, intermediate, heads in ((256, 768, 4), (512, 768, 8), (256, 1536, 4)):
        kept = []
        for layers in (1, 3):
            config = Qwen3Config(
                vocab_size=64, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
                num_attention_heads=heads, num_key_value_heads=heads // 2, head_dim=64, max_position_embeddings=256,
            )  # fmt: skip
            model = transformers.Qwen3Model(config)
            own = {p.untyped_storage().data_ptr() for p in model.parameters()}
            seen: dict[int, torch.Tensor] = {}

            def keep(tensor: torch.Tensor, own: set[int] = own, seen: dict[int, torch.Tensor] = seen) -> torch.Tensor:
                if tensor.untyped_storage().data_ptr() not in own:
                    seen[tensor.untyped_storage().data_ptr()] = tensor
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                model(input_ids=torch.zeros(2, 75, dtype=torch.int64), use_cache=False).last_hidden_state.sum()
            kept.append(sum(tensor.untyped_storage().nbytes() for tensor in seen.values()))
        per_hidden, per_intermediate = report.KEPT["float32"]
        assert (kept[1] - kept[0]) / 2 / 150 == pytest.approx(per_hidden * hidden + per_intermediate * intermediate, rel=0.02)


EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_is_explained_without_a_hub(name: str) -> None:
    text = explain(explained(f"+experiment={name}"))
    if name in PUBLIC:
        assert re.search(r"parameters +unknown +OSError: We couldn't connect", text)
        assert re.search(r"model +from the hub +\S+/\S+, revision", text)
        assert re.search(r"data +from the hub +openai/gsm8k, revision e53f048", text)
    else:
        assert re.search(r"parameters +[\d,]+ ", text)
        assert re.search(r"together +[\d.]+ [MG]iB", text)
        assert re.search(r"model +made here", text)
        assert re.search(r"data +made here", text)


@pytest.mark.usefixtures("no_model")
def test_a_local_model_is_read_from_its_config_alone(tmp_path: Path) -> None:
    QWEN3_06B.save_pretrained(tmp_path)
    text = explain(explained("+experiment=bapo_qwen06b", f"policy.path={tmp_path}"))
    assert re.search(r"parameters +596,049,920", text)
    assert re.search(rf"model +local +{tmp_path}", text)


@pytest.mark.usefixtures("no_model")
def test_code_of_a_model_never_runs(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config: dict[str, Any] = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
    PretrainedConfig.from_dict(config).save_pretrained(tmp_path)
    text = explain(explained("policy=hub", f"policy.path={tmp_path}", "policy.trust_remote_code=true"))
    assert re.search(r"parameters +unknown +\w+: ", text)
    assert not (tmp_path / "ran").exists()


@pytest.mark.usefixtures("no_model")
def test_local_data_is_local(tmp_path: Path) -> None:
    parts = explained("policy=hub", "policy.path=owner/model", "task=gsm8k", f"task.path={tmp_path}")
    assert [(line.name, line.value, line.how) for line in source_lines(parts, None)] == [
        ("model", "from the hub", "owner/model, revision newest, unless it is in the hub's cache"),
        ("data", "local", str(tmp_path)),
    ]


def test_sizes_are_written_in_a_unit_that_fits() -> None:
    shown = [str(Line("x", size, "", bytes=True)).split()[1:3] for size in (96, 2**20, 3 * 2**29)]
    assert shown == [["0.09", "KiB"], ["1.00", "MiB"], ["1.50", "GiB"]]
    assert str(Line("x", 1234567, "")).split()[1] == "1,234,567"


def test_the_command_says_it_and_leaves_nothing(tmp_path: Path) -> None:
    """A warning on the way (top_p) goes into the log, which goes too; a GPU need not be here."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    overrides = ["+experiment=smoke", "rollout.sampling.top_p=0.9", "trainer=gpu", "trainer.devices=64", "explain=true"]
    command = [sys.executable, str(REPOSITORY / "train.py"), *overrides]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"responses per round +64 +prompts 16 \* G 4", done.stdout)
    assert "top_p" in done.stdout + done.stderr
    assert not list(tmp_path.glob("outputs/**/*"))
