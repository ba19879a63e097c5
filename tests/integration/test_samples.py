"""A few responses of every round: the file, the loggers, the terminal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import SMALL, run_experiment
from support.wandb_files import wandb_records

from bapo.analysis.samples import choose, main, read_samples, shorten
from bapo.evaluation.folder import add_samples
from bapo.evaluation.scoring import Scored
from bapo.module import BapoModule
from bapo.rollouts.pool import load_pool
from bapo.rollouts.schedule import Schedule
from bapo.training.callbacks.samples import Samples, keep_before


def sample(round_index: int, number: int, reward: float = 0.0, **changes: Any) -> dict[str, Any]:
    row = {
        "uid": f"t/{number}@0", "sample_index": number, "prompt": "b12=", "answer": "21", "response": f"2{number}",
        "reward": reward, "correctness": reward, "length": 3, "finish_reason": "stop", "policy_version": 4 * round_index,
        "kept": True,
    }  # fmt: skip
    return row | changes


@dataclass
class Run:
    """As much of a trainer as the callback reads; the pool of round r holds six samples and was drawn at update 4 r."""

    default_root_dir: Path
    is_global_zero: bool = True
    current_epoch: int = 0
    loggers: list = field(default_factory=list)
    global_rank: int = 0
    world_size: int = 1
    samples: bool = True

    @property
    def datamodule(self) -> Any:
        def pool(round_index: int, ranks: Any) -> Any:
            meta: dict[str, Any] = {"policy_version": 4 * round_index}
            if self.samples:
                meta["samples"] = [sample(round_index, n) for n in range(6)]
            return SimpleNamespace(meta=meta)

        return SimpleNamespace(schedule=Schedule(2, 2), pool=pool)

    def epochs(self, callback: Samples, first: int, last: int) -> None:
        for self.current_epoch in range(first, last + 1):
            for batch in range(2):
                callback.on_train_batch_start(self, None, None, batch)  # type: ignore[arg-type]

    def written(self) -> list[tuple[int, int, str]]:
        rows = map(json.loads, (self.default_root_dir / "samples.jsonl").read_text().splitlines())
        return [(row["round"], row["global_step"], row["uid"]) for row in rows]


EXPECTED = [(r, 4 * r, f"t/{n}@0") for r in range(3) for n in range(2)]


def test_the_first_rows_of_every_round_are_written_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.epochs(Samples(2), 0, 5)
    assert run.written() == EXPECTED
    first = json.loads((tmp_path / "samples.jsonl").read_text().splitlines()[0])
    assert first == {"round": 0, "global_step": 0, **sample(0, 0)}


@pytest.mark.parametrize("stop", range(6))
@pytest.mark.parametrize("back", range(6))
@pytest.mark.parametrize("torn", ["", '{"round": 1, "gl'])
def test_a_resumed_run_neither_repeats_nor_loses_a_round(tmp_path: Path, stop: int, back: int, torn: str) -> None:
    """Killed in epoch `stop`, and gone on with from a checkpoint in epoch `back` or before."""
    run = Run(tmp_path)
    run.epochs(Samples(2), 0, stop)
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write(torn)
    run.epochs(Samples(2), min(stop, back), 5)
    assert run.written() == EXPECTED
    assert [path.name for path in tmp_path.iterdir()] == ["samples.jsonl"]


def test_other_ranks_and_pools_without_samples_write_nothing(tmp_path: Path) -> None:
    Run(tmp_path, is_global_zero=False).epochs(Samples(), 0, 3)
    Run(tmp_path, samples=False).epochs(Samples(), 0, 3)
    assert list(tmp_path.iterdir()) == []
    keep_before(tmp_path / "samples.jsonl", 3)
    with pytest.raises(ValueError, match=r"callbacks.samples.per_round is 0; it must be >= 1; callbacks.samples=null"):
        Samples(0)


@pytest.fixture
def small(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.setattr("bapo.analysis.report.write_report", lambda folder: folder / "report.html")
    return (*SMALL, f"policy.warm_start.cache_dir={cache_dir}")


def test_a_run_stopped_and_resumed_leaves_the_file_of_one_that_was_not(small, tmp_path, monkeypatch) -> None:
    run_experiment(tmp_path / "whole", *small)
    whole = (tmp_path / "whole" / "samples.jsonl").read_bytes()
    assert [row["round"] for row in map(json.loads, whole.splitlines())] == [0] * 8 + [1] * 8 + [2] * 8
    plain = BapoModule.log_row
    for update in (4, 7):  # at the end of a round, inside an epoch

        def log_row(self: BapoModule, row: dict[str, float], update: int = update) -> None:
            plain(self, row)
            if self.global_step == update and "policy/loss" in row:
                os.kill(os.getpid(), signal.SIGTERM)

        monkeypatch.setattr(BapoModule, "log_row", log_row)
        folder = tmp_path / str(update)
        with pytest.raises(SystemExit):
            run_experiment(folder, *small)
        monkeypatch.setattr(BapoModule, "log_row", plain)
        run_experiment(folder, f"resume={folder}")
        assert (folder / "samples.jsonl").read_bytes() == whole, update


def test_the_callback_changes_nothing_and_null_leaves_it_out(small, tmp_path) -> None:
    run_experiment(tmp_path / "with", *small, "trainer.max_rounds=1")
    run_experiment(tmp_path / "without", *small, "trainer.max_rounds=1", "callbacks.samples=null")
    assert not (tmp_path / "without" / "samples.jsonl").exists()
    assert (tmp_path / "with" / "metrics.csv").read_bytes() == (tmp_path / "without" / "metrics.csv").read_bytes()


def tokens_of_rounds(folder: Path, rounds: int) -> list[int]:
    return [int(load_pool(folder / "rounds", n).batch.response_mask.sum()) for n in range(rounds)]  # type: ignore[union-attr]


def test_wandb_has_a_table_and_tensorboard_a_text_of_every_round_and_both_the_ages(small, tmp_path, monkeypatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("WANDB_MODE", "offline")
    run_experiment(tmp_path, *small, "trainer.max_rounds=2", "logger=[wandb,tensorboard]")
    rows = read_samples(tmp_path)
    history = [
        {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        for record in wandb_records(tmp_path)
        if record.HasField("history")
    ]
    tables = [row for row in history if any(key.startswith("samples") for key in row)]
    assert [row["trainer/global_step"] for row in tables] == ["0", "4"]
    assert sum("policy/loss" in row for row in history) == 8  # the tables dropped no row of the metrics
    ages = [row["staleness/histogram/values"] for row in history if row.get("staleness/histogram/bins") == "[-0.5,0.5]"]
    assert ages == [f"[{tokens}]" for tokens in tokens_of_rounds(tmp_path, 2)]  # every token, at its first update
    files = tmp_path.glob("wandb/offline-run-*/files/media/table/samples*.json")
    contents = [json.loads(file.read_text()) for file in files]
    shown = [dict(zip(table["columns"], line, strict=True)) for table in contents for line in table["data"]]
    assert sorted(map(json.dumps, shown)) == sorted(map(json.dumps, rows))

    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"histograms": 0}).Reload()
    shown = events.Histograms("staleness/histogram")
    assert [(event.step, event.histogram_value.num) for event in shown] == list(
        zip((0, 4), tokens_of_rounds(tmp_path, 2), strict=True)
    )
    assert [(event.histogram_value.min, event.histogram_value.max) for event in shown] == [(0, 0)] * 2  # as they are drawn
    texts = events.Tensors("samples/text_summary")
    assert [event.step for event in texts] == [0, 4]
    said = texts[1].tensor_proto.string_val[0].decode()
    assert all(f"    {row['response']}" in said and row["uid"] in said for row in rows if row["round"] == 1)


# In the terminal.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [sample(r, n, reward=float(n == 1)) for r in range(3) for n in range(3)]
    rows[-1] |= {"response": "x" * 500 + "MIDDLE" + "y" * 500, "reward": -0.5, "kept": False, "prompt": "[red]a[/red]\x1b[2J"}
    lines = [json.dumps({"round": i // 3, "global_step": i // 3 * 4} | row) + "\n" for i, row in enumerate(rows)]
    (tmp_path / "samples.jsonl").write_text("".join(lines))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ([], [(r, n) for r in range(3) for n in range(3)]),
        (["--round", "1"], [(1, 0), (1, 1), (1, 2)]),
        (["--last", "--wrong"], [(2, 0), (2, 2)]),
        (["--right"], [(0, 1), (1, 1), (2, 1)]),
        (["--wrong", "--n", "3"], [(1, 2), (2, 0), (2, 2)]),
    ],
)
def test_what_is_asked_for_is_shown(folder: Path, capsys, arguments: list[str], shown: list) -> None:
    main([str(folder), *arguments])
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("round ")]
    assert heads == [f"round {r}  update {4 * r}  t/{n}@0 #{n}" for r, n in shown]


def test_long_texts_lose_their_middle_and_texts_are_shown_as_they_are(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(folder), "--last", "--n", "1"])
    out = capsys.readouterr().out
    assert "[red]a[/red]\\x1b[2J" in out  # neither markup nor a command to the terminal
    assert "\x1b" not in out
    assert "[... 206 characters ...]" in out
    assert "MIDDLE" not in out
    assert "reward -0.5 (task 0)  3 tokens, stop  not trained on" in out
    main([str(folder), "--last", "--n", "1", "--full"])
    assert "MIDDLE" in capsys.readouterr().out
    assert shorten("abcdefgh", 4) == "ab\n[... 4 characters ...]\ngh"
    assert shorten("abcd", 4) == "abcd"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--round", "7"], "--round is 7; there are samples of 3 rounds, from 0 to 2"),
        (["--n", "0"], "--n is 0; it must be >= 1"),
        (["--last", "--round", "1"], "not allowed with argument"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_a_line(folder: Path, capsys, arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as refused:
        main([str(folder), *arguments])
    assert refused.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_folder_without_samples_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no right sample in round 1"):
        choose([row for row in read_samples(folder) if not row["reward"]], 1, False, True, None)
    with (folder / "samples.jsonl").open("a") as file:
        file.write('{"torn')
    assert len(read_samples(folder)) == 9
    (folder / "samples.jsonl").write_text("no json\n")
    with pytest.raises(ValueError, match=r"samples.jsonl is damaged"):
        read_samples(folder)
    (folder / "samples.jsonl").unlink()
    with pytest.raises(ValueError, match="it is not the folder of a run or an evaluation"):
        read_samples(folder)
    (folder / "config.yaml").touch()
    with pytest.raises(ValueError, match=r"callbacks\.samples was null, or the run has made no update yet"):
        read_samples(folder)


def test_an_evaluation_is_read_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        Scored("t/0", 0, 5, "21", 1.0, True, 3, "stop", "it is 21", "b12=", "21"),
        Scored("t/0", 1, 6, None, 0.0, False, 4, "length", "it is", "b12=", "21"),
    ]
    add_samples(tmp_path, rows)
    main([str(tmp_path), "--wrong"])
    out = [line.strip() for line in capsys.readouterr().out.splitlines()[1:]]
    assert out == [
        "t/0 #1", "reward 0  4 tokens, length  could not be verified", "prompt", "b12=", "answer", "21", "given", "(no answer)",
        "response", "it is",
    ]  # fmt: skip
    for arguments in (["--last"], ["--round", "1"]):
        with pytest.raises(SystemExit):
            main([str(tmp_path), *arguments])
        assert "these are the samples of an evaluation, which has no rounds" in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    row = {"round": 0, "global_step": 0, **sample(0, 0, response="x" * 4000)}
    (tmp_path / "samples.jsonl").write_text((json.dumps(row) + "\n") * 200)
    command = [sys.executable, "-m", "bapo.analysis.samples", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None  # noqa: PT018 - for the type checker
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == -signal.SIGPIPE
