"""Settings that both vLLM engines share, and the arguments and environment that vLLM gets for them."""

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
from bapo.protocols import EngineOptions

ENGINE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # those that vLLM knows
NOT_FOR_VLLM = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "VLLM_API_KEY")


@dataclass(frozen=True)
class VLLMOptions(EngineOptions):
    """Settings of a vLLM engine; null leaves a choice to vLLM.

    dtype: of the engine's weights, null for the policy's. sleep_level, on a GPU: 1 frees the engine's GPU memory while the
    trainer works, its weights move to host memory; 2 drops them, as a sync brings them anyway; 0 keeps all. lora_sync: a LoRA
    policy arrives merged into full weights, or as an adapter of rank <= max_lora_rank. weight_sync: by files in `sync_dir`
    (null: shared memory), or by vLLM's own `ipc` (trainer and engine on one GPU) or `nccl` transfer. cpu_kv_cache_gib counts
    without a GPU only, gpu_memory_utilization with one only. timeout_s: for one call of a sync. engine_args: further arguments
    by vLLM's names.
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
        self.check(
            ("dtype", self.dtype is None or self.dtype in ENGINE_DTYPES, f"null or one of {', '.join(ENGINE_DTYPES)}"),
            ("max_model_len", self.max_model_len is None or self.max_model_len >= 2, ">= 2"),
            ("max_num_seqs", self.max_num_seqs >= 1, ">= 1"),
            ("gpu_memory_utilization", 0 < self.gpu_memory_utilization <= 1, "in (0, 1]"),
            ("tensor_parallel_size", self.tensor_parallel_size >= 1, ">= 1"),
            ("max_lora_rank", self.max_lora_rank in LORA_RANKS, f"one of {', '.join(map(str, LORA_RANKS))}"),
            ("cpu_kv_cache_gib", self.cpu_kv_cache_gib >= 1, ">= 1"),
            ("timeout_s", 0 < self.timeout_s < 1e9, "> 0 and below 1e9"),
            ("sync_dir", self.sync_dir is None or Path(self.sync_dir).is_dir(), "null or a folder that exists"),
            ("weight_sync", self.lora_sync == "merged" or self.weight_sync == "files", "files with lora_sync native"),
        )
        if fixed := set(self._own_arguments("", torch.float32)) & set(self.engine_args):
            raise ValueError(f"rollout.engine.engine_args holds {', '.join(sorted(fixed))}: the engine's own options set that")

    def check(self, *conditions: tuple[str, Any, str]) -> None:
        """Raises ValueError for the first (field, condition, bound) that does not hold."""
        for name, holds, bound in conditions:
            if not holds:
                raise ValueError(f"rollout.engine.{name} is {getattr(self, name)!r}; it must be {bound}")

    def require(self) -> None:
        """Raises ValueError if vLLM is not installed, or a setting needs a GPU that is not there."""
        if importlib.util.find_spec("vllm") is None:
            how = "pip install -r requirements-vllm.txt" if torch.cuda.is_available() else "make vllm"
            raise ValueError(f"rollout.engine needs vLLM, which is not installed: {how}")
        self.check(("weight_sync", self.weight_sync == "files" or torch.cuda.is_available(), "'files' without a GPU"))

    @property
    def sleeps(self) -> bool:
        """True if there is GPU memory to free between two rounds of rollouts."""
        return self.sleep_level > 0 and torch.cuda.is_available()

    def arguments(self, model_path: str | Path, dtype: torch.dtype, **source: Any) -> dict[str, Any]:
        """Return the arguments of vLLM's engine by its names. dtype: the policy's; source: revision, trust_remote_code."""
        return self._own_arguments(model_path, dtype, **source) | dict(self.engine_args)

    def _own_arguments(
        self, model_path: str | Path, dtype: torch.dtype, revision: str | None = None, trust_remote_code: bool = False
    ) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "model": str(model_path),
            "revision": revision,
            "tokenizer_revision": revision,
            "trust_remote_code": trust_remote_code,
            "dtype": self.dtype or str(dtype).removeprefix("torch."),
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

    def environment(self, gpus: str | None, more: Mapping[str, str]) -> dict[str, str]:
        """Return the whole environment of the engine's processes. gpus: as in CUDA_VISIBLE_DEVICES, None for all.

        Keeps vLLM's variables that are set here already, and leaves out what would tell vLLM that it is a rank of this run.
        """
        defaults = {
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(self.cpu_kv_cache_gib),
        }
        kept = {name: value for name, value in os.environ.items() if name not in NOT_FOR_VLLM}
        return defaults | kept | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}) | dict(more)


def eos_ids(model_path: str | Path, revision: str | None = None, trust_remote_code: bool = False) -> tuple[int, ...]:
    """Return the ids that end a response, from the model's generation config. Raises ValueError if it has none."""
    from transformers import GenerationConfig

    eos = None
    with suppress(OSError):
        source: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        eos = GenerationConfig.from_pretrained(str(model_path), **source).eos_token_id
    if eos is None:
        raise ValueError(f"{model_path}: generation_config.json names no eos_token_id; responses could never end")
    return tuple(sorted(eos)) if isinstance(eos, list) else (eos,)
