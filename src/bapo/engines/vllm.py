"""vLLM run by this process: its `LLM` holds the model in processes of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bapo.engines.options import VLLMOptions, eos_ids
from bapo.engines.process import local_llm
from bapo.engines.vllm_engine import Answer, VLLMEngine
from bapo.engines.weight_sync import sync_folder
from bapo.types import Sample, SamplingParams

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class VLLMRollouts(VLLMOptions):
    """Called with a model: its engine, in processes of this one. Every rank has one of its own, on its own GPU.

    generate_timeout_s: for all samples of one `generate`.
    """

    generate_timeout_s: float = 7200.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(("generate_timeout_s", 0 < self.generate_timeout_s < threading.TIMEOUT_MAX, "> 0 and finite"))

    def __call__(self, model_path: str | Path, dtype: torch.dtype = torch.float32, **source: Any) -> LocalVLLM:
        eos = eos_ids(model_path, **source)
        arguments = self.arguments(model_path, dtype, **source)
        log.info("starting vLLM: half a minute on a small model, minutes on a large one")
        with ExitStack() as resources:
            folder = resources.enter_context(sync_folder(self.sync_dir))
            llm, watchdog = resources.enter_context(local_llm(self, arguments))
            engine = LocalVLLM(self, llm, watchdog.kill, arguments["dtype"], eos, folder)
            engine.sleep()
            engine.resources = resources.pop_all()
            return engine


class LocalVLLM(VLLMEngine):
    """Engine on a `vllm.LLM`. kill: ends its processes."""

    options: VLLMRollouts

    def __init__(self, options: VLLMRollouts, llm: Any, kill: Callable[[], None], dtype: str, eos: Sequence[int], folder: Path):
        super().__init__(options, dtype, eos, llm.llm_engine.model_config.max_model_len, folder)
        self.llm = llm
        self._kill = kill
        self._adapter: Any = None
        self._adapters = 0

    def _within(self, option: str, call: Callable[[], Any]) -> Any:
        """Call vLLM, which waits for its processes for ever. After the option's seconds they are killed, and its wait fails."""
        seconds, late = getattr(self.options, option), threading.Event()

        def end() -> None:
            late.set()
            self._kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            return call()
        except Exception as error:
            if late.is_set():
                raise TimeoutError(f"no answer within rollout.engine.{option}={seconds:g} s") from error
            raise
        finally:
            timer.cancel()

    def rpc(self, method: str, **arguments: Any) -> list[Any]:
        return self._within("timeout_s", lambda: self.llm.collective_rpc(method, kwargs=arguments))

    def wake_up(self, tag: str) -> None:
        self._within("timeout_s", lambda: self.llm.wake_up(tags=[tag]))

    def fall_asleep(self, level: int) -> None:
        self._within("timeout_s", lambda: self.llm.sleep(level=level))

    def reset_prefix_cache(self) -> bool:
        return self._within("timeout_s", self.llm.reset_prefix_cache)

    def serve_adapter(self, name: str | None, source: Path | None) -> None:
        if self._adapter is not None:
            self._within("timeout_s", lambda: self.llm.llm_engine.remove_lora(self._adapter.lora_int_id))
            self._adapter = None
        if name is not None:
            from vllm.lora.request import LoRARequest

            self._adapters += 1  # an id for every version, as vLLM keeps what it has read under its id
            adapter = LoRARequest(name, self._adapters, str(source))
            self._within("timeout_s", lambda: self.llm.llm_engine.add_lora(adapter))
            self._adapter = adapter

    def complete(self, samples: Sequence[Sample], sampling: SamplingParams) -> list[Answer]:
        from vllm import SamplingParams as VLLMSampling

        prompts = [{"prompt_token_ids": list(sample.input_ids)} for sample in samples]
        params = [VLLMSampling(**self.request(sample, sampling), detokenize=False) for sample in samples]
        outputs = self._within(
            "generate_timeout_s",
            lambda: self.llm.generate(prompts, params, use_tqdm=False, lora_request=self._adapter),
        )
        return [_answer(output) for output in outputs]


def _answer(output: Any) -> Answer:
    (response,) = output.outputs
    steps = [{token: entry.logprob for token, entry in step.items()} for step in response.logprobs or ()]
    return Answer(output.prompt_token_ids, response.token_ids, steps, response.finish_reason)
