"""Rollouts from vLLM in this process's charge: its `LLM` runs the model in processes of its own."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from bapo.engines.options import VLLMOptions
from bapo.engines.process import started
from bapo.engines.weight_files import sync_folder, write_adapter, write_weights
from bapo.engines.weight_transfer import WeightTransfer
from bapo.protocols import EngineError
from bapo.types import Adapter, Request, Sample, SamplingParams

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class VLLMRollouts(VLLMOptions):
    """Called with a model: its engine, in processes of this one. Every rank has one of its own, on its own GPU.

    generate_timeout_s: for the responses of one draw.
    """

    generate_timeout_s: float = 7200.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.generate_timeout_s < threading.TIMEOUT_MAX:
            raise ValueError(f"rollout.engine.generate_timeout_s is {self.generate_timeout_s}; it must be > 0 and finite")

    def __call__(
        self,
        model_path: str | Path,
        dtype: torch.dtype = torch.float32,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> VLLMEngine:
        dtype, eos, arguments = self.settle(model_path, dtype, revision, trust_remote_code)
        log.info("starting vLLM: half a minute on a small model, minutes on a large one")
        with ExitStack() as resources:
            folder = resources.enter_context(sync_folder(self.sync_dir))
            llm, processes = resources.enter_context(started(self, arguments))
            return VLLMEngine(self, llm, eos, dtype, folder, processes, resources.pop_all())


class VLLMEngine:
    """Engine on a `vllm.LLM`: asleep or awake, and with a complete set of weights (`version` >= 0) or without."""

    def __init__(
        self,
        options: VLLMRollouts,
        llm: Any,
        eos: Sequence[int],
        dtype: torch.dtype,
        folder: Path,
        processes: Sequence[Any],
        resources: ExitStack,
    ):
        self.options = options
        self.llm = llm
        self.eos = tuple(eos)
        self.dtype = dtype
        self.version = -1
        self.takes_adapter = options.lora_sync == "native"
        self.max_positions: int = llm.llm_engine.model_config.max_model_len
        self.folder = folder
        self._transfer = None if options.weight_sync == "files" else WeightTransfer(options, self._rpc)
        self._adapter: Any = None
        self._adapters = 0
        self._processes = processes
        self._resources = resources  # end with `close`
        self._asleep = False
        self.sleep()

    def _rpc(self, method: str, kwargs: Mapping[str, Any]) -> list[Any]:
        return self.llm.collective_rpc(method, timeout=self.options.timeout_s, kwargs=dict(kwargs))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        with self._updating(version):
            if self._transfer is not None:
                self._transfer.send(weights)
                return
            source = write_weights(self.folder, weights, version, self.dtype)
            try:
                for found, _ in self._rpc("load_policy_weights", {"folder": str(source)}):
                    if found != version:
                        raise RuntimeError(f"the engine took version {found} of the weights, not {version}")
            finally:
                shutil.rmtree(source)

    def load_adapter(self, adapter: Adapter, version: int) -> None:
        """As `load_weights`, for a LoRA policy whose base weights the engine has from its model folder."""
        from vllm.lora.request import LoRARequest

        with self._updating(version):
            # vLLM reads the folder at the first request that names it, and keeps what it has read by its id.
            source = write_adapter(self.folder, adapter, version)
            if self._adapter is not None:
                self.llm.llm_engine.remove_lora(self._adapter.lora_int_id)
                shutil.rmtree(self._adapter.lora_path)
            self._adapters += 1  # never an id that vLLM may have kept
            self._adapter = LoRARequest(f"policy-{version}", self._adapters, str(source))
            self.llm.llm_engine.add_lora(self._adapter)

    @contextmanager
    def _updating(self, version: int) -> Iterator[None]:
        """Wakes up to take weights; when they are all there the cache of the old ones is dropped, and the version is theirs."""
        self.version = -1
        with _engine_errors("could not take the weights"), self._deadline("timeout_s"):
            if self._asleep:
                self.llm.wake_up(tags=["weights"])
            yield
            if self._asleep:
                self.llm.wake_up(tags=["kv_cache"])
                self._asleep = False
            if not self.llm.reset_prefix_cache():
                raise RuntimeError("it still has requests of the weights before, and its prefix cache could not be reset")
        self.version = version

    @contextmanager
    def _deadline(self, option: str) -> Iterator[None]:
        """vLLM waits for its processes for ever. After the option's seconds they are killed, and its wait ends in an error."""
        seconds = getattr(self.options, option)
        late = threading.Event()

        def end() -> None:
            late.set()
            for process in self._processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        except Exception as error:
            if late.is_set():
                raise TimeoutError(f"no answer within rollout.engine.{option}={seconds:g} s") from error
            raise
        finally:
            timer.cancel()

    def sleep(self) -> None:
        """Frees the engine's GPU memory until the next weights come, if it was configured to."""
        if self.options.sleeps and not self._asleep:
            self.llm.sleep(level=self.options.sleep_level)
            self._asleep = True

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Sample]:
        if self._asleep:
            raise RuntimeError("the engine is asleep: load_weights wakes it")
        if self.version < 0:
            raise RuntimeError("the engine holds no complete set of weights: call load_weights first")
        prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
        params = [vllm_sampling(request.seed, sampling, self.eos) for request in requests]
        with _engine_errors("could not generate"), self._deadline("generate_timeout_s"):
            outputs = self.llm.generate(prompts, params, use_tqdm=False, lora_request=self._adapter) if prompts else []
        drawn = [self._rollout(request, output) for request, output in zip(requests, outputs, strict=True)]
        return [rollout for rollout in drawn if rollout is not None]

    def _rollout(self, request: Request, output: Any) -> Sample | None:
        if tuple(output.prompt_token_ids) != request.prompt_ids:
            raise RuntimeError(f"the engine answered another prompt than that of {request.uid!r}")
        (answer,) = output.outputs
        if answer.finish_reason not in ("stop", "length"):
            log.warning("prompt %r, sample %d: vLLM ended it as %r", request.uid, request.sample_index, answer.finish_reason)
            return None
        steps = zip(answer.token_ids, answer.logprobs, strict=True)
        logprobs = [of_step[token].logprob for token, of_step in steps]
        return request.answered(answer.token_ids, logprobs, answer.finish_reason, self.version)

    def close(self) -> None:
        """Ends every process of the engine and takes away what lies in the sync folder. Safe to call again."""
        if self.llm is None:
            return
        with suppress(Exception):  # one that has died cannot be shut down
            self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        self._resources.close()


@contextmanager
def _engine_errors(what: str) -> Iterator[None]:
    """vLLM raises many classes, some of its own; to a run they are one."""
    try:
        yield
    except Exception as error:
        raise EngineError(f"vLLM {what}: {type(error).__name__}: {error}") from error


def vllm_sampling(seed: int, sampling: SamplingParams, eos: Sequence[int]) -> Any:
    """vLLM's own sampling parameters of one request: log-probs of the sampled token only, no text, the given ids end it."""
    from vllm import SamplingParams as VLLMSampling

    return VLLMSampling(
        n=1,
        seed=seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        logprobs=0,
        detokenize=False,
        ignore_eos=True,  # the tokenizer's; those of the generation config count
        stop_token_ids=list(eos),
    )
