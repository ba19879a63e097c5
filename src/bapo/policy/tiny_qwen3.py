"""A causal language model of the Qwen3 architecture, small enough to train on two CPU cores, with random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import Qwen3Config, Qwen3ForCausalLM


def qwen3_sizes(
    vocab_size: int,
    eos_token_id: int,
    pad_token_id: int,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    num_hidden_layers: int = 2,
    num_attention_heads: int = 2,
    num_key_value_heads: int = 1,
    head_dim: int = 32,
    max_position_embeddings: int = 64,
    tie_word_embeddings: bool = False,
) -> dict[str, Any]:
    """The checked fields of a `Qwen3Config`. ValueError names the size that cannot be."""
    sizes = dict(locals())
    tokens = {name: sizes.pop(name) for name in ("eos_token_id", "pad_token_id")}
    if not isinstance(tie_word_embeddings, bool):
        raise ValueError(f"tie_word_embeddings is {tie_word_embeddings!r}; it must be true or false")
    for name, value in sizes.items():
        if name != "tie_word_embeddings" and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} is {value!r}; it must be an integer >= 1")
    if num_attention_heads % num_key_value_heads:
        bound = f"it must divide num_attention_heads, {num_attention_heads}"
        raise ValueError(f"num_key_value_heads is {num_key_value_heads}; {bound}")
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}; it must be even, for rotary embeddings")
    for name, value in tokens.items():
        if not 0 <= value < vocab_size:
            raise ValueError(f"{name} is {value}; it must be in [0, {vocab_size}), the vocabulary")
    return {**sizes, **tokens, "bos_token_id": None, "dtype": "float32"}


def qwen3_config(vocab_size: int, eos_token_id: int, pad_token_id: int, **sizes: Any) -> Qwen3Config:
    """The config of these sizes; see `qwen3_sizes`."""
    from transformers import Qwen3Config  # seconds of import, not for a config that is refused

    return Qwen3Config(**qwen3_sizes(vocab_size, eos_token_id, pad_token_id, **sizes))


def tiny_qwen3(vocab_size: int, eos_token_id: int, pad_token_id: int, *, seed: int = 0, **sizes: Any) -> Qwen3ForCausalLM:
    """A new float32 model on the CPU. sizes: fields of `qwen3_sizes`, whose defaults make 0.08M parameters.

    `seed` alone decides the weights; the ambient random state is left alone. The generation config stops at EOS and samples
    the bare distribution: its neutral values are written out because an absent `top_k` means 50 to transformers.
    """
    from transformers import GenerationConfig, Qwen3ForCausalLM

    config = qwen3_config(vocab_size, eos_token_id, pad_token_id, **sizes)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # Not torch.manual_seed: it would seed the accelerators too, whose state is not forked here.
        torch.default_generator.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float()
    model.generation_config = GenerationConfig(
        eos_token_id=eos_token_id, pad_token_id=pad_token_id, do_sample=True, temperature=1.0, top_k=0, top_p=1.0
    )
    return model
