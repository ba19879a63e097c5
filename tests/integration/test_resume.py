"""A run stopped anywhere and resumed leaves what the uninterrupted one leaves."""

from __future__ import annotations

import csv
import fcntl
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support import REPOSITORY, SMALL, run_experiment

from bapo.engines.hf import HFEngine
from bapo.module import BapoModule
from bapo.protocols import EngineError
from bapo.sft.warm_start import WarmStart
from bapo.training.resume import newest_checkpoint
from bapo.training.run_folder import resume_command


@pytest.fixture(scope="module")
def small(cache_dir) -> tuple[str, ...]:
    return (*SMALL, f"policy.warm_start.cache_dir={cache_dir}")


@pytest.fixture(scope="module")
def uninterrupted(small, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    run_experiment(folder, *small)
    return folder


KILLED = """
import os, runpy, signal, sys
from bapo.module import BapoModule

def log_row(self, row, plain=BapoModule.log_row):
    plain(self, row)
    if self.global_step == 6:
        os.kill(os.getpid(), signal.SIGKILL)

BapoModule.log_row = log_row
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A program that runs a script, here train.py, and kills itself while its sixth update is being logged."""


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(newest_checkpoint(folder), weights_only=True)["state_dict"]


def assert_same_run(folder: Path, other: Path) -> None:
    assert (folder / "metrics.csv").read_bytes() == (other / "metrics.csv").read_bytes()
    ours, theirs = final_weights(folder), final_weights(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@pytest.fixture
def signal_after(monkeypatch):
    """Sends this process a signal while update number `update` is being logged."""
    plain = BapoModule.log_row

    def arrange(update: int) -> None:
        def log_row(self, row):
            plain(self, row)
            if self.global_step == update and "policy/loss" in row:
                os.kill(os.getpid(), signal.SIGTERM)

        monkeypatch.setattr(BapoModule, "log_row", log_row)

    return arrange


def test_one_seed_gives_one_csv_and_another_seed_another(uninterrupted, small, tmp_path):
    run_experiment(tmp_path / "same", *small)
    assert_same_run(tmp_path / "same", uninterrupted)
    run_experiment(tmp_path / "other", *small, "seed=1")
    assert (tmp_path / "other" / "metrics.csv").read_bytes() != (uninterrupted / "metrics.csv").read_bytes()


# A round has 2 epochs of 2 updates: 1 and 3 are inside an epoch, 2 at its end, 4 and 8 at the end of a round, 12 of the run.
@pytest.mark.parametrize("update", [1, 2, 3, 4, 5, 8, 12])
def test_stopped_by_a_signal_and_resumed_equals_uninterrupted(
    uninterrupted, small, tmp_path, signal_after, update, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    signal_after(update)
    with pytest.raises(SystemExit) as stopped:
        run_experiment(tmp_path, *small)
    assert stopped.value.code == 128 + signal.SIGTERM
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["status"], status["global_step"]) == ("interrupted", update)
    assert f"python train.py resume={tmp_path}" in caplog.text
    monkeypatch.undo()
    run_experiment(tmp_path, f"resume={tmp_path}")
    assert_same_run(tmp_path, uninterrupted)
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "finished"


@pytest.mark.parametrize("stops", [(4, 8), (4, 6, 8), (2, 4), (3, 4, 5), (8, 12)], ids=str)
def test_stopped_and_resumed_again_and_again_equals_uninterrupted(uninterrupted, small, tmp_path, signal_after, stops):
    command = small
    for update in stops:
        signal_after(update)
        with pytest.raises(SystemExit):
            run_experiment(tmp_path, *command)
        command = (f"resume={tmp_path}",)
    signal_after(-1)
    run_experiment(tmp_path, *command)
    assert_same_run(tmp_path, uninterrupted)


@pytest.mark.parametrize("fails", ["train", "sync", "eval"])
def test_an_engine_that_fails_takes_no_update_with_it(uninterrupted, small, tmp_path, monkeypatch, fails):
    """At the end of round 1: while round 2 is drawn, at the sync before, and in the evaluation between them."""
    generate = HFEngine.generate

    def failing(self, requests, sampling):
        asked = {"sync": "sync"}.get(requests[0].uid, "eval" if sampling.temperature == 0 else "train")
        if self.version == 8 and asked == fails and (fails != "sync" or self.evaluated):
            raise EngineError("the engine is gone")
        self.evaluated = asked == "eval"
        return generate(self, requests, sampling)

    monkeypatch.setattr(HFEngine, "generate", failing)
    with pytest.raises(EngineError, match="the engine is gone"):
        run_experiment(tmp_path, *small, "callbacks.checkpoint.every_n_updates=1000")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["update=000008.ckpt"]
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["status"] == "failed"
    assert "the engine is gone" in status["error"]
    monkeypatch.undo()
    run_experiment(tmp_path, f"resume={tmp_path}")
    assert_same_run(tmp_path, uninterrupted)


def test_a_run_made_longer_twice_equals_one_that_was_long_from_the_start(uninterrupted, small, tmp_path):
    run_experiment(tmp_path, *small, "trainer.max_rounds=1")
    for rounds in (2, 3):
        run_experiment(tmp_path, f"resume={tmp_path}", f"trainer.max_rounds={rounds}")
    assert_same_run(tmp_path, uninterrupted)


@pytest.mark.parametrize(
    "choice", [("loss=adaptive_ratio",), ("objective.reference_kl=0.1", "objective.top_entropy_frac=0.5")], ids=str
)
def test_what_a_loss_remembers_goes_on_too(small, tmp_path, signal_after, choice):
    run_experiment(tmp_path / "whole", *small, *choice)
    signal_after(6)
    with pytest.raises(SystemExit):
        run_experiment(tmp_path / "stopped", *small, *choice)
    signal_after(-1)
    run_experiment(tmp_path / "stopped", f"resume={tmp_path / 'stopped'}")
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


def test_a_resumed_run_collects_no_round_twice(uninterrupted, small, tmp_path, signal_after, monkeypatch):
    signal_after(6)
    with pytest.raises(SystemExit):
        run_experiment(tmp_path, *small)
    monkeypatch.undo()
    drawn = []
    generate = HFEngine.generate

    def count(self, requests, sampling):
        if requests[0].uid != "sync":
            drawn.append((sampling.temperature, len(requests)))
        return generate(self, requests, sampling)

    monkeypatch.setattr(HFEngine, "generate", count)
    run_experiment(tmp_path, f"resume={tmp_path}")
    assert drawn == [(0.0, 8), (1.0, 64), (0.0, 8)]  # the evaluation of round 1, then round 2 and its evaluation
    assert_same_run(tmp_path, uninterrupted)


def test_training_collects_one_pool_per_round_and_none_before_it_is_needed(small, tmp_path, monkeypatch):
    drawn = []
    generate = HFEngine.generate

    def count(self, requests, sampling):
        if requests[0].uid != "sync":
            drawn.append((sampling.temperature, self.version))
        return generate(self, requests, sampling)

    monkeypatch.setattr(HFEngine, "generate", count)
    run_experiment(tmp_path, *small)
    assert drawn == [(1.0, 0), (0.0, 0), (0.0, 4), (1.0, 4), (0.0, 8), (1.0, 8), (0.0, 12)]


def test_a_finished_run_can_be_given_more_rounds(uninterrupted, small, tmp_path):
    run_experiment(tmp_path, *small, "trainer.max_rounds=2")
    run_experiment(tmp_path, f"resume={tmp_path}", "trainer.max_rounds=3")
    assert_same_run(tmp_path, uninterrupted)


def test_resuming_a_finished_run_changes_nothing(uninterrupted, small, tmp_path):
    run_experiment(tmp_path, *small)
    before = (tmp_path / "metrics.csv").read_bytes()
    metrics = run_experiment(tmp_path, f"resume={tmp_path}")
    assert (tmp_path / "metrics.csv").read_bytes() == before
    assert metrics["trainer/global_step"] == 12


def test_a_resumed_run_keeps_its_own_config(uninterrupted):
    with pytest.raises(ValueError, match=r"seed=5 cannot be changed \(allowed: trainer.max_rounds\)"):
        run_experiment(uninterrupted, f"resume={uninterrupted}", "seed=5")


def test_a_folder_in_use_or_with_a_run_in_it_is_refused(uninterrupted, small, tmp_path):
    with pytest.raises(ValueError, match=r"holds a run already; to resume it: python train.py resume="):
        run_experiment(uninterrupted, *small)
    with (uninterrupted / "commands.log").open() as other_process:
        fcntl.flock(other_process, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="is in use: a run is in progress in it"):
            run_experiment(uninterrupted, f"resume={uninterrupted}")
    assert json.loads((uninterrupted / "status.json").read_text())["status"] == "finished"


def test_a_full_disk_leaves_the_checkpoint_before(small, tmp_path, monkeypatch):
    run_experiment(tmp_path, *small, "trainer.max_rounds=1")
    before = newest_checkpoint(tmp_path)

    def full(checkpoint, path):
        path.write_bytes(b"half a file")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bapo.training.callbacks.checkpoint.torch.save", full)
    with pytest.raises(OSError, match="No space left"):
        run_experiment(tmp_path, f"resume={tmp_path}", "trainer.max_rounds=2")
    assert newest_checkpoint(tmp_path) == before
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "failed"


@pytest.mark.parametrize("every", [5, 1000])
def test_the_end_of_a_run_is_always_saved(small, tmp_path, every):
    run_experiment(tmp_path, *small, "trainer.max_rounds=1", f"callbacks.checkpoint.every_n_updates={every}")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["update=000004.ckpt"]


def test_a_longer_run_that_is_stopped_goes_on_to_its_new_length(uninterrupted, small, tmp_path, signal_after):
    run_experiment(tmp_path, *small, "trainer.max_rounds=1")
    signal_after(6)
    with pytest.raises(SystemExit):
        run_experiment(tmp_path, f"resume={tmp_path}", "trainer.max_rounds=3")
    signal_after(-1)
    run_experiment(tmp_path, f"resume={tmp_path}")
    assert_same_run(tmp_path, uninterrupted)


def test_a_run_cannot_end_before_it_goes_on(uninterrupted):
    with pytest.raises(ValueError, match=r"trainer.max_rounds is 2; this run is in round 3: it must be >= 3"):
        run_experiment(uninterrupted, f"resume={uninterrupted}", "trainer.max_rounds=2")
    assert json.loads((uninterrupted / "status.json").read_text())["status"] == "finished"
    assert "max_rounds: 3" in (uninterrupted / "config.yaml").read_text()  # what was refused is not kept


def test_a_damaged_round_is_collected_again_only_if_nothing_was_trained_on_it(uninterrupted, small, tmp_path, caplog):
    run_experiment(tmp_path, *small, "trainer.max_rounds=1")
    ahead = tmp_path / "rounds" / "round_00001.json"
    ahead.write_text('{"round": 1, "rows')  # as a kill in the middle of a refill might leave it
    run_experiment(tmp_path, f"resume={tmp_path}", "trainer.max_rounds=2")
    assert "round_00001.json is damaged" in caplog.text
    tensors = tmp_path / "rounds" / "round_00001.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"round_00001.safetensors is damaged"):
        run_experiment(tmp_path, f"resume={tmp_path}", "trainer.max_rounds=3")


def test_lost_rows_of_the_metrics_are_said(small, tmp_path, caplog):
    run_experiment(tmp_path, *small, "trainer.max_rounds=1")
    path = tmp_path / "metrics.csv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    run_experiment(tmp_path, f"resume={tmp_path}", "trainer.max_rounds=2")
    assert "metrics.csv lacks the rows from step 2 to the checkpoint's, 4" in caplog.text
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"metrics.csv is damaged"):
        run_experiment(tmp_path, f"resume={tmp_path}", "trainer.max_rounds=3")


def test_a_run_is_found_from_another_directory_and_under_any_name(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "lr=3, (a b)"
    run_experiment(folder, *SMALL, "policy.warm_start.cache_dir=cache", "trainer.max_rounds=1")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    command = shlex.split(resume_command(folder))
    assert command[:2] == ["python", "train.py"]
    run_experiment(folder, command[2], "trainer.max_rounds=2")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_resume_goes_on_in_its_own_folder_only(uninterrupted, tmp_path):
    with pytest.raises(ValueError, match=r"neither -m nor hydra.run.dir fits"):
        run_experiment(tmp_path, f"resume={uninterrupted}")


def test_a_damaged_config_is_said(small, tmp_path):
    run_experiment(tmp_path, *small, "trainer.max_rounds=1")
    (tmp_path / "config.yaml").write_text("trainer: [\n")
    with pytest.raises(ValueError, match=r"config.yaml is damaged"):
        run_experiment(tmp_path, f"resume={tmp_path}")


def test_a_missing_round_is_said_before_anything_is_trained(small, tmp_path):
    run_experiment(tmp_path, *small, "trainer.max_rounds=1")
    (tmp_path / "rounds" / "round_00000.json").unlink()
    with pytest.raises(FileNotFoundError, match="no complete round 0"):
        run_experiment(tmp_path, f"resume={tmp_path}", "trainer.max_rounds=2")
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "failed"


def test_rows_follow_updates_and_the_first_of_a_round_tells_of_its_pool(uninterrupted):
    with (uninterrupted / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(r["trainer/global_step"]) for r in rows] == list(range(13))
    assert [r["rollout/round"] for r in rows[1:]] == ["0"] * 4 + ["1"] * 4 + ["2"] * 4
    assert [int(r["trainer/global_step"]) for r in rows if r["rollout/reward_mean"]] == [1, 5, 9]
    assert [int(r["trainer/global_step"]) for r in rows if r["eval/test/avg@1"]] == [0, 4, 8, 12]
    assert [float(r["staleness/mean"]) for r in rows[1:]] == [0, 1, 2, 3] * 3
    for name in ("bounds/clip_low", "bounds/clip_high", "bounds/positive_ratio", "policy/entropy"):
        assert all(float(r[name]) >= 0 for r in rows[1:]), name
    assert all(float(r["mismatch/logp_abs_diff_max"]) < 1e-4 for r in rows if r["mismatch/logp_abs_diff_max"])


def test_the_checkpoint_holds_tensors_and_plain_values_only(uninterrupted):
    path = newest_checkpoint(uninterrupted)
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["global_step"] == 12
    assert [p.name for p in path.parent.iterdir()] == ["update=000012.ckpt"]

    def walk(value):
        if isinstance(value, dict):
            for key, part in value.items():
                assert isinstance(key, (str, int))
                walk(part)
        elif isinstance(value, (list, tuple)):
            for part in value:
                walk(part)
        else:
            assert value is None or isinstance(value, (torch.Tensor, str, int, float, bool)), type(value)

    walk(checkpoint)


@pytest.mark.parametrize("where", ["WarmStart.__call__", "HFEngine.generate"])
def test_a_signal_before_the_first_update_ends_the_run_with_a_status(small, tmp_path, monkeypatch, where):
    owner = {"WarmStart": WarmStart, "HFEngine": HFEngine}[where.split(".")[0]]

    def kill(self, *args):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr(owner, where.split(".")[1], kill)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped:
        run_experiment(tmp_path, *small)
    assert stopped.value.code == 128 + signal.SIGTERM
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "interrupted"
    assert signal.getsignal(signal.SIGTERM) == before


def test_behaviour_is_scored_at_the_precision_of_training(small, tmp_path):
    run_experiment(tmp_path, *small, "trainer.precision=bf16-mixed", "trainer.max_rounds=1")
    with (tmp_path / "metrics.csv").open() as file:
        first = list(csv.DictReader(file))[1]
    assert float(first["policy/ratio_max"]) == pytest.approx(1.0, abs=1e-6)
    assert float(first["policy/approx_kl"]) == pytest.approx(0.0, abs=1e-9)
    assert float(first["mismatch/logp_abs_diff_max"]) > 1e-3  # the engine works in float32, and that is said


@pytest.mark.slow
def test_killed_without_warning_loses_at_most_the_updates_since_the_checkpoint(uninterrupted, small, tmp_path):
    folder = tmp_path / "killed"
    command = [sys.executable, "-c", KILLED, str(REPOSITORY / "train.py"), *small, f"hydra.run.dir={folder}"]
    killed = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert json.loads((folder / "status.json").read_text())["status"] == "running"
    run_experiment(folder, f"resume={folder}")
    assert_same_run(folder, uninterrupted)


@pytest.mark.slow
def test_ctrl_c_saves_and_prints_how_to_go_on(uninterrupted, small, tmp_path):
    folder = tmp_path / "stopped"
    command = [sys.executable, str(REPOSITORY / "train.py"), *small, "trainer.max_rounds=50", f"hydra.run.dir={folder}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 120
    while not (folder / "metrics.csv").exists() or len((folder / "metrics.csv").read_text().splitlines()) < 4:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"python train.py resume={folder}" in output
    assert "Traceback" not in output
    saved = newest_checkpoint(folder)
    last_row = (folder / "metrics.csv").read_text().splitlines()[-1]
    assert torch.load(saved, weights_only=True)["global_step"] == int(last_row.split(",")[0])
