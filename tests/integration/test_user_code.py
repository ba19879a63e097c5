"""A loss, a task, an advantage, a reward and a callback in a folder of their own, run from there, the package untouched."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import REPOSITORY
from support.configs import shrunk

pytestmark = pytest.mark.slow

CODE = '''
from collections.abc import Sequence
from dataclasses import dataclass, replace

import lightning as L
import torch

from bapo.losses import FixedClipLoss
from bapo.protocols import Task
from bapo.types import ClipBounds, Prompt


@dataclass(frozen=True)
class OneSidedClip(FixedClipLoss):
    """No lower bound."""

    def choose(self, tally: torch.Tensor) -> ClipBounds:
        return replace(super().choose(tally), clip_low=torch.zeros(()))


@dataclass(frozen=True)
class Letters(Task):
    """Right is every response that begins with the letter asked for."""

    letters: str = "ab"
    alphabet = "ab?"
    eos = "."

    def prompts(self, split: str) -> Sequence[Prompt]:
        return [Prompt(f"{split}-{n}", f"{letter}?", letter) for n, letter in enumerate(self.letters * 8)]

    def verify(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
        return [float(response[:1] == prompt.answer) for prompt, response in zip(prompts, responses, strict=True)]

    def demonstrations(self, n: int, seed: int) -> list[tuple[str, str]]:
        return [(f"{'ab'[i % 2]}?", "ab"[i // 2 % 2]) for i in range(n)]


def centred(rewards: torch.Tensor, groups: Sequence[str]) -> torch.Tensor:
    return rewards - rewards.mean()


@dataclass(frozen=True)
class Short:
    """A bonus for a response of one letter."""

    bonus: float

    def __call__(self, sample, text: str) -> float:
        return self.bonus * (len(text) == 1)


class Count(L.Callback):
    def on_train_batch_end(self, trainer, *args) -> None:
        for logger in trainer.loggers:
            logger.log_metrics({"mine/batches": trainer.global_step}, trainer.global_step)
'''

FILES = {
    "my_code.py": CODE,
    "conf/loss/one_sided.yaml": "_target_: my_code.OneSidedClip\nclip_low: 0.8\nclip_high: 1.2\n",
    "conf/task/letters.yaml": "_target_: my_code.Letters\nletters: ab\n",
    "conf/reward/short.yaml": "short:\n  _target_: my_code.Short\n  bonus: 0.1\n",
    "conf/experiment/mine.yaml": "# @package _global_\ndefaults:\n  - override /loss: one_sided\n  - override /task: letters\n"
    "  - override /reward: short\n  - override /advantage: centred\nname: mine\n",
    "conf/advantage/centred.yaml": "_target_: my_code.centred\n_partial_: true\n",
}
SIZES = [
    "policy.warm_start.steps=60", "rollout.prompts_per_round=8", "rollout.group_size=4", "rollout.sampling.max_tokens=4",
    "schedule.epochs_per_round=1", "schedule.minibatches_per_epoch=2", "trainer.max_rounds=1",
    "+callbacks.mine._target_=my_code.Count",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "train.py"), *arguments]
    return subprocess.run(command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)


@pytest.mark.parametrize("path", ["--config-dir=conf", "hydra.searchpath=[file://{}/conf]"])
def test_a_folder_beside_the_run_brings_its_own_parts(path: str, folder: Path) -> None:
    done = train(folder, path.format(folder), "experiment=mine", *SIZES)
    assert done.returncode == 0, done.stderr
    (run,) = (folder / "outputs" / "mine").iterdir()
    assert json.loads((run / "status.json").read_text())["status"] == "finished"
    head, *rows = (line.split(",") for line in (run / "metrics.csv").read_text().splitlines())
    last = dict(zip(head, rows[-1], strict=True))
    assert (float(last["bounds/clip_low"]), float(last["bounds/clip_high"])) == pytest.approx((0.0, 1.2))
    assert last["mine/batches"] == "2"
    assert any(dict(zip(head, row, strict=True))["rollout/reward/short"] for row in rows)


def test_the_loss_of_the_tutorial_runs_as_it_is_printed_there(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "tutorial.md").read_text()
    files = re.findall(r"^```\w+ title=(\S+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in files] == ["my_loss.py", "conf/loss/one_sided.yaml"]
    for name, text in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (command,) = re.findall(r"^python train\.py (.*loss=one_sided)$", page, re.MULTILINE)
    done = train(tmp_path, *command.split(), "experiment=smoke", "trainer.max_rounds=1", "callbacks.evaluate=null")
    assert done.returncode == 0, done.stderr
    (table,) = tmp_path.glob("outputs/*/*/metrics.csv")
    head, *rows = (line.split(",") for line in table.read_text().splitlines())
    last = dict(zip(head, rows[-1], strict=True))
    assert (float(last["bounds/clip_low"]), float(last["bounds/clip_high"])) == pytest.approx((0.0, 1.2))


def test_a_wrong_key_of_a_users_own_class_is_named(folder: Path) -> None:
    done = train(folder, "--config-dir=conf", "experiment=mine", "+loss.clip_hihg=2")
    assert done.returncode == 2
    assert "unknown key 'loss.clip_hihg'; nearest: 'loss.clip_high'" in done.stderr


def test_optuna_gets_the_optimized_metric(tmp_path: Path, cache_dir: Path) -> None:
    sizes = shrunk("sweep=optuna", cache_dir=cache_dir)[1:]
    done = train(tmp_path, "-m", "sweep=optuna", "hydra.sweeper.n_trials=2", "callbacks.report=null", *sizes)
    assert done.returncode == 0, done.stderr
    best = (tmp_path / "outputs" / "sweeps" / "optuna").glob("*/optimization_results.yaml")
    (result,) = [path.read_text() for path in best]
    scores = []
    for metrics in (tmp_path / "outputs" / "sweeps" / "optuna").glob("*/[0-9]/metrics.csv"):
        head, *rows = (line.split(",") for line in metrics.read_text().splitlines())
        scores.append([row[head.index("eval/test/avg@1")] for row in rows if row[head.index("eval/test/avg@1")]][-1])
    assert len(scores) == 2
    assert f"best_value: {max(map(float, scores))}" in result


def test_an_unknown_optimized_metric_is_named(tmp_path: Path, cache_dir: Path) -> None:
    done = train(tmp_path, "optimized_metric=eval/test/avg@9", *shrunk(cache_dir=cache_dir), "callbacks.report=null")
    assert done.returncode == 2
    assert "optimized_metric is 'eval/test/avg@9', which the run has not logged; near: eval/test/avg@1" in done.stderr
