"""The rollout engine that draws from vLLM over HTTP, and gets over what can be got over."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bapo.engines.client import ServerClient, ServerFault, ServersGone
from bapo.engines.completions import Completions
from bapo.engines.server_process import ServerProcess
from bapo.engines.server_weights import ServerWeights
from bapo.protocols import EngineError
from bapo.types import Adapter, Request, Sample, SamplingParams

log = logging.getLogger(__name__)


@dataclass
class _Drawing:
    """The requests of a `generate`, by index: bodies that wait for an answer, and what has come."""

    waiting: dict[int, dict[str, Any]]
    answers: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ServerFault] = field(default_factory=dict)
    retries: int = 0


class VLLMServerEngine:
    """Engine on the servers of `client`, shared by all ranks: one rank loads them, the others are told the version.

    A `server` that this run has started is started again when it is gone, gets the newest weights, and is asked again what it
    left unanswered; a request's seed alone decides its response, so nothing changes by it. Servers of others are never started;
    of several, one that does not answer is passed over. `resources` end with `close`. options: a `VLLMServerRollouts`.
    """

    shared = True

    def __init__(
        self,
        options: Any,
        client: ServerClient,
        weights: ServerWeights,
        eos: Sequence[int],
        max_positions: int,
        server: ServerProcess | None,
        resources: ExitStack,
    ):
        self.options = options
        self.client = client
        self.weights = weights
        self.eos = tuple(eos)
        self.max_positions = max_positions
        self.dtype: torch.dtype = weights.dtype
        self.takes_adapter = options.lora_sync == "native"
        self.counters = {"rollout/retries": 0.0, "rollout/engine_restarts": 0.0}
        self.server = server
        self._resources = resources
        self._loads = server is not None  # is it this rank that loads the servers?
        self._restarts = 0
        self._stale = False  # has the server been started again since the last update?

    @property
    def version(self) -> int:
        return self.weights.version

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._load(lambda: self.weights.prepare(weights, version))
        if self.server is None or not self.weights.repeatable:
            self.weights.release()

    def load_adapter(self, adapter: Adapter, version: int) -> None:
        """As `load_weights`, for a LoRA policy whose base weights the servers have from their model folder."""
        self._load(lambda: self.weights.prepare_adapter(adapter, version))

    def _load(self, prepare: Callable[[], None]) -> None:
        self._loads = True
        try:
            prepare()
        except OSError as error:  # no room for the weights
            raise EngineError(str(error)) from error
        self._surviving(self._update)

    def _update(self) -> None:
        self.weights.update()
        self._stale = False

    def set_version(self, version: int) -> None:
        """Another rank has loaded the servers with the weights of this version."""
        self._loads = False
        self.weights.set_version(version)

    def sleep(self) -> None:
        """Frees the servers' GPU memory until the next weights come, if they were configured to and this rank loads them."""
        if self._loads:
            self._surviving(self.weights.sleep)

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Sample]:
        if self.weights.asleep:
            raise RuntimeError("the engine is asleep: load_weights wakes it")
        if self.version < 0:
            raise RuntimeError("the engine holds no complete set of weights: call load_weights first")
        drawing = _Drawing({index: self._body(request, sampling) for index, request in enumerate(requests)})
        before = self._restarts
        if requests:
            self._surviving(lambda: self._draw(drawing))
        restarts = self._restarts - before
        self.counters = {"rollout/retries": float(drawing.retries), "rollout/engine_restarts": float(restarts)}
        if failures := drawing.failures:
            some = f"the first, prompt {requests[min(failures)].uid!r}: {failures[min(failures)]}"
            if not drawing.answers:
                raise EngineError(f"none of {len(requests)} requests succeeded; {some}")
            log.warning("%d of %d requests failed for good; %s", len(failures), len(requests), some)
        drawn = [self._rollout(requests[index], answer) for index, answer in sorted(drawing.answers.items())]
        return [rollout for rollout in drawn if rollout is not None]

    def _draw(self, drawing: _Drawing) -> None:
        """Asks for everything that waits. Raises ServersGone with the rest of it left to ask for again."""
        if self._stale:
            self._update()
        if not drawing.waiting:
            return
        holders = self.weights.holders()
        batch = Completions(self.client, holders)
        try:
            self.client.run(batch.draw(drawing.waiting))
        finally:
            drawing.retries += batch.retries + len(self.client.urls) - len(holders)
            drawing.failures = batch.failures
            drawing.answers |= batch.answers
            for index in batch.answers:
                del drawing.waiting[index]
        self.weights.check_kept(holders)

    def _body(self, request: Request, sampling: SamplingParams) -> dict[str, Any]:
        body = {
            "prompt": list(request.prompt_ids),
            "n": 1,
            "seed": request.seed,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": sampling.max_tokens,
            "logprobs": 0,  # of the sampled token only
            "ignore_eos": True,  # the tokenizer's; those of the generation config count
            "stop_token_ids": list(self.eos),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        return body | ({"model": self.weights.adapter} if self.weights.adapter else {})

    def _rollout(self, request: Request, answer: Any) -> Sample | None:
        try:
            (choice,) = answer["choices"]
            prompt, ids, finish = tuple(choice["prompt_token_ids"]), tuple(choice["token_ids"]), choice["finish_reason"]
            steps = zip(ids, choice["logprobs"]["top_logprobs"], strict=True)
            logprobs = tuple(float(of_step[f"token_id:{token}"]) for token, of_step in steps)
        except (KeyError, TypeError, ValueError) as error:
            what = f"{type(error).__name__}: {error}"
            raise EngineError(f"a server's answer lacks ids, or the log-prob of a sampled token ({what})") from error
        if prompt != request.prompt_ids:
            raise EngineError(f"a server answered another prompt than that of {request.uid!r}")
        if finish not in ("stop", "length"):
            log.warning("prompt %r, sample %d: vLLM ended it as %r", request.uid, request.sample_index, finish)
            return None
        return request.answered(ids, logprobs, finish, self.version)

    def _surviving(self, work: Callable[[], None]) -> None:
        """Does `work`, again after each restart. Whatever else fails is an EngineError."""
        while True:
            try:
                return work()
            except (ServerFault, ServersGone) as error:
                self._recover(error)

    def _recover(self, error: EngineError) -> None:
        """Returns when the run's own server, which was gone, is there again. Raises EngineError if that is not how it is."""
        if self.options.urls or (self.server is not None and (self.client.there() or not self.weights.repeatable)):
            raise EngineError(str(error)) from error
        most = self.options.max_restarts
        if self._restarts >= most:
            raise EngineError(f"{error}; rollout.engine.max_restarts is {most}, and that many there were") from error
        self._restarts += 1
        if self.server is None:
            self._wait_for_another(error)
            return
        count = f"restart {self._restarts} of at most {most}"
        log.warning("the vLLM server is gone (%s); %s. %s", error, count, self.server.tail())
        self.server.stop()
        start_server(self.server, self.client, self.options.start_timeout_s)
        self.weights.asleep, self.weights.adapter = False, None
        self._stale = True

    def _wait_for_another(self, error: EngineError) -> None:
        """The rank that has started the server starts it again and loads it, if it draws too."""
        limit = self.options.start_timeout_s
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            with suppress(ServersGone):
                self.weights.holders()
                return
            time.sleep(1.0)
        raise EngineError(f"{error}; it was not back within rollout.engine.start_timeout_s={limit:g}") from error

    def close(self) -> None:
        """Ends the run's own server and takes away what lies in the sync folder. Safe to call again."""
        self._resources.close()


def start_server(server: ServerProcess, client: ServerClient, timeout_s: float) -> None:
    """Starts the run's own server and returns when it answers. Raises EngineError, with the end of its log, if it does not."""
    server.start()
    server.wait_until(lambda: client.there(attempts=1), timeout_s)
