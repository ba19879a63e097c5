"""What a run has trained, as a folder that others load."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM
from support import REPOSITORY, SMALL, run_experiment
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from bapo.export import export, main, policy_config, policy_options, trained_policy
from bapo.policy.causal_lm import CausalLMPolicy
from bapo.policy.lora import Lora
from bapo.training.cli import cli
from bapo.training.resume import newest_checkpoint

LORA = (
    "+policy/lora=default",
    "policy.lora.r=4",
    "policy.lora.modules_to_save=[lm_head]",
    "optimizer.lr=0.01",
    "trainer.max_rounds=1",
)
RUNS = {
    "whole": ("optimizer.lr=0.01", "trainer.max_rounds=1"),
    "whole, tied": ("optimizer.lr=0.01", "trainer.max_rounds=1", "policy.warm_start.model.tie_word_embeddings=true"),
    "lora": LORA,
    "lora, tied": (*LORA, "policy.warm_start.model.tie_word_embeddings=true"),
    "lora, bfloat16": (*LORA, "policy.dtype=bfloat16"),
}
IDS = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 10, 2, 11]])


@pytest.fixture(scope="module")
def run_of(cache_dir, tmp_path_factory):
    """The folder of a finished run by its name in `RUNS`; made once."""
    made: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp("run")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("bapo.analysis.report.write_report", lambda folder: folder / "report.html")
                run_experiment(folder, *SMALL, f"policy.warm_start.cache_dir={cache_dir}", *RUNS[name])
            made[name] = folder
        return made[name]

    return run


def policy_of(run_dir: Path) -> CausalLMPolicy:
    config = policy_config(run_dir)
    return trained_policy(run_dir, config, *policy_options(config))


def logits(model) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits.float()


def in_transformers(folder: Path, dtype: torch.dtype = torch.float32):
    """The folder's model, loaded by transformers with nothing missing and nothing left over."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    assert {p.dtype for p in model.parameters()} == {dtype}
    return model


def refused(capsys, monkeypatch, *arguments: object) -> str:
    """What the command line says, in one line, before it exits with 2."""
    monkeypatch.setattr(sys, "argv", ["export", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli(main)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("name", ["whole", "whole, tied", "lora", "lora, tied"])
def test_the_whole_model_says_what_the_policy_says(run_of, tmp_path, name):
    run_dir = run_of(name)
    export(run_dir, tmp_path / "out")
    model, policy = in_transformers(tmp_path / "out"), policy_of(run_dir)
    torch.testing.assert_close(logits(model), logits(policy.model), atol=1e-5, rtol=0)
    _, path = policy_options(policy_config(run_dir))
    start = AutoModelForCausalLM.from_pretrained(path)
    assert float((logits(model) - logits(start)).abs().max()) > 1e-3
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in start.named_parameters()]
    assert model.config.tie_word_embeddings == ("tied" in name)
    assert model.generation_config.eos_token_id == start.generation_config.eos_token_id == 1
    assert model.generation_config.top_k == 0
    tokenizer, original = AutoTokenizer.from_pretrained(tmp_path / "out"), AutoTokenizer.from_pretrained(path)
    assert tokenizer.get_vocab() == original.get_vocab()
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (original.eos_token_id, original.pad_token_id)


def test_the_policy_is_that_of_the_newest_checkpoint(run_of):
    for name in ("whole", "lora"):
        saved = torch.load(newest_checkpoint(run_of(name)), weights_only=True)["state_dict"]
        policy = {f"policy.{key}": value for key, value in policy_of(run_of(name)).state_dict().items()}
        assert all(torch.equal(value, policy[key]) for key, value in saved.items()), name


@pytest.mark.parametrize("name", ["lora", "lora, tied"])
def test_the_adapter_says_what_the_policy_says(run_of, tmp_path, name):
    run_dir = run_of(name)
    export(run_dir, tmp_path / "out", adapter=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    _, path = policy_options(policy_config(run_dir))
    assert (config["base_model_name_or_path"], config["revision"]) == (str(path), None)
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(loaded), logits(policy_of(run_dir).model), atol=1e-5, rtol=0)


def test_a_bfloat16_policy_is_exported_in_bfloat16(run_of, tmp_path):
    run_dir = run_of("lora, bfloat16")
    export(run_dir, tmp_path / "out")
    model = in_transformers(tmp_path / "out", torch.bfloat16)
    weights = dict(policy_of(run_dir).named_weights())
    assert all(torch.equal(value, weights[name]) for name, value in model.named_parameters())


NAMES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


def test_an_export_is_a_new_or_empty_folder_with_nothing_beside_it(run_of, tmp_path):
    out = tmp_path / "models" / "first"
    export(run_of("lora"), out)
    assert [path.name for path in out.parent.iterdir()] == ["first"]
    assert sorted(path.name for path in out.iterdir()) == NAMES
    assert not any(str(tmp_path.parent) in (out / name).read_text() for name in NAMES if name.endswith("json"))
    (tmp_path / "empty").mkdir()
    export(run_of("lora"), tmp_path / "empty", adapter=True)
    assert len(list((tmp_path / "empty").iterdir())) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "models"]


@pytest.mark.slow
def test_the_command_says_where_the_folder_is_and_nothing_else(run_of, tmp_path):
    command = [sys.executable, "-m", "bapo.export", run_of("lora"), tmp_path / "out"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == str(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == NAMES


def test_what_cannot_be_exported_is_said_in_a_line(run_of, tmp_path, capsys, monkeypatch):
    run_dir, out = run_of("whole"), tmp_path / "out"
    line = refused(capsys, monkeypatch, tmp_path / "no_run", out)
    assert line == f"error: '{tmp_path}/no_run' is not a run folder: there is no config.yaml in it"
    line = refused(capsys, monkeypatch, run_dir, out, "--adapter")
    assert line == f"error: --adapter needs a run with policy.lora; in {run_dir} it is null, and the model was trained whole"
    line = refused(capsys, monkeypatch, run_dir, run_dir)
    assert line == f"error: OUT is '{run_dir}'; it must be a new or an empty folder"
    (tmp_path / "file").touch()
    assert refused(capsys, monkeypatch, run_dir, tmp_path / "file").endswith("it must be a new or an empty folder")
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "config.yaml").write_bytes((run_dir / "config.yaml").read_bytes())
    assert refused(capsys, monkeypatch, begun, out) == f"error: RUN_DIR is '{begun}'; there is no checkpoint in it"
    (begun / "config.yaml").write_text("trainer: [\n")
    assert refused(capsys, monkeypatch, begun, out).startswith(f"error: {begun}/config.yaml is damaged: ")
    assert not out.exists()


def test_a_checkpoint_that_does_not_fit_its_config_is_said(run_of, tmp_path, capsys, monkeypatch):
    for name in ("lora", "whole"):
        run_dir = tmp_path / name
        (run_dir / "checkpoints").mkdir(parents=True)
        (run_dir / "checkpoints" / "update=000004.ckpt").symlink_to(newest_checkpoint(run_of(name)))
        config = yaml.safe_load((run_of(name) / "config.yaml").read_text())
        config["policy"]["lora"] = (config["policy"]["lora"] or {"_target_": "bapo.policy.lora.Lora", "alpha": 8}) | {"r": 2}
        (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    line = refused(capsys, monkeypatch, tmp_path / "lora", tmp_path / "out")
    assert line.startswith(
        "error: the checkpoint does not fit the policy: policy.model.model.layers.0.mlp.down_proj.lora_A.default"
    )
    assert line.endswith("in the checkpoint and [2, 64] in the policy (14 such)")
    line = refused(capsys, monkeypatch, tmp_path / "whole", tmp_path / "out")
    assert line.startswith(
        "error: the checkpoint does not fit the policy: only in the checkpoint: policy.model.lm_head.weight, "
    )
    assert "; only in the policy: policy.model.model.layers.0.mlp.down_proj.lora_A.default.weight, " in line
    config["policy"]["lora"]["r"] = 0
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    line = refused(capsys, monkeypatch, tmp_path / "whole", tmp_path / "out")
    assert line == "error: the run's policy cannot be made again: policy.lora.r is 0; it must be >= 1"


@pytest.mark.parametrize("adapter", [False, True])
def test_an_export_that_fails_leaves_nothing(run_of, tmp_path, monkeypatch, adapter):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bapo.engines.weight_sync.save_file", full)
    monkeypatch.setattr("bapo.export.load_tokenizer", full)  # when the weights are on disk already
    with pytest.raises(OSError, match="No space left"):
        export(run_of("lora"), tmp_path / "out", adapter)
    assert list(tmp_path.iterdir()) == []


def test_a_run_from_before_adapters_is_exported(run_of, tmp_path):
    """Its config.yaml does not have the keys."""
    config = yaml.safe_load((run_of("whole") / "config.yaml").read_text())
    del config["policy"]["lora"], config["policy"]["gradient_checkpointing"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "checkpoints").symlink_to(run_of("whole") / "checkpoints")
    export(tmp_path, tmp_path / "out")
    torch.testing.assert_close(logits(in_transformers(tmp_path / "out")), logits(policy_of(tmp_path).model), atol=1e-5, rtol=0)


def test_the_policys_options_are_those_of_the_run(run_of):
    options, path = policy_options(policy_config(run_of("lora")))
    assert options.lora == Lora(4, 32, modules_to_save=["lm_head"])
    assert Path(path).is_absolute()


@pytest.fixture
def served(tmp_path):
    """Starts vLLM's server for a folder, as `vllm serve` does, and gives a function that asks it; ends it with the test."""
    processes = []

    def serve(folder: Path) -> Any:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
        command += ["--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "64", "--served-model-name", "policy"]
        log = (tmp_path / "server.log").open("w")
        environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
        processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True))

        def ask(path: str, **request: Any) -> Any:
            data = json.dumps(request).encode() if request else None
            sent = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(sent, timeout=120) as answer:
                return json.loads(answer.read() or b"null")

        deadline = time.monotonic() + 400
        while True:
            try:
                ask("/health")
                return ask
            except urllib.error.URLError:
                assert processes[-1].poll() is None, (tmp_path / "server.log").read_text()[-3000:]
                assert time.monotonic() < deadline
                time.sleep(1)

    yield serve
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_vllm_serves_the_whole_model(run_of, tmp_path, served):
    export(run_of("lora"), tmp_path / "out")
    ask = served(tmp_path / "out")
    policy = policy_of(run_of("lora")).model
    expected = policy(input_ids=IDS).logits.log_softmax(-1)[:, :-1].gather(-1, IDS[:, 1:, None]).squeeze(-1)
    for ids, logprobs in zip(IDS.tolist(), expected, strict=True):
        answer = ask("/v1/completions", model="policy", prompt=ids, max_tokens=1, prompt_logprobs=0)
        found = [
            part[str(token)]["logprob"]
            for token, part in zip(ids[1:], answer["choices"][0]["prompt_logprobs"][1:], strict=True)
        ]
        torch.testing.assert_close(torch.tensor(found), logprobs, atol=1e-5, rtol=0)
