"""The part that both vLLM engines share: sleep, syncs, and the check of every answer."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from bapo.engines.options import ENGINE_DTYPES, VLLMOptions
from bapo.engines.weight_sync import WeightTransfer, save_adapter, write_weights
from bapo.protocols import Engine, EngineError
from bapo.types import Adapter, Sample, SamplingParams

log = logging.getLogger(__name__)

RESET_S = 10.0  # how long requests that the trainer has dropped may keep the prefix cache in use


@dataclass(frozen=True)
class Answer:
    """vLLM's answer to one sample: the prompt it read, and the tokens it generated with the log-probs of each step by id."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    steps: Sequence[Mapping[int, float]] | None
    finish_reason: str


class VLLMEngine(Engine):
    """Asleep or awake, with a complete set of weights (`version` >= 0) or without. Subclasses reach vLLM in their way.

    folder: for weights on their way. resources: end with `close`; the caller fills it.
    """

    def __init__(self, options: VLLMOptions, dtype: str, eos: Sequence[int], max_positions: int, folder: Path):
        self.options = options
        self.dtype = ENGINE_DTYPES[dtype]
        self.eos = tuple(eos)
        self.max_positions = max_positions
        self.takes_adapter = options.lora_sync == "native"
        self.folder = folder
        self.version = -1
        self.asleep = False
        self.resources = ExitStack()
        self._transfer = None
        if options.weight_sync != "files":
            self._transfer = WeightTransfer(options.weight_sync, options.tensor_parallel_size, self.rpc)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        with self._update(version):
            self.serve_adapter(None, None)  # full weights have it merged
            if self._transfer is not None:
                self._transfer.send(weights)
                return
            source = write_weights(self.folder, weights, version, self.dtype)
            for (loaded,) in self.rpc("load_policy_weights", folder=str(source)):
                if loaded != version:
                    raise RuntimeError(f"the engine took version {loaded} of the weights, not {version}")
            self._empty_folder()

    def load_adapter(self, adapter: Adapter, version: int) -> None:
        """Load a LoRA adapter on top of the base weights that the engine has from its model folder."""
        with self._update(version):
            source = Path(tempfile.mkdtemp(prefix=f"adapter-{version}-", dir=self.folder))
            save_adapter(source, adapter)
            self.serve_adapter(f"policy-{version}", source)  # vLLM may read the files as late as at the first request

    @contextmanager
    def _update(self, version: int) -> Iterator[None]:
        """Wake the engine for new weights; once all are there, drop the prefix cache of the old ones and note the version."""
        self.version = -1
        with self._errors("could not take the weights"):
            self._empty_folder()
            if self.asleep:
                self.wake_up("weights")
            self.rpc("mark_policy", version=-1)
            yield
            if self.asleep:
                self.wake_up("kv_cache")
                self.asleep = False
            deadline = time.monotonic() + RESET_S
            while not self.reset_prefix_cache():
                if time.monotonic() > deadline:
                    raise RuntimeError("requests of earlier weights are still running: its prefix cache could not be reset")
                time.sleep(0.2)
            self.rpc("mark_policy", version=version)
        self.version = version

    def _empty_folder(self) -> None:
        for leftover in filter(Path.is_dir, self.folder.iterdir()):
            shutil.rmtree(leftover)

    def sleep(self) -> None:
        """Free the engine's GPU memory until the next weights come, if it was configured to."""
        if self.options.sleeps and not self.asleep:
            with self._errors("could not sleep"):
                self.fall_asleep(self.options.sleep_level)
            self.asleep = True

    def generate(self, samples: Sequence[Sample], sampling: SamplingParams) -> list[Sample]:
        if self.asleep:
            raise RuntimeError("the engine is asleep: load_weights wakes it")
        if self.version < 0:
            raise RuntimeError("the engine holds no complete set of weights: call load_weights first")
        if not samples:
            return []
        with self._errors("could not generate"):
            answers = self.complete(samples, sampling)
            extended = [self._extended(sample, answer) for sample, answer in zip(samples, answers, strict=True) if answer]
        return [sample for sample in extended if sample is not None]

    def _extended(self, sample: Sample, answer: Answer) -> Sample | None:
        if tuple(answer.prompt_ids) != sample.input_ids:
            raise RuntimeError(f"it answered another prompt than that of {sample.uid!r}")
        if answer.finish_reason not in ("stop", "length"):
            log.warning("prompt %r, sample %d: vLLM ended it as %r", *sample.key, answer.finish_reason)
            return None
        finish_reason: Any = answer.finish_reason
        try:
            logprobs = [step[token] for token, step in zip(answer.response_ids, answer.steps or (), strict=True)]
        except (KeyError, ValueError) as error:
            raise RuntimeError(f"its answer to {sample.uid!r} lacks the log-prob of a sampled token") from error
        return sample.extended(answer.response_ids, logprobs, finish_reason, self.version)

    def request(self, sample: Sample, sampling: SamplingParams) -> dict[str, Any]:
        """Return vLLM's sampling parameters of one sample."""
        return {
            "n": 1,
            "seed": sample.seed,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": sampling.max_tokens,
            "logprobs": 0,  # of the sampled token only
            "ignore_eos": True,  # the tokenizer's; those of the generation config count
            "stop_token_ids": list(self.eos),
        }

    @contextmanager
    def _errors(self, failure: str) -> Iterator[None]:
        """Turn every error of vLLM, the network or the disk into an EngineError."""
        try:
            yield
        except Exception as error:
            raise EngineError(f"vLLM {failure}: {type(error).__name__}: {error}{self.last_words()}") from error

    def close(self) -> None:
        """End the engine's processes and remove its folders. Idempotent."""
        self.resources.close()

    # The ways to vLLM.

    def rpc(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method of every worker; return their answers."""
        raise NotImplementedError

    def wake_up(self, tag: str) -> None:
        """Bring the memory of the "weights" or the "kv_cache" back."""
        raise NotImplementedError

    def fall_asleep(self, level: int) -> None:
        """Free the GPU memory."""
        raise NotImplementedError

    def reset_prefix_cache(self) -> bool:
        """Drop the prefix cache; False while requests use it."""
        raise NotImplementedError

    def serve_adapter(self, name: str | None, source: Path | None) -> None:
        """Generate with the adapter in the folder `source` instead of the one before; None for none."""
        raise NotImplementedError

    def complete(self, samples: Sequence[Sample], sampling: SamplingParams) -> Sequence[Answer | None]:
        """Continue every sample; None where that failed for good."""
        raise NotImplementedError

    def last_words(self) -> str:
        """Return the end of the engine's log for an error message, if there is one."""
        return ""
