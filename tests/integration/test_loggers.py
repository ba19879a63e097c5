import contextlib
import itertools
import math
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from support.wandb_files import wandb_records

from bapo.training.loggers import CsvLogger, _wandb_mode, finish, tensorboard_logger


def log_steps(logger: CsvLogger, first: int, last: int) -> None:
    """A run in small: rounds of two updates, `rollout/*` on the first, an evaluation before all and after each round."""
    for step in range(first, last + 1):
        if step:
            row = {"trainer/global_step": step, "policy/loss": step / 3, "rollout/round": (step - 1) // 2, "time/train": 0.5}
            if step % 2:
                row |= {"rollout/reward_mean": 1 / step, "time/refill": 2.0}
            if step >= 3:
                row |= {"policy/skipped_updates": step}
            logger.log_metrics(row, step=step)
        if step % 2 == 0:
            logger.log_metrics({"eval/test/avg@1": step / 10, "time/eval": 0.25}, step=step)


def test_files_byte_by_byte(tmp_path: Path) -> None:
    log_steps(CsvLogger(tmp_path / "run"), 0, 3)
    assert (tmp_path / "run/metrics.csv").read_bytes() == (
        b"trainer/global_step,eval/test/avg@1,policy/loss,rollout/round,rollout/reward_mean,policy/skipped_updates\n"
        b"0,0.0,,,,\n"
        b"1,,0.3333333333333333,0,1.0,\n"
        b"2,0.2,0.6666666666666666,0,,\n"
        b"3,,1.0,1,0.3333333333333333,3\n"
    )
    assert (tmp_path / "run/timing.csv").read_bytes() == (
        b"trainer/global_step,time/eval,time/train,time/refill\n0,0.25,,\n1,,0.5,2.0\n2,0.25,0.5,\n3,,0.5,2.0\n"
    )
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["metrics.csv", "timing.csv"]


def test_cells_read_back_to_the_same_number(tmp_path: Path) -> None:
    third = torch.tensor(1 / 3)
    logger = CsvLogger(tmp_path)
    logger.log_metrics(
        {"policy/loss": third, "policy/lr": 1e-300, "rollout/groups_kept": 12, "policy/entropy": math.nan}, step=7
    )
    logger.log_metrics({"policy/ratio_max": math.inf}, step=8)
    header, seven, eight = (tmp_path / "metrics.csv").read_text().splitlines()
    assert header == "trainer/global_step,policy/loss,policy/lr,rollout/groups_kept,policy/entropy,policy/ratio_max"
    assert seven == f"7,{third.double().item()!r},1e-300,12,,"
    assert eight == "8,,,,,inf"


def test_same_step_merges_and_the_newer_value_stays(tmp_path: Path) -> None:
    logger = CsvLogger(tmp_path)
    logger.log_metrics({"policy/loss": 0.123456789, "policy/lr": 1.0}, step=1)
    logger.log_metrics({"policy/loss": 0.5}, step=1)  # a shorter row in the place of a longer one
    assert (tmp_path / "metrics.csv").read_text() == "trainer/global_step,policy/loss,policy/lr\n1,0.5,1.0\n"
    logger.log_metrics({"policy/loss": 2.0}, step=2)
    assert (tmp_path / "metrics.csv").read_text() == "trainer/global_step,policy/loss,policy/lr\n1,0.5,1.0\n2,2.0,\n"


@pytest.mark.parametrize("step", [4, None])
def test_a_row_of_a_callback_that_counts_otherwise_joins_the_last_one(tmp_path: Path, step: int | None) -> None:
    logger = CsvLogger(tmp_path)
    logger.log_metrics({"policy/lr": 1.0}, step=5)
    logger.log_metrics({"my/own": 2.0, "epoch": 1.0}, step=step)
    assert (tmp_path / "metrics.csv").read_text() == "trainer/global_step,policy/lr,my/own,epoch\n5,1.0,2.0,1.0\n"


def test_a_new_run_overwrites_nothing(tmp_path: Path) -> None:
    log_steps(CsvLogger(tmp_path), 0, 2)
    before = (tmp_path / "metrics.csv").read_bytes()
    with pytest.raises(ValueError, match=r"metrics\.csv exists; it is not overwritten"):
        CsvLogger(tmp_path)
    assert (tmp_path / "metrics.csv").read_bytes() == before


@pytest.mark.parametrize("torn", [b"", b"5,0.2", b"5,,1.6", b"33,1.0\n"])
def test_resumed_files_equal_those_of_an_uninterrupted_run(tmp_path: Path, torn: bytes) -> None:
    log_steps(CsvLogger(tmp_path / "whole"), 0, 8)
    for stop, checkpoint in itertools.combinations_with_replacement(range(9), 2):
        stop, checkpoint = checkpoint, stop  # the last step logged is at or after the checkpoint's
        run = tmp_path / f"{stop}-{checkpoint}"
        log_steps(CsvLogger(run), 0, stop)
        for name in ("metrics.csv", "timing.csv"):
            with (run / name).open("ab") as file:
                file.write(torn)
        log_steps(CsvLogger(run, resume_step=checkpoint), checkpoint + 1, 8)
        for name in ("metrics.csv", "timing.csv"):
            assert (run / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), (stop, checkpoint, name)


def test_the_evaluation_of_the_checkpoints_step_merges_after_a_resume(tmp_path: Path) -> None:
    log_steps(CsvLogger(tmp_path), 0, 5)
    before = (tmp_path / "metrics.csv").read_text().splitlines()
    CsvLogger(tmp_path, resume_step=4).log_metrics({"eval/test/avg@1": 0.9}, step=4)
    after = (tmp_path / "metrics.csv").read_text().splitlines()
    assert after == [*before[:-2], before[-2].replace("4,0.4,", "4,0.9,")]


def test_only_rank_zero_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger = CsvLogger(tmp_path / "run")
    logger.log_metrics({"policy/loss": 1.0}, step=1)
    assert not (tmp_path / "run").exists()


def test_tensorboard_forgets_what_was_logged_beyond_the_resumed_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume_step, steps, value in ((None, (1, 2, 3), 0.25), (1, (2,), 0.75)):
        logger = tensorboard_logger(tmp_path, resume_step)
        for step in steps:
            logger.log_metrics({"policy/loss": value}, step=step)
        finish([logger])
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("policy/loss")] == [(1, 0.25), (2, 0.75)]


def test_finish_closes_every_logger_even_when_one_fails(tmp_path: Path) -> None:
    class Recorder(CsvLogger):
        closed: str | None = None

        def finalize(self, status: str) -> None:
            self.closed = status
            if self.run_dir.name == "b":
                raise OSError("disk full")

    loggers = [Recorder(tmp_path / name) for name in "abc"]
    with pytest.raises(OSError, match="disk full"):
        finish(loggers, exit_code=3)
    assert [logger.closed for logger in loggers] == ["failed"] * 3


@pytest.mark.parametrize(
    ("wished", "has_key", "mode"),
    [
        (None, True, "online"),
        (None, False, "offline"),
        ("offline", True, None),
        ("disabled", False, None),
        ("online", True, None),
    ],
)
def test_wandb_mode(monkeypatch: pytest.MonkeyPatch, wished: str | None, has_key: bool, mode: str | None) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if wished:
        monkeypatch.setenv("WANDB_MODE", wished)
    monkeypatch.setattr("wandb.login", lambda prompt, verify: has_key)
    assert _wandb_mode() == mode


def test_wandb_online_without_a_key_is_an_error_and_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr("wandb.login", lambda prompt, verify: False)
    with pytest.raises(ValueError, match="WANDB_MODE is online but W&B finds no key"):
        _wandb_mode()


WANDB_JOB = """
import sys
from bapo.training.loggers import finish, wandb_logger
for job in range(3):
    logger = wandb_logger(f"job{job}", project="p", name=f"name{job}", group="sweep", tags=("a", "b"))
    try:
        logger.log_metrics({"policy/loss": job / 2, "rollout/round": 0}, step=1)
        logger.log_metrics({"eval/test/avg@1": 0.5, "rollout/round": 0}, step=1)
    finally:
        if job != 1:  # one that forgot to
            finish([logger], exit_code=job)
            finish([logger], exit_code=job)
"""


def run_on_terminal(command: list[str], folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """stdin, stdout and stderr are a terminal at which nobody sits; a prompt would wait for ever and be killed here."""
    main, end = pty.openpty()
    with subprocess.Popen(command, cwd=folder, env=environment, stdin=end, stdout=end, stderr=end) as process:
        os.close(end)
        timer = threading.Timer(120, process.kill)
        timer.start()
        output = b""
        with contextlib.suppress(OSError):  # how a terminal says that its other end is closed
            while chunk := os.read(main, 4096):
                output += chunk
        process.wait()
        timer.cancel()
    os.close(main)
    return process.returncode, output.decode()


def run_without_stdin(command: list[str], folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [True, False])
def test_wandb_offline_runs_of_one_process_are_separate(tmp_path: Path, terminal: bool) -> None:
    """On a terminal: no key, nobody types. Without one: a key in the environment and offline asked for."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")} | {"HOME": str(tmp_path)}
    sentinel = "SENTINEL" * 6
    if not terminal:
        environment |= {"WANDB_MODE": "offline", "WANDB_API_KEY": sentinel}
    command = [sys.executable, "-c", WANDB_JOB, f"engine.key={sentinel}"]
    code, output = (
        run_on_terminal(command, tmp_path, environment) if terminal else run_without_stdin(command, tmp_path, environment)
    )
    assert code == 0, output
    assert sentinel not in output

    jobs = [wandb_records(tmp_path / f"job{job}") for job in range(3)]
    runs = [next(record.run for record in records if record.HasField("run")) for records in jobs]
    assert len({run.run_id for run in runs}) == 3
    assert [(run.project, run.display_name, run.run_group, list(run.tags)) for run in runs] == [
        ("p", f"name{job}", "sweep", ["a", "b"]) for job in range(3)
    ]
    for job, records in enumerate(jobs):
        rows = [
            {item.key or "/".join(item.nested_key): item.value_json for item in r.history.item}
            for r in records
            if r.HasField("history")
        ]
        values = [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]
        step = {"trainer/global_step": "1", "rollout/round": "0"}
        assert values == [{"policy/loss": f"{job / 2:g}", **step}, {"eval/test/avg@1": "0.5", **step}]
        axes = {r.metric.name or r.metric.glob_name: r.metric.step_metric for r in records if r.HasField("metric")}
        assert axes["policy/*"] == axes["eval/*"] == axes["bounds/*"] == "trainer/global_step"
        assert axes["rollout/*"] == "rollout/round"
        assert axes["rollout/tokens_total"] == axes["rollout/round"] == axes["trainer/global_step"] == ""
    assert [[r.exit.exit_code for r in records if r.HasField("exit")] for records in (jobs[0], jobs[2])] == [[0], [2]]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and sentinel.encode() in path.read_bytes()]
