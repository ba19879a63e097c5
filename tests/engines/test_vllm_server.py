"""The engine that speaks to vLLM servers, against a stub."""

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
from support.engines import asked
from support.vllm_stub import Stub, completion

from bapo.engines import client as server_client
from bapo.engines import vllm_engine
from bapo.engines.server_check import server_command, switches
from bapo.engines.vllm_server import ServerVLLM, VLLMServerRollouts
from bapo.protocols import EngineError
from bapo.rollouts.grading import generate_graded
from bapo.rollouts.prompt_format import PLAIN
from bapo.types import Adapter, Prompt, SamplingParams

KEY = "sentinel-key-of-the-tests"
SAMPLING = SamplingParams(temperature=0.6, max_tokens=3)
WEIGHTS = {"model.embed_tokens.weight": torch.arange(6.0).reshape(2, 3), "lm_head.weight": torch.ones(2, 3)}
AN_UPDATE = ["mark_policy", "load_policy_weights", "/reset_prefix_cache", "mark_policy"]


@pytest.fixture(autouse=True)
def no_server_around(monkeypatch):
    for name in ("BAPO_VLLM_KEY", "BAPO_VLLM_SOCKET", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(server_client, "BACKOFF_S", (0.02, 0.1))


@pytest.fixture
def stubs():
    """Makes stubs, and stops them."""
    made: list[Stub] = []

    def make(**options) -> Stub:
        made.append(Stub(**options).start())
        return made[-1]

    yield make
    for stub in made:
        stub.stop()


@pytest.fixture
def engines(model_folder):
    """Makes engines on stubs, loaded with version 5 unless they should not be, and closes them."""
    made: list[ServerVLLM] = []

    def make(*servers: Stub, load: bool = True, **options) -> ServerVLLM:
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


def requests(n: int, first_seed: int = 100) -> list:
    return [asked(f"p{i}", i % 2, first_seed + i, (3, 4, 2 + i % 5)) for i in range(n)]


def ids_of(request) -> tuple[int, ...]:
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
    given.require()
    with pytest.raises(ValueError, match="needs vLLM, which is not installed"):
        VLLMServerRollouts().require()


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


def test_the_command_of_a_server():
    options = VLLMServerRollouts(urls=["http://127.0.0.1:1"], max_model_len=64, engine_args={"enable_prefix_caching": False})
    arguments = options.arguments("/m", torch.float32) | options.engine_args
    command = server_command(arguments, "--uds", "/s", python="python")
    assert command[:3] == ["python", "-m", "vllm.entrypoints.openai.api_server"]
    assert command[-2:] == ["--uds", "/s"]
    pairs = dict(itertools.pairwise(command))
    assert pairs["--worker-extension-cls"] == "bapo.engines.worker.PolicyWorker"
    assert pairs["--logprobs-mode"] == "processed_logprobs"
    assert pairs["--generation-config"] == "vllm"
    assert pairs["--dtype"] == "float32"
    assert pairs["--max-model-len"] == "64"
    assert "--revision" not in command
    assert {"--no-enable-prefix-caching", "--no-enforce-eager"} <= set(command)


def test_native_adapters_need_a_switch_of_the_server():
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in switches(VLLMServerRollouts(urls=["http://127.0.0.1:1"]))
    native = switches(VLLMServerRollouts(urls=["http://127.0.0.1:1"], lora_sync="native"))
    assert native["VLLM_SERVER_DEV_MODE"] == native["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


# Servers that run already.


@pytest.mark.parametrize(
    ("facts", "options", "message"),
    [
        ({"logprobs_mode": "raw_logprobs"}, {}, "has logprobs_mode='raw_logprobs'; it must be 'processed_logprobs'"),
        ({"default_sampling": {"min_p": 0.1}}, {}, "has default_sampling={'min_p': 0.1}; it must be {}"),
        ({"dtype": "bfloat16"}, {}, "has dtype='bfloat16'; it must be 'float32'"),
        ({"max_model_len": 32}, {"max_model_len": 64}, "has max_model_len=32; it must be 64"),
        ({"max_lora_rank": 0}, {"lora_sync": "native"}, "has max_lora_rank=0; it must be >= 64"),
        (500, {}, "HTTP 500"),
        (404, {}, "HTTP 404"),
        ({"version": "no number"}, {}, "not that of the worker extension"),
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
    assert str(refused.value).endswith(f" --middleware bapo.engines.auth.KeyOnEveryRoute --host 127.0.0.1 --port {port}")


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
    with pytest.raises(ValueError, match="answers requests without a key"):
        engines(stubs())
    assert engines(stubs(key=KEY)).version == 5


# A sync.


def test_a_sync_is_complete_before_the_cache_is_dropped_and_that_before_a_request(stubs, engines):
    stub = stubs()
    engine, read = engines(stub, load=False), {}

    def load(folder: Path) -> list[int]:
        for path in sorted(folder.glob("*.safetensors")):
            read.update(load_file(path))
        return [json.loads((folder / "sync.json").read_text())["version"]]

    stub.load = load
    for version in (7, 8):
        engine.load_weights(WEIGHTS.items(), version)
        (rollout, *_) = engine.generate(requests(2), SAMPLING)
        assert set(rollout.versions) == {version} == {engine.version}
        assert stub.names() == [*AN_UPDATE, "/v1/completions", "/v1/completions"]
        assert [body["kwargs"]["version"] for body in stub.bodies("mark_policy")] == [-1, version]
        stub.calls.clear()
    assert read.keys() == WEIGHTS.keys()
    assert all(torch.equal(read[name], value) for name, value in WEIGHTS.items())
    assert list(engine.folder.iterdir()) == []  # nothing lies about in shared memory
    engine.close()
    engine.close()
    assert not engine.folder.exists()


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
        ("load_policy_weights", {"results": [[4]]}),
        ("/reset_prefix_cache", {"success": False}),
        ("mark_policy", 503),
    ],
    ids=str,
)
def test_after_half_a_sync_nothing_is_generated_until_a_whole_one(stubs, engines, fails, answer, monkeypatch):
    monkeypatch.setattr(vllm_engine, "RESET_S", 0.3)
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
    assert engine.generate(requests(1), SAMPLING)[0].versions[0] == 6


def test_no_room_for_the_weights_is_an_engine_error(stubs, engines, monkeypatch):
    engine = engines(stubs())
    monkeypatch.setattr("bapo.engines.weight_sync.shutil.disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(EngineError, match="MiB left"):
        engine.load_weights(WEIGHTS.items(), 6)
    assert engine.version == -1
    monkeypatch.undo()
    engine.load_weights(WEIGHTS.items(), 6)
    assert list(engine.folder.iterdir()) == []


def test_an_adapter_gets_a_name_of_its_own_and_the_old_one_goes(stubs, engines):
    stub = stubs()
    engine = engines(stub, load=False, lora_sync="native")
    assert engine.takes_adapter
    adapter = Adapter({"r": 2}, {"a": torch.ones(2)})
    for version, old in ((3, []), (4, ["policy-3"]), (4, [])):
        engine.load_adapter(adapter, version)
        assert engine.generate(requests(1), SAMPLING)[0].versions[0] == version
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
    assert len(list(engine.folder.iterdir())) == 1
    engine.load_weights(WEIGHTS.items(), 5)
    engine.generate(requests(1), SAMPLING)
    assert "model" not in stub.bodies("/v1/completions")[0]  # the old adapter does not go on top of full weights


# Generation.


def test_every_sample_is_a_request_with_its_own_seed_and_the_neutral_settings(stubs, engines):
    stub = stubs()
    engine = engines(stub)
    sampling = SamplingParams(temperature=0.6, max_tokens=4, top_p=0.9, top_k=7)
    samples = engine.generate(requests(3), sampling)
    assert sorted(stub.bodies("/v1/completions"), key=lambda body: body["seed"]) == [
        {
            "prompt": list(request.prompt_ids), "n": 1, "seed": request.seed, "temperature": 0.6, "top_p": 0.9, "top_k": 7,
            "max_tokens": 4, "logprobs": 0, "ignore_eos": True, "stop_token_ids": list(engine.eos), "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        for request in requests(3)
    ]  # fmt: skip
    assert len(engine.eos) == 1
    assert [(r.uid, r.sample_index, r.seed) for r in samples] == [(r.uid, r.sample_index, r.seed) for r in requests(3)]
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
    with pytest.raises(EngineError, match="another prompt" if fault == "another prompt" else "lacks .*the log-prob"):
        engine.generate(requests(1), SAMPLING)


def test_a_response_that_was_aborted_is_left_out(stubs, engines, caplog):
    stub = stubs()
    engine = engines(stub)

    def aborted(body):
        answer = completion(body)
        answer["choices"][0]["finish_reason"] = "abort" if body["seed"] == 101 else "stop"
        return answer

    stub.complete = aborted
    samples = engine.generate(requests(3), SAMPLING)
    assert [r.seed for r in samples] == [100, 102]
    assert {r.finish_reason for r in samples} == {"stop"}
    assert "ended it as 'abort'" in caplog.text


# Retries.


def test_connections_that_break_are_tried_again_and_change_nothing(stubs, engines):
    stub = stubs()
    engine, breaks = engines(stub), iter(["reset", "reset"])
    expected = engine.generate(requests(4), SAMPLING)
    stub.calls.clear()
    stub.complete = lambda body: next(breaks, None) or completion(body)
    assert engine.generate(requests(4), SAMPLING) == expected
    assert len(stub.bodies("/v1/completions")) == 6


@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_an_overloaded_server_is_asked_again(stubs, engines, status):
    stub = stubs()
    engine, busy = engines(stub), iter([status])
    stub.complete = lambda body: next(busy, None) or completion(body)
    assert len(engine.generate(requests(2), SAMPLING)) == 2
    assert len(stub.bodies("/v1/completions")) == 3


def test_a_server_that_never_answers_is_an_error_in_time(stubs, engines):
    stub = stubs()
    engine = engines(stub, request_timeout_s=0.4, max_retries=2, concurrency=2)
    stub.complete = lambda body: "hang"
    begun = time.monotonic()
    with pytest.raises(EngineError, match=r"could not generate: .*no answer within 0.4 s"):
        engine.generate(requests(20), SAMPLING)
    assert time.monotonic() - begun < 0.4 + 1


def test_a_sync_that_is_not_answered_is_an_error_in_time(stubs, engines):
    stub = stubs()
    engine = engines(stub, timeout_s=0.4)
    stub.answer = lambda name, body: "hang" if name == "load_policy_weights" else None
    begun = time.monotonic()
    with pytest.raises(EngineError, match=r"could not take the weights: .*no answer within 0.4 s"):
        engine.load_weights(WEIGHTS.items(), 6)
    assert time.monotonic() - begun < 0.4 + 1


def test_a_request_that_fails_for_good_is_left_out_and_its_group_dropped(stubs, engines, tokenizer, caplog):
    stub = stubs()
    engine = engines(stub, max_retries=2)
    stub.complete = lambda body: 500 if body["seed"] == 13 else completion(body)
    group = [asked("p", i, 10 + i, (3, 4)) for i in range(4)]
    assert [r.sample_index for r in engine.generate(group, SAMPLING)] == [0, 1, 2]
    assert Counter(body["seed"] for body in stub.bodies("/v1/completions")) == {10: 1, 11: 1, 12: 1, 13: 3}
    assert "1 of 4 requests failed for good; the first, prompt 'p'" in caplog.text

    class AllRight:
        def verify(self, prompts, responses):
            return [1.0] * len(responses)

    prompts = [(uid, Prompt(uid, "1", "1")) for uid in "pq"]
    judged = generate_graded(
        engine, AllRight(), tokenizer, PLAIN, prompts, SAMPLING, 4, lambda uid, index: (10 if uid == "p" else 20) + index
    )
    assert [(s.uid, s.sample_index) for s in judged] == [("q", i) for i in range(4)]


@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_request_that_is_wrong_is_not_tried_again(stubs, engines, status):
    stub = stubs()
    engine = engines(stub)
    stub.complete = lambda body: status if body["seed"] < 102 else completion(body)
    assert [r.seed for r in engine.generate(requests(4), SAMPLING)] == [102, 103]
    assert len(stub.bodies("/v1/completions")) == 4
    with pytest.raises(EngineError, match=rf"none of 2 requests succeeded; the first, prompt 'p0': .*HTTP {status}"):
        engine.generate(requests(2), SAMPLING)


def test_a_dead_server_is_an_error(stubs, engines):
    stub = stubs()
    engine = engines(stub, max_retries=1)
    stub.stop()
    with pytest.raises(EngineError, match=rf"could not generate: .*{stub.url}.*Connect"):
        engine.generate(requests(2), SAMPLING)
    with pytest.raises(EngineError, match=rf"could not take the weights: .*{stub.url}.*Connect"):
        engine.load_weights(WEIGHTS.items(), 6)


@pytest.mark.parametrize("where", ["thread", "event loop"])
def test_it_generates_in_any_thread(stubs, engines, where):
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
    samples = engine.generate(requests(12), SAMPLING)
    assert [r.response_ids for r in samples] == [ids_of(request) for request in requests(12)]
    for stub in servers:
        assert stub.names()[:4] == AN_UPDATE
        assert len(stub.bodies("/v1/completions")) == 4


def test_one_of_several_servers_that_dies_fails_the_round_by_its_name(stubs, engines):
    one, other = stubs(), stubs()
    engine = engines(one, other, max_retries=1)

    def dying(body):
        other.shutdown()
        other.socket.close()
        return "reset"

    other.complete = dying
    with pytest.raises(EngineError, match=f"could not generate: .*{other.url}/v1/completions"):
        engine.generate(requests(10), SAMPLING)


def test_a_server_that_was_loaded_by_another_process_is_noticed(stubs, engines):
    stub = stubs()
    engine = engines(stub)

    def swap(body):
        stub.facts["version"] = -1  # as after a restart
        return completion(body)

    stub.complete = swap
    with pytest.raises(EngineError, match="holds policy version -1, not 5"):
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


def test_the_other_ranks_use_the_server_of_rank_0(stubs, model_folder, monkeypatch, tmp_path):
    stub = stubs(socket=tmp_path / "s")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "1")
    options = VLLMServerRollouts(sleep_level=1, lora_sync="native")
    with pytest.raises(ValueError, match="ranks that Lightning does not start need the url of a server"):
        options(model_folder)
    monkeypatch.setenv("BAPO_VLLM_SOCKET", str(tmp_path / "s"))
    engine = options(model_folder)
    assert engine.shared
    with pytest.raises(RuntimeError, match="no complete set"):
        engine.generate(requests(1), SAMPLING)
    engine.set_version(4)
    with pytest.raises(EngineError, match="holds policy version -1, not 4"):
        engine.generate(requests(1), SAMPLING)
    stub.facts["version"] = 4  # rank 0 has loaded it
    stub.calls.clear()
    assert engine.generate(requests(1), SAMPLING)[0].versions[0] == 4
    engine.sleep()
    engine.close()
    assert stub.names() == ["/v1/completions"]
    assert stub.bodies("/v1/completions")[0]["model"] == "policy-4"


@pytest.mark.parametrize("variable", ["NODE_RANK", "GROUP_RANK"])
def test_a_run_on_several_machines_needs_urls(model_folder, monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ValueError, match="servers that all of them reach"):
        VLLMServerRollouts()(model_folder)
