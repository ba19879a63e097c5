"""Every file of conf composes, builds and trains; what cannot run is refused before a model is loaded."""

from __future__ import annotations

import csv
import dataclasses
import functools
import importlib
import itertools
import json
import math
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hydra import compose, initialize_config_dir
from lightning import Callback
from omegaconf import DictConfig, ListConfig, OmegaConf
from support import run_experiment
from support.configs import CONF, composed, leaves, parts_of, plain, shrunk, warm_model, without_hydra

from bapo.losses import BapoLoss, BoundRange, FixedClipLoss
from bapo.sft.warm_start import WarmStart
from bapo.tasks.digit_ops import DigitOps
from bapo.training import run_folder
from bapo.training.cli import explain
from bapo.training.config_check import check_hydra_keys
from bapo.training.train import build_parts

OVERLAYS = ("experiment", "sweep")
ADDED = ("policy/lora", "rollout/partial", "schedule/replay")  # groups that no default list has


# Every file.

OF_EVALUATE = {"benchmark", "protocol"}  # of evaluate.py alone: tests/test_evaluate_entry.py builds them
OF_SFT = {"data", "callbacks/sft"}  # of sft.py alone: tests/test_sft.py trains with them
FILES = sorted(
    file
    for file in (path.relative_to(CONF).with_suffix("") for path in CONF.glob("*/**/*.yaml"))
    if file.parts[0] not in ("hydra", "debug")
    and file.stem[0] != "_"
    and not {file.parts[0], str(file)} & (OF_SFT | OF_EVALUATE)
)


TEST_ONLY = {"math500", "aime24", "aime25"}  # tasks that can be evaluated, but not trained on
WARM = {"digit_ops", "arithmetic"}  # tasks that train here from a warm start; every other one from a model's folder


def choice(file: Path) -> list[str]:
    """The overrides that bring a file of conf in."""
    *groups, name = file.parts
    group = "/".join(groups)
    return [f"{'+' if group in ADDED else ''}{group}={name}"]


@pytest.mark.parametrize("file", FILES, ids=str)
@pytest.mark.usefixtures("no_report")
def test_every_file_of_conf_trains(
    file: Path,
    cache_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stand_ins: Callable[..., list[str]],
    byte_model: Path,
) -> None:
    """Experiments and engines with stand-ins for what is not here: `stand_ins`."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    chosen = choice(file)
    if file.parts == ("policy", "hub"):
        chosen.append(f"policy.path={warm_model(cache_dir)}")
    if file.parts == ("policy", "tiny_untrained"):  # it earns nothing
        monkeypatch.setattr(DigitOps, "verify", lambda self, prompts, responses: [len(response) % 2 for response in responses])
    if file.parts == ("policy", "smollm2"):
        chosen.append("task=arithmetic")
    if file.parts[0] == "task" and file.name not in WARM:
        chosen += ["policy=hub", "policy.path=any"]
    if file.parts == ("task", "skywork"):
        chosen.append("callbacks.evaluate.split=train")
    keep = ["schedule"] if file.parts[0] in ("schedule", *OVERLAYS) else []
    overrides = shrunk(*chosen, keep=keep, cache_dir=cache_dir)
    if file.parts[0] in ("experiment", "rollout", "task") or file.name == "smollm2":
        overrides += stand_ins(*overrides)
    if file.parts[0] == "task" and file.name in TEST_ONLY:
        with pytest.raises(ValueError, match=f"task is {file.name}, which has only test: nothing to train on"):
            run_experiment(tmp_path, *overrides)
        data = [o for o in overrides if o.startswith("task.path=")]
        asked = f"callbacks.evaluate.benchmarks.{file.name}"
        sizes = [f"{asked}.test_size=4", *(f"{asked}.{o.removeprefix('task.')}" for o in data)]
        small = shrunk("policy=hub", f"policy.path={byte_model}", keep=keep, cache_dir=cache_dir)
        monkeypatch.setattr(DigitOps, "verify", lambda self, prompts, responses: [len(said) % 2 for said in responses])
        metrics = run_experiment(tmp_path / "run", *small, f"+task@{asked}={file.name}", *sizes)
        assert metrics[f"eval/{file.name}/avg@1"] == 0
        return
    cfg = composed(*overrides)
    if cfg.trainer.accelerator == "gpu" and not torch.accelerator.device_count():
        flags = parts_of(*overrides, "explain=true")["trainer"].flags
        assert (flags["precision"], flags["strategy"]) == ("bf16-mixed", "ddp" if file.name == "ddp" else "auto")
        return
    updates_per_round = parts_of(*overrides)["schedule"].updates_per_round
    rounds = math.ceil(2 / updates_per_round)
    metrics = run_experiment(tmp_path, *overrides, f"trainer.max_rounds={rounds}")
    assert metrics["trainer/global_step"] == rounds * updates_per_round >= 2
    with (tmp_path / "metrics.csv").open() as rows:
        steps = [int(row["trainer/global_step"]) for row in csv.DictReader(rows)]
    assert steps == list(range(rounds * updates_per_round + 1))
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "finished"
    made = {"wandb": "wandb/offline-run-*/*.wandb", "tensorboard": "tensorboard/events.*"}
    for name in cfg.logger:
        assert len(list(tmp_path.glob(made[name]))) == 1, name


@pytest.mark.slow
def test_vllm_tiny_trains_on_vllm(cache_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    metrics = run_experiment(tmp_path, "+experiment=vllm_tiny", f"policy.warm_start.cache_dir={cache_dir}")
    assert metrics["trainer/global_step"] == 12
    assert 0 < metrics["mismatch/probe_max_diff"] < 1e-3


@pytest.mark.parametrize("file", [file for file in FILES if file.parts[0] in OVERLAYS], ids=str)
def test_an_overlay_has_the_last_word_and_says_its_command(file: Path) -> None:
    source = CONF / file.with_suffix(".yaml")
    cfg = composed(*choice(file))
    assert {key: OmegaConf.select(cfg, key) for key in leaves(plain(source))} == leaves(plain(source))
    assert cfg.name == file.name
    header = itertools.takewhile(lambda line: line.startswith("#"), source.read_text().splitlines())
    command = "-m +sweep" if file.parts[0] == "sweep" else "+experiment"
    assert f"#   python train.py {command}={file.name}" in header


@pytest.mark.parametrize("file", [file for file in FILES if file.parts[0] == "sweep" and file.name != "optuna"], ids=str)
def test_every_job_of_a_sweep_builds(file: Path) -> None:
    params = composed(*choice(file)).hydra.sweeper.params
    assert len(params) >= 2
    for values in itertools.product(*(str(value).split(",") for value in params.values())):
        job = [f"{key}={value}" for key, value in zip(params, values, strict=True)]
        parts_of(*choice(file), *job)


# What the files say.


def paper_loss(target: float) -> BapoLoss:
    """Section 5.1 of arXiv 2510.18927: a- .6, b- .9, delta_2 .02, a+ 1.2, b+ 3.0, delta_1 .05; clip_high moves first."""
    return BapoLoss(target, BoundRange(0.6, 0.9, 0.02), BoundRange(1.2, 3.0, 0.05), "high_first", "gradient")


def test_bapo_is_the_papers_and_the_embedded_run_asks_for_more() -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        alone = compose("loss/bapo")
    assert alone.loss.target_positive_ratio == 0.4
    assert parts_of()["loss"] == paper_loss(0.55)
    assert parts_of("loss.target_positive_ratio=0.4")["loss"] == paper_loss(0.4)


@pytest.mark.parametrize(
    ("overrides", "loss"),
    [
        (["loss=grpo"], FixedClipLoss(0.8, 1.2)),
        (["loss=clip_higher"], FixedClipLoss(0.8, 1.28)),
        (["+experiment=fixed_bounds"], FixedClipLoss(0.78, 2.46)),
        (["+experiment=on_policy"], FixedClipLoss(0.8, 1.2)),
    ],
    ids=str,
)
def test_fixed_bounds_are_those_of_their_sources(overrides: list[str], loss: FixedClipLoss) -> None:
    assert parts_of(*overrides)["loss"] == loss


def test_several_loggers_at_once() -> None:
    assert list(parts_of("logger=[wandb,tensorboard]")["logger"]) == ["wandb", "tensorboard"]
    assert parts_of("logger=[csv,tensorboard]")["logger"].keys() == {"tensorboard"}
    assert parts_of("logger=csv")["logger"] == {}


def test_null_leaves_a_callback_or_logger_out() -> None:
    parts = parts_of("logger=[wandb,tensorboard]", "logger.wandb=null", "callbacks.progress=null")
    assert parts["logger"]["wandb"] is None
    assert parts["callbacks"]["progress"] is None


def test_a_collection_must_be_a_section() -> None:
    cfg = without_hydra(composed())
    cfg.callbacks = None
    with pytest.raises(ValueError, match="callbacks is None; it must be a section"):
        build_parts(cfg)


def test_a_model_in_the_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parts_of("policy=hub", "policy.path='~/model'")["policy"].path == str(tmp_path / "model")
    assert parts_of("policy=hub", "policy.path=owner/model")["policy"].path == "owner/model"


# What cannot run: command line -> words of the one message. All of it before any model is loaded.

HERE_ARE = "known here: loss.balance, loss.bounds_scope, loss.clip_high, loss.clip_low"
REFUSED = {
    # unknown keys
    "loss.target_positive_ratoi=.3": "unknown key 'loss.target_positive_ratoi'; nearest: 'loss.target_positive_ratio'",
    "+loss.target_positive_ratoi=.3": f"'loss.target_positive_ratoi'; nearest: 'loss.target_positive_ratio'; {HERE_ARE}",
    "modle.lr=1": "unknown key 'modle.lr'; nearest: 'optimizer.lr'",
    "+modle.lr=1": "unknown key 'modle'; nearest: 'policy.warm_start.model'; known here: advantage, allow_changes, callbacks",
    "+lerning_rate=1": "unknown key 'lerning_rate'; known here: advantage, allow_changes, callbacks, explain, logger, loss",
    "+callbacks.checkpoint.every_n_update=3": "unknown key 'callbacks.checkpoint.every_n_update'; nearest: "
    "'callbacks.checkpoint.every_n_updates'",
    "+policy.warm_start.model.hiden_size=8": "policy.warm_start.model has hiden_size; it takes hidden_size, intermediate_size",
    "logger=wandb logger.wandb.projct=x": "unknown key 'logger.wandb.projct'; nearest: 'logger.wandb.project'",
    "hydra.run.dri=x": "unknown key 'hydra.run.dri'",
    # files that are not there
    "loss=no_such_loss": "Could not find 'loss/no_such_loss' Available options in 'loss': adaptive_ratio asymmetric_high",
    "+experiment=nope": "Could not find 'experiment/nope' Available options in 'experiment': bapo_octothinker_3b",
    "loss=null": "loss=null: a group cannot be null",
    # what is no object, or no call of Hydra's own
    "+callbacks.foo=3": "callbacks.foo is 3; it must be a section with a _target_, or null, which leaves it out",
    "+callbacks.foo.samples=3": "callbacks.foo is {'samples': 3}; it must be a section with a _target_, or null",
    "+logger.x=3": "logger.x is 3; it must be a section with a _target_, or null, which leaves it out",
    "+loss._partial_=true": "loss._partial_ is True; bapo.losses.BapoLoss is built whole",
    "+rollout.sampling._partial_=true": "rollout.sampling._partial_ is True",
    # wrong types
    "loss.target_positive_ratio=forty": "loss.target_positive_ratio is 'forty'; it must be a number",
    """optimizer.lr="'1e-6'" """: "optimizer.lr is '1e-6'; it must be a number",
    "optimizer.lr=true": "optimizer.lr is True; it must be a number",
    "optimizer.betas=0.9": "optimizer.betas is 0.9; it must be [",
    "optimizer.betas=[a,b]": "optimizer.betas holds 'a'; it must be a finite number",
    "optimizer.betas=[0.9]": "optimizer.betas is [0.9]; it must be [",
    "lr_schedule.name=cosin": "lr_schedule is refused by get_scheduler: cosin is not a valid SchedulerType",
    "lr_schedule.num_warmup_step=3": "unknown key 'lr_schedule.num_warmup_step'; nearest: 'lr_schedule.num_warmup_steps'",
    "~optimizer._partial_": "optimizer.params is missing",
    "optimizer._target_=torch.optim.SGD": "optimizer.betas is [0.9, 0.95]; torch.optim.SGD takes dampening, differentiable",
    "seed=x": "seed is 'x'; it must be an integer",
    "threads=yes": "threads is 'yes'; it must be an integer or null",
    "name=null": "name is None; it must be a text",
    "trainer.devices=1.5": "trainer.devices is 1.5; it must be a number of devices, a list of them, or auto",
    "advantage.normalize_std=1": "advantage.normalize_std is 1; it must be true or false",
    "policy.revision=3": "policy.revision is 3; it must be a text or null",
    "rollout.engine=null": "rollout.engine is None; it must be a section with a _target_",
    "rollout.sampling=hot": "rollout.sampling.max_tokens: node `rollout.sampling` is not a container",
    "rollout.engine._target_=bapo.engines.hf.No": "rollout.engine._target_ is 'bapo.engines.hf.No', which cannot be imported",
    "callbacks.evaluate.split=dev": "callbacks.evaluate.split is 'dev'; it must be one of train, test",
    "logger=wandb logger.wandb.tags=abc": "logger.wandb.tags is 'abc'; it must be a list whose every item is a text",
    # missing
    "policy=hub": "policy.path is None and policy.warm_start is null",
    "~seed": "seed is missing",
    "~optimizer._target_": "optimizer is {'_partial_': True, 'lr': 0.0003",
    "~schedule": "schedule is missing",
    # bounds
    "seed=-1": "seed is -1; it must be in [0, 4294967295]",
    "threads=0": "threads is 0; it must be >= 1, or null",
    "loss.target_positive_ratio=-1": "loss.target_positive_ratio is -1; it must be in (0, 1)",
    "loss.target_positive_ratio=40": "loss.target_positive_ratio is 40; it must be in (0, 1)",
    "loss.clip_high.start=0.9": "loss.clip_high.start is 0.9; it must be > 1",
    "loss.clip_low.stop=1.2": "loss.clip_low.stop is 1.2; it must be < 1",
    "loss.clip_low.step=0": "loss.clip_low.step is 0; it must be > 0",
    "loss=grpo loss.clip_low=1.1": "loss.clip_low is 1.1; it must be in (0, 1)",
    "loss=grpo loss.clip_high=1": "loss.clip_high is 1; it must be > 1",
    "advantage.eps=-1": "advantage.eps is -1; it must be >= 0",
    "rollout.group_size=0": "rollout.group_size is 0; it must be >= 1",
    "rollout.group_size=1": "rollout.group_size is 1; a group-relative advantage compares responses to one prompt: >= 2",
    "rollout.prompts_per_round=0": "rollout.prompts_per_round is 0; it must be >= 1",
    "rollout.sampling.temperature=0": "rollout.sampling.temperature is 0; training needs > 0",
    "rollout.sampling.temperature=nan": "rollout.sampling.temperature is nan; it must be >= 0 and finite",
    "rollout.sampling.temperature=inf": "rollout.sampling.temperature is inf; it must be >= 0 and finite",
    "callbacks.evaluate.sampling.temperature=inf": "callbacks.evaluate.sampling.temperature is inf; it must be >= 0 and finite",
    "rollout.sampling.top_p=nan": "rollout.sampling.top_p is nan; it must be in (0, 1]",
    "rollout.sampling.top_p=2": "rollout.sampling.top_p is 2; it must be in (0, 1]",
    "rollout.sampling.max_tokens=0": "rollout.sampling.max_tokens is 0; it must be >= 1",
    "rollout.engine.device=cuda:99": "rollout.engine.device is 'cuda:99'; on this machine it must be one of auto, cpu",
    "rollout.engine.device=meta": "rollout.engine.device is 'meta'; on this machine it must be one of auto, cpu",
    "rollout.engine.device=cpuu": "rollout.engine.device is 'cpuu'; on this machine it must be one of auto, cpu",
    "rollout.max_prompt_tokens=0": "rollout.max_prompt_tokens is 0; it must be >= 1",
    "rollout.prompt.kind=chatt": "rollout.prompt.kind is 'chatt'; it must be one of plain, chat",
    "rollout.prompt.system=x": "rollout.prompt.system is 'x'; it goes with rollout.prompt.kind chat only",
    "rollout.prompt.examples=[a]": "rollout.prompt.examples is ['a']; it must be a list whose every item is [a text, a text]",
    "rollout.prompt.template=x": "rollout.prompt.template is 'x'; it must hold {text}, the question, once",
    "schedule.epochs_per_round=0": "schedule.epochs_per_round is 0; it must be >= 1",
    "schedule.minibatches_per_epoch=7": "schedule.minibatches_per_epoch is 7, which does not divide the pool of "
    "rollout.prompts_per_round * rollout.group_size = 64 * 8 = 512 responses; 1, 2, 4, 8 would",
    "schedule.minibatches_per_epoch=50 rollout.prompts_per_round=60": "= 60 * 8 = 480 responses; 32, 40, 48, 60 would",
    "schedule.minibatches_per_epoch=1024": "schedule.minibatches_per_epoch is 1024, which does not divide",
    "optimizer.lr=0": "optimizer.lr is 0; it must be a number > 0",
    "optimizer.betas=[0.9,2]": "optimizer is refused by AdamW: Invalid beta parameter at index 1: 2",
    "optimizer.betas=[nan,0.9]": "optimizer.betas holds nan; it must be a finite number",
    "optimizer.eps=inf": "optimizer.eps is inf; it must be a finite number",
    "optimizer.eps=nan": "optimizer.eps is nan; it must be a finite number",
    "optimizer.weight_decay=inf": "optimizer.weight_decay is inf; it must be a finite number",
    "optimizer.weight_decay=nan": "optimizer.weight_decay is nan; it must be a finite number",
    "trainer.max_grad_norm=0": "trainer.max_grad_norm is 0; it must be a number > 0",
    "trainer.max_rounds=0": "trainer.max_rounds is 0; it must be an integer >= 1",
    "trainer.micro_batch_tokens=0": "trainer.micro_batch_tokens is 0; it must be an integer >= 1",
    "trainer.strategy=ddp_spawn": "trainer.strategy is 'ddp_spawn'; it must be auto or ddp: ranks are started by",
    "trainer.strategy=fsdp": "trainer.strategy is 'fsdp'; it must keep whole weights on every rank, such as auto or ddp",
    "trainer.precision=16-mixed": "trainer.precision is '16-mixed'; it must be 32-true or bf16-mixed: fp16 needs a",
    "trainer.precision=bf16-true": "trainer.precision is 'bf16-true'; it must be 32-true or bf16-mixed: weights in bfloat16: "
    "policy.dtype=bfloat16",
    "trainer.accelerator=tpu": "trainer: Lightning refuses its flags",
    "+trainer.max_epochs=3": "trainer.max_epochs is 3; the loop sets it: rounds are counted: trainer.max_rounds",
    "trainer.gradient_clip_val=1": "trainer.gradient_clip_val cannot be set; the loop sets it: the gradient of an update is ",
    "trainer.limit_train_batches=2": "; to add it: +trainer.limit_train_batches=VALUE",
    "optimizer.fused=true": "; to add it: +optimizer.fused=VALUE",
    "+trainer.gradient_clip_val=1": "trainer.gradient_clip_val is 1; the loop sets it: the gradient of an update is clipped "
    "once, by trainer.max_grad_norm",
    "+trainer.accumulate_grad_batches=2": "trainer.accumulate_grad_batches is 2; the loop sets it: a mini-batch is one update",
    "+trainer.limit_train_batchs=2": "unknown key 'trainer.limit_train_batchs'; nearest: 'trainer.limit_train_batches'",
    "trainer=gpu trainer.devices=999": "trainer.devices is 999 with trainer.accelerator gpu; this machine has",
    "policy.dtype=float17": "policy.dtype is 'float17'; it must be one of float32, bfloat16",
    "policy.lora.r=8": "unknown key 'policy.lora.r'; nearest: '+policy/lora=default'",
    "+policy.lora.r=8": "policy.lora is {'r': 8}, without a _target_; +policy/lora=default makes it",
    "+policy/lora=default policy.lora.rank=8": "unknown key 'policy.lora.rank'; nearest: 'policy.lora",
    "+policy/lora=default policy.lora.r=0": "policy.lora.r is 0; it must be >= 1",
    "+policy/lora=default policy.lora.alpha=big": "policy.lora.alpha is 'big'; it must be a number",
    "+policy/lora=default policy.lora.dropout=1": "policy.lora.dropout is 1; it must be in [0, 1)",
    "+policy/lora=default policy.lora.target_modules=[]": "policy.lora.target_modules is []; it must be a list of module names",
    "+policy/lora=default policy.lora.target_modules=q_proj": "policy.lora.target_modules is 'q_proj'; it must be a list whose "
    "every item is a text or one of all-linear",
    "policy.gradient_checkpointing=1": "policy.gradient_checkpointing is 1; it must be true or false",
    "policy.warm_start=null": "policy.path is None and policy.warm_start is null; exactly one must be given",
    "policy.path=./nothing": "policy.path is './nothing' and policy.warm_start is given; exactly one must be given",
    "policy=hub policy.path=./nothing": "policy.path is './nothing'; there is no config.json in that folder",
    """policy=hub "policy.path='~/nothing'" """: "policy.path is '~/nothing'; there is no config.json in that folder",
    "policy.warm_start.steps=0": "policy.warm_start.steps is 0; it must be an integer >= 1",
    "policy.warm_start.model.head_dim=3": "head_dim is 3; it must be even",
    "task=gsm8k task.test_size=0": "task.test_size is 0; it must be >= 1, or null for all rows",
    "task=skywork task.min_difficulty=16": "task.min_difficulty is 16; it must be <= 15, task.max_difficulty",
    "task=skywork task.answer_format=json": "task.answer_format is 'json'; it must be one of text, hashes, json_list",
    "task=files": "task.train and task.test are null; at least one of them must be a file",
    "+task@callbacks.evaluate.benchmarks.mine=files": "callbacks.evaluate.benchmarks.mine.train and "
    "callbacks.evaluate.benchmarks.mine.test are null; at least one of them must be a file",
    "task=skywork": "callbacks.evaluate.split is 'test'; task skywork has only train: callbacks.evaluate=null, "
    "callbacks.evaluate.split=train or +task@callbacks.evaluate.benchmarks.NAME=NAME",
    "task=math500": "task is math500, which has only test: nothing to train on",
    "+task@callbacks.evaluate.benchmarks.aime24=aime24 callbacks.evaluate.split=train": "callbacks.evaluate.split is 'train'; "
    "callbacks.evaluate.benchmarks.aime24 has only test: callbacks.evaluate=null, callbacks.evaluate.split=test or",
    "reward=[overlong,fromat]": "Could not load 'reward/fromat'; nearest: 'format'; conf/reward has correctness, format",
    "task=verl_format task.train=none.parquet": "task.train is 'none.parquet'; it must be a file: .jsonl, .json, .parquet",
    "task=math500 task.bad_rows=drop": "task.bad_rows is 'drop'; it must be one of refuse, skip",
    "task=reasoning_gym task.dataset=n_queens": "task.dataset is 'n_queens', whose scorer runs what the model writes as Python",
    "task=arithmetic task.operations=[plus]": "task.operations is ['plus']; it must be some of +, -, *, each once",
    "schedule.replay={}": "schedule.replay is {}; it must be a section with a _target_ or null",
    "+rollout.partial.tokens_per_round=4": "rollout.partial is {'tokens_per_round': 4}; it must be a section with a _target_",
    "rollout.partial.tokens_per_round=4": "unknown key 'rollout.partial.tokens_per_round'; nearest: '+rollout/partial=default'",
    "+schedule/replay=uniform": "Could not find 'schedule/replay/uniform' Available options in 'schedule/replay': default",
    "+schedule/replay=default schedule.max_staleness=15": "schedule.max_staleness is 15; with schedule.replay it must be >= 31",
    "explain=1": "explain is 1; it must be true or false",
    "task.digits=0": "task.digits is 0; it must be in [2, 16]",
    "callbacks.evaluate.samples=4": "callbacks.evaluate.samples is 4 at temperature 0",
    "callbacks.evaluate.max_prompts=0": "callbacks.evaluate.max_prompts is 0; it must be >= 1",
    "callbacks.evaluate.every_n_rounds=0": "callbacks.evaluate.every_n_rounds is 0; it must be >= 1",
}


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading or making a model fails the test."""

    def fail(*args: Any, **kwargs: Any) -> None:
        pytest.fail("a model was loaded")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    monkeypatch.setattr(WarmStart, "__call__", fail)


@pytest.mark.parametrize("line", REFUSED)
@pytest.mark.usefixtures("no_model")
def test_what_cannot_run_is_refused_before_a_model_is_loaded(line: str, tmp_path: Path) -> None:
    overrides = shlex.split(line)
    with pytest.raises(Exception) as refused:  # noqa: PT011  the message is what counts
        run_experiment(tmp_path, *overrides)
    message = explain(refused.value, overrides)
    assert REFUSED[line] in re.sub(r"\s+", " ", message)
    assert "full_key" not in message
    assert not (tmp_path / "config.yaml").exists()


@pytest.mark.usefixtures("no_model")
def test_every_mistake_of_a_command_line_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="seed is 'x'") as refused:
        run_experiment(tmp_path, "seed=x", "trainer.devices=1.5", "+loss.clip_hihg=3")
    lines = str(refused.value).splitlines()
    assert len(lines) == 3
    assert all(
        any(word in line for line in lines)
        for word in ("seed", "trainer.devices", "'loss.clip_hihg'; nearest: 'loss.clip_high'")
    )


@pytest.mark.usefixtures("no_model")
def test_a_run_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("a file where the folder should be")
    with pytest.raises(ValueError, match=r"run folder .*outputs/run' cannot be written: Not a directory"):
        run_experiment(tmp_path / "outputs" / "run")


@pytest.mark.parametrize(
    ("override", "known"),
    [
        ("+hydra.run.dri=x", "dir"),
        ("++hydra.jbo.name=x", "callbacks, defaults, help, hydra_help, hydra_logging, job, job_logging"),
    ],
)
def test_an_added_hydra_key_that_hydra_would_never_read_is_refused(override: str, known: str) -> None:
    key = override.lstrip("+").split("=")[0]
    with pytest.raises(ValueError, match=rf"unknown key '{key}'; Hydra knows here: {known}"):
        check_hydra_keys(["seed=1", override])
    check_hydra_keys(
        ["+hydra.sweeper.params.seed=1,2", "hydra.run.dir=x", "+hydra.job.env_set.OMP_NUM_THREADS=1", "+loss.hydra.x=1"]
    )


# Run folders, as the config names them.


@pytest.mark.parametrize(
    ("name", "folder"),
    [("a/b", "a_b"), ("../../x", "_.._x"), ("n" * 300, "n" * 80), ("größe=1 %", "größe=1_"), (".", "run"), ("~/runs", "_runs")],
)
def test_any_name_is_one_folder_below_outputs(name: str, folder: str) -> None:
    for dirs, depth in ((composed(f"name='{name}'").hydra.run.dir, 3), (composed(f"name='{name}'").hydra.sweep.dir, 4)):
        parts = Path(dirs).parts
        assert len(parts) == depth
        assert parts[-2] == folder
        assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_[0-9a-f]{6}", parts[-1])


def test_a_secret_is_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "SENTINEL_1")
    for dirs in ("run", "sweep"):
        with pytest.raises(Exception, match="name holds the value of an environment variable") as refused:
            OmegaConf.select(composed("name='x-${oc.env:HF_TOKEN}'"), f"hydra.{dirs}.dir", throw_on_resolution_failure=True)
        assert "SENTINEL_1" not in explain(refused.value)


def test_resume_needs_a_run_folder(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="must be a run folder") as refused:
        _ = composed("resume=outputs/nope").hydra.run.dir
    assert explain(refused.value) == "resume is 'outputs/nope'; it must be a run folder, and there is no config.yaml in it"
    (tmp_path / "config.yaml").touch()
    assert composed(f"resume={tmp_path}").hydra.run.dir == str(tmp_path)


# Nothing of Hydra's behind the config.


def held(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(path, value) of everything inside an object that a config built."""
    yield path, value
    inside: dict[Any, Any] = {}
    if isinstance(value, dict):
        inside = value
    elif isinstance(value, list | tuple):
        inside = dict(enumerate(value))
    elif isinstance(value, functools.partial):
        inside = value.keywords
    elif dataclasses.is_dataclass(value) or isinstance(value, Callback):
        inside = vars(value)
    for key, item in inside.items():
        yield from held(item, f"{path}.{key}")


def test_only_built_in_types_leave_the_config() -> None:
    seen = dict(held(parts_of("logger=[wandb,tensorboard]"), ""))
    assert seen[".optimizer.betas"] == [0.9, 0.95]
    assert seen[".logger.wandb.tags"] == []
    assert seen[".policy.warm_start.model.hidden_size"] == 64
    assert [path for path, value in seen.items() if isinstance(value, DictConfig | ListConfig)] == []
    containers = [value for value in seen.values() if isinstance(value, dict | list | tuple)]
    assert {type(value) for value in containers} == {dict, list, tuple}
    json.dumps({path: value for path, value in seen.items() if type(value) in (dict, list) and path.startswith(".policy")})


@pytest.mark.usefixtures("no_report")
def test_registering_twice_and_two_runs_in_one_process(cache_dir: Path, tmp_path: Path) -> None:
    for _ in range(2):
        importlib.reload(run_folder).register_resolvers()
        assert composed().hydra.run.dir == composed().hydra.run.dir
    rows = []
    for number in (0, 1):
        run_experiment(tmp_path / str(number), *shrunk(cache_dir=cache_dir), f"seed={number}", "logger=tensorboard")
        rows.append((tmp_path / str(number) / "metrics.csv").read_text().splitlines())
        assert len(list((tmp_path / str(number) / "tensorboard").glob("events.*"))) == 1
    assert [len(lines) for lines in rows] == [4, 4]
    assert rows[0][0] == rows[1][0]
    assert rows[0][-1] != rows[1][-1]


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    "evaluated",
    ["callbacks.evaluate=null", "callbacks.evaluate.split=train", "+task@callbacks.evaluate.benchmarks.gsm8k=gsm8k"],
)
def test_each_remedy_for_a_task_without_a_test_split_is_one(evaluated: str) -> None:
    assert parts_of("task=skywork", evaluated)["task"].splits == ("train",)
