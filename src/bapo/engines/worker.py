"""What runs inside vLLM's worker processes: taking new weights. vLLM is given its name only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bapo.engines.weight_files import read_header, read_weights

WORKER = "bapo.engines.worker.PolicyWorker"  # for vLLM's worker_extension_cls


class PolicyWorker:
    """Methods that vLLM adds to its workers; called by name through `collective_rpc`."""

    reload_weights: Any  # vLLM's worker has them
    model_runner: Any
    vllm_config: Any
    policy_version = -1

    def mark_policy(self, version: int) -> None:
        """Notes whose weights are complete here, -1: nobody's. A server's clients ask, as it may have been started anew."""
        self.policy_version = version

    def policy_facts(self) -> dict[str, Any]:
        """What a trainer must know of a server: `mark_policy`'s version, and options that it may have been started without."""
        config = self.vllm_config
        return {
            "version": self.policy_version,
            "max_model_len": config.model_config.max_model_len,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "logprobs_mode": str(config.model_config.logprobs_mode),
            "default_sampling": config.model_config.get_diff_sampling_param(),
            "sleep": bool(config.model_config.enable_sleep_mode),
            "max_lora_rank": config.lora_config.max_lora_rank if config.lora_config else 0,
        }

    def load_policy_weights(self, folder: str) -> list[int]:
        """Takes every weight of a folder of `write_weights`; returns (version, tensors read)."""
        version, tensors = read_header(Path(folder))
        taken = 0

        def counted() -> Any:
            nonlocal taken
            for taken, item in enumerate(read_weights(Path(folder)), start=1):  # noqa: B007
                yield item

        self.reload_weights(weights_iterator=counted())
        if taken != tensors:
            raise RuntimeError(f"{taken} of {tensors} tensors were read")
        self.repack_heads()
        return [version, taken]

    def repack_heads(self) -> None:
        """Some builds multiply by a packed copy of the head, which vLLM's own reload leaves stale where embeddings are tied."""
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        for module in self.model_runner.get_model().modules():
            if isinstance(module, VocabParallelEmbedding):  # ParallelLMHead is one
                module.quant_method.process_weights_after_loading(module)
