"""Fixtures that all floors share: a tokenizer, a tiny random model in a folder, a cache for warm starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test must not wait for a hub

import pytest
import torch
from hydra.utils import get_object
from support.configs import composed
from support.task_files import local_data
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from bapo.engines.hf import HFEngine
from bapo.engines.vllm import VLLMRollouts
from bapo.engines.vllm_server import VLLMServerRollouts
from bapo.policy.smollm2 import SmolLM2
from bapo.policy.tiny_qwen3 import tiny_qwen3
from bapo.policy.tokenizer import character_tokenizer
from bapo.tasks.arithmetic import Arithmetic
from bapo.tasks.dataset import DatasetTask
from bapo.tasks.digit_ops import DigitOps
from bapo.tasks.reasoning_gym import ReasoningGym


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer():
    task = DigitOps()
    return character_tokenizer(task.alphabet, task.eos)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Path:
    """A random Qwen3 of a few thousand parameters with its tokenizer, as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("tiny_model")
    model = tiny_qwen3(
        len(tokenizer),
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of all tests keep their warm start."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pictures are two thirds of the time of so short a run."""
    monkeypatch.setattr("bapo.analysis.report.write_report", lambda folder: folder / "report.html")


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model that reads any text, a token per byte, with a chat template that can think."""
    backend = Tokenizer(BPE({symbol: index for index, symbol in enumerate(sorted(ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}{{ '' if enable_thinking else '<>' }}"
    )
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "max_position_embeddings": 10_240}
    folder = tmp_path_factory.mktemp("byte_model")
    tiny_qwen3(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def stand_ins(byte_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Called with a command line: what it trains with here, whatever model, data, engine or device it asks for."""

    def engine(self: Any, model_path: Path, **load: Any) -> HFEngine:
        return HFEngine(model_path, 64, "cpu", **load)

    def replaced(*overrides: str) -> list[str]:
        for rollouts in (VLLMRollouts, VLLMServerRollouts):
            monkeypatch.setattr(rollouts, "__call__", engine)
            monkeypatch.setattr(rollouts, "require", lambda self: None)
        monkeypatch.setattr(SmolLM2, "__call__", lambda self, task: byte_model)
        cfg, more = composed(*overrides), []
        if cfg.trainer.accelerator == "gpu":
            more += ["trainer.accelerator=cpu", "trainer.devices=1", "trainer.strategy=auto"]
        if cfg.policy.warm_start is None:
            more += [f"policy.path={byte_model}"]
        more += local_data(cfg.task.get("name", ""), tmp_path)
        if cfg.policy.warm_start is None or cfg.policy.warm_start._target_.endswith("SmolLM2"):  # the model knows nothing
            own = get_object(cfg.task._target_)
            for task in {DatasetTask, Arithmetic, ReasoningGym, own}:
                monkeypatch.setattr(task, "verify", lambda self, prompts, responses: [len(said) % 2 for said in responses])
            more += ["rollout.max_prompt_tokens=512"]  # a token per byte
        return more

    return replaced
