"""A vLLM server itself, its CPU build, started by the engine: weights, adapters, keys, deaths."""

import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from support.engines import asked, largest_gap
from transformers import Qwen3ForCausalLM

from bapo.engines.process import ServerProcess
from bapo.engines.vllm_server import ServerVLLM, VLLMServerRollouts
from bapo.engines.watchdog import is_alive
from bapo.policy.causal_lm import CausalLMPolicy
from bapo.policy.lora import Lora
from bapo.policy.tiny_qwen3 import tiny_qwen3
from bapo.protocols import EngineError
from bapo.types import Sample, SamplingParams

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
def engine(folder) -> Iterator[ServerVLLM]:
    """One server for all tests: adapters are switched on, and full weights go there as well."""
    engine = VLLMServerRollouts(lora_sync="native", max_lora_rank=8, concurrency=16, max_retries=1, **OPTIONS)(folder)
    yield engine
    engine.close()


def another(folder: Path, seed: int) -> Qwen3ForCausalLM:
    """The model of the folder with random weights of its own, far enough apart that stale ones show."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    return model


def generated(engine: ServerVLLM, n: int = 24, sampling: SamplingParams = SAMPLING) -> list[Sample]:
    return engine.generate([asked(f"p{i}", i % 3, 2**62 + i, (3, 4, 5 + i % 4)) for i in range(n)], sampling)


def gap(samples: list[Sample], model: torch.nn.Module) -> float:
    """Largest difference of a log-prob between server and transformers."""
    return largest_gap(samples, CausalLMPolicy(model, TEMPERATURE), token_budget=4096)


def processes(engine: ServerVLLM) -> list[psutil.Process]:
    """The server's processes, but for Python's resource tracker."""
    main = psutil.Process(engine.server.process.pid)
    return [main, *(p for p in main.children(recursive=True) if "VLLM" in p.name())]


def test_every_sync_brings_the_weights_that_are_then_served(engine, folder):
    assert engine.max_positions == 64
    before: list[Sample] = []
    for version, model in enumerate([Qwen3ForCausalLM.from_pretrained(folder), *(another(folder, seed) for seed in range(3))]):
        engine.load_weights(model.named_parameters(), version)
        samples = generated(engine)
        assert gap(samples, model) < 1e-4
        assert {v for r in samples for v in r.versions} == {version}
        assert len({r.response_ids for r in samples}) > 12  # seeds differ, and so do samples
        assert {r.finish_reason for r in samples} <= {"stop", "length"}
        assert all((r.response_ids[-1] in engine.eos) == (r.finish_reason == "stop") for r in samples)
        assert before == [] or gap(before, model) > 0.1  # the old weights would have been seen
        assert generated(engine) == samples
        before = samples


def test_the_server_listens_on_a_socket_of_this_user_alone(engine):
    assert Path(engine.client.socket).parent.stat().st_mode & 0o077 == 0
    main = psutil.Process(engine.server.process.pid)
    assert not [c for c in main.net_connections("inet") if c.status == psutil.CONN_LISTEN]


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
        samples = generated(engine)
        assert gap(samples, model) < 1e-4
        assert gap(samples, Qwen3ForCausalLM.from_pretrained(folder)) > 0.1
        assert {v for r in samples for v in r.versions} == {version}


def test_a_server_that_is_killed_while_it_generates_ends_the_run_and_leaves_nothing(engine, folder):
    engine.load_weights(another(folder, 5).named_parameters(), 6)
    alive = processes(engine)
    (core,) = [p for p in alive if "EngineCor" in p.name()]
    threading.Timer(0.3, core.kill).start()
    begun = time.monotonic()
    with pytest.raises(EngineError, match=r"vLLM could not generate: (?s:.*)The end of its log:"):
        generated(engine, 2000)
    assert time.monotonic() - begun < 30
    engine.close()
    assert not any(map(is_alive, alive))
    assert not Path(engine.client.socket).parent.exists()


def test_a_server_of_others_wants_its_key_on_every_route_and_outlives_the_run(folder, tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(ValueError, match="Start it, with its key") as refused:
        VLLMServerRollouts(urls=[url], max_retries=0, **OPTIONS)(folder)
    command = shlex.split(str(refused.value).partition("by: ")[2])  # as the message says
    switches = dict(word.split("=") for word in command[: command.index("python")])
    command = [sys.executable, *command[command.index("python") + 1 :]]
    key = "sentinel-key-of-the-tests"
    environment = os.environ | switches | {"BAPO_VLLM_KEY": key, "VLLM_CPU_KVCACHE_SPACE": "1"}
    server = ServerProcess(command, environment, tmp_path / "log")
    try:
        with httpx.Client(base_url=url, trust_env=False) as http:
            headers = {"authorization": f"Bearer {key}"}

            def healthy() -> bool:
                with suppress(httpx.HTTPError):
                    return http.get("/health", headers=headers).status_code == 200
                return False

            server.wait_until(healthy, 300)
            for method in ("GET", "POST", "DELETE", "OPTIONS"):
                for route in ROUTES:
                    assert http.request(method, route).status_code == 401, (method, route)
            pickled = {"content-type": "application/octet-stream"}
            assert http.post("/collective_rpc", headers=headers | pickled, content=b"x").status_code == 400
        monkeypatch.setenv("BAPO_VLLM_KEY", key)
        engine = VLLMServerRollouts(urls=[url], **OPTIONS)(folder)
        model = another(folder, 7)
        engine.load_weights(model.named_parameters(), 2)
        assert gap(generated(engine), model) < 1e-4
        engine.close()
        assert server.process.poll() is None
        assert key not in " ".join(command) + server.log.read_text()
    finally:
        server.stop()


def test_nothing_outlives_a_trainer_that_is_killed_as_its_server_starts(folder, tmp_path):
    script = f"""
from bapo.engines import process, vllm_server
begin = process.ServerProcess.__init__
process.ServerProcess.__init__ = lambda self, *a: (begin(self, *a), print(self.process.pid, flush=True))[0]
vllm_server.VLLMServerRollouts(sync_dir={str(tmp_path)!r}, **{OPTIONS!r})({str(folder)!r})
"""
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    main = psutil.Process(int(trainer.stdout.readline()))
    deadline = time.monotonic() + 120
    while not any("VLLM::Worker" in p.name() for p in main.children(recursive=True)) and time.monotonic() < deadline:
        time.sleep(0.1)
    alive = [main, *main.children(recursive=True)]
    assert len(alive) >= 3
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + 5
    while any(map(is_alive, alive)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, alive))
