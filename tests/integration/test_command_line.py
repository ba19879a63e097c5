"""`python train.py` as a user meets it: run folders, sweeps, exit codes, secrets."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from support import REPOSITORY, SMALL

pytestmark = pytest.mark.slow

STAMP = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_[0-9a-f]{6}")
FILES = {
    *("config.yaml", "provenance.json", "commands.log", "status.json", "train.log"),
    *("metrics.csv", "timing.csv", "report.html", "figures", "rounds", "updates", "samples.jsonl", "checkpoints"),
}
COLUMNS = {
    *("trainer/global_step", "rollout/round", "rollout/tokens_total", "rollout/reward_mean", "eval/test/avg@1"),
    *("bounds/clip_low", "bounds/clip_high", "bounds/positive_ratio", "policy/entropy", "staleness/mean"),
}


@pytest.fixture
def tiny(cache_dir: Path) -> tuple[str, ...]:
    """Overrides of a whole run of one round."""
    return (*SMALL, "trainer.max_rounds=1", f"policy.warm_start.cache_dir={cache_dir}")


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """`python train.py ARGUMENTS` in `folder`."""
    command = [sys.executable, str(REPOSITORY / "train.py"), *arguments]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"} | environment
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit status, stdout and stderr."""
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    return process.returncode, out, err


def train(folder: Path, *arguments: str, **environment: str) -> tuple[int, str, str]:
    return end(start(folder, *arguments, **environment))


def status(folder: Path) -> dict[str, object]:
    return json.loads((folder / "status.json").read_text())


def test_two_runs_at_once_have_a_whole_folder_each(tiny: tuple[str, ...], tmp_path: Path) -> None:
    both = [start(tmp_path, *tiny, "name=a/b", "seed=3", "tags=[one,two]") for _ in range(2)]
    for code, out, err in map(end, both):
        assert code == 0, err
        assert "round 1/1  epoch 2/2  updates 4/4" in out
        assert "Traceback" not in err
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == ["a_b"]
    folders = list((tmp_path / "outputs" / "a_b").iterdir())
    assert len(folders) == 2
    for folder in folders:
        assert STAMP.fullmatch(folder.name)
        assert {path.name for path in folder.iterdir()} == FILES
    assert len({(folder / "metrics.csv").read_bytes() for folder in folders}) == 1  # one seed, one result

    folder = folders[0]
    assert status(folder).items() >= {"status": "finished", "global_step": 4}.items()
    cfg = OmegaConf.load(folder / "config.yaml")
    assert (cfg.name, cfg.seed, cfg.task.digits, cfg.loss.target_positive_ratio) == ("a/b", 3, 2, 0.55)
    assert "${" not in (folder / "config.yaml").read_text()
    facts = json.loads((folder / "provenance.json").read_text())
    plain = [word.removeprefix("+") for word in tiny]  # experiment=smoke and +experiment=smoke are one
    command = " ".join([str(REPOSITORY / "train.py"), *plain, "name=a/b", "seed=3", "tags=[one,two]"])
    assert facts["command"].endswith(command)
    assert facts["tags"] == ["one", "two"]
    assert facts["packages"]["torch"] == torch.__version__
    assert re.fullmatch(r"[0-9a-f]{40}|", facts["git_revision"])
    (line,) = (folder / "commands.log").read_text().splitlines()
    assert line.endswith(command)
    with (folder / "metrics.csv").open() as rows:
        table = list(csv.DictReader(rows))
    assert set(table[0]) >= COLUMNS
    assert [row["trainer/global_step"] for row in table] == ["0", "1", "2", "3", "4"]
    assert all(row["bounds/clip_low"] and row["bounds/positive_ratio"] for row in table[1:])
    page = (folder / "report.html").read_text()
    assert page.lower().startswith("<!doctype html>")
    assert "data:image/png;base64," in page
    assert not re.search(r"""(src|href)=["']?https?:""", page)


def test_a_failing_job_of_a_sweep_stops_no_other_and_says_why(tiny: tuple[str, ...], tmp_path: Path) -> None:
    """Job 1 fails at run time (no answer fits into one token), job 2 by its config."""
    code, out, err = train(tmp_path, "-m", *tiny, "logger=wandb", "name=x/y", "rollout.sampling.max_tokens=10,1,0,9")
    assert code != 0
    assert [path.name for path in (tmp_path / "outputs" / "sweeps").iterdir()] == ["x_y"]
    (sweep,) = (tmp_path / "outputs" / "sweeps" / "x_y").iterdir()
    assert STAMP.fullmatch(sweep.name)
    jobs = [sweep / str(number) for number in range(4)]
    assert [status(job)["status"] for job in jobs] == ["finished", "failed", "failed", "finished"]
    assert {path.name for path in jobs[3].iterdir()} == FILES | {"wandb"}

    log = (jobs[1] / "train.log").read_text()
    reason = "after rollout.max_attempts=3 batches only 0 of 192 finished responses are in groups with differing rewards"
    assert "Traceback (most recent call last)" in log
    assert reason in log
    assert reason in str(status(jobs[1])["error"])
    refused = "rollout.sampling.max_tokens is 0; it must be >= 1"
    assert refused in (jobs[2] / "train.log").read_text()
    assert status(jobs[2])["error"] == refused
    assert reason in out + err
    assert refused in out + err

    # A job that got as far as to log has a W&B run of its own, in its own folder.
    runs = {job.name: [run.name.split("-")[-1] for run in job.glob("wandb/offline-run-*")] for job in jobs}
    assert {job: len(ids) for job, ids in runs.items()} == {"0": 1, "1": 1, "2": 0, "3": 1}
    assert len({name for ids in runs.values() for name in ids}) == 3


def test_a_sweep_in_two_processes_has_one_folder(tiny: tuple[str, ...], tmp_path: Path) -> None:
    long = "n" * 300
    code, out, err = train(tmp_path, "-m", "+sweep=losses", *tiny, "loss=bapo,grpo", "seed=0", f"name={long}")
    assert code == 0, err
    assert "n_jobs=2" in out + err
    assert [path.name for path in (tmp_path / "outputs" / "sweeps").iterdir()] == [long[:80]]
    (sweep,) = (tmp_path / "outputs" / "sweeps" / long[:80]).iterdir()
    assert sorted(path.name for path in sweep.iterdir() if path.is_dir()) == ["0", "1"]
    for number, loss in enumerate(("BapoLoss", "FixedClipLoss")):
        job = sweep / str(number)
        assert {path.name for path in job.iterdir()} == FILES
        assert status(job)["status"] == "finished"
        assert OmegaConf.load(job / "config.yaml").loss._target_ == f"bapo.losses.{loss}"


def test_no_secret_reaches_a_file_or_the_screen(tiny: tuple[str, ...], tmp_path: Path) -> None:
    secrets = {"HF_TOKEN": "SENTINEL_1", "WANDB_API_KEY": "SENTINEL_2", "OPENAI_API_KEY": "SENTINEL_3", "MY_KEY": "SENTINEL_4"}
    reads_them = ("policy.revision=${oc.env:HF_TOKEN}", "logger.wandb.tags=[${policy.revision}-${oc.env:MY_KEY}]")
    code, out, err = train(tmp_path, *tiny, "logger=[wandb,tensorboard]", *reads_them, **secrets)
    assert code == 0, err
    (folder,) = (tmp_path / "outputs" / "smoke").iterdir()
    assert {path.name for path in folder.iterdir()} == FILES | {"wandb", "tensorboard"}
    cfg = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"), resolve=False)
    assert cfg["policy"]["revision"] == "${oc.env:HF_TOKEN}"  # so that a resumed run finds it
    assert cfg["logger"]["wandb"]["tags"] == ["${policy.revision}-${oc.env:MY_KEY}"]
    for file in ("commands.log", "provenance.json"):
        assert "logger.wandb.tags=[${policy.revision}-${oc.env:MY_KEY}]" in (folder / file).read_text()
    assert "SENTINEL_" not in out + err
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert [path for path in files if "SENTINEL_" in str(path) or b"SENTINEL_" in path.read_bytes()] == []


def test_a_secret_on_the_command_line_is_refused(tmp_path: Path) -> None:
    code, out, err = train(tmp_path, "-m", "name=SENTINEL_4", MY_KEY="SENTINEL_4")
    assert code == 2
    assert err.splitlines()[-1].startswith("error: the command line holds a secret; name its environment variable instead")
    assert "SENTINEL_" not in out + err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["modle.lr=1"], 2, "error: unknown key 'modle.lr'; nearest: 'optimizer.lr'"),
        (["optimizer.lr=0"], 2, "error: optimizer.lr is 0; it must be a number > 0 and finite"),
        (["-m", "seed=-1,-2"], 2, "error: seed is -1; it must be in [0, 4294967295]"),
        (["+hydra.run.dri=x"], 2, "error: unknown key 'hydra.run.dri'; Hydra knows here: dir"),
        (
            ["resume=outputs/nope"],
            2,
            "error: resume is 'outputs/nope'; it must be a run folder, and there is no config.yaml in it",
        ),
        (["hydra.run.dir=a_file/x"], 1, "error: [Errno 20] Not a directory: 'a_file/x'"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_mistake_ends_in_one_message(arguments: list[str], code: int, message: str, tmp_path: Path) -> None:
    (tmp_path / "a_file").touch()
    found, out, err = train(tmp_path, *arguments)
    assert found == code
    assert err.splitlines()[-1] == message
    assert "Traceback" not in out + err
    assert list(tmp_path.glob("outputs/digits/*")) == []  # nothing ran, nothing is left


def test_a_model_that_is_not_there_ends_in_a_message_and_a_failed_run(tmp_path: Path) -> None:
    code, out, err = train(tmp_path, "policy=hub", "policy.path=no-such-owner/no-such-model")
    assert code == 2
    assert "error: policy.path is 'no-such-owner/no-such-model'; no model could be loaded from it" in err
    (folder,) = (tmp_path / "outputs" / "digits").iterdir()
    assert status(folder)["status"] == "failed"
    assert "Traceback" in (folder / "train.log").read_text()
    assert "Traceback" not in out + err
    assert "resume=" not in out + err + (folder / "train.log").read_text()  # it would fail again
