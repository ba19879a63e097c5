"""Whole runs on vLLM, as a user starts them: they end well, or badly, and no process outlives them."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from support import REPOSITORY, run_experiment

from bapo.records.files import load_update
from bapo.rollouts.pool import load_pool

pytestmark = pytest.mark.slow
pytest.importorskip("vllm")
psutil = pytest.importorskip("psutil")

VLLM = ("+experiment=smoke", "rollout=vllm", "rollout.engine.enforce_eager=true")


@pytest.fixture
def start(cache_dir, tmp_path) -> Iterator:
    """Starts `train.py` in a session of its own; what is left of it at the end of the test is killed."""
    started: list[subprocess.Popen] = []
    sync = tmp_path / "sync"
    sync.mkdir()

    def begin(*overrides: str) -> subprocess.Popen:
        command = [sys.executable, "train.py", *overrides]
        log = (tmp_path / "screen.log").open("a")
        started.append(subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log, start_new_session=True))
        return started[-1]

    yield begin
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def overrides(cache_dir: Path, tmp_path: Path) -> list[str]:
    run = tmp_path / "run"
    return [
        *VLLM,
        f"policy.warm_start.cache_dir={cache_dir}",
        f"hydra.run.dir={run}",
        f"rollout.engine.sync_dir={tmp_path / 'sync'}",
    ]


def wait_for(condition, seconds: float, screen: Path):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.2)
    raise AssertionError(screen.read_text()[-3000:])


def session(pid: int) -> list:
    """The living processes of a session. Python's resource tracker is one, until it has removed what others left in memory."""
    alive = []
    for process in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == pid and process.info["status"] != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


def rows(run: Path) -> list[dict[str, str]]:
    if not (run / "metrics.csv").is_file():
        return []
    with (run / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_run_is_stopped_by_a_signal_resumed_and_finished(start, cache_dir, tmp_path):
    screen, run = tmp_path / "screen.log", tmp_path / "run"
    first = start(*overrides(cache_dir, tmp_path), "trainer.max_rounds=6")
    wait_for(lambda: [row for row in rows(run) if row.get("policy/loss")], 300, screen)
    # As a terminal does it: every process of the group hears Ctrl-C, and the engine's must not.
    os.killpg(first.pid, signal.SIGINT)
    assert first.wait(120) == 128 + signal.SIGINT, screen.read_text()[-3000:]
    assert json.loads((run / "status.json").read_text())["status"] == "interrupted"
    assert wait_for(lambda: session(first.pid) == [], 60, screen)
    assert list((tmp_path / "sync").iterdir()) == []

    second = start(f"resume={run}")
    assert second.wait(300) == 0, screen.read_text()[-3000:]
    assert json.loads((run / "status.json").read_text())["status"] == "finished"
    assert wait_for(lambda: session(second.pid) == [], 60, screen)
    assert list((tmp_path / "sync").iterdir()) == []
    generated = [row for row in rows(run) if row.get("mismatch/probe_max_diff")]
    assert [row["rollout/round"] for row in generated] == [str(index) for index in range(6)]
    assert all(0 < float(row["mismatch/probe_max_diff"]) < 1e-3 for row in generated)
    assert all(float(row["mismatch/logp_abs_diff_max"]) < 1e-3 for row in generated)
    assert float(generated[-1]["trainer/global_step"]) == 21


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)], ids=["TERM", "KILL"])
def test_no_process_outlives_a_killed_run(start, cache_dir, tmp_path, number, code):
    screen = tmp_path / "screen.log"
    process = start(*overrides(cache_dir, tmp_path), "trainer.max_rounds=500")
    wait_for(lambda: [row for row in rows(tmp_path / "run") if row.get("policy/loss")], 300, screen)
    assert len(session(process.pid)) >= 3  # the trainer, vLLM's core and its worker
    process.send_signal(number)
    assert process.wait(120) == code, screen.read_text()[-3000:]
    assert wait_for(lambda: session(process.pid) == [], 60, screen)


def test_an_engine_that_dies_ends_the_run_with_a_checkpoint(start, cache_dir, tmp_path):
    screen, run = tmp_path / "screen.log", tmp_path / "run"
    process = start(*overrides(cache_dir, tmp_path), "trainer.max_rounds=500", "callbacks.checkpoint.every_n_updates=100000")
    wait_for(lambda: [row for row in rows(run) if row.get("policy/loss")], 300, screen)
    for child in session(process.pid):
        if "Worker" in " ".join(child.cmdline()):
            child.kill()
    assert process.wait(120) == 1, screen.read_text()[-3000:]
    assert "error: vLLM could not" in screen.read_text()
    assert json.loads((run / "status.json").read_text())["status"] == "failed"
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert checkpoint.name == f"update={int(float(rows(run)[-1]['trainer/global_step'])):06d}.ckpt"
    assert wait_for(lambda: session(process.pid) == [], 60, screen)


def test_a_run_that_generates_in_the_background_has_the_data_of_one_that_does_not(cache_dir, tmp_path):
    """Partial rollouts, a lag of one round: both sides agree on every token by the weights of the version that it has."""
    common = (
        *VLLM,
        f"policy.warm_start.cache_dir={cache_dir}",
        "callbacks.evaluate=null",
        "optimizer.lr=0.003",
        "schedule.lag=1",
    )
    common += (
        "trainer.max_rounds=5",
        "+rollout/partial=default",
        "rollout.partial.tokens_per_round=3",
        "rollout.max_attempts=6",
    )
    run_experiment(tmp_path / "after", *common)
    run_experiment(tmp_path / "background", *common, "schedule.overlap=true")
    assert "time/wait" in (tmp_path / "background" / "timing.csv").read_text()
    assert "time/wait" not in (tmp_path / "after" / "timing.csv").read_text()
    spans: set[int] = set()
    for n in range(5):
        pool, other = load_pool(tmp_path / "background" / "rounds", n), load_pool(tmp_path / "after" / "rounds", n)
        assert pool.rows == other.rows
        batch, mask = pool.batch, pool.batch.response_mask
        assert torch.equal(batch.input_ids, other.batch.input_ids)
        assert torch.equal(batch.policy_version, other.batch.policy_version)
        assert pool.meta["policy_version"] == max(0, 4 * (n - 1))  # of lag 1
        assert set(batch.policy_version[mask].tolist()) <= {0, *range(4, pool.meta["policy_version"] + 1, 4)}
        # The trainer's weights of a version and vLLM's agree on every token that has this version, whatever its span.
        assert (batch.behaviour_logprobs - batch.sampler_logprobs)[mask].abs().max() < 1e-3
        for row, here in zip(batch.policy_version, mask, strict=True):
            assert row[here].tolist() == sorted(row[here].tolist())
            spans.add(len(set(row[here].tolist())))
    assert max(spans) >= 2
    trained = [row for row in rows(tmp_path / "background") if row.get("policy/loss")]
    assert max(float(row["policy/ratio_max"]) for row in trained) > 1.1  # the versions differ by more than the two sides do
    for update, row in enumerate(trained):
        assert float(row["staleness/max"]) == max(load_update(tmp_path / "background" / "updates", update + 1).staleness[:, 0])
        assert float(row["staleness/max"]) >= update % 4 + 4 * min(1, update // 4)


def test_the_experiment_on_qwen3_runs_here_but_for_its_model_and_data(byte_model, tmp_path, monkeypatch):
    rows = "".join(json.dumps({"question": f"{n} + 1?", "answer": f"#### {n + 1}"}) + "\n" for n in range(50))
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(rows)
    judge = lambda self, prompts, responses: [len(response) % 2 for response in responses]  # noqa: E731  it knows nothing
    monkeypatch.setattr("bapo.tasks.dataset.DatasetTask.verify", judge)
    metrics = run_experiment(
        tmp_path / "run", "+experiment=bapo_qwen06b", f"policy.path={byte_model}", f"task.path={tmp_path}",
        "trainer.accelerator=cpu", "trainer.precision=32-true", "trainer.max_rounds=2", "rollout.prompts_per_round=8",
        "rollout.group_size=4", "rollout.sampling.max_tokens=16", "callbacks.evaluate.max_prompts=4",
        "callbacks.evaluate.sampling.max_tokens=16",
    )  # fmt: skip
    assert metrics["trainer/global_step"] == 32
    assert 0 < metrics["mismatch/probe_max_diff"] < 0.5  # the engine computes in bfloat16
    assert metrics["rollout/groups_generated"] == 8


def test_no_process_outlives_a_run_killed_while_its_engine_starts(start, cache_dir, tmp_path):
    process = start(*overrides(cache_dir, tmp_path))
    wait_for(lambda: [p for p in session(process.pid) if "EngineCore" in " ".join(p.cmdline())], 300, tmp_path / "screen.log")
    process.kill()
    process.wait()
    assert wait_for(lambda: session(process.pid) == [], 60, tmp_path / "screen.log")
