"""A vLLM server itself, its CPU build, started by the engine: weights, keys, adapters, deaths. FAULTS 20, 21, 22, 28, 59."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from transformers import Qwen3ForCausalLM

from bapo.engines.server_engine import VLLMServerEngine
from bapo.engines.vllm_server import VLLMServerRollouts
from bapo.engines.watchdog import members
from bapo.policy.causal_lm import CausalLMPolicy
from bapo.policy.lora import Lora
from bapo.policy.tiny_qwen3 import tiny_qwen3
from bapo.rollouts.pool import collate
from bapo.types import Request, Sample, SamplingParams

pytestmark = pytest.mark.slow
pytest.importorskip("vllm")

TEMPERATURE = 0.6
SAMPLING = SamplingParams(temperature=TEMPERATURE, max_tokens=12)
OPTIONS = {"max_model_len": 64, "enforce_eager": True, "max_num_seqs": 32}
ROUTES = (
    "/v1/completions",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/sleep",
    "/pause",
    "/v1/load_lora_adapter",
    "/health",
    "/docs",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer) -> Path:
    """A random Qwen3 whose embeddings are its head."""
    folder = tmp_path_factory.mktemp("tied_model")
    model = tiny_qwen3(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, tie_word_embeddings=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(folder) -> Iterator[VLLMServerEngine]:
    """One server for all tests: adapters are switched on, and full weights go there as well."""
    engine = VLLMServerRollouts(lora_sync="native", max_lora_rank=8, concurrency=16, **OPTIONS)(folder)
    yield engine
    session = engine.server.pid
    engine.close()
    assert members(session) == []


def another(folder: Path, seed: int) -> Qwen3ForCausalLM:
    """The model of the folder with random weights of its own, far enough apart that stale ones show."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    return model


def drawn(engine: VLLMServerEngine, n: int = 24, sampling: SamplingParams = SAMPLING) -> list[Sample]:
    return engine.generate([Request(f"p{i}", i % 3, 2**62 + i, (3, 4, 5 + i % 4)) for i in range(n)], sampling)


def gap(rollouts: list[Sample], model: torch.nn.Module) -> float:
    """The largest difference of a log-prob between server and transformers."""
    zeros = torch.zeros(len(rollouts))
    batch = collate(rollouts, zeros, zeros, pad_id=0)
    with torch.no_grad():
        found = CausalLMPolicy(model, TEMPERATURE)(batch).logprobs
    return float((found - batch.sampler_logprobs).abs().max())


def test_every_sync_brings_the_weights_that_are_then_served(engine, folder):
    assert engine.max_positions == 64
    before: list[Sample] = []
    for version, model in enumerate([Qwen3ForCausalLM.from_pretrained(folder), *(another(folder, seed) for seed in range(3))]):
        engine.load_weights(model.named_parameters(), version)
        rollouts = drawn(engine)
        assert gap(rollouts, model) < 1e-4
        assert {r.policy_version for r in rollouts} == {version}
        assert len({r.response_ids for r in rollouts}) > 12  # seeds differ, and so do samples
        assert {r.finish_reason for r in rollouts} <= {"stop", "length"}
        assert all((r.response_ids[-1] in engine.eos) == (r.finish_reason == "stop") for r in rollouts)
        assert before == [] or gap(before, model) > 0.1  # the old weights would have been seen
        assert drawn(engine) == rollouts
        before = rollouts


def test_every_route_wants_the_key(engine):
    (url,) = engine.client.urls
    with httpx.Client(base_url=url, trust_env=False) as http:
        for method in ("GET", "POST", "DELETE", "OPTIONS"):
            for route in ROUTES:
                assert http.request(method, route).status_code == 401, (method, route)
        headers = {"authorization": f"Bearer {engine.client.key}"}
        assert http.get("/health", headers=headers).status_code == 200
        pickled = {"content-type": "application/octet-stream"}
        assert http.post("/collective_rpc", headers=headers | pickled, content=b"x").status_code == 400
    (process,) = [p for p in members(engine.server.pid) if p.pid == engine.server.pid]
    assert not [c for c in process.net_connections() if c.status == psutil.CONN_LISTEN and c.laddr.ip != "127.0.0.1"]
    assert engine.client.key not in " ".join(process.cmdline()) + engine.server.log.read_text()


def test_an_adapter_is_served_as_peft_applies_it(engine, folder):
    engine.load_weights(Qwen3ForCausalLM.from_pretrained(folder).named_parameters(), 0)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    Lora(r=4, alpha=8).apply(model, seed=0)
    policy = CausalLMPolicy(model, TEMPERATURE)
    for version in (1, 2):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(version)))
        engine.load_adapter(policy.adapter(), version)
        rollouts = drawn(engine)
        assert gap(rollouts, model) < 1e-4
        assert gap(rollouts, Qwen3ForCausalLM.from_pretrained(folder)) > 0.1
        assert {r.policy_version for r in rollouts} == {version}


@pytest.mark.parametrize("victim", ["the server", "its engine"])
def test_kill_9_while_it_draws_is_survived(engine, folder, victim):
    model = another(folder, 5)
    engine.load_weights(model.named_parameters(), 6)
    expected = drawn(engine, 400)
    processes = members(engine.server.pid)
    names = {process.pid: process.name() for process in processes}
    (pid,) = [engine.server.pid] if victim == "the server" else [pid for pid, name in names.items() if "EngineCor" in name]
    threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
    again = drawn(engine, 400)
    assert engine.counters["rollout/engine_restarts"] == 1
    assert again == expected
    assert gap(again[:24], model) < 1e-4
    old = {process.pid for process in processes}
    assert not old & {process.pid for process in members(engine.server.pid)}
    assert not [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def test_nothing_outlives_a_trainer_that_is_killed_as_its_server_starts(folder, tmp_path):
    script = f"""
from bapo.engines import vllm_server
start = vllm_server.ServerProcess.start
vllm_server.ServerProcess.start = lambda self: (start(self), print(self.pid, flush=True))
vllm_server.VLLMServerRollouts(sync_dir={str(tmp_path)!r}, **{OPTIONS!r})({str(folder)!r})
"""
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    session = int(trainer.stdout.readline())
    deadline = time.monotonic() + 120
    while not any("VLLM::Worker" in process.name() for process in members(session)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(members(session)) >= 3
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + 5
    while members(session) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert members(session) == []
