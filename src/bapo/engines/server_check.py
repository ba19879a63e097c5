"""The command line of a vLLM server that can serve a run, and the check of servers that run already."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from bapo.engines.auth import KEY_VARIABLE, MIDDLEWARE
from bapo.engines.client import ServerClient, ServerFault

if TYPE_CHECKING:
    from bapo.engines.vllm_server import VLLMServerRollouts

OWN_ARGUMENTS = {"host", "port", "uds", "middleware", "api_key", "headless", "grpc"}  # of the server; not for `engine_args`


def server_command(arguments: Mapping[str, Any], *listen: str, python: str = sys.executable) -> list[str]:
    """Return the command line of a server with these arguments of vLLM's engine. listen: its own arguments."""
    command = [python, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            command.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, list | tuple):
            command += [flag, *map(str, value)]
        elif value is not None:
            command += [flag, json.dumps(value) if isinstance(value, Mapping) else str(value)]
    return [*command, "--disable-uvicorn-access-log", "--disable-log-stats", *listen]  # at the end: the last one counts


def switches(options: VLLMServerRollouts) -> dict[str, str]:
    """Return the environment variables that give a server the routes which the engine uses."""
    lora = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if options.lora_sync == "native" else {}
    return {"VLLM_SERVER_DEV_MODE": "1"} | lora


def check_servers(options: VLLMServerRollouts, client: ServerClient, arguments: Mapping[str, Any]) -> int:
    """Return the most tokens of prompt and response together. ValueError, with the command, for servers that cannot serve."""
    wanted = {"dtype": arguments["dtype"], "logprobs_mode": arguments["logprobs_mode"], "default_sampling": {}}
    wanted |= {"sleep": True} if options.sleeps else {}
    wanted |= {"max_model_len": options.max_model_len} if options.max_model_len else {}
    lengths = {}
    for url, workers in client.facts().items():
        how = _how_to_start(options, url, arguments)
        if isinstance(workers, ServerFault) and workers.status == 401:
            raise ValueError(f"rollout.engine.urls: {url} refuses the key in the environment variable {options.api_key_env}")
        if isinstance(workers, ServerFault):
            raise ValueError(f"rollout.engine.urls: {workers}. {how}")
        facts = workers[0]
        for name, value in wanted.items():
            if facts.get(name) != value:
                raise ValueError(f"rollout.engine.urls: {url} has {name}={facts.get(name)!r}; it must be {value!r}. {how}")
        rank = options.max_lora_rank if options.lora_sync == "native" else 0
        if facts.get("max_lora_rank", 0) < rank:
            raise ValueError(
                f"rollout.engine.urls: {url} has max_lora_rank={facts.get('max_lora_rank', 0)}; it must be >= {rank}. {how}"
            )
        lengths[url] = int(facts["max_model_len"])
    if len(set(lengths.values())) > 1:
        raise ValueError(f"rollout.engine.urls: the servers differ in max_model_len, {lengths}; it must be the same")
    if client.key:
        for url, answer in replace(client, key=None).facts().items():
            if not isinstance(answer, ServerFault) or answer.status != 401:
                how = _how_to_start(options, url, arguments)
                raise ValueError(f"rollout.engine.urls: {url} answers requests without a key. {how}")
    return min(lengths.values())


def _how_to_start(options: VLLMServerRollouts, url: str, arguments: Mapping[str, Any]) -> str:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    listen = ["--middleware", MIDDLEWARE, "--host", parts.hostname or "", "--port", str(port)]
    command = shlex.join(server_command(arguments, *listen, python="python"))
    environment = " ".join(f"{name}={value}" for name, value in switches(options).items())
    return f"Start it, with its key in the environment variable {KEY_VARIABLE}, by: {environment} {command}"
