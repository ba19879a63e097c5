"""The engine that speaks to vLLM servers, against a stub. FAULTS 20, 21, 22, 26, 28, 59."""

import asyncio
import itertools
import json
import logging
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from support.vllm_stub import Stub, completion

from bapo.engines import client as server_client
from bapo.engines import server_weights
from bapo.engines.server_engine import VLLMServerEngine
from bapo.engines.vllm_server import VLLMServerRollouts, server_command, server_environment
from bapo.protocols import EngineError
from bapo.rollouts.grading import draw
from bapo.rollouts.prompt_format import PLAIN
from bapo.types import Adapter, Prompt, Request, SamplingParams

KEY = "sentinel-key-of-the-tests"
SAMPLING = SamplingParams(temperature=0.6, max_tokens=3)
WEIGHTS = {"model.embed_tokens.weight": torch.arange(6.0).reshape(2, 3), "lm_head.weight": torch.ones(2, 3)}
AN_UPDATE = ["mark_policy", "load_policy_weights", "/reset_prefix_cache", "mark_policy"]


@pytest.fixture(autouse=True)
def no_server_around(monkeypatch):
    for name in ("BAPO_VLLM_KEY", "BAPO_VLLM_URLS", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(server_client, "BACKOFF_S", (0.02, 0.1))


@pytest.fixture
def stubs():
    """Makes stubs, and stops them."""
    made: list[Stub] = []

    def make(key: str | None = None) -> Stub:
        made.append(Stub(key=key).start())
        return made[-1]

    yield make
    for stub in made:
        stub.stop()


@pytest.fixture
def engines(model_folder):
    """Makes engines on stubs, loaded with version 5 unless they should not be, and closes them."""
    made: list[VLLMServerEngine] = []

    def make(*servers: Stub, load: bool = True, **options) -> VLLMServerEngine:
        options = {"request_timeout_s": 5.0, "timeout_s": 5.0} | options
        made.append(VLLMServerRollouts(urls=[stub.url for stub in servers], **options)(model_folder))
        if load:
            made[-1].load_weights(WEIGHTS.items(), 5)
        for stub in servers:
            stub.calls.clear()
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def requests(n: int, first_seed: int = 100) -> list[Request]:
    return [Request(f"p{i}", i % 2, first_seed + i, (3, 4, 2 + i % 5)) for i in range(n)]


def ids_of(request: Request) -> tuple[int, ...]:
    body = {"prompt": list(request.prompt_ids), "seed": request.seed, "max_tokens": SAMPLING.max_tokens}
    return tuple(completion(body)["choices"][0]["token_ids"])


# Options.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"urls": ["http://127.0.0.1:1", "http://127.0.0.1:1/"]}, "urls is .* every url differs"),
        ({"urls": ["127.0.0.1:8000"]}, "urls holds '127.0.0.1:8000'; it must be like http://127.0.0.1:8000"),
        ({"urls": ["ftp://127.0.0.1:8000"]}, "urls holds 'ftp:"),
        ({"urls": ["http://127.0.0.1:8000?x=1"]}, "urls holds"),
        ({"api_key_env": "MY_VARIABLE"}, "api_key_env is 'MY_VARIABLE'; .* with KEY, TOKEN or SECRET in its name"),
        ({"gpus": "0,"}, "gpus is '0,'; it must be null or like 0,1"),
        ({"gpus": "0", "tensor_parallel_size": 2}, "gpus is '0'; .* at least tensor_parallel_size=2"),
        ({"start_timeout_s": 0.0}, r"start_timeout_s is 0.0; it must be > 0"),
        ({"request_timeout_s": -1.0}, r"request_timeout_s is -1.0; it must be > 0"),
        ({"max_retries": -1}, "max_retries is -1; it must be >= 0"),
        ({"concurrency": 0}, "concurrency is 0; it must be >= 1"),
        ({"max_restarts": -1}, "max_restarts is -1; it must be >= 0"),
        ({"weight_sync": "ipc"}, "weight_sync is 'ipc'; it must be files or nccl"),
        ({"weight_sync": "nccl", "urls": ["http://127.0.0.1:1", "http://[::1]:2"]}, "weight_sync is 'nccl'; it must be files"),
        ({"engine_args": {"host": "0.0.0.0"}}, "engine_args holds host"),
        ({"engine_args": {"api_key": KEY}}, "engine_args holds api_key"),
        ({"engine_args": {"api-key": KEY, "max_loras": 2}}, "engine_args holds api-key: "),
        ({"urls": ["http://127.0.0.1:70000"]}, "urls holds 'http://127.0.0.1:70000'"),
        ({"engine_args": {"logprobs_mode": "raw_logprobs"}}, "engine_args holds logprobs_mode"),
    ],
    ids=str,
)
def test_options_out_of_bounds_are_refused_by_name_and_value(options, message):
    with pytest.raises(ValueError, match=rf"rollout\.engine\.{message}"):
        VLLMServerRollouts(**{"urls": ["http://127.0.0.1:1"]} | options)


def test_vllm_is_needed_only_to_start_a_server(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    given = VLLMServerRollouts(urls=["http://localhost:8000/"])
    assert given.urls == ["http://localhost:8000"]
    given.require_vllm()
    with pytest.raises(ValueError, match="needs vLLM, which is not installed"):
        VLLMServerRollouts().require_vllm()


@pytest.mark.parametrize("host", ["10.0.0.1", "0.0.0.0", "node-7", "[2001:db8::1]", "127.0.0.1.example.org"])
def test_a_server_that_others_can_reach_must_have_a_key(host, monkeypatch, tmp_path, caplog):
    options = {"sync_dir": str(tmp_path), "api_key_env": "MY_KEY"}
    with pytest.raises(ValueError, match=r"others can reach, and the environment variable MY_KEY .* is not set"):
        VLLMServerRollouts(urls=[f"https://{host}:8000"], **options)
    monkeypatch.setenv("MY_KEY", KEY)
    VLLMServerRollouts(urls=[f"https://{host}:8000"], **options)
    assert caplog.text == ""
    VLLMServerRollouts(urls=[f"http://{host}:8000"], **options)
    assert "in the clear" in caplog.text
    with pytest.raises(ValueError, match=r"sync_dir is None .* a folder that both machines have"):
        VLLMServerRollouts(urls=[f"https://{host}:8000"], api_key_env="MY_KEY")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "[::1]"])
def test_this_machines_own_address_needs_no_key(host, caplog):
    VLLMServerRollouts(urls=[f"http://{host}:8000"])
    assert caplog.text == ""


def test_a_password_in_a_url_is_refused_and_not_shown():
    with pytest.raises(ValueError, match=r"urls holds 'https://\.\.\.@host:1'") as refused:
        VLLMServerRollouts(urls=[f"https://me:{KEY}@host:1"])
    assert KEY not in str(refused.value)


# How the run's own server is started.


def test_the_command_binds_this_machine_alone_and_holds_no_key():
    options = VLLMServerRollouts(urls=["http://127.0.0.1:1"], max_model_len=64, engine_args={"enable_prefix_caching": False})
    command = server_command({**options.arguments("/m", torch.float32), **options.engine_args}, "127.0.0.1", 8123, "python")
    assert command[:3] == ["python", "-m", "vllm.entrypoints.openai.api_server"]
    pairs = dict(itertools.pairwise(command))
    assert pairs["--host"] == "127.0.0.1"
    assert pairs["--port"] == "8123"
    assert pairs["--middleware"] == "bapo.engines.auth.KeyOnEveryRoute"
    assert pairs["--worker-extension-cls"] == "bapo.engines.worker.PolicyWorker"
    assert pairs["--logprobs-mode"] == "processed_logprobs"
    assert pairs["--generation-config"] == "vllm"
    assert pairs["--dtype"] == "float32"
    assert pairs["--max-model-len"] == "64"
    assert "--revision" not in command
    assert {"--no-enable-prefix-caching", "--no-enforce-eager"} <= set(command)
    assert not [word for word in command if "key" in word.lower() and "KeyOnEveryRoute" not in word]


def test_the_environment_carries_the_key_and_no_rank(monkeypatch):
    for name, value in {"LOCAL_RANK": "1", "MASTER_PORT": "1", "VLLM_API_KEY": "x", "KEPT": "yes"}.items():
        monkeypatch.setenv(name, value)
    options = VLLMServerRollouts(urls=["http://127.0.0.1:1"], gpus="2,3", lora_sync="native")
    environment = server_environment(options, KEY)
    assert environment["BAPO_VLLM_KEY"] == KEY
    assert environment["VLLM_SERVER_DEV_MODE"] == environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert environment["KEPT"] == "yes"
    assert not {"LOCAL_RANK", "MASTER_PORT", "VLLM_API_KEY"} & environment.keys()
    plain = server_environment(VLLMServerRollouts(urls=["http://127.0.0.1:1"]), KEY)
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in plain


# Servers that run already.


@pytest.mark.parametrize(
    ("facts", "options", "message"),
    [
        ({"logprobs_mode": "raw_logprobs"}, {}, "has logprobs_mode='raw_logprobs'; it must be 'processed_logprobs'"),
        ({"default_sampling": {"min_p": 0.1}}, {}, "has default_sampling={'min_p': 0.1}; it must be {}"),
        ({"dtype": "bfloat16"}, {}, "has dtype='bfloat16'; it must be 'float32'"),
        ({"max_model_len": 32}, {"max_model_len": 64}, "has max_model_len=32; it must be 64"),
        ({"max_lora_rank": 0}, {"lora_sync": "native"}, "has max_lora_rank=0; it must be 64"),
        (500, {}, "HTTP 500"),
        (404, {}, "HTTP 404"),
        ({"version": "no number"}, {}, "no facts"),
    ],
    ids=str,
)
def test_a_server_that_cannot_serve_is_refused_with_the_command_that_can(stubs, engines, facts, options, message):
    good, stub = stubs(), stubs()
    if isinstance(facts, int):
        stub.answer = lambda name, body: facts
    else:
        stub.facts |= facts
    with pytest.raises(ValueError, match=message) as refused:
        engines(good, stub, **options)
    port = stub.server_address[1]
    assert stub.url in str(refused.value)
    assert "Start it, with its key in the environment variable BAPO_VLLM_KEY, by: VLLM_SERVER_DEV_MODE=1" in str(refused.value)
    assert "python -m vllm.entrypoints.openai.api_server --model " in str(refused.value)
    assert str(refused.value).endswith(f" --host 127.0.0.1 --port {port}")


def test_servers_must_agree_on_the_longest_sequence(stubs, engines):
    one, other = stubs(), stubs()
    other.facts["max_model_len"] = 128
    with pytest.raises(ValueError, match="differ in max_model_len"):
        engines(one, other)
    other.facts["max_model_len"] = 64
    assert engines(one, other, load=False).max_positions == 64


def test_a_server_that_is_not_there_and_one_with_another_key(stubs, engines, monkeypatch):
    gone = stubs()
    gone.stop()
    with pytest.raises(ValueError, match=rf"{gone.url}.*Connect.*Start it"):
        engines(gone, max_retries=0)
    monkeypatch.setenv("BAPO_VLLM_KEY", KEY)
    with pytest.raises(ValueError, match="refuses the key in the environment variable BAPO_VLLM_KEY"):
        engines(stubs(key="another"))
    with pytest.raises(ValueError, match="obeys whoever comes without a key"):
        engines(stubs())
    assert engines(stubs(key=KEY)).version == 5


# A sync.


def test_a_sync_is_complete_before_the_cache_is_dropped_and_that_before_anything_is_drawn(stubs, engines):
    stub = stubs()
    engine, read = engines(stub, load=False), {}

    def load(folder: Path) -> list[int]:
        for path in sorted(folder.glob("*.safetensors")):
            read.update(load_file(path))
        return [json.loads((folder / "sync.json").read_text())["version"], len(read)]

    stub.load = load
    for version in (7, 8):
        engine.load_weights(WEIGHTS.items(), version)
        (rollout, *_) = engine.generate(requests(2), SAMPLING)
        assert rollout.policy_version == version == engine.version
        assert stub.names() == [*AN_UPDATE, "/v1/completions", "/v1/completions"]
        assert [body["kwargs"]["version"] for body in stub.bodies("mark_policy")] == [-1, version]
        stub.calls.clear()
    assert read.keys() == WEIGHTS.keys()
    assert all(torch.equal(read[name], value) for name, value in WEIGHTS.items())
    assert list(engine.weights.folder.iterdir()) == []  # nothing lies about in shared memory
    engine.close()
    engine.close()
    assert not engine.weights.folder.exists()


def test_a_sleeping_server_wakes_for_weights_then_for_its_cache(stubs, engines, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    stub = stubs()
    engine = engines(stub, sleep_level=2)
    engine.sleep()
    engine.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        engine.generate(requests(1), SAMPLING)
    engine.load_weights(WEIGHTS.items(), 6)
    engine.generate(requests(1), SAMPLING)
    assert stub.names() == [
        "/sleep?level=2", "/wake_up?tags=weights", "mark_policy", "load_policy_weights", "/wake_up?tags=kv_cache",
        "/reset_prefix_cache", "mark_policy", "/v1/completions",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fails", "answer"),
    [
        ("load_policy_weights", 500),
        ("load_policy_weights", {"results": [[4, 2]]}),
        ("/reset_prefix_cache", {"success": False}),
        ("mark_policy", 503),
    ],
    ids=str,
)
def test_after_half_a_sync_nothing_is_drawn_until_a_whole_one(stubs, engines, fails, answer, monkeypatch):
    monkeypatch.setattr(server_weights, "RESET_S", 0.3)
    stub = stubs()
    engine = engines(stub)
    stub.answer = lambda name, body: answer if name == fails else None
    with pytest.raises(EngineError):
        engine.load_weights(WEIGHTS.items(), 6)
    assert engine.version == -1
    with pytest.raises(RuntimeError, match="no complete set of weights"):
        engine.generate(requests(1), SAMPLING)
    assert stub.bodies("/v1/completions") == []
    stub.answer = lambda name, body: None
    engine.load_weights(WEIGHTS.items(), 6)
    assert engine.generate(requests(1), SAMPLING)[0].policy_version == 6


def test_no_room_for_the_weights_is_an_engine_error(stubs, engines, monkeypatch):
    engine = engines(stubs())
    monkeypatch.setattr("bapo.engines.weight_files.shutil.disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(EngineError, match="MiB left"):
        engine.load_weights(WEIGHTS.items(), 6)
    assert engine.version == -1
    monkeypatch.undo()
    engine.load_weights(WEIGHTS.items(), 6)
    assert list(engine.weights.folder.iterdir()) == []


def test_an_adapter_gets_a_name_of_its_own_and_the_old_one_goes(stubs, engines):
    stub = stubs()
    engine = engines(stub, load=False, lora_sync="native")
    assert engine.takes_adapter
    adapter = Adapter({"r": 2}, {"a": torch.ones(2)})
    for version, old in ((3, []), (4, ["policy-3"]), (4, [])):
        engine.load_adapter(adapter, version)
        assert engine.generate(requests(1), SAMPLING)[0].policy_version == version
        unloaded = [body["lora_name"] for body in stub.bodies("/v1/unload_lora_adapter")]
        assert sorted(unloaded) == sorted([*old, f"policy-{version}"])
        (load,) = stub.bodies("/v1/load_lora_adapter")
        assert load["lora_name"] == f"policy-{version}"
        files = sorted(path.name for path in Path(load["lora_path"]).iterdir())
        assert files == ["adapter_config.json", "adapter_model.safetensors"]
        names = stub.names()
        assert names.index("/v1/load_lora_adapter") < names.index("/reset_prefix_cache") < names.index("/v1/completions")
        assert stub.bodies("/v1/completions")[0]["model"] == f"policy-{version}"
        stub.calls.clear()
    assert len(list(engine.weights.folder.iterdir())) == 1
    engine.load_weights(WEIGHTS.items(), 5)
    engine.generate(requests(1), SAMPLING)
    assert "model" not in stub.bodies("/v1/completions")[0]  # the old adapter does not go on top of full weights


# Drawing.


def test_every_sample_is_a_request_with_its_own_seed_and_the_neutral_settings(stubs, engines):
    stub = stubs()
    engine = engines(stub)
    sampling = SamplingParams(temperature=0.6, max_tokens=4, top_p=0.9, top_k=7)
    drawn = engine.generate(requests(3), sampling)
    assert sorted(stub.bodies("/v1/completions"), key=lambda body: body["seed"]) == [
        {
            "prompt": list(request.prompt_ids), "n": 1, "seed": request.seed, "temperature": 0.6, "top_p": 0.9, "top_k": 7,
            "max_tokens": 4, "logprobs": 0, "ignore_eos": True, "stop_token_ids": list(engine.eos), "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        for request in requests(3)
    ]  # fmt: skip
    assert len(engine.eos) == 1
    assert [(r.uid, r.sample_index, r.seed) for r in drawn] == [(r.uid, r.sample_index, r.seed) for r in requests(3)]
    assert engine.generate([], sampling) == []


def test_a_log_prob_is_that_of_the_sampled_id_not_of_the_first_or_likeliest(stubs, engines):
    stub = stubs()
    engine = engines(stub)
    (rollout,) = engine.generate(requests(1), SAMPLING)
    assert rollout.response_ids == ids_of(requests(1)[0])
    assert rollout.sampler_logprobs == tuple(-float(token) for token in rollout.response_ids)


@pytest.mark.parametrize("fault", ["missing id", "one step less", "another prompt", "no ids", "two choices", "nothing"])
def test_an_answer_without_the_sampled_ids_and_their_log_probs_is_an_error(stubs, engines, fault):
    stub = stubs()

    def wrong(body):
        answer = completion(body)
        (choice,) = answer["choices"]
        steps = choice["logprobs"]["top_logprobs"]
        if fault == "missing id":
            steps[1] = {"token_id:9": -0.5}
        elif fault == "one step less":
            steps.pop()
        elif fault == "another prompt":
            choice["prompt_token_ids"] = [1, 2]
        elif fault == "no ids":
            del choice["token_ids"]
        elif fault == "two choices":
            answer["choices"] *= 2
        return {} if fault == "nothing" else answer

    engine = engines(stub)
    stub.complete = wrong
    with pytest.raises(EngineError, match="another prompt" if fault == "another prompt" else "lacks ids, or the log-prob"):
        engine.generate(requests(1), SAMPLING)


def test_a_response_that_was_aborted_is_left_out(stubs, engines, caplog):
    stub = stubs()
    engine = engines(stub)

    def aborted(body):
        answer = completion(body)
        answer["choices"][0]["finish_reason"] = "abort" if body["seed"] == 101 else "stop"
        return answer

    stub.complete = aborted
    drawn = engine.generate(requests(3), SAMPLING)
    assert [r.seed for r in drawn] == [100, 102]
    assert {r.finish_reason for r in drawn} == {"stop"}
    assert "ended it as 'abort'" in caplog.text


# Retries.


def test_a_connection_that_breaks_twice_costs_two_retries_and_changes_nothing(stubs, engines):
    stub = stubs()
    engine, breaks = engines(stub), iter(["reset", "reset"])
    expected = engine.generate(requests(4), SAMPLING)
    assert engine.counters == {"rollout/retries": 0.0, "rollout/engine_restarts": 0.0}
    stub.complete = lambda body: next(breaks, None) or completion(body)
    assert engine.generate(requests(4), SAMPLING) == expected
    assert engine.counters == {"rollout/retries": 2.0, "rollout/engine_restarts": 0.0}


@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_an_overloaded_server_is_asked_again(stubs, engines, status):
    stub = stubs()
    engine, busy = engines(stub), iter([status])
    stub.complete = lambda body: next(busy, None) or completion(body)
    assert len(engine.generate(requests(2), SAMPLING)) == 2
    assert engine.counters["rollout/retries"] == 1
    assert len(stub.bodies("/v1/completions")) == 3


@pytest.mark.parametrize("also_control", [False, True])
def test_a_server_that_never_answers_is_an_error_in_time(stubs, engines, also_control):
    stub = stubs()
    engine = engines(stub, request_timeout_s=0.4, max_retries=2, concurrency=2)
    hanging = threading.Event()

    def hang(body):
        hanging.set()
        return "hang"

    stub.complete = hang
    stub.answer = lambda name, body: "hang" if also_control or hanging.is_set() else None
    begun = time.monotonic()
    with pytest.raises(EngineError, match="no answer within"):
        engine.generate(requests(20), SAMPLING)
    assert time.monotonic() - begun < 0.4 * 3 + 1


def test_a_request_that_fails_for_good_is_left_out_and_its_group_dropped(stubs, engines, tokenizer, caplog):
    stub = stubs()
    engine = engines(stub, max_retries=2)
    stub.complete = lambda body: "reset" if body["seed"] == 13 else completion(body)
    asked = [Request("p", i, 10 + i, (3, 4)) for i in range(4)]
    assert [r.sample_index for r in engine.generate(asked, SAMPLING)] == [0, 1, 2]
    assert engine.counters["rollout/retries"] == 2
    assert Counter(body["seed"] for body in stub.bodies("/v1/completions")) == {10: 1, 11: 1, 12: 1, 13: 3}
    assert "1 of 4 requests failed for good; the first, prompt 'p'" in caplog.text

    class AllRight:
        def verify(self, prompts, responses):
            return [1.0] * len(responses)

    prompts = [(uid, Prompt(uid, "1", "1")) for uid in "pq"]
    judged = draw(
        engine, AllRight(), tokenizer, PLAIN, prompts, SAMPLING, 4, lambda uid, index: (10 if uid == "p" else 20) + index
    )
    assert [(s.rollout.uid, s.rollout.sample_index) for s in judged] == [("q", i) for i in range(4)]


@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_request_that_is_wrong_is_not_tried_again(stubs, engines, status):
    stub = stubs()
    engine = engines(stub)
    stub.complete = lambda body: status if body["seed"] < 102 else completion(body)
    assert [r.seed for r in engine.generate(requests(4), SAMPLING)] == [102, 103]
    assert engine.counters["rollout/retries"] == 0
    assert len(stub.bodies("/v1/completions")) == 4
    with pytest.raises(EngineError, match=rf"none of 2 requests succeeded; the first, prompt 'p0': .*HTTP {status}"):
        engine.generate(requests(2), SAMPLING)


def test_a_dead_server_of_others_is_an_error_not_a_restart(stubs, engines):
    stub = stubs()
    engine = engines(stub, max_retries=1)
    stub.stop()
    with pytest.raises(EngineError, match=r"no server holds policy version 5.*Connect"):
        engine.generate(requests(2), SAMPLING)
    with pytest.raises(EngineError, match="Connect"):
        engine.load_weights(WEIGHTS.items(), 6)


@pytest.mark.parametrize("where", ["thread", "event loop"])
def test_it_draws_from_any_thread(stubs, engines, where):
    engine, found = engines(stubs()), []
    if where == "thread":
        thread = threading.Thread(target=lambda: found.extend(engine.generate(requests(2), SAMPLING)))
        thread.start()
        thread.join()
    else:

        async def notebook() -> None:
            found.extend(engine.generate(requests(2), SAMPLING))

        asyncio.run(notebook())
    assert [r.response_ids for r in found] == [ids_of(request) for request in requests(2)]


def test_no_more_requests_are_under_way_than_allowed(stubs, engines):
    stub, lock, now, most = stubs(), threading.Lock(), [0], [0]

    def slow(body):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.02)
        with lock:
            now[0] -= 1
        return completion(body)

    engine = engines(stub, concurrency=3)
    stub.complete = slow
    assert len(engine.generate(requests(15), SAMPLING)) == 15
    assert most == [3]


# Several servers.


def test_servers_are_loaded_alike_and_share_the_requests(stubs, engines):
    servers = [stubs() for _ in range(3)]
    engine = engines(*servers)
    engine.load_weights(WEIGHTS.items(), 6)
    drawn = engine.generate(requests(12), SAMPLING)
    assert [r.response_ids for r in drawn] == [ids_of(request) for request in requests(12)]
    for stub in servers:
        assert stub.names()[:4] == AN_UPDATE
        assert len(stub.bodies("/v1/completions")) == 4


def test_a_dead_server_is_passed_over_and_comes_back_with_the_next_sync(stubs, engines, caplog):
    one, other = stubs(), stubs()
    engine = engines(one, other)
    port = other.server_address[1]
    other.stop()
    for _ in range(2):
        assert len(engine.generate(requests(6), SAMPLING)) == 6
        assert engine.counters["rollout/retries"] == 1
        engine.load_weights(WEIGHTS.items(), engine.version + 1)
    assert "servers are passed over" in caplog.text
    back = Stub(port).start()
    engine.generate(requests(6), SAMPLING)
    assert back.bodies("/v1/completions") == []  # it answers, but holds nothing of this run
    engine.load_weights(WEIGHTS.items(), 9)
    engine.generate(requests(6), SAMPLING)
    assert len(back.bodies("/v1/completions")) == 3
    assert engine.counters["rollout/retries"] == 0
    back.stop()


@pytest.mark.parametrize("fault", ["dies", "hangs"])
def test_a_server_that_fails_while_drawing_leaves_its_share_to_the_others(stubs, engines, fault):
    one, other = stubs(), stubs()
    engine = engines(one, other, concurrency=1, request_timeout_s=1.0, max_retries=1)

    def failing(body):
        if fault == "hangs":
            return "hang"
        other.shutdown()
        other.socket.close()
        return "reset"

    other.complete = failing
    drawn = engine.generate(requests(10), SAMPLING)
    assert [r.response_ids for r in drawn] == [ids_of(request) for request in requests(10)]
    assert len(one.bodies("/v1/completions")) == 10
    assert len(other.bodies("/v1/completions")) <= 2  # as many as were under way


def test_a_server_loaded_by_somebody_else_meanwhile_is_noticed(stubs, engines):
    stub = stubs()
    engine = engines(stub)

    def swap(body):
        stub.facts["version"] = -1  # as after a restart by somebody else
        return completion(body)

    stub.complete = swap
    with pytest.raises(EngineError, match="held policy version 5 and now holds -1"):
        engine.generate(requests(1), SAMPLING)
    with pytest.raises(EngineError, match=r"no server holds policy version 5: .* holds -1"):
        engine.generate(requests(1), SAMPLING)


# Keys.


def test_the_key_goes_into_the_header_and_nowhere_else(stubs, engines, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("BAPO_VLLM_KEY", KEY)
    stub = stubs(key=KEY)
    engine = engines(stub)
    assert len(engine.generate(requests(2), SAMPLING)) == 2
    stub.complete = lambda body: 400  # whose text repeats the header
    with pytest.raises(EngineError, match=r"the header was Bearer \*\*\*") as refused:
        engine.generate(requests(2), SAMPLING)
    seen = [caplog.text, str(refused.value), repr(engine), repr(engine.client), repr(engine.options), repr(stub.calls)]
    assert [text for text in seen if KEY in text] == []


# Ranks.


def test_the_other_ranks_use_the_server_of_rank_0(stubs, model_folder, monkeypatch):
    stub = stubs(key=KEY)
    monkeypatch.setattr(VLLMServerRollouts, "require_vllm", lambda self: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "1")
    options = VLLMServerRollouts(start_timeout_s=1.5, sleep_level=1, lora_sync="native", max_restarts=2)
    with pytest.raises(ValueError, match="ranks that Lightning does not start need the url of a server"):
        options(model_folder)
    monkeypatch.setenv("BAPO_VLLM_URLS", stub.url)
    monkeypatch.setenv("BAPO_VLLM_KEY", KEY)
    engine = options(model_folder)
    assert engine.shared
    with pytest.raises(RuntimeError, match="no complete set"):
        engine.generate(requests(1), SAMPLING)
    engine.set_version(4)
    with pytest.raises(EngineError, match=r"holds -1; it was not back within rollout\.engine\.start_timeout_s=1\.5"):
        engine.generate(requests(1), SAMPLING)
    stub.calls.clear()
    threading.Timer(0.2, stub.facts.update, [{"version": 4}]).start()  # rank 0 has started and loaded it again
    assert engine.generate(requests(1), SAMPLING)[0].policy_version == 4
    engine.sleep()
    engine.close()
    assert stub.names() == ["/v1/completions"]
    assert stub.bodies("/v1/completions")[0]["model"] == "policy-4"


@pytest.mark.parametrize("variable", ["NODE_RANK", "GROUP_RANK"])
def test_a_run_on_several_machines_needs_urls(model_folder, monkeypatch, variable):
    monkeypatch.setattr(VLLMServerRollouts, "require_vllm", lambda self: None)
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ValueError, match="servers that all of them reach"):
        VLLMServerRollouts()(model_folder)
