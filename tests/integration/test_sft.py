"""Supervised fine-tuning: ids, the loss of an update, whole runs and the model they leave."""

from __future__ import annotations

import csv
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from support import REPOSITORY, ScriptedEngine, configs, run_experiment
from support.commands import commands
from support.configs import shrunk
from support.sft import TINY, fine_tune
from support.updates import adamw
from transformers import AutoModelForCausalLM, AutoTokenizer

from bapo.export import export
from bapo.policy.causal_lm import CausalLMPolicy, load_model
from bapo.rollouts.grading import generate_graded
from bapo.rollouts.prompt_format import PLAIN, PromptFormat
from bapo.sft.demonstrations import Demonstration, FileDemonstrations, TaskDemonstrations
from bapo.sft.module import SftModule
from bapo.sft.rows import Row, SftData, SftOptions, encode, end_of_sequence, fitting, padded, split
from bapo.sft.run import SFT
from bapo.training.cli import explain
from bapo.training.job import build
from bapo.training.resume import newest_checkpoint
from bapo.training.run_folder import register_resolvers
from bapo.training.train import TRAIN
from bapo.types import Prompt, SamplingParams

CONF = REPOSITORY / "conf"
SIZES = ("hidden_size=16", "intermediate_size=16", "num_hidden_layers=1", "head_dim=4")


def composed(*overrides: str) -> DictConfig:
    """The config of `python sft.py OVERRIDES`, Hydra's own part included."""
    register_resolvers()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("sft", overrides=[*overrides], return_hydra_config=True)


@pytest.fixture(scope="module")
def tiny(cache_dir: Path) -> tuple[str, ...]:
    model = (f"policy.warm_start.model.{size}" for size in SIZES if not size.startswith("head_dim"))
    return (*TINY, *model, "policy.warm_start.model.head_dim=4", f"policy.warm_start.cache_dir={cache_dir}")


@pytest.fixture(scope="module")
def finished(tiny: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    fine_tune(folder, *tiny)
    return folder


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(newest_checkpoint(folder), weights_only=True)["state_dict"]


# Token ids.


class Told:
    """A task of given questions."""

    def prompts(self, split: str) -> list[Prompt]:
        return []

    def verify(self, prompts: Any, responses: Any) -> list[float]:
        return [0.0] * len(responses)


CHAT = PromptFormat(kind="chat", system="Be brief.", examples=(("1+1?", "2"),), thinking=False, template="Q: {text}")


@pytest.mark.parametrize("prompt_format", [PLAIN, PromptFormat(template="<{text}>"), CHAT], ids=["plain", "template", "chat"])
def test_a_demonstration_is_asked_as_the_rollout_engine_is(byte_model: Path, prompt_format: PromptFormat) -> None:
    tokenizer = AutoTokenizer.from_pretrained(byte_model)
    engine = ScriptedEngine(lambda request: [5])
    engine.load_weights([], 0)
    texts = ["2+3?", "é", " x\n"]
    asked = [(f"q{number}", Prompt(f"q{number}", text, "")) for number, text in enumerate(texts)]
    generate_graded(engine, Told(), tokenizer, prompt_format, asked, SamplingParams(max_tokens=4), 1, lambda uid, index: 0)
    rows = encode(tokenizer, prompt_format, [Demonstration(text, "5") for text in texts], 7, frozenset({7}))
    assert [tuple(row.ids[: row.prompt].tolist()) for row in rows] == [request.prompt_ids for request in engine.requests]
    assert [row.ids[row.prompt :].tolist() for row in rows] == [[*tokenizer("5")["input_ids"], 7]] * 3


class Pieces:
    """A tokenizer that owns a token for "hello" and for its halves, adds BOS to a text, and pads with its EOS."""

    name_or_path, bos_token_id, eos_token_id, pad_token_id = "pieces", 1, 2, 2

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids, vocabulary = [], {"hello": 5, "he": 3, "llo": 4, "</s>": 2}
        while text:
            piece = next(piece for piece in vocabulary if text.startswith(piece))
            ids.append(vocabulary[piece])
            text = text[len(piece) :]
        return {"input_ids": [1, *ids] if add_special_tokens else ids}


def test_ids_are_joined_and_never_tokenised_together() -> None:
    """One BOS in front of the prompt, none in front of the response; one end, where the text has some already too."""
    shown = [Demonstration("he", "llo"), Demonstration("hello", "he</s></s>"), Demonstration("he", "he</s>he")]
    rows = encode(Pieces(), PLAIN, shown, 2, frozenset({2, 9}))  # type: ignore[arg-type]
    assert [(row.ids.tolist(), row.prompt) for row in rows] == [([1, 3, 4, 2], 2), ([1, 5, 3, 2], 2), ([1, 3, 3, 2, 3, 2], 2)]


def test_masks_go_by_position_where_the_end_and_the_pad_have_one_id() -> None:
    batch = padded([Row(torch.tensor([1, 3, 4, 2, 2]), 2), Row(torch.tensor([2, 4, 2]), 1)], pad_id=2)
    assert batch.input_ids.tolist() == [[1, 3, 4, 2, 2], [2, 4, 2, 2, 2]]
    assert batch.response_mask.int().tolist() == [[0, 0, 1, 1, 1], [0, 1, 1, 0, 0]]
    assert batch.attention_mask.int().tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]


def test_the_end_is_the_tokenizers_where_the_generation_config_has_several() -> None:
    def found(eos: Any, own: int) -> tuple[int, frozenset[int]]:
        model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=eos))
        return end_of_sequence(model, SimpleNamespace(eos_token_id=own))  # type: ignore[arg-type]

    assert found(3, 9) == (3, frozenset({3}))
    assert found([8, 3], 3) == (3, frozenset({3, 8}))
    assert found([8, 3], 9) == (8, frozenset({3, 8}))
    with pytest.raises(ValueError, match=r"generation_config\.json names no eos_token_id"):
        found(None, 3)


def test_a_text_without_tokens_is_named(tokenizer) -> None:
    with pytest.raises(ValueError, match=r"demonstration 1, 'b12=': .*UNK"):
        encode(tokenizer, PLAIN, [Demonstration("a12=", "12"), Demonstration("b12=", "Z")], 1, frozenset({1}))


def test_a_chat_goes_through_the_prompt_format(byte_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(byte_model)
    shown = Demonstration("and 3?", "4", system="Count.", turns=(("1?", "2"),))
    (row,) = encode(tokenizer, PromptFormat(kind="chat", thinking=True), [shown], 7, frozenset({7}))
    said = tokenizer.decode(row.ids[: row.prompt].tolist())
    assert said == "system: Count.<|im_end|>user: 1?<|im_end|>assistant: 2<|im_end|>user: and 3?<|im_end|>"
    assert tokenizer.decode(row.ids[row.prompt : -1].tolist()) == "4"
    with pytest.raises(ValueError, match=r"demonstration 0, 'and 3\?': rollout.prompt.system is 'Count.'; it goes with"):
        encode(tokenizer, PLAIN, [shown], 7, frozenset({7}))


def rows_of_lengths(*lengths: int) -> list[Row]:
    return [Row(torch.arange(length, dtype=torch.int32), 1) for length in lengths]


def test_rows_that_are_too_long_are_left_out_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    rows = rows_of_lengths(3, 9, 5, 8)
    assert [len(row.ids) for row in fitting(rows, 5, 64, "skip")] == [3, 5]
    assert "sft.max_tokens is 5; 2 of 4 demonstrations are longer, such as number 1 with 9 tokens: left out" in caplog.text
    assert len(fitting(rows, None, 9, "refuse")) == 4
    with pytest.raises(
        ValueError, match=r"the model has 8 positions; 1 of 4 .* number 1 with 9 tokens \(sft.too_long is refuse"
    ):
        fitting(rows, None, 8, "refuse")
    with pytest.raises(ValueError, match=r"sft.max_tokens is 2; 4 of 4"):
        fitting(rows, 2, 64, "skip")
    with pytest.raises(ValueError, match=r"sft.max_tokens is 65; it must be <= 64, the positions of the model"):
        fitting(rows, 65, 64, "skip")


def test_the_held_out_rows_are_the_same_whatever_the_seed() -> None:
    rows = rows_of_lengths(*range(2, 52))
    train, test = split(rows, 0.1)
    assert (len(train), len(test)) == (45, 5)
    assert sorted(map(id, [*train, *test])) == sorted(map(id, rows))
    assert list(map(id, split(rows, 0.1)[1])) == list(map(id, test))
    assert split(rows, 0.0) == (rows, [])
    assert len(split(rows, 1e-9)[1]) == 1
    with pytest.raises(ValueError, match=r"sft.test_share is 0.999, 50 of 50 demonstrations; it must leave one"):
        split(rows, 0.999)


def epochs_of(data: SftData, rank: int = 0, world: int = 1) -> list[list[list[int]]]:
    """Per epoch and update the rows, known by their lengths."""
    epochs = []
    for epoch in range(data.epochs):
        data.trainer = SimpleNamespace(current_epoch=epoch, global_rank=rank, world_size=world)  # type: ignore[assignment]
        epochs.append([batch.sequences.lengths().tolist() for batch in data.train_dataloader()])
    return epochs


def test_every_row_is_in_one_update_of_an_epoch_and_the_last_epoch_may_be_cut() -> None:
    rows = rows_of_lengths(*range(2, 52))
    epochs = epochs_of(SftData(rows, [], SftOptions(epochs=2, batch_size=8), 0, seed=3, world=1))
    assert [[len(update) for update in epoch] for epoch in epochs] == [[8] + [7] * 6] * 2
    assert [sorted(itertools.chain(*epoch)) for epoch in epochs] == [list(range(2, 52))] * 2
    assert epochs[0] != epochs[1]
    cut = epochs_of(SftData(rows, [], SftOptions(max_updates=10, batch_size=8), 0, seed=3, world=1))
    assert cut == [epochs[0], epochs[1][:3]]
    halves = [epochs_of(SftData(rows, [], SftOptions(epochs=2, batch_size=8), 0, 3, 2), rank, 2) for rank in (0, 1)]
    joined = [[sorted(a + b) for a, b in zip(*pair, strict=True)] for pair in zip(*halves, strict=True)]
    assert joined == [[sorted(update) for update in epoch] for epoch in epochs]
    with pytest.raises(ValueError, match=r"sft.batch_size is 2; 3 demonstrations make 2 updates with it, and each of 2 proc"):
        SftData(rows[:3], [], SftOptions(batch_size=2), 0, 0, 2)


# One update.


def fitted(
    folder: Path, rows: list[Row], budget: int, options: SftOptions, lr: float, **settings
) -> tuple[SftModule, list[dict]]:
    log: list[dict[str, float]] = []

    class Recording(SftModule):
        def log_row(self, row: dict[str, float]) -> None:
            super().log_row(row)
            log.append(row | {"step": self.global_step})

    data = SftData(rows, rows[:3], options, 0, 0, 1)
    policy, every = CausalLMPolicy(load_model(folder)), options.test_every_n_updates
    module = Recording(policy, adamw(lr), budget, data.total, every, **settings)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=data.epochs, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, reload_dataloaders_every_n_epochs=1, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    return module, log


def random_rows(count: int) -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 12, (count,), generator=generator).tolist()
    return [Row(torch.randint(2, 15, (length,), generator=generator, dtype=torch.int32), 3) for length in lengths]


@pytest.mark.parametrize("budget", [1, 24, 10_000])
def test_an_update_is_that_of_the_mean_over_all_its_tokens(model_folder: Path, budget: int) -> None:
    """Against transformers' own loss on one padded batch, and AdamW by hand, however the mini-batch is cut."""
    rows = random_rows(7)
    module, log = fitted(model_folder, rows, budget, SftOptions(batch_size=8), 1e-2, max_grad_norm=0.1)

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    batch = padded(rows, 0)
    labels = batch.input_ids.masked_fill(~batch.response_mask, -100)
    loss = model(input_ids=batch.input_ids, labels=labels).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0).step()
    before, update, after = log
    assert update["sft/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert update["policy/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert (update["sft/epoch"], update["policy/lr"]) == (0, 1e-2)
    held = padded(rows[:3], 0)
    labels = held.input_ids.masked_fill(~held.response_mask, -100)
    first = AutoModelForCausalLM.from_pretrained(model_folder)(input_ids=held.input_ids, labels=labels).loss
    assert (before["step"], after["step"]) == (0, 1)
    assert before["sft/test_loss"] == pytest.approx(first.item(), rel=1e-5)
    assert after["sft/test_loss"] < before["sft/test_loss"]
    for (name, ours), (_, theirs) in zip(module.policy.model.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4, msg=name)


def test_held_out_rows_are_looked_at_every_so_often_and_in_the_end(model_folder: Path) -> None:
    options = SftOptions(epochs=3, batch_size=4, test_every_n_updates=2)
    _, log = fitted(model_folder, random_rows(9), 100, options, 1e-3)
    assert [row["step"] for row in log if "sft/test_loss" in row] == [0, 2, 4, 6, 8, 9]
    assert [row["sft/epoch"] for row in log if "sft/epoch" in row] == [0] * 3 + [1] * 3 + [2] * 3


def test_it_learns_what_it_is_shown(model_folder: Path) -> None:
    rows = [Row(torch.tensor(ids, dtype=torch.int32), 2) for ids in ([5, 4, 7, 7, 1], [6, 4, 8, 1])] * 4
    module, log = fitted(model_folder, rows, 100, SftOptions(epochs=60, batch_size=8), 1e-2)
    assert log[-1]["sft/test_loss"] < 0.05 < 2 < log[0]["sft/test_loss"]
    with torch.no_grad():
        greedy = module.policy.model(input_ids=torch.tensor([[5, 4, 7, 7]])).logits[0, 1:].argmax(-1)
    assert greedy.tolist() == [7, 7, 1]  # the end of sequence is learned too


# Whole runs.


def test_a_run_leaves_what_every_run_leaves_and_a_model(finished: Path, tiny: tuple[str, ...]) -> None:
    names = {path.name for path in finished.iterdir()}
    assert names >= {
        "config.yaml",
        "provenance.json",
        "commands.log",
        "status.json",
        "metrics.csv",
        "timing.csv",
        "checkpoints",
    }
    assert json.loads((finished / "status.json").read_text()).items() >= {"status": "finished", "global_step": 18}.items()
    rows = rows_of(finished)
    assert [int(row["trainer/global_step"]) for row in rows] == list(range(19))
    assert [int(row["trainer/global_step"]) for row in rows if row["sft/test_loss"]] == [0, 4, 8, 12, 16, 18]
    assert float(rows[-1]["sft/test_loss"]) < float(rows[0]["sft/test_loss"])
    assert {row["sft/epoch"] for row in rows[1:]} == {"0", "1"}
    assert float(rows[1]["policy/lr"]) == pytest.approx(1.5e-3)  # half of the peak: the first of two updates of warm-up
    assert float(rows[18]["policy/lr"]) < 1e-4  # cosine
    model, info = AutoModelForCausalLM.from_pretrained(finished / "model", output_loading_info=True)
    assert not any(info.values())
    trained = weights_of(finished)
    for name, value in model.state_dict().items():
        assert torch.equal(value, trained[f"policy.model.{name}"]), name
    assert AutoTokenizer.from_pretrained(finished / "model")("b12=")["input_ids"] == [13, 3, 4, 18]
    assert model.generation_config.eos_token_id == 1


def test_the_model_can_be_trained_with_rewards(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bapo.tasks.digit_ops.DigitOps.verify", lambda self, prompts, texts: [len(t) % 2 for t in texts])
    small = shrunk("policy=hub", f"policy.path={finished / 'model'}")
    assert run_experiment(tmp_path, *small)["trainer/global_step"] == 2


def test_a_run_is_exported_like_any_other(finished: Path, tmp_path: Path) -> None:
    export(finished, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (finished / "model" / "model.safetensors").read_bytes()


@pytest.fixture
def signal_after(monkeypatch: pytest.MonkeyPatch):
    """Sends this process a signal while update number `update` is being logged."""
    plain = SftModule.log_row

    def arrange(update: int) -> None:
        def log_row(self: SftModule, row: dict[str, float]) -> None:
            plain(self, row)
            if self.global_step == update and "sft/loss" in row:
                os.kill(os.getpid(), signal.SIGTERM)

        monkeypatch.setattr(SftModule, "log_row", log_row)

    return arrange


# Inside an epoch, with a look at the held-out rows, at an epoch's end, at the last update, again and again.
@pytest.mark.parametrize("stops", [(1,), (8,), (9,), (11,), (18,), (9, 12), (4, 9, 18)], ids=str)
def test_stopped_and_resumed_equals_uninterrupted(finished, tiny, tmp_path, signal_after, monkeypatch, caplog, stops) -> None:
    caplog.set_level("INFO")
    command = tiny
    for update in stops:
        signal_after(update)
        with pytest.raises(SystemExit) as stopped:
            fine_tune(tmp_path, *command)
        assert stopped.value.code == 128 + signal.SIGTERM
        assert f"python sft.py resume={tmp_path}" in caplog.text
        command = (f"resume={tmp_path}",)
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["status"], status["global_step"]) == ("interrupted", stops[-1])
    assert not (tmp_path / "model").exists()
    monkeypatch.undo()
    fine_tune(tmp_path, f"resume={tmp_path}")
    assert (tmp_path / "metrics.csv").read_bytes() == (finished / "metrics.csv").read_bytes()
    ours, theirs = weights_of(tmp_path), weights_of(finished)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == (finished / "model" / "model.safetensors").read_bytes()
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "finished"


def test_a_resumed_run_keeps_its_config_and_its_kind(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sft.epochs=3 cannot be changed \(allowed: nothing\)"):
        fine_tune(finished, f"resume={finished}", "sft.epochs=3")
    with pytest.raises(ValueError, match=r"it is no run of train\.py: its config has no advantage, explain, loss, objective"):
        run_experiment(finished, f"resume={finished}")
    with pytest.raises(ValueError, match=r"holds a run already; .*: python sft\.py resume="):
        fine_tune(finished)


LORA = ("+policy/lora=default", "policy.lora.r=4", "optimizer.lr=0.02")


@pytest.mark.parametrize("more", [(), ("policy.gradient_checkpointing=true",)], ids=["", "checkpointed"])
def test_an_adapter_is_merged_into_the_model(tiny, finished, tmp_path, more) -> None:
    begun = finished / "model"
    hub = [o for o in tiny if not o.startswith("policy.")]
    metrics = fine_tune(tmp_path, *hub, "policy=hub", f"policy.path={begun}", *LORA, *more)
    state = weights_of(tmp_path)
    assert state
    assert all("lora_" in name for name in state)
    assert all(value.norm() > 0 for name, value in state.items() if "lora_B" in name)
    base, merged = (AutoModelForCausalLM.from_pretrained(folder) for folder in (begun, tmp_path / "model"))
    changed = [name for name, value in merged.state_dict().items() if not torch.equal(value, base.state_dict()[name])]
    assert changed == [name for name, _ in base.named_parameters() if name.endswith("proj.weight")]
    # The held-out loss of the files on disk is the last one that was logged.
    table = rows_of(tmp_path)
    assert float(table[-1]["sft/test_loss"]) == pytest.approx(metrics["sft/test_loss"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    from bapo.tasks.digit_ops import DigitOps

    shown = TaskDemonstrations(80)(DigitOps(digits=2, train_size=50, test_size=10))
    _, test = split(encode(tokenizer, PLAIN, shown, 1, frozenset({1})), 0.1)
    scored = CausalLMPolicy(merged).token_stats(padded(test, 0), 10_000).logprobs
    tokens = sum(len(row.ids) - row.prompt for row in test)
    assert -float(scored.sum()) / tokens == pytest.approx(metrics["sft/test_loss"], abs=1e-4)


def test_it_continues_from_a_warm_start(tiny, cache_dir, tmp_path) -> None:
    chosen = ("policy=tiny_qwen3", "policy.warm_start.steps=5", "sft.max_updates=1", "optimizer.lr=1e-5")
    metrics = fine_tune(tmp_path, *tiny, *chosen)
    assert metrics["trainer/global_step"] == 1
    assert metrics["policy/lr"] == pytest.approx(1e-5 / 2)


# Data.


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_file_of_chats_trains_a_model_that_reads_any_text(byte_model: Path, tmp_path: Path, suffix: str) -> None:
    rows = [{"chat": [{"role": "user", "content": f"{n}+1?"}, {"role": "assistant", "content": str(n + 1)}]} for n in range(20)]
    file = write(tmp_path / f"rows.{suffix}", rows)
    chosen = ("policy=hub", f"policy.path={byte_model}", "data=file", f"data.path={file}", "data.messages=chat")
    chat = ("prompt.kind=chat", "prompt.thinking=false", "sft.batch_size=5", "sft.test_share=0.2", "logger=[tensorboard]")
    assert fine_tune(tmp_path / "run", *chosen, *chat)["trainer/global_step"] == 4
    assert len(list((tmp_path / "run" / "tensorboard").glob("events.*"))) == 1


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    import datasets

    datasets.disable_progress_bars()
    if file.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_of_a_file(tmp_path: Path, suffix: str) -> None:
    file = write(tmp_path / f"rows.{suffix}", [{"q": f"{n}?", "a": str(n), "more": None} for n in range(3)])
    read = FileDemonstrations(str(file), prompt="q", response="a", rows=2)
    assert read(None) == [Demonstration("0?", "0"), Demonstration("1?", "1")]
    turns = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    chat = [{"role": role, "content": text} for role, text in turns]
    file = write(tmp_path / f"chats.{suffix}", [{"messages": chat}, {"messages": chat[1:3]}])
    assert FileDemonstrations(str(file), messages="messages")(None) == [
        Demonstration("c", "d", system="s", turns=(("a", "b"),)),
        Demonstration("a", "b"),
    ]


def chat(*roles: str, content: Any = "x") -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role in roles]


@pytest.mark.parametrize(
    ("row", "messages", "message"),
    [
        ({"prompt": "a"}, None, r"has no column response \(it has prompt\)"),
        ({"prompt": "a", "response": ""}, None, "row 0: its response is ''; it must be a text, and not empty"),
        ({"prompt": 3, "response": "b"}, None, "row 0: its prompt is 3"),
        ({"m": chat("user")}, "m", "row 0: its roles are user; they must be an optional system, then user, assistant"),
        ({"m": chat("user", "assistant", "user")}, "m", "row 0: its roles are user, assistant, user"),
        ({"m": chat("assistant", "user")}, "m", "row 0: its roles are assistant, user"),
        ({"m": chat("user", "assistant", content="")}, "m", "row 0: its content of message 0 is ''"),
        ({"m": [{"role": "user"}]}, "m", "row 0: its messages are "),
    ],
)
def test_a_row_that_cannot_be_learned_from_is_named(tmp_path: Path, row: dict, messages: str | None, message: str) -> None:
    file = write(tmp_path / "rows.jsonl", [row])
    with pytest.raises(ValueError, match=message):
        FileDemonstrations(str(file), messages=messages)(None)


# What cannot run: command line -> words of the one message, before a model is loaded.

REFUSED = {
    "loss=grpo": "unknown key 'loss'",
    "+loss.clip=1": "unknown key 'loss'; known here: allow_changes, callbacks, data, logger, lr_schedule, name, ",
    "data=file data.path=conf/sft.yaml": "data.path is 'conf/sft.yaml'; split 'train' could not be loaded",
    "sft.epochs=0": "sft.epochs is 0; it must be >= 1",
    "sft.batch_size=x": "sft.batch_size is 'x'; it must be an integer",
    "sft.epoch=3": "unknown key 'sft.epoch'; nearest: 'sft.epochs'",
    "sft.test_share=1": "sft.test_share is 1; it must be in [0, 1)",
    "sft.too_long=cut": "sft.too_long is 'cut'; it must be one of skip, refuse",
    "sft.batch_size=1 trainer.devices=2": "sft.batch_size is 1; it must be >= 2, the number of processes",
    "trainer.max_rounds=3": "trainer.max_rounds is 3; it must be null: sft.epochs or sft.max_updates counts",
    "task=gsm8k": "which has no demonstrations: data=file data.path=PATH_OR_HUB_ID",
    "data=file": "data.path is missing",
    "data=file data.path=./no.jsonl": "data.path is './no.jsonl'; there is no such file",
    "data=file data.path=no.parquet": "data.path is 'no.parquet'; there is no such file",
    "data=file data.path=x data.rows=0": "data.rows is 0; it must be >= 1, or null",
    "data.n=0": "data.n is 0; it must be >= 1",
    "prompt.kind=chatt": "prompt.kind is 'chatt'; it must be one of plain, chat",
    "prompt.system=x": "prompt.system is 'x'; it goes with prompt.kind chat only",
    "prompt.template=x": "prompt.template is 'x'; it must hold {text}, the question, once",
    "seed=-1": "seed is -1; it must be in [0, 4294967295]",
    "trainer=gpu trainer.devices=999 sft.batch_size=999": "trainer.devices is 999 with trainer.accelerator gpu",
    "policy.warm_start.model.head_dim=3": "head_dim is 3; it must be even",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_run_is_refused_before_a_model_is_loaded(line: str, tmp_path: Path, monkeypatch) -> None:
    for loads in ("transformers.AutoModelForCausalLM.from_pretrained", "transformers.AutoTokenizer.from_pretrained"):
        monkeypatch.setattr(loads, lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(Exception) as refused:  # noqa: PT011  the message is what counts
        fine_tune(tmp_path / "run", *line.split())
    message = explain(refused.value, line.split(), "sft")
    assert REFUSED[line] in message
    assert "rollout.prompt" not in message
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.slow
def test_two_processes_make_the_run_of_one(tiny: tuple[str, ...], finished: Path, tmp_path: Path) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(REPOSITORY / "sft.py"), *tiny, "trainer.devices=2", "trainer.strategy=ddp"]
    command += [f"hydra.run.dir={tmp_path / 'two'}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["two"]
    one, two = rows_of(finished), rows_of(tmp_path / "two")
    assert [row.keys() for row in one] == [row.keys() for row in two]
    for row, other in zip(one, two, strict=True):
        for name, value in row.items():
            assert bool(value) == bool(other[name]), name
            if value:
                assert float(other[name]) == pytest.approx(float(value), rel=1e-3, abs=1e-5), (row["trainer/global_step"], name)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "model")
    for name, value in AutoModelForCausalLM.from_pretrained(finished / "model").state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_the_command_line_says_mistakes_in_one_line_and_leaves_no_folder(tmp_path: Path) -> None:
    command = [sys.executable, str(REPOSITORY / "sft.py"), "sft.epoch=3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: unknown key 'sft.epoch'; nearest: 'sft.epochs'\n"
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize("path", sorted(CONF.glob("data/*.yaml")), ids=lambda p: p.stem)
def test_every_data_file_of_conf_trains(path: Path, tiny: tuple[str, ...], tmp_path: Path) -> None:
    overrides = [*tiny, "sft.max_updates=2", f"data={path.stem}"]
    if path.stem == "file":
        rows = [{"prompt": f"a{n}=", "response": str(n)} for n in range(20)]
        overrides = [*(o for o in overrides if o != "data.n=80"), f"data.path={write(tmp_path / 'rows.jsonl', rows)}"]
    assert fine_tune(tmp_path / "run", *overrides)["trainer/global_step"] == 2


def test_the_default_is_about_what_the_warm_start_is() -> None:
    """The same model, demonstrations, batch size and peak of the learning rate."""
    cfg = composed()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        warm = compose("train").policy.warm_start
    assert cfg.policy.warm_start.model == warm.model
    assert (cfg.data.n, cfg.sft.batch_size, cfg.optimizer.lr) == (warm.demonstrations, warm.batch_size, warm.lr)


@pytest.mark.parametrize("command", commands((REPOSITORY / "docs" / "sft.md").read_text()))
def test_every_command_of_the_page_builds(command: str, byte_model: Path, finished: Path, tmp_path: Path) -> None:
    """With placeholders filled in."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    files = {
        "rows.jsonl": write(tmp_path / "rows.jsonl", [{"prompt": "a", "response": "b"}]),
        "chats.parquet": write(tmp_path / "chats.parquet", [{"messages": turns}]),
        "PATH_OR_HUB_ID": byte_model, "RUN_DIR": finished,
    }  # fmt: skip
    _, script, *arguments = shlex.split(command)
    for name, path in files.items():
        arguments = [argument.replace(name, str(path)) for argument in arguments]
    if script == "-m":
        assert (arguments[0], arguments[2:]) == ("bapo.export", ["OUT"])
        return
    cfg = composed(*arguments) if script == "sft.py" else configs.composed(*arguments)
    build(configs.without_hydra(cfg), {"sft.py": SFT, "train.py": TRAIN}[script])


def test_few_held_out_rows_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    rows = [Row(torch.arange(3, dtype=torch.int32), 1)] * 800
    split(rows, 0.02)
    split(rows, 0)
    assert caplog.messages == []
    split(rows[:50], 0.02)
    assert caplog.messages == ["sft.test_share is 0.02, 1 of 50 demonstrations: their loss says little"]
