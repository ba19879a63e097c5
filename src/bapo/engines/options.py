"""What both vLLM engines can be told, and what vLLM is told for it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from bapo.engines.worker import WORKER

ENGINE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # those that vLLM knows


@dataclass(frozen=True)
class VLLMOptions:
    """Of a vLLM engine; null leaves a choice to vLLM.

    dtype: of the engine's weights, null for the policy's. sleep_level, on a GPU: 1 frees the engine's GPU memory while the
    trainer works, its weights wait in host memory; 2 drops them, as a sync brings them anyway; 0 keeps all. lora_sync: how a
    LoRA policy gets there, merged into full weights or as an adapter of rank <= max_lora_rank. weight_sync: by files in
    `sync_dir` (null: shared memory), or by vLLM's own `ipc` (trainer and engine on one GPU) or `nccl` transfer.
    cpu_kv_cache_gib counts without a GPU only, gpu_memory_utilization with one only. timeout_s: for one sync. engine_args:
    further arguments by vLLM's names.
    """

    dtype: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    sleep_level: Literal[0, 1, 2] = 0
    lora_sync: Literal["merged", "native"] = "merged"
    max_lora_rank: int = 64
    weight_sync: Literal["files", "ipc", "nccl"] = "files"
    sync_dir: str | None = None
    cpu_kv_cache_gib: int = 1
    timeout_s: float = 600.0
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError for what vLLM itself would refuse late, or not at all."""
        for name, ok, bound in (
            ("dtype", self.dtype is None or self.dtype in ENGINE_DTYPES, f"null or one of {', '.join(ENGINE_DTYPES)}"),
            ("max_model_len", self.max_model_len is None or self.max_model_len >= 2, ">= 2"),
            ("max_num_seqs", self.max_num_seqs >= 1, ">= 1"),
            ("gpu_memory_utilization", 0 < self.gpu_memory_utilization <= 1, "in (0, 1]"),
            ("tensor_parallel_size", self.tensor_parallel_size >= 1, ">= 1"),
            ("max_lora_rank", self.max_lora_rank in LORA_RANKS, f"one of {', '.join(map(str, LORA_RANKS))}"),
            ("cpu_kv_cache_gib", self.cpu_kv_cache_gib >= 1, ">= 1"),
            ("timeout_s", 0 < self.timeout_s < 1e9, "> 0 and below 1e9"),
            ("sync_dir", self.sync_dir is None or Path(self.sync_dir).is_dir(), "null or a folder that exists"),
        ):
            if not ok:
                raise ValueError(f"rollout.engine.{name} is {getattr(self, name)!r}; it must be {bound}")
        if self.lora_sync == "native" and self.weight_sync != "files":
            raise ValueError(f"rollout.engine.weight_sync is {self.weight_sync!r}; with lora_sync native it must be files")
        if fixed := set(self.arguments("", torch.float32)) & set(self.engine_args):
            raise ValueError(f"rollout.engine.engine_args holds {', '.join(sorted(fixed))}: the engine's own options set that")

    @property
    def sleeps(self) -> bool:
        """Is there GPU memory to free between refills?"""
        return self.sleep_level > 0 and torch.cuda.is_available()

    def arguments(
        self, model_path: str | Path, dtype: torch.dtype, revision: str | None = None, trust_remote_code: bool = False
    ) -> dict[str, Any]:
        """Arguments of vLLM's engine by its names, but for `engine_args`."""
        arguments: dict[str, Any] = {
            "model": str(model_path),
            "revision": revision,
            "tokenizer_revision": revision,
            "trust_remote_code": trust_remote_code,
            "dtype": str(dtype).removeprefix("torch."),
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "tensor_parallel_size": self.tensor_parallel_size,
            "enforce_eager": self.enforce_eager,
            "seed": 0,  # every request brings its own
            "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled, temperature included
            "generation_config": "vllm",  # the model's own sampling defaults must not creep in
            "worker_extension_cls": WORKER,
        }
        if self.sleeps:
            arguments["enable_sleep_mode"] = True
        if self.lora_sync == "native":
            arguments |= {"enable_lora": True, "max_lora_rank": self.max_lora_rank, "max_loras": 1}
        if self.weight_sync != "files":
            arguments["weight_transfer_config"] = {"backend": self.weight_sync}
        return arguments

    def settle(
        self, model_path: str | Path, policy_dtype: torch.dtype, revision: str | None, trust_remote_code: bool
    ) -> tuple[torch.dtype, tuple[int, ...], dict[str, Any]]:
        """For a model: the engine's dtype, the ids that end a response, and all arguments of vLLM's engine."""
        dtype = ENGINE_DTYPES[self.dtype] if self.dtype else policy_dtype
        eos = eos_ids(model_path, revision, trust_remote_code)
        return dtype, eos, {**self.arguments(model_path, dtype, revision, trust_remote_code), **self.engine_args}

    def environment(self) -> dict[str, str]:
        """What vLLM takes from the environment; what is set there already stays."""
        wanted = {
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(self.cpu_kv_cache_gib),
        }
        return {name: value for name, value in wanted.items() if name not in os.environ}

    def require_vllm(self) -> None:
        """ValueError where vLLM is not there, or what was asked of it needs a GPU that is not."""
        if importlib.util.find_spec("vllm") is None:
            how = "pip install -r requirements-vllm.txt" if torch.cuda.is_available() else "make vllm"
            raise ValueError(f"rollout.engine needs vLLM, which is not installed: {how}")
        if self.weight_sync != "files" and not torch.cuda.is_available():
            raise ValueError(f"rollout.engine.weight_sync is {self.weight_sync!r}; without a GPU it must be 'files'")


def eos_ids(model_path: str | Path, revision: str | None, trust_remote_code: bool) -> tuple[int, ...]:
    """The ids that end a response, as the model's generation config has them. Raises ValueError if it has none."""
    from transformers import GenerationConfig

    eos = None
    with suppress(OSError):
        source: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        eos = GenerationConfig.from_pretrained(str(model_path), **source).eos_token_id
    if eos is None:
        raise ValueError(f"{model_path}: generation_config.json names no eos_token_id; responses could never end")
    return tuple(sorted(eos)) if isinstance(eos, list) else (eos,)
