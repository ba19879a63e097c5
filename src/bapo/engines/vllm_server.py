"""Rollouts from vLLM's OpenAI-compatible server: one that the run starts, or those that run already at given urls."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from bapo.engines.auth import KEY_VARIABLE, MIDDLEWARE
from bapo.engines.client import ServerClient, ServerFault, is_loopback
from bapo.engines.options import VLLMOptions
from bapo.engines.server_engine import VLLMServerEngine, start_server
from bapo.engines.server_process import ServerProcess, reserve_port
from bapo.engines.server_weights import ServerWeights
from bapo.engines.weight_files import sync_folder

log = logging.getLogger(__name__)

URLS_VARIABLE = "BAPO_VLLM_URLS"  # tells the other ranks of a run where the server is that rank 0 has started
OWN_ARGUMENTS = {"host", "port", "uds", "middleware", "api_key", "headless", "grpc"}  # of the server; not for `engine_args`
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # not for vLLM


@dataclass(frozen=True)
class VLLMServerRollouts(VLLMOptions):
    """Called with a model: the engine of a vLLM server that all ranks share.

    urls: of servers that run already, with the same model; requests are spread evenly over them. None: the run starts one on
    127.0.0.1, on the GPUs `gpus` (as in CUDA_VISIBLE_DEVICES; null: this process's), ready within `start_timeout_s`, and starts
    it again, up to `max_restarts` times, should it die. api_key_env: the environment variable with the key of `urls`; a server
    that the run starts gets a key of its own. request_timeout_s: of one HTTP request; max_retries: further attempts of one;
    concurrency: requests under way, per server.
    """

    urls: list[str] = field(default_factory=list)
    api_key_env: str = KEY_VARIABLE
    gpus: str | None = None
    start_timeout_s: float = 600.0
    request_timeout_s: float = 600.0
    max_retries: int = 3
    concurrency: int = 256
    max_restarts: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "urls", [url.rstrip("/") for url in self.urls])
        secret = re.fullmatch(r"[A-Z][A-Z0-9_]*", self.api_key_env) and re.search("KEY|TOKEN|SECRET", self.api_key_env)
        named = re.fullmatch(r"[\w-]+(,[\w-]+)*", self.gpus or "")
        gpus = self.gpus is None or (named and self.gpus.count(",") + 1 >= self.tensor_parallel_size)
        for name, ok, bound in (
            ("urls", len(set(self.urls)) == len(self.urls), "a list in which every url differs"),
            ("api_key_env", secret, "an environment variable with KEY, TOKEN or SECRET in its name: logs hide its value"),
            ("gpus", gpus, f"null or like 0,1 with at least tensor_parallel_size={self.tensor_parallel_size} of them"),
            ("start_timeout_s", self.start_timeout_s > 0, "> 0"),
            ("request_timeout_s", self.request_timeout_s > 0, "> 0"),
            ("max_retries", self.max_retries >= 0, ">= 0"),
            ("concurrency", self.concurrency >= 1, ">= 1"),
            ("max_restarts", self.max_restarts >= 0, ">= 0"),
            ("weight_sync", self.weight_sync != "ipc", "files or nccl: handles on GPU memory do not travel over HTTP"),
            ("weight_sync", self.weight_sync != "nccl" or len(self.urls) <= 1, "files, with several urls"),
        ):
            if not ok:
                raise ValueError(f"rollout.engine.{name} is {getattr(self, name)!r}; it must be {bound}")
        if names := [name for name in self.engine_args if name in OWN_ARGUMENTS or not re.fullmatch(r"[a-z]\w*", name)]:
            raise ValueError(
                f"rollout.engine.engine_args holds {', '.join(names)}: fixed, or no name of vLLM's (like max_loras)"
            )
        for url in self.urls:
            self._check_url(url)

    def require_vllm(self) -> None:
        """Only where the run starts the server, or talks to its GPUs."""
        if not self.urls or self.weight_sync == "nccl":
            super().require_vllm()

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

    def __call__(
        self,
        model_path: str | Path,
        dtype: torch.dtype = torch.float32,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> VLLMServerEngine:
        dtype, eos, arguments = self.settle(model_path, dtype, revision, trust_remote_code)
        with ExitStack() as resources:
            folder = resources.enter_context(sync_folder(self.sync_dir))
            client, server = self._connect(arguments, folder, resources)
            positions = check_servers(self, client, arguments)
            weights = ServerWeights(self, client, folder, dtype)
            if server is not None:
                weights.sleep()
            return VLLMServerEngine(self, client, weights, eos, positions, server, resources.pop_all())

    def _connect(
        self, arguments: Mapping[str, Any], folder: Path, resources: ExitStack
    ) -> tuple[ServerClient, ServerProcess | None]:
        """A client of the servers, and the server's process if it is this one that starts it; its end goes to `resources`."""
        key = os.environ.get(self.api_key_env)
        client = ServerClient(tuple(self.urls), key, self.request_timeout_s, self.max_retries, self.concurrency)
        if self.urls:
            return client, None
        if int(os.environ.get("NODE_RANK") or os.environ.get("GROUP_RANK") or 0):
            raise ValueError("rollout.engine.urls is []; a run on several machines needs servers that all of them reach")
        if int(os.environ.get("LOCAL_RANK") or 0):
            if URLS_VARIABLE not in os.environ:
                raise ValueError("rollout.engine.urls is []; ranks that Lightning does not start need the url of a server")
            return replace(client, urls=(os.environ[URLS_VARIABLE],)), None
        held, key = resources.enter_context(reserve_port()), secrets.token_urlsafe(32)
        port = held.getsockname()[1]
        command = server_command(arguments, "127.0.0.1", port)
        server = ServerProcess(command, server_environment(self, key), folder / "server.log", key)
        resources.callback(server.stop)
        client = replace(client, urls=(f"http://127.0.0.1:{port}",), key=key, died=server.died)
        start_server(server, client, self.start_timeout_s)
        resources.enter_context(_environment({URLS_VARIABLE: client.urls[0], self.api_key_env: key}))
        return client, server


def server_command(arguments: Mapping[str, Any], host: str, port: int, python: str = sys.executable) -> list[str]:
    """The command line of a server with these arguments of vLLM's engine. Its key comes by the environment alone."""
    command = [python, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            command.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, list | tuple):
            command += [flag, *map(str, value)]
        elif value is not None:
            command += [flag, json.dumps(value) if isinstance(value, Mapping) else str(value)]
    command += ["--middleware", MIDDLEWARE, "--disable-uvicorn-access-log", "--disable-log-stats"]
    return [*command, "--host", host, "--port", str(port)]  # at the end: the last one counts


def _switches(options: VLLMServerRollouts) -> dict[str, str]:
    """Environment variables without which a server lacks routes that the engine uses."""
    lora = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if options.lora_sync == "native" else {}
    return {"VLLM_SERVER_DEV_MODE": "1"} | lora


def server_environment(options: VLLMServerRollouts, key: str) -> dict[str, str]:
    """The whole environment of the run's own server."""
    kept = {name: value for name, value in os.environ.items() if name not in (*RANK_VARIABLES, "VLLM_API_KEY")}
    gpus = {"CUDA_VISIBLE_DEVICES": options.gpus} if options.gpus is not None else {}
    return kept | options.environment() | _switches(options) | gpus | {KEY_VARIABLE: key}


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables for the ranks that this process starts."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def check_servers(options: VLLMServerRollouts, client: ServerClient, arguments: Mapping[str, Any]) -> int:
    """The most tokens of prompt and response together. ValueError for servers that cannot serve this run, with the command."""
    wanted = {"dtype": arguments["dtype"], "logprobs_mode": arguments["logprobs_mode"], "default_sampling": {}}
    wanted |= {"sleep": True} if options.sleeps else {}
    wanted |= {"max_model_len": options.max_model_len} if options.max_model_len else {}
    lengths = {}
    for url, workers in client.facts().items():
        if isinstance(workers, ServerFault) and workers.status == 401:
            raise ValueError(f"rollout.engine.urls: {url} refuses the key in the environment variable {options.api_key_env}")
        if isinstance(workers, ServerFault):
            raise ValueError(f"rollout.engine.urls: {workers}. {_how_to_start(options, url, arguments)}")
        facts = workers[0]
        wrong = {name: (facts.get(name), value) for name, value in wanted.items() if facts.get(name) != value}
        if options.lora_sync == "native" and facts.get("max_lora_rank", 0) < options.max_lora_rank:
            wrong["max_lora_rank"] = (facts.get("max_lora_rank", 0), options.max_lora_rank)
        for name, (found, value) in wrong.items():
            how = _how_to_start(options, url, arguments)
            raise ValueError(f"rollout.engine.urls: {url} has {name}={found!r}; it must be {value!r}. {how}")
        lengths[url] = int(facts["max_model_len"])
    if len(set(lengths.values())) > 1:
        raise ValueError(f"rollout.engine.urls: the servers differ in max_model_len, {lengths}; it must be the same")
    if client.key and options.urls:
        for url, answer in replace(client, key=None).facts().items():
            if not isinstance(answer, ServerFault) or answer.status != 401:
                how = _how_to_start(options, url, arguments)
                raise ValueError(f"rollout.engine.urls: {url} obeys whoever comes without a key. {how}")
    return min(lengths.values())


def _how_to_start(options: VLLMServerRollouts, url: str, arguments: Mapping[str, Any]) -> str:
    parts = urlsplit(url)
    command = server_command(arguments, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80), "python")
    switches = " ".join(f"{name}={value}" for name, value in _switches(options).items())
    return f"Start it, with its key in the environment variable {KEY_VARIABLE}, by: {switches} {shlex.join(command)}"
