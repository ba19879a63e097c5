"""Methods inside vLLM's worker processes that take new weights. vLLM is given the name of the class only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bapo.engines.weight_sync import read_header, read_weights

WORKER = "bapo.engines.worker.PolicyWorker"  # for vLLM's worker_extension_cls


class PolicyWorker:
    """Methods that vLLM adds to its workers; called by name through `collective_rpc`."""

    reload_weights: Any  # these three are vLLM's
    model_runner: Any
    vllm_config: Any
    policy_version = -1

    def mark_policy(self, version: int) -> None:
        """Note the version of the complete weights, -1 for none. Clients of a server ask for it."""
        self.policy_version = version

    def policy_facts(self) -> dict[str, Any]:
        """Return the marked version and the options that a server may have been started without."""
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
        """Load every weight of a folder of `write_weights`; return [its version]: servers turn a plain number into text."""
        version, tensors = read_header(Path(folder))
        count = 0

        def counted() -> Any:
            nonlocal count
            for count, item in enumerate(read_weights(Path(folder)), start=1):  # noqa: B007
                yield item

        self.reload_weights(weights_iterator=counted())
        if count != tensors:
            raise RuntimeError(f"{count} of {tensors} tensors were read")
        self.repack_heads()
        return [version]

    def repack_heads(self) -> None:
        """Pack the output head anew: vLLM's CPU build uses a packed copy, which its own reload leaves stale if it is tied."""
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        for module in self.model_runner.get_model().modules():
            if isinstance(module, VocabParallelEmbedding):  # ParallelLMHead is one
                module.quant_method.process_weights_after_loading(module)
