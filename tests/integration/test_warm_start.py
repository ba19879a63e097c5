"""The character tokenizer, the tiny model, the supervised fit on demonstrations, and the cache that keeps its result."""

import json
import logging
import multiprocessing
import os
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bapo.policy.tiny_qwen3 import tiny_qwen3
from bapo.policy.tokenizer import PAD, character_tokenizer, check_alphabet
from bapo.protocols import Task
from bapo.sft.warm_start import Untrained, WarmStart
from bapo.tasks.digit_ops import ALPHABET, EOS, DigitOps
from bapo.types import Prompt

TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 4}


@dataclass(frozen=True)
class Echo(Task):
    """A task with its own characters and demonstrations: write the letter again."""

    alphabet: str = "ab="
    eos: str = "."

    def demonstrations(self, n: int, seed: int) -> Sequence[tuple[str, str]]:
        return [("a=", "a"), ("b=", "bb")] * (n // 2)


def tiny(cache_dir: Path, **changes: object) -> WarmStart:
    fields = {"steps": 3, "batch_size": 4, "demonstrations": 8, "model": TINY, "cache_dir": str(cache_dir)}
    return WarmStart(**{**fields, **changes})  # type: ignore[arg-type]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Tokenizer


def test_ids_follow_the_alphabet_and_nothing_is_added() -> None:
    tokenizer = character_tokenizer("ab=", ".")
    assert tokenizer.get_vocab() == {PAD: 0, ".": 1, "a": 2, "b": 3, "=": 4}
    assert tokenizer("ba=.")["input_ids"] == [3, 2, 4, 1]
    assert tokenizer("")["input_ids"] == []
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, None)


@pytest.mark.parametrize("saved", [False, True])
def test_round_trip(saved: bool, tmp_path: Path) -> None:
    tokenizer = character_tokenizer(ALPHABET, EOS)
    if saved:
        tokenizer.save_pretrained(tmp_path)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("b58392=")["input_ids"]
    assert ids == [13, 7, 10, 5, 11, 4, 18]
    assert tokenizer.decode(ids) == "b58392="
    response = tokenizer("23589x98532.")["input_ids"]
    assert response[-1] == tokenizer.eos_token_id != tokenizer.pad_token_id
    assert (
        tokenizer.decode([*response, tokenizer.pad_token_id, tokenizer.pad_token_id], skip_special_tokens=True) == "23589x98532"
    )
    assert tokenizer.batch_decode([[ids[0]], ids[:2]], skip_special_tokens=True) == ["b", "b5"]
    with pytest.raises(Exception, match=r"Missing \[UNK\] token"):  # never dropped in silence
        tokenizer("b5Z392=")


def test_whitespace_can_be_in_the_alphabet() -> None:
    tokenizer = character_tokenizer("a \n", ".")
    assert tokenizer.decode(tokenizer(" a\n a")["input_ids"]) == " a\n a"


def test_unknown_character_is_named() -> None:
    tokenizer = character_tokenizer(ALPHABET, EOS)
    check_alphabet(tokenizer, "b58392=23589.")
    with pytest.raises(ValueError, match="character 'Z' at position 2 of 'b5Z392='"):
        check_alphabet(tokenizer, "b5Z392=")


@pytest.mark.parametrize(
    ("alphabet", "eos", "message"),
    [
        ("ab", "", "eos is ''"),
        ("ab", "..", "eos is '..'"),
        ("", ".", "alphabet is empty"),
        ("aba", ".", "'a'"),
        ("a.", ".", "'.'"),
    ],
)
def test_bad_alphabets(alphabet: str, eos: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        character_tokenizer(alphabet, eos)


# Model


def test_model_size_and_generation_config() -> None:
    model = tiny_qwen3(20, eos_token_id=1, pad_token_id=0)
    # Embedding and head; per layer q, k, v, o, the norms of q and k, the MLP, two norms; the last norm.
    layer = 64 * 64 + 64 * 32 + 64 * 32 + 64 * 64 + 2 * 32 + 3 * 64 * 128 + 2 * 64
    assert sum(p.numel() for p in model.parameters()) == 2 * 20 * 64 + 2 * layer + 64
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    config = model.generation_config
    assert (config.eos_token_id, config.pad_token_id, config.bos_token_id) == (1, 0, None)
    assert (config.temperature, config.top_k, config.top_p) == (1.0, 0, 1.0)  # neutral: an absent top_k would mean 50


def test_seed_alone_decides_the_weights() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = tiny_qwen3(5, 1, 0, **TINY, seed=7).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    again, other = tiny_qwen3(5, 1, 0, **TINY, seed=7).state_dict(), tiny_qwen3(5, 1, 0, **TINY, seed=8).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


# Fit


def test_a_short_fit_learns(tmp_path: Path) -> None:
    """The task's two demonstrations, and the end of each; the loss of the mark is that of the held-out ones."""
    folder = tiny(tmp_path, steps=60, lr=2e-2)(Echo())
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert json.loads((folder / "warm_start.json").read_text())["loss"] < 0.1
    for ids in ([2, 4, 2, 1], [3, 4, 3, 3, 1]):  # "a=a." and "b=bb."
        greedy = model(torch.tensor([ids])).logits[0].argmax(-1)
        assert greedy[1:-1].tolist() == ids[2:]
    untrained = Untrained(model=TINY, cache_dir=str(tmp_path))(Echo())
    logits = AutoModelForCausalLM.from_pretrained(untrained)(torch.tensor([[3, 4, 3, 3]])).logits
    assert (logits.log_softmax(-1) + np.log(5)).abs().max() < 0.5  # it guesses one of five


# Cache


def test_folder_loads_and_a_second_call_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start = tiny(tmp_path)
    folder = start(Echo())
    first, stamps = contents(folder), {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert (model.config.vocab_size, model.generation_config.eos_token_id, tokenizer.eos_token_id) == (5, 1, 1)
    assert json.loads((folder / "generation_config.json").read_text())["top_k"] == 0
    with caplog.at_level(logging.INFO, logger="bapo.policy.folder_cache"):
        assert replace(start)(Echo()) == folder
    assert [record.message for record in caplog.records] == [f"warm start: cached in {folder}"]
    assert contents(folder) == first
    assert {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} == stamps
    shutil.rmtree(folder)
    start(Echo())
    assert contents(folder)["model.safetensors"] == first["model.safetensors"]  # the fit is deterministic


def test_everything_that_decides_the_policy_has_its_own_folder(tmp_path: Path) -> None:
    task, start = DigitOps(train_size=10, test_size=10), tiny(tmp_path)
    variants = [start, *(replace(start, **change) for change in ({"steps": 4}, {"lr": 1e-3}, {"seed": 1}, {"model": {}}))]
    keys = [variant._key(task) for variant in variants] + [start._key(replace(task, max_attempts=2)), start._key(Echo())]
    assert len(set(keys)) == 7
    assert replace(start, cache_dir="elsewhere")._key(task) == start._key(task)
    assert replace(start, model={})._key(task) == replace(start, model={"hidden_size": 64})._key(task)


def test_silent_and_leaves_the_surroundings_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(3), np.random.seed(3), random.seed(3)  # noqa: NPY002
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    settings = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()
    environment = dict(os.environ)
    tiny(Path("cache"))(Echo())
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (np.random.get_state()[1].tolist(), random.getstate())  # noqa: NPY002
    assert settings == (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled())
    assert dict(os.environ) == environment
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]  # no lightning_logs, no checkpoints


@pytest.mark.parametrize("damage", ["no mark", "missing file", "half a file", "garbled mark", "empty mark", "a file", "a link"])
def test_a_broken_entry_is_built_again(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny(tmp_path)(Echo())
    weights = (folder / "model.safetensors").read_bytes()
    mark = folder / "warm_start.json"
    match damage:
        case "no mark":
            mark.unlink()
        case "missing file":
            (folder / "tokenizer.json").unlink()
        case "half a file":
            (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
        case "garbled mark":
            mark.write_text(mark.read_text()[:20])
        case "empty mark":
            mark.write_text('{"files": {}}')
        case "a file":
            shutil.rmtree(folder)
            folder.write_text("")
            (folder.parent / f".{folder.name}.building").write_text("")
        case "a link":
            shutil.rmtree(folder)
            (tmp_path / "elsewhere").mkdir()
            (tmp_path / "elsewhere" / "kept").touch()
            folder.symlink_to(tmp_path / "elsewhere")
            (folder.parent / f".{folder.name}.building").symlink_to(tmp_path / "nowhere")
    caplog.clear()
    assert tiny(tmp_path)(Echo()) == folder
    assert "is broken or was interrupted; building it again" in caplog.text
    assert folder.is_dir()
    assert not folder.is_symlink()
    assert damage != "a link" or (tmp_path / "elsewhere" / "kept").exists()
    assert (folder / "model.safetensors").read_bytes() == weights
    assert AutoTokenizer.from_pretrained(folder)("ab")["input_ids"] == [2, 3]


def test_a_build_that_stops_leaves_no_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    start = tiny(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(WarmStart, "_fit", stop)
        with pytest.raises(KeyboardInterrupt):
            start(Echo())
    assert [path.suffix for path in (tmp_path / "warm_start").iterdir() if path.is_dir()] == [".building"]
    folder = start(Echo())
    assert "was interrupted; building it again" in caplog.text
    assert [path for path in folder.parent.iterdir() if path.is_dir()] == [folder]


def test_what_another_process_built_meanwhile_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is granted after the other process has finished: no second build."""
    other = tiny(tmp_path / "other")(Echo())

    def granted(*_: object) -> None:
        shutil.copytree(other, tmp_path / "warm_start" / other.name)

    monkeypatch.setattr("bapo.policy.folder_cache.fcntl.flock", granted)
    monkeypatch.setattr(WarmStart, "_fit", None)
    folder = tiny(tmp_path)(Echo())
    assert contents(folder) == contents(other)
    assert folder == tmp_path / "warm_start" / other.name


def _race(cache_dir: Path, barrier: Barrier, results: "SimpleQueue[tuple[Path, int]]") -> None:
    barrier.wait()
    folder = tiny(cache_dir, steps=20)(Echo())
    results.put((folder, len(AutoTokenizer.from_pretrained(folder))))


@pytest.mark.slow
def test_two_processes_race_and_both_get_a_whole_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.SimpleQueue()
    processes = [context.Process(target=_race, args=(tmp_path, barrier, results)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0, 0]
    first, second = results.get(), results.get()
    assert first == second == (first[0], 5)
    assert [path for path in (tmp_path / "warm_start").iterdir() if path.is_dir()] == [first[0]]


# Bad input


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 0}, "steps is 0; it must be an integer >= 1"),
        ({"batch_size": 2.5}, "batch_size is 2.5"),
        ({"demonstrations": "many"}, "demonstrations is 'many'"),
        ({"seed": -1}, "seed is -1"),
        ({"lr": 0.0}, "lr is 0.0; it must be a finite number > 0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"lr": "3e-3"}, "lr is '3e-3'"),  # YAML reads 3e-3 as text
        ({"model": {"hiden_size": 64}}, "model has hiden_size; it takes hidden_size, "),
        ({"model": {"seed": 1}}, "model has seed"),
        ({"model": {"hidden_size": 0}}, "hidden_size is 0"),
        ({"model": {"num_key_value_heads": 3}}, "num_key_value_heads is 3; it must divide num_attention_heads, 2"),
        ({"model": {"head_dim": 15}}, "head_dim is 15; it must be even"),
        ({"model": {"tie_word_embeddings": "no"}}, "tie_word_embeddings is 'no'"),
    ],
)
def test_bad_fields_are_named_before_anything_runs(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WarmStart(**fields)  # type: ignore[arg-type]


def test_bad_ids_are_named() -> None:
    with pytest.raises(ValueError, match=r"eos_token_id is 5; it must be in \[0, 5\)"):
        tiny_qwen3(5, eos_token_id=5, pad_token_id=0)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cache_dir is '.*file'; it cannot be written"):
        tiny(tmp_path / "file")(Echo())


def test_bad_tasks_are_named(tmp_path: Path) -> None:
    class NoRepr(Echo):
        __repr__ = object.__repr__

    with pytest.raises(ValueError, match="its repr must state its fields"):
        tiny(tmp_path)(NoRepr())
    with pytest.raises(ValueError, match=r"demonstration 1, 'b=': .*character 'b' has no token"):
        tiny(tmp_path)(Echo(alphabet="a="))
    with pytest.raises(ValueError, match=r"^policy\.warm_start\.model\.max_position_embeddings is 4; it must be >= 5"):
        tiny(tmp_path, model={**TINY, "max_position_embeddings": 4})(Echo())


def test_a_fit_that_diverges_says_so_and_leaves_no_entry(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the warm start diverged"):
        tiny(tmp_path, lr=1e25, steps=10)(Echo())
    assert all(path.name.startswith(".") for path in (tmp_path / "warm_start").iterdir())


# The whole thing


def sample(model: torch.nn.Module, ids: torch.Tensor, greedy: bool, max_tokens: int = 32) -> tuple[torch.Tensor, float]:
    """Responses [B, max_tokens], 0 after EOS (id 1), and the mean entropy of what they were drawn from, in nats."""
    drawn, entropy = [], []
    going = torch.ones(len(ids), dtype=torch.bool)
    cache = None
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(max_tokens):
            output = model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache, logprobs = output.past_key_values, output.logits[:, -1].log_softmax(-1)
            entropy.append(-(logprobs.exp() * logprobs).sum(-1)[going])
            token = logprobs.argmax(-1) if greedy else torch.multinomial(logprobs.exp(), 1, generator=generator)[:, 0]
            token = torch.where(going, token, 0)
            drawn.append(token)
            going = going & (token != 1)
            ids = token[:, None]
    return torch.stack(drawn, dim=1), torch.cat(entropy).mean().item()


@pytest.mark.slow
def test_the_default_leaves_something_to_learn(tmp_path: Path) -> None:
    """Accuracy from 0.10 to 0.35, entropy above 0.3 nats, and wrong responses longer than right ones."""
    task = DigitOps()
    folder = WarmStart(cache_dir=str(tmp_path))(task)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompts: list[Prompt] = list(task.prompts("test"))
    for greedy in (False, True):
        rows = prompts * (1 if greedy else 8)
        responses, entropy = sample(model, torch.tensor(tokenizer([p.text for p in rows])["input_ids"]), greedy)
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        rewards = torch.tensor(task.verify(rows, texts))
        lengths = (responses != 0).sum(dim=1).float()
        assert 0.10 <= rewards.mean() <= 0.35
        assert entropy > 0.3
        assert lengths[rewards == 0].mean() > lengths[rewards == 1].mean() + 1


def test_untrained_is_what_a_warm_start_begins_with(tmp_path: Path) -> None:
    made = Untrained(seed=3, model=TINY, cache_dir=str(tmp_path))
    folder = made(Echo())
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    expected = tiny_qwen3(5, 1, 0, **TINY, seed=3).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert tokenizer("ab=.")["input_ids"] == [2, 3, 4, 1]
    assert model.generation_config.eos_token_id == 1
    assert made.config(Echo()).vocab_size == 5
    assert replace(made, cache_dir=str(tmp_path))(Echo()) == folder
    others = [replace(made, seed=4)(Echo()), replace(made, model={})(Echo()), made(Echo(alphabet="ab=c"))]
    assert len({folder, *others}) == 4
    with pytest.raises(ValueError, match="model has hiden_size; it takes"):
        Untrained(model={"hiden_size": 8})
    with pytest.raises(ValueError, match="task is Task, which has no demonstrations"):
        made(Task())


def test_a_model_too_short_is_refused_before_all_demonstrations_are_made(tmp_path: Path) -> None:
    asked: list[int] = []

    class Slow(Echo):
        def demonstrations(self, n: int, seed: int) -> list[tuple[str, str]]:
            asked.append(n)
            return super().demonstrations(n, seed)

    with pytest.raises(ValueError, match=r"model\.max_position_embeddings is 4; it must be >= 5"):
        tiny(tmp_path, model={**TINY, "max_position_embeddings": 4}, demonstrations=500)(Slow())
    assert asked == [64]
