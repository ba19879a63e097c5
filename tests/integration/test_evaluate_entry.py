"""`python evaluate.py`: which policy, asked what, kept where; stopped at any time it goes on, and finished it says so again."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from support import REPOSITORY, SMALL, run_experiment
from support.evaluations import TASK, WARM, composed
from support.task_files import MATH500
from tokenizers.processors import TemplateProcessing

from bapo.engines.hf import HFEngine
from bapo.evaluation.folder import SAMPLES, read_samples, write_samples
from bapo.evaluation.plan import Plan, plans
from bapo.evaluation.run import EVALUATE, run
from bapo.evaluation.words import check_words, spelled_out
from bapo.export import export
from bapo.policy.tiny_qwen3 import tiny_qwen3
from bapo.policy.tokenizer import character_tokenizer
from bapo.protocols import EngineError
from bapo.rollouts.seeds import derive_seed
from bapo.tasks.digit_ops import DigitOps
from bapo.training.cli import explain
from bapo.training.job import build
from bapo.training.run_folder import locked
from bapo.types import Prompt

CONF = REPOSITORY / "conf"


def planned(*overrides: str) -> list[Plan]:
    cfg = composed(*overrides)
    return plans(cfg, build(cfg, EVALUATE), overrides)


@pytest.fixture
def small(cache_dir: Path, tmp_path: Path) -> tuple[str, ...]:
    """Overrides of an evaluation of the small embedded policy."""
    return (*TASK, *WARM, f"cache_dir={cache_dir}", f"output_dir={tmp_path / 'eval'}", "sampling.max_tokens=10")


@pytest.fixture(scope="session")
def trained(cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one round, whose prompts have a template of their own."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    run_experiment(folder, *SMALL, f"policy.warm_start.cache_dir={cache_dir}", "trainer.max_rounds=1")
    return folder


def forbid_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no model may be loaded."""
    loads: Callable[..., Any] = lambda *_, **__: pytest.fail("a model was loaded")  # noqa: E731
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", loads)


def folder_of(tmp_path: Path, at: str = "eval") -> Path:
    (found,) = (tmp_path / at).glob("*/*-*")
    return found


def values(result: dict[str, Any]) -> dict[str, float]:
    return {name: one["value"] for name, one in result["metrics"].items()}


# A whole evaluation.


def test_an_evaluation_leaves_its_samples_its_result_and_a_table(small, tmp_path, capsys) -> None:
    (result,) = run(composed(*small))
    folder = folder_of(tmp_path)
    assert {path.name for path in folder.iterdir()} == {"samples.jsonl", "result.json", "result.csv", "result.md", ".lock"}
    assert json.loads((folder / "result.json").read_text()) == result
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [(row["uid"], row["sample_index"]) for row in rows] == [
        (f"digit_ops/test/{i}", s) for i in range(32) for s in range(4)
    ]
    assert all(row["seed"] == derive_seed(0, "eval", row["uid"], row["sample_index"]) for row in rows)
    task = DigitOps(digits=2, train_size=200, test_size=32)
    prompts = {prompt.uid: prompt for prompt in task.prompts("test")}
    assert [row["reward"] for row in rows] == task.verify([prompts[r["uid"]] for r in rows], [r["response"] for r in rows])
    assert rows[0].keys() == {
        "uid", "sample_index", "seed", "answer", "reward", "verified", "length", "finish_reason", "response", "prompt",
        "gold",
    }  # fmt: skip
    assert [(row["prompt"], row["gold"]) for row in rows] == [(prompts[r["uid"]].text, prompts[r["uid"]].answer) for r in rows]
    assert 0 < values(result)["avg@4"] == sum(row["reward"] for row in rows) / 128 < 1
    assert result["settings"].items() >= {
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 10, "samples": 4, "seed": 0, "problems": 32,
        "split": "test", "engine": {"_target_": "bapo.engines.hf.HFRollouts"}, "dtype": "float32",
    }.items()  # fmt: skip
    assert result["metrics"].keys() == {
        "avg@4", "pass@1", "pass@2", "pass@4", "maj@4", "response_length_mean", "truncated_frac", "no_answer_frac",
        "unverified_frac",
    }  # fmt: skip
    assert result["metrics"]["avg@4"].keys() == {"value", "stderr", "low", "high"}
    assert (result["policy"]["name"], result["policy"]["step"], result["missing_samples"]) == ("tiny_qwen3", None, 0)
    assert result["packages"]["torch"]
    (row,) = csv.DictReader((folder / "result.csv").open())
    assert float(row["avg@4_high"]) == result["metrics"]["avg@4"]["high"]
    table = (folder / "result.md").read_text()
    assert capsys.readouterr().out == table
    assert len(table.splitlines()) == 3


def test_a_finished_evaluation_is_told_again_without_a_model(small, tmp_path, capsys, monkeypatch) -> None:
    first = run(composed(*small))
    forbid_loading(monkeypatch)
    told = capsys.readouterr().out
    before = {path: path.stat().st_mtime_ns for path in folder_of(tmp_path).iterdir()}
    assert run(composed(*small)) == first
    assert capsys.readouterr().out == told
    assert {path: path.stat().st_mtime_ns for path in folder_of(tmp_path).iterdir()} == before


@pytest.mark.parametrize(
    "change",
    ["samples=2", "sampling.temperature=0.9", "seed=1", "max_problems=8", "rollout.prompt.template='a{text}'",
     "benchmark.digit_ops.max_attempts=1", "benchmark.digit_ops.seed=1", "policy.dtype=bfloat16", "sampling.max_tokens=9"],
)  # fmt: skip
def test_whatever_decides_the_result_decides_the_folder(small, model_folder, change: str) -> None:
    fixed = (*small, f"policy={model_folder}")
    (one,), (same,), (other,) = (
        planned(*fixed),
        planned(*fixed, "problems_per_batch=3", "threads=null"),
        planned(*fixed, change),
    )
    assert one.folder == same.folder != other.folder


# Stopped and repeated.


def failing(monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException) -> list[int]:
    """The engine raises at its `at`-th draw; returns how many requests each draw had."""
    plain, calls = HFEngine.generate, []

    def generate(self, requests, sampling):
        calls.append(len(requests))
        if len(calls) == at:
            raise error
        return plain(self, requests, sampling)

    monkeypatch.setattr(HFEngine, "generate", generate)
    return calls


@pytest.mark.parametrize("error", [EngineError("the engine is gone"), KeyboardInterrupt(), SystemExit(143)], ids=repr)
def test_what_is_finished_is_kept_and_only_the_rest_is_generated(small, tmp_path, monkeypatch, caplog, error) -> None:
    (whole,) = run(composed(*small))
    cut = (*small[:-2], f"output_dir={tmp_path / 'cut'}", small[-1], "problems_per_batch=5")
    with monkeypatch.context() as patch, caplog.at_level("INFO", "bapo"):
        failing(patch, 4, error)  # the probe, then two draws
        with pytest.raises(type(error)):
            run(composed(*cut))
    folder = folder_of(tmp_path, "cut")
    assert f"digit_ops: 10 of 32 problems are saved in {folder}" in caplog.text
    assert "to resume: python " in caplog.text
    assert not (folder / "result.json").exists()
    with (folder / SAMPLES).open("a") as file:  # a kill in the middle of a line, after a whole one
        one = (folder_of(tmp_path) / SAMPLES).read_text().splitlines(keepends=True)[40]
        file.write(one + one[:30])
    calls = failing(monkeypatch, 0, error)
    (again,) = run(composed(*cut))
    assert calls[1:] == [20, 20, 20, 20, 8]
    assert (folder / SAMPLES).read_bytes() == (folder_of(tmp_path) / SAMPLES).read_bytes()
    assert again | {"wall_s": 0} == whole | {"wall_s": 0}


def test_all_generated_but_not_summed_up_needs_no_engine(small, tmp_path, monkeypatch) -> None:
    (first,) = run(composed(*small))
    forbid_loading(monkeypatch)
    (folder_of(tmp_path) / "result.json").unlink()
    (again,) = run(composed(*small))
    assert again | {"wall_s": first["wall_s"]} == first


def test_two_calls_at_once_are_refused(small, monkeypatch) -> None:
    (plan,) = planned(*small)
    forbid_loading(monkeypatch)
    with (
        locked(plan.folder, ".lock", "evaluation folder", "the same evaluation is going on"),
        pytest.raises(ValueError, match=r"evaluation folder '.*' is in use: the same evaluation is running"),
    ):
        run(composed(*small))


def test_damage_other_than_a_torn_end_is_refused(small, monkeypatch) -> None:
    (plan,) = planned(*small)
    forbid_loading(monkeypatch)
    plan.folder.mkdir(parents=True)
    (plan.folder / SAMPLES).write_text('{"uid": "a"}\n')
    with pytest.raises(ValueError, match=r"samples.jsonl is damaged in line 1: .*; without the file it begins again"):
        run(composed(*small))
    (plan.folder / SAMPLES).unlink()
    (plan.folder / "result.json").write_text("{")
    with pytest.raises(ValueError, match=r"result.json is damaged"):
        run(composed(*small))


def test_samples_survive_the_file_and_unfinished_problems_do_not(tmp_path) -> None:
    from support.scored import scored

    odd = scored("a", 0, "é", 1.0, response="line\none\u2028two\x85three\x1c \ud800")
    rows = [odd, scored("a", 1, None, 0.0), scored("b", 0, "7", 1.0)]
    write_samples(tmp_path, rows)
    assert read_samples(tmp_path, 2) == rows[:2]
    (tmp_path / SAMPLES).write_bytes((tmp_path / SAMPLES).read_bytes() + b'{"uid": "b", "sample')
    assert read_samples(tmp_path, 2) == rows[:2]
    assert read_samples(tmp_path / "none", 2) == []


# Which policy, and asked what.


def test_a_run_is_evaluated_as_it_evaluated_itself(small, trained, tmp_path) -> None:
    greedy = (f"cache_dir={tmp_path / 'cache'}", *small[-2:], "protocol=greedy", "max_problems=8")
    (result,) = run(composed(*greedy, f"policy={trained}"))
    last = list(csv.DictReader((trained / "metrics.csv").open()))[-1]
    assert values(result)["avg@1"] == float(last["eval/test/avg@1"])
    assert values(result)["response_length_mean"] == float(last["eval/test/response_length_mean"])
    assert result["metrics"]["avg@1"]["stderr"] == float(last["eval/test/avg@1_stderr"])
    assert (result["benchmark"], result["policy"]["step"]) == ("digit_ops", 4)
    assert result["settings"]["task"]["digits"] == 2  # the run's own
    (checkpoint,) = (trained / "checkpoints").iterdir()
    (by_file,) = planned(*greedy, f"policy={checkpoint}")
    assert by_file.folder == folder_of(tmp_path)
    export(trained, tmp_path / "exported")
    (folder,) = run(composed(*greedy, f"policy={tmp_path / 'exported'}", *TASK))
    assert folder["policy"]["name"] == "exported"
    one, other = sorted((tmp_path / "eval").glob("*/*/samples.jsonl"))
    assert one.read_bytes() == other.read_bytes()


def test_a_runs_own_prompt_and_task_are_used_unless_the_command_line_says_otherwise(small, trained, tmp_path) -> None:
    config = OmegaConf.load(trained / "config.yaml")
    config.rollout.prompt.template = "c{text}"
    other = tmp_path / "other"
    other.mkdir()
    (other / "checkpoints").symlink_to(trained / "checkpoints")
    OmegaConf.save(config, other / "config.yaml")
    plain = (*small[-3:], f"policy={other}")
    (own,) = planned(*plain)
    assert own.prompt_format.template == "c{text}"
    assert (own.benchmark, len(own.problems), own.task.digits) == ("digit_ops", 32, 2)
    (asked,) = planned(*plain, "rollout.prompt.template='d{text}'", "benchmark=digit_ops", "max_problems=3")
    assert asked.prompt_format.template == "d{text}"
    assert (asked.task.digits, len(asked.problems)) == (5, 3)
    (set_one,) = planned(*plain, "benchmark.digit_ops.max_attempts=2")
    assert (set_one.task.digits, set_one.task.max_attempts) == (5, 2)


def test_several_benchmarks_share_an_engine(small, trained, tmp_path, capsys, monkeypatch) -> None:
    started, init = [], HFEngine.__init__
    monkeypatch.setattr(HFEngine, "__init__", lambda self, *a, **k: started.append(1) or init(self, *a, **k))
    both = (*small[-3:], f"policy={trained}", "benchmark=digit_ops", "+benchmark.second=${benchmark.digit_ops}")
    results = run(composed(*both, "max_problems=4"))
    assert [result["benchmark"] for result in results] == ["digit_ops", "second"]
    assert values(results[0]) == values(results[1])
    assert len(started) == 1
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_a_benchmark_of_boxed_answers_is_judged_and_voted_on(byte_model, tmp_path, monkeypatch) -> None:
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in MATH500))
    tokenizer = transformers.AutoTokenizer.from_pretrained(byte_model)
    texts = [r"\boxed{0.5}", r"so \boxed{\frac12}", r"\boxed{2}", "no idea"]
    plain = HFEngine.generate

    def generate(self, requests, sampling):
        if requests[0].uid == "sync":
            return plain(self, requests, sampling)
        drawn = []
        for request in requests:
            ids = [*tokenizer(texts[request.sample_index])["input_ids"], tokenizer.eos_token_id]
            drawn.append(request.extended(ids, [-1.0] * len(ids), "stop", self.version))
        return drawn

    monkeypatch.setattr(HFEngine, "generate", generate)
    (result,) = run(
        composed(
            f"policy={byte_model}", "benchmark=math500", f"benchmark.math500.path={tmp_path / 'test.jsonl'}", "samples=4",
            "rollout.prompt.kind=chat", f"output_dir={tmp_path / 'eval'}",
        )
    )  # fmt: skip
    found = values(result)
    assert (found["avg@4"], found["pass@4"], found["pass@1"], found["maj@4"]) == (0.25, 0.5, 0.25, 0.5)
    lines = [json.loads(line) for line in (folder_of(tmp_path) / SAMPLES).read_text().splitlines()]
    assert [line["answer"] for line in lines[4:]] == ["1/2", "1/2", "2", None]


def test_a_hub_id_is_known_by_its_commit(small, monkeypatch, model_folder, trained) -> None:
    plain = transformers.AutoConfig.from_pretrained

    def config(path, revision=None, **options):
        found = plain(str(model_folder), **options)
        found._commit_hash = {"main": "abc", None: "abc"}.get(revision, revision)
        return found

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", config)
    monkeypatch.setattr("bapo.evaluation.plan.load_tokenizer", lambda path, **_: character_tokenizer(*_alphabet()))
    hub = (*small[-3:], *TASK, "policy=owner/model")
    (newest,), (same,), (other,) = planned(*hub), planned(*hub, "revision=abc"), planned(*hub, "revision=def")
    assert newest.folder == same.folder != other.folder
    assert newest.source.load["revision"] == "abc"  # what is loaded is what was looked at
    assert newest.folder.parent.name == "owner_model"


def _alphabet() -> tuple[str, str]:
    return DigitOps().alphabet, DigitOps().eos


@pytest.fixture
def bos_model(tmp_path: Path) -> Path:
    """A model whose tokenizer puts a beginning-of-sequence token in front, as does its chat template."""
    tokenizer = character_tokenizer(*_alphabet())
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    single = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = single
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}="
    folder = tmp_path / "bos_model"
    tiny_qwen3(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, hidden_size=32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_training_and_both_evaluations_ask_with_the_same_ids(bos_model, tmp_path, monkeypatch) -> None:
    asked: dict[str, set[tuple[str, tuple[int, ...]]]] = {"pool": set(), "callback": set(), "evaluate.py": set()}
    plain, stage = HFEngine.generate, ["callback"]

    def generate(self, requests, sampling):
        for request in requests:
            if request.uid != "sync":
                uid, _, epoch = request.uid.partition("@")
                asked["pool" if epoch else stage[0]].add((uid, request.prompt_ids))
        return plain(self, requests, sampling)

    monkeypatch.setattr(HFEngine, "generate", generate)
    monkeypatch.setattr(DigitOps, "verify", lambda self, prompts, responses: [len(r) % 2 for r in responses])
    sizes = ("policy.warm_start=null", "rollout.max_attempts=20", "task.train_size=16")
    run_experiment(
        tmp_path / "run", "+experiment=smoke", *sizes, f"policy.path={bos_model}", "rollout.prompt.kind=chat",
        "trainer.max_rounds=1", "callbacks.evaluate.split=train", "rollout.sampling.temperature=2.0",
    )  # fmt: skip
    stage[0] = "evaluate.py"
    out = (f"cache_dir={tmp_path / 'cache'}", f"output_dir={tmp_path / 'eval'}")
    run(composed(*out, f"policy={tmp_path / 'run'}", "split=train", "samples=1"))
    assert len(asked["pool"]) == 16
    assert asked["pool"] == asked["callback"] == asked["evaluate.py"]
    bos = 2 + len(_alphabet()[0])
    assert all(ids.count(bos) == 1 and ids[0] == bos for _, ids in asked["pool"])


@pytest.mark.parametrize("file", sorted((CONF / "benchmark").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_benchmark_is_the_task_of_its_name(file: Path, tmp_path: Path) -> None:
    cfg = composed(f"benchmark={file.stem}")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        assert cfg.benchmark == {file.stem: compose(f"task/{file.stem}").task}
    if "test" in cfg.benchmark[file.stem]:  # data of one's own
        cfg.benchmark[file.stem].test = str(tmp_path / "test.jsonl")
        (tmp_path / "test.jsonl").touch()
    build(cfg, EVALUATE)


@pytest.mark.parametrize("file", sorted((CONF / "protocol").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_protocol_builds(file: Path) -> None:
    sizes = {"default": (4, 1.0, 1.0), "greedy": (1, 0.0, 1.0), "paper": (16, 0.6, 0.95)}
    parts = build(composed(f"protocol={file.stem}", "sampling.max_tokens=7"), EVALUATE)
    sampling = parts["sampling"]
    assert (parts["samples"], sampling.temperature, sampling.top_p) == sizes[file.stem]
    assert sampling.max_tokens == 7


# What cannot be evaluated: command line -> words of the one message. All of it before any model is loaded.

SECOND = "+benchmark.b={_target_:bapo.tasks.digit_ops.DigitOps,digits:3,train_size:5,test_size:6}"
REFUSED = {
    "samples=4 sampling.temperature=0": "samples is 4 at temperature 0: they would all be the same response",
    "protocol=greedy samples=2": "samples is 2 at temperature 0",
    "samples=0": "samples is 0; it must be >= 1",
    "samples=x": "samples is 'x'; it must be an integer",
    "smaples=3": "unknown key 'smaples'; nearest: 'samples'",
    "+smaples=3": "unknown key 'smaples'; nearest: 'samples'",
    "sampling.temperature=-1": "sampling.temperature is -1; it must be >= 0 and finite",
    "sampling.max_tokens=61": "sampling.max_tokens is 61; it must be <= ",
    "rollout.sampling.temperature=0.5": "rollout.sampling.temperature counts in training alone; here it is sampling.*",
    "rollout.group_size=4": "rollout.group_size counts in training alone",
    "rollout.prompt.kind=chat": "rollout.prompt.kind is 'chat'; the tokenizer of ",
    "max_problems=0": "max_problems is 0; it must be >= 1",
    "problems_per_batch=0": "problems_per_batch is 0; it must be >= 1",
    "devices=0": "devices is 0; it must be >= 1",
    SECOND + " devices=2": "devices is 2; with policy.path null it takes one benchmark at a time",
    "split=validation": "split is 'validation'; it must be one of train, test",
    "policy.dtype=float64": "policy.dtype is 'float64'; it must be one of float32, bfloat16 or null",
    "seed=-1": "seed is -1; it must be >= 0",
    "benchmark=nope": "Could not find 'benchmark/nope'",
    "benchmark.digit_ops=null": "benchmark names no task",
    "benchmark=gsm8k": "task is gsm8k, which has no demonstrations for policy.warm_start: choose a model for it",
    "policy=./no_such": "policy.path is './no_such'; it must be a model folder (config.json), a run folder, a ",
    "policy=no-such-owner/no-such-model": "policy.path is 'no-such-owner/no-such-model'; no model could be loaded from it: ",
    "policy=hub": "policy is 'hub', which names no model; here it is policy=PATH_OR_HUB_ID itself",
    "task=files": "task=files is of train.py; what is evaluated here is a benchmark, whose keys are the task's: ",
    "task.digits=3": "the task's: benchmark=NAME benchmark.NAME.KEY=...",
    "revision=abc": "policy.revision is 'abc'; it goes with a hub id, and policy.path is null",
    "rollout=vllm rollout.engine.lora_sync=native": "rollout.engine.lora_sync is 'native'; whole models are evaluated: merged",
}


@pytest.mark.parametrize("command", REFUSED)
def test_what_cannot_be_evaluated_is_refused(command: str, small, tmp_path, monkeypatch) -> None:
    planned(*small)  # makes the embedded policy
    forbid_loading(monkeypatch)
    monkeypatch.setattr("bapo.engines.options.VLLMOptions.require", lambda self: None)
    kept = [one for one in small if not (one.startswith(("benchmark.", "embedded.")) and "benchmark=" in command)]
    if "benchmark.b" in command:
        monkeypatch.setattr("bapo.evaluation.policy.fingerprint", lambda folder: str(folder))
        monkeypatch.setattr("bapo.policy.options.PolicyOptions.model_path", lambda self, task: Path(repr(task)))
        monkeypatch.setattr("bapo.evaluation.policy._with_positions", lambda source: source)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Hydra's own too
        run(composed(*kept, *command.split(" ")))
    assert REFUSED[command] in explain(caught.value, command.split(" "), "evaluate")
    assert not list(tmp_path.glob("eval/*/*/samples.jsonl"))


def test_folders_that_are_no_whole_policy_are_refused(small, trained, tmp_path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="an adapter alone; a whole model: python -m bapo"):
        planned(*small[-3:], f"policy={tmp_path / 'adapter'}")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.yaml").write_bytes((trained / "config.yaml").read_bytes())
    with pytest.raises(ValueError, match="there is no checkpoint in that run folder"):
        planned(*small[-3:], f"policy={tmp_path / 'new'}")
    with pytest.raises(ValueError, match=r"policy.revision is 'abc'; it goes with a hub id, and policy.path is"):
        planned(*small[-3:], f"policy={trained}", "revision=abc")


def test_a_policy_that_is_made_here_is_meant_by_its_name(small, cache_dir) -> None:
    model = [one for one in small if ".model." in one]
    (plan,) = planned(*TASK, *model, *small[-3:], "policy=tiny_untrained")
    assert plan.source.name == plan.source.path == plan.folder.parent.name == "tiny_untrained"
    assert Path(plan.source.like).name.startswith("untrained_")
    assert planned(*small)[0].source.name == "tiny_qwen3"
    assert spelled_out(["policy=smollm2", "policy=./smollm2"]) == ["policy@embedded=smollm2", "policy.path=./smollm2"]
    check_words(["+task@benchmark.parity=parity"])


def test_a_text_that_a_policy_cannot_read_is_refused(small, model_folder, monkeypatch) -> None:
    forbid_loading(monkeypatch)
    message = r"the tokenizer of '.*' cannot read prompt 'arithmetic/test/0': character ' ' has no token"
    with pytest.raises(ValueError, match=message):
        planned(*small[-3:], f"policy={model_folder}", "benchmark=arithmetic")


def test_what_a_task_says_of_its_keys_is_said_of_the_benchmarks(small, model_folder, monkeypatch, tmp_path) -> None:
    def refuse(self, *_):
        raise ValueError("prompt 'a': task.path is 'x'; see bapo.task.y")

    with monkeypatch.context() as patch:
        patch.setattr(DigitOps, "prompts", refuse)
        with pytest.raises(ValueError, match=r"^prompt 'a': benchmark.digit_ops.path is 'x'; see bapo.task.y$"):
            planned(*small, f"policy={model_folder}")
    monkeypatch.setattr(DigitOps, "verify", refuse)
    with pytest.raises(ValueError, match=r"^prompt 'a': benchmark.digit_ops.path is 'x'"):
        run(composed(*small))


def test_few_tokens_are_warned_of_before_anything_is_generated(small, model_folder, monkeypatch, caplog) -> None:
    monkeypatch.setattr("bapo.evaluation.run._finish", lambda *_: None)
    run(composed(*small))
    assert "longer responses are cut" not in caplog.text
    run(composed(*small, f"policy={model_folder}"))
    assert "digit_ops: sampling.max_tokens is 10: longer responses are cut" in caplog.text


def test_a_trained_policy_is_said_to_be_kept_once_and_as_what_it_is(small, trained, tmp_path, caplog) -> None:
    mine = (f"cache_dir={tmp_path / 'cache'}", *small[-2:], f"policy={trained}", "max_problems=2")
    run(composed(*mine))
    caplog.clear()
    with caplog.at_level("INFO", "bapo"):
        run(composed(*mine, "seed=1"))
    (said,) = [message for message in caplog.messages if "warm_start/trained_" in message]
    assert said.startswith("trained policy: cached in ")


def test_prompts_that_are_too_long_are_refused(small, monkeypatch) -> None:
    monkeypatch.setattr(DigitOps, "prompts", lambda self, split: ())
    with pytest.raises(ValueError, match="task DigitOps, split 'test': it has 0 prompts"):
        planned(*small)
    monkeypatch.setattr(DigitOps, "prompts", lambda self, split: (Prompt("a", "a1=", "1"), Prompt("a", "a2=", "2")))
    with pytest.raises(ValueError, match="2 prompts have the uid 'a'; every uid must differ"):
        planned(*small)


# As a user starts it.


def start(cwd: Path, *overrides: str) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(REPOSITORY / "evaluate.py"), *overrides]
    return subprocess.Popen(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def evaluate(cwd: Path, *overrides: str) -> tuple[int, str, str]:
    process = start(cwd, *overrides)
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


@pytest.mark.slow
def test_a_mistake_ends_in_one_message(tmp_path) -> None:
    for arguments, message in (
        (["sampels=1"], "error: unknown key 'sampels'; nearest: 'samples'"),
        (["samples=0"], "error: samples is 0; it must be >= 1"),
    ):
        code, out, err = evaluate(tmp_path, *arguments)
        assert (code, err.splitlines()[-1]) == (2, message)
        assert "Traceback" not in out + err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["KILL", "TERM", "INT"]
)
def test_a_stopped_evaluation_goes_on_where_it_was(small, tmp_path, number, code) -> None:
    (whole,) = run(composed(*small[:3], *small[3:], "benchmark.digit_ops.test_size=400"))
    cut = (
        *small[:-2],
        f"output_dir={tmp_path / 'cut'}",
        small[-1],
        "benchmark.digit_ops.test_size=400",
        "problems_per_batch=1",
    )
    process = start(tmp_path, *cut)
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        found = list((tmp_path / "cut").glob("*/*/samples.jsonl"))
        if found and found[0].read_bytes().count(b"\n") >= 40:
            break
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "Traceback" not in err
    assert ("to resume: python " in out) == (number != signal.SIGKILL)
    folder = folder_of(tmp_path, "cut")
    kept = len(read_samples(folder, 4)) // 4
    assert 10 <= kept < 400
    code, out, err = evaluate(tmp_path, *cut)
    assert code == 0, err
    assert f"digit_ops: {kept} of 400 problems were finished before" in out
    assert (folder / SAMPLES).read_bytes() == (folder_of(tmp_path) / SAMPLES).read_bytes()
    assert json.loads((folder / "result.json").read_text()) | {"wall_s": 0} == whole | {"wall_s": 0}


@pytest.mark.slow
def test_two_processes_give_the_numbers_and_files_of_one(small, tmp_path) -> None:
    (one,) = run(composed(*small, "max_problems=31"))
    two = (*small[:-2], f"output_dir={tmp_path / 'two'}", small[-1], "max_problems=31", "problems_per_batch=5", "devices=2")
    code, out, err = evaluate(tmp_path, *two)
    assert code == 0, err
    assert out.count("31 of 31 problems") == 1  # rank 0 says it
    alone, together = folder_of(tmp_path), folder_of(tmp_path, "two")
    for name in (SAMPLES, "result.csv", "result.md"):
        assert (alone / name).read_bytes() == (together / name).read_bytes(), name
    assert json.loads((together / "result.json").read_text()) | {"wall_s": 0} == one | {"wall_s": 0}
    code, again, err = evaluate(tmp_path, *two)
    assert (code, again.splitlines()[-3:]) == (0, out.splitlines()[-3:]), err


@pytest.mark.slow
def test_torchrun_starts_the_processes_as_well(small, tmp_path) -> None:
    (one,) = run(composed(*small))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    two = (*small[:-2], f"output_dir={tmp_path / 'two'}", small[-1], "devices=2")
    done = subprocess.run(
        [*launcher, str(REPOSITORY / "evaluate.py"), *two],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((folder_of(tmp_path, "two") / "result.json").read_text()) | {"wall_s": 0} == one | {"wall_s": 0}


@pytest.mark.slow
def test_vllm_generates_an_evaluation(small, tmp_path) -> None:
    pytest.importorskip("vllm")
    fast = (*small, "protocol=greedy", "sampling.max_tokens=10")
    (here,) = run(composed(*fast))
    (there,) = run(composed(*fast, "rollout=vllm", "rollout.engine.enforce_eager=true"))
    assert there["settings"]["engine"]["_target_"] == "bapo.engines.vllm.VLLMRollouts"
    assert values(there) == values(here)  # greedy, in float32: the same responses
    assert len(list((tmp_path / "eval" / "tiny_qwen3").iterdir())) == 2


def test_whatever_of_the_engine_may_change_a_number_makes_another_evaluation(small: tuple[str, ...]) -> None:
    def folder(*overrides: str) -> Path:
        return planned(*small, *overrides)[0].folder

    assert folder("rollout.engine.batch_size=7") == folder()
    assert folder("policy.dtype=bfloat16") != folder()


def test_engine_options_are_part_of_what_is_evaluated(small: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bapo.engines.vllm.VLLMRollouts.require", lambda self: None)
    vllm = (*small, "rollout=vllm")
    changes = (
        (),
        ("+rollout.engine.engine_args.quantization=fp8",),
        ("+rollout.engine.engine_args.kv_cache_dtype=fp8",),
        ("rollout.engine.dtype=float32",),
        ("rollout.engine.dtype=float32", "policy.dtype=bfloat16"),
        ("rollout.engine.max_model_len=64",),
    )
    assert len({planned(*vllm, *change)[0].folder for change in changes}) == len(changes)
    assert planned(*vllm, "rollout.engine.timeout_s=9")[0].folder == planned(*vllm)[0].folder
