"""Fixtures that all floors share: a tokenizer, a tiny random model in a folder, a cache for warm starts."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test must not wait for a hub

import pytest
import torch

from bapo.policy.tiny_qwen3 import tiny_qwen3
from bapo.policy.tokenizer import character_tokenizer
from bapo.tasks.digit_ops import DigitOps


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
