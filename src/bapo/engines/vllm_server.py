"""vLLM's OpenAI-compatible server: one that the run starts, or those that run already at given urls."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bapo.engines.auth import KEY_VARIABLE
from bapo.engines.client import CONNECT_S, RPC, ServerClient, ServerFault, is_loopback
from bapo.engines.options import VLLMOptions, eos_ids
from bapo.engines.process import ServerProcess
from bapo.engines.server_check import OWN_ARGUMENTS, check_servers, server_command, switches
from bapo.engines.vllm_engine import Answer, VLLMEngine
from bapo.engines.weight_sync import sync_folder
from bapo.types import Sample, SamplingParams

log = logging.getLogger(__name__)

SOCKET_VARIABLE = "BAPO_VLLM_SOCKET"  # tells the other ranks of a run where the server listens that rank 0 has started


@dataclass(frozen=True)
class VLLMServerRollouts(VLLMOptions):
    """Called with a model: the engine of a vLLM server that all ranks share.

    urls: of servers that run already, with the same model; requests are spread evenly over them. None: the run starts one,
    which listens on a Unix socket that only this user can reach, on the GPUs `gpus` (as in CUDA_VISIBLE_DEVICES; null: this
    process's), ready within `start_timeout_s`. api_key_env: the environment variable with the key of `urls`.
    request_timeout_s: of one HTTP request; max_retries: of a request whose connection breaks or whose server is busy;
    concurrency: requests under way, per server.
    """

    urls: list[str] = field(default_factory=list)
    api_key_env: str = KEY_VARIABLE
    gpus: str | None = None
    start_timeout_s: float = 600.0
    request_timeout_s: float = 600.0
    max_retries: int = 3
    concurrency: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "urls", [url.rstrip("/") for url in self.urls])
        secret = re.fullmatch(r"[A-Z][A-Z0-9_]*", self.api_key_env) and re.search("KEY|TOKEN|SECRET", self.api_key_env)
        named = re.fullmatch(r"[\w-]+(,[\w-]+)*", self.gpus or "")
        gpus = self.gpus is None or (named and self.gpus.count(",") + 1 >= self.tensor_parallel_size)
        self.check(
            ("urls", len(set(self.urls)) == len(self.urls), "a list in which every url differs"),
            ("api_key_env", secret, "an environment variable with KEY, TOKEN or SECRET in its name: logs hide its value"),
            ("gpus", gpus, f"null or like 0,1 with at least tensor_parallel_size={self.tensor_parallel_size} of them"),
            ("start_timeout_s", self.start_timeout_s > 0, "> 0"),
            ("request_timeout_s", self.request_timeout_s > 0, "> 0"),
            ("max_retries", self.max_retries >= 0, ">= 0"),
            ("concurrency", self.concurrency >= 1, ">= 1"),
            ("weight_sync", self.weight_sync != "ipc", "files or nccl: handles on GPU memory do not travel over HTTP"),
            ("weight_sync", self.weight_sync != "nccl" or len(self.urls) <= 1, "files, with several urls"),
        )
        if names := [name for name in self.engine_args if name in OWN_ARGUMENTS or not re.fullmatch(r"[a-z]\w*", name)]:
            raise ValueError(
                f"rollout.engine.engine_args holds {', '.join(names)}: fixed, or no name of vLLM's (like max_loras)"
            )
        for url in self.urls:
            self._check_url(url)

    def _check_url(self, url: str) -> None:
        shown = re.sub("//.*@", "//...@", url)  # no password in a message
        form = re.fullmatch(r"https?://([\w.-]+|\[[\da-fA-F:.]+\])(:(\d{1,5}))?(/[\w./-]*)?", url)
        if form is None or int(form[3] or 0) > 65535:
            raise ValueError(f"rollout.engine.urls holds {shown!r}; it must be like http://127.0.0.1:8000")
        if is_loopback(url):
            return
        if not os.environ.get(self.api_key_env):
            raise ValueError(
                f"rollout.engine.urls holds {url!r}, which others can reach, and the environment variable {self.api_key_env} "
                "(rollout.engine.api_key_env) is not set; it must hold that server's key"
            )
        if self.weight_sync != "files" or self.sync_dir is None:
            raise ValueError(
                f"rollout.engine.sync_dir is {self.sync_dir!r} and weight_sync {self.weight_sync!r}; for {url!r}, on another "
                "machine, it must be a folder that both machines have, and files"
            )
        if url.startswith("http:"):
            log.warning("rollout.engine.urls holds %s: key and samples travel in the clear; https would hide them", url)

    def require(self) -> None:
        """Raises ValueError if vLLM is missing where the run starts the server, or sends weights to its GPUs."""
        if not self.urls or self.weight_sync == "nccl":
            super().require()

    def __call__(self, model_path: str | Path, dtype: torch.dtype = torch.float32, **source: Any) -> ServerVLLM:
        eos = eos_ids(model_path, **source)
        arguments = self.arguments(model_path, dtype, **source)
        with ExitStack() as resources:
            folder = resources.enter_context(sync_folder(self.sync_dir))
            client, server = self._connect(arguments, resources)
            positions = check_servers(self, client, arguments)
            engine = ServerVLLM(self, client, server, arguments["dtype"], eos, positions, folder)
            engine.sleep()
            engine.resources = resources.pop_all()
            return engine

    def _connect(self, arguments: Mapping[str, Any], resources: ExitStack) -> tuple[ServerClient, ServerProcess | None]:
        """Return a client of the servers, and the server's process if this process starts it; `resources` end it."""
        client = ServerClient(tuple(self.urls), self.request_timeout_s, self.max_retries, self.concurrency)
        if self.urls:
            return replace(client, key=os.environ.get(self.api_key_env)), None
        if int(os.environ.get("NODE_RANK") or os.environ.get("GROUP_RANK") or 0):
            raise ValueError("rollout.engine.urls is []; a run on several machines needs servers that all of them reach")
        client = replace(client, urls=("http://localhost",))
        if int(os.environ.get("LOCAL_RANK") or 0):
            if SOCKET_VARIABLE not in os.environ:
                raise ValueError("rollout.engine.urls is []; ranks that Lightning does not start need the url of a server")
            return replace(client, socket=os.environ[SOCKET_VARIABLE]), None
        folder = resources.enter_context(sync_folder())  # not in sync_dir: the path of a socket must be short
        client = replace(client, socket=str(folder / "server.sock"))
        command = server_command(arguments, "--uds", str(client.socket))
        server = ServerProcess(command, self.environment(self.gpus, switches(self)), folder / "server.log")
        resources.callback(server.stop)
        impatient = replace(client, max_retries=0, timeout_s=min(CONNECT_S, self.request_timeout_s))
        server.wait_until(
            lambda: not any(isinstance(answer, ServerFault) for answer in impatient.facts().values()), self.start_timeout_s
        )
        os.environ[SOCKET_VARIABLE] = str(client.socket)
        resources.callback(os.environ.pop, SOCKET_VARIABLE, None)
        return client, server


class ServerVLLM(VLLMEngine):
    """Engine on the servers of `client`, shared by all ranks: one rank loads them, the others are told the version.

    server: the process of the server that this rank has started.
    """

    shared = True

    def __init__(
        self,
        options: VLLMOptions,
        client: ServerClient,
        server: ServerProcess | None,
        dtype: str,
        eos: Sequence[int],
        max_positions: int,
        folder: Path,
    ):
        super().__init__(options, dtype, eos, max_positions, folder)
        self.client = client
        self.server = server
        self.adapter: str | None = None  # the model that completions ask for
        self._loads = server is not None  # this rank loads the servers, and sends them to sleep

    def set_version(self, version: int) -> None:
        """Note that another rank has loaded the servers with the weights of this version."""
        self._loads = False
        self.version = version
        self.adapter = f"policy-{version}" if self.takes_adapter else None

    def sleep(self) -> None:
        if self._loads:
            super().sleep()

    def _everywhere(self, path: str, body: Any = None, missing: bool = False) -> list[Any]:
        """POST to every server; return the JSON answers. missing: 404 is as good. Raises ServerFault."""
        self._loads = True
        answers = self.client.call(path, body, self.options.timeout_s)
        for answer in answers.values():
            if isinstance(answer, ServerFault) and not (missing and answer.status == 404):
                raise answer
        return list(answers.values())

    def rpc(self, method: str, **arguments: Any) -> list[Any]:
        body = {"method": method, "kwargs": arguments, "timeout": self.options.timeout_s}
        return [result for answer in self._everywhere(RPC, body) for result in (answer or {}).get("results", [])]

    def wake_up(self, tag: str) -> None:
        self._everywhere(f"/wake_up?tags={tag}")

    def fall_asleep(self, level: int) -> None:
        self._everywhere(f"/sleep?level={level}")

    def reset_prefix_cache(self) -> bool:
        return all((answer or {}).get("success") for answer in self._everywhere("/reset_prefix_cache"))

    def serve_adapter(self, name: str | None, source: Path | None) -> None:
        if name is not None:
            for known in {name, self.adapter or name}:  # a server that has `name` already would keep what it has
                self._everywhere("/v1/unload_lora_adapter", {"lora_name": known}, missing=True)
            self._everywhere("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(source)})
        self.adapter = name

    def complete(self, samples: Sequence[Sample], sampling: SamplingParams) -> list[Answer | None]:
        answers = self.client.complete([self._body(sample, sampling) for sample in samples])
        faults = [(sample, answer) for sample, answer in zip(samples, answers, strict=True) if isinstance(answer, ServerFault)]
        if faults:
            first = f"the first, prompt {faults[0][0].uid!r}: {faults[0][1]}"
            if len(faults) == len(samples):
                raise RuntimeError(f"none of {len(samples)} requests succeeded; {first}")
            log.warning("%d of %d requests failed for good; %s", len(faults), len(samples), first)
        for url, workers in self.client.facts().items():
            if isinstance(workers, ServerFault):
                raise workers
            for facts in workers:
                if facts["version"] != self.version:
                    raise RuntimeError(f"{url} holds policy version {facts['version']}, not {self.version}: it was loaded anew")
        return [None if isinstance(answer, ServerFault) else _answer(answer) for answer in answers]

    def _body(self, sample: Sample, sampling: SamplingParams) -> dict[str, Any]:
        ids = {"prompt": list(sample.input_ids), "return_token_ids": True, "return_tokens_as_token_ids": True}
        return self.request(sample, sampling) | ids | ({"model": self.adapter} if self.adapter else {})

    def last_words(self) -> str:
        return f". {self.server.tail()}" if self.server is not None else ""


def _answer(answer: Any) -> Answer:
    try:
        (choice,) = answer["choices"]
        steps = [
            {int(name.removeprefix("token_id:")): float(logprob) for name, logprob in step.items()}
            for step in choice["logprobs"]["top_logprobs"]
        ]
        return Answer(choice["prompt_token_ids"], choice["token_ids"], steps, choice["finish_reason"])
    except (KeyError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise RuntimeError(f"a server's answer lacks ids, or the log-prob of a sampled token ({what})") from error
