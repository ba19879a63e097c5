"""A what-if without changes reproduces the log; one with changes equals an independent count."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from support import REPOSITORY, SMALL, run_experiment

from bapo.analysis.whatif import walk as walk_module
from bapo.analysis.whatif.__main__ import main, what_if
from bapo.analysis.whatif.config import build, changed_config
from bapo.analysis.whatif.table import agreement, bounds_differ
from bapo.analysis.whatif.walk import Outcome, walk
from bapo.losses import AdaptiveRatioLoss, BapoLoss, FixedClipLoss, GspoLoss
from bapo.losses.objective import Objective
from bapo.records.files import check_complete, load_update, record_path
from bapo.rollouts.pool import load_pool
from bapo.training.run_folder import read_config


@pytest.fixture(scope="module")
def small(cache_dir) -> tuple[str, ...]:
    return (*SMALL, f"policy.warm_start.cache_dir={cache_dir}", "trainer.micro_batch_tokens=120", "trainer.max_rounds=2")


@pytest.fixture(scope="module", autouse=True)
def no_report() -> None:
    with pytest.MonkeyPatch.context() as patch:  # two thirds of the time of so short a run
        patch.setattr("bapo.analysis.report.write_report", lambda folder: folder / "report.html")
        yield


TARGET = "loss.target_positive_ratio=0.45"
"""Met half way by some updates of these runs, so that the order of the search matters."""


@pytest.fixture(scope="module")
def run_dir(small, tmp_path_factory) -> Path:
    """A run with BAPO, in two micro-batches or more per update."""
    folder = tmp_path_factory.mktemp("recorded")
    run_experiment(folder, *small, TARGET)
    return folder


@pytest.fixture
def copy(run_dir, tmp_path) -> Path:
    return Path(shutil.copytree(run_dir, tmp_path / "copy", ignore=shutil.ignore_patterns("whatif")))


def logged(folder: Path) -> list[dict[str, float]]:
    with (folder / "metrics.csv").open() as file:
        rows = [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]
    return [row for row in rows if "policy/loss" in row]


def outcomes(folder: Path, *overrides: str) -> list[Outcome]:
    loss, objective = build(changed_config(read_config(folder), overrides))
    return list(walk(folder, check_complete(folder / "updates"), loss, objective))


RUNS = {
    "bapo": [],
    "bapo, bounds of each micro-batch": ["loss.bounds_scope=micro_batch"],
    "grpo": ["loss=grpo", "objective.correction=token_tis", "objective.correction_cap=1.001", "trainer.precision=bf16-mixed"],
    "bapo_reference": ["loss=bapo_reference", "objective.aggregation=sequence_mean"],
    "gspo": ["loss=gspo"],
    "cispo": ["loss=cispo", "objective.top_entropy_frac=0.4"],
    "adaptive_ratio": ["loss=adaptive_ratio"],
    "m2po": [
        "loss=m2po", "objective.aggregation=sequence_sum", "objective.sequence_constant=10",
        "objective.correction=sequence_mis", "trainer.precision=bf16-mixed",
    ],
    "bapo, older data": ["+schedule/replay=default", "schedule.replay.groups=4", "schedule.lag=1", "trainer.max_rounds=3"],
}  # fmt: skip


@pytest.mark.parametrize("overrides", RUNS.values(), ids=RUNS)
def test_without_overrides_it_gives_what_was_logged(small, tmp_path, overrides):
    run_experiment(tmp_path, *small, *overrides)
    found, rows = outcomes(tmp_path), logged(tmp_path)
    assert len(found) == len(rows) >= 8
    assert max(len(load_update(tmp_path / "updates", outcome.step).micro_batches) for outcome in found) >= 2
    for outcome, row in zip(found, rows, strict=True):
        again = outcome.what_if
        assert outcome.step == row["trainer/global_step"]
        assert again.loss == pytest.approx(row["policy/loss"], abs=1e-6)
        if "loss.bounds_scope=micro_batch" in overrides:  # a mean over tokens
            assert again.bounds == pytest.approx((row["bounds/clip_low"], row["bounds/clip_high"]), abs=1e-12)
        else:
            assert again.bounds == (row["bounds/clip_low"], row["bounds/clip_high"])
        assert again.positive_ratio == pytest.approx(row["bounds/positive_ratio"], abs=1e-9)
        assert again.entropy_clip_cov == pytest.approx(row["policy/entropy_clip_cov"], abs=1e-9)
        assert sum(again.clipped) == pytest.approx(row["policy/clip_frac"], abs=1e-12)
        assert not bounds_differ(outcome)
        assert outcome.recorded.clipped == again.clipped
    assert len({row["policy/loss"] for row in rows}) == len(rows)


def test_the_corrections_of_these_runs_do_something(small, tmp_path):
    """Else the cases above would say nothing of them."""
    run_experiment(tmp_path, *small, *RUNS["grpo"])
    assert max(row["mismatch/corrected_frac"] for row in logged(tmp_path)) > 0
    plain = outcomes(tmp_path, "objective.correction=none")
    assert max(abs(o.what_if.loss - o.recorded.loss) for o in plain) > 1e-5


def test_an_adaptive_width_persists_from_update_to_update(small, tmp_path):
    run_experiment(tmp_path, *small, "loss=adaptive_ratio")
    found = outcomes(tmp_path)
    assert len({o.what_if.clip_high for o in found}) > 3
    loss = AdaptiveRatioLoss()
    ((alone),) = walk(tmp_path, [8], loss, Objective())
    assert alone.what_if.bounds != alone.recorded.bounds  # out of order it would begin with the first width


# What if.


@pytest.mark.parametrize(
    ("overrides", "choice"),
    [
        (["loss.search_order=low_first"], "low_first"),
        (["loss.target_positive_ratio=0.3"], "target_0.3"),
        (["loss.target_positive_ratio=0.5"], "target_0.5"),
        (["loss=bapo", TARGET], "high_first"),
    ],
    ids=str,
)
def test_another_choice_is_the_counterfactual_that_the_run_itself_logged(run_dir, overrides, choice):
    found = outcomes(run_dir, *overrides)
    for outcome, row in zip(found, logged(run_dir), strict=True):
        names = (f"bounds/cf/{choice}/{name}" for name in ("clip_low", "clip_high", "positive_ratio"))
        low, high, ratio = (row[name] for name in names)
        assert outcome.what_if.bounds == (low, high)
        # On data as new as the policy the search takes r for 1, the loss for what rounding leaves of it.
        assert outcome.what_if.positive_ratio == pytest.approx(ratio, abs=1e-6)
    assert any(map(bounds_differ, found)) == (choice not in ("high_first",))


def test_another_loss_is_what_a_count_over_the_tokens_gives(run_dir):
    """GRPO on the data of a BAPO run, in float64 numpy, from the files."""
    for outcome in outcomes(run_dir, "loss=grpo"):
        record = load_update(run_dir / "updates", outcome.step)
        batch = load_pool(run_dir / "rounds", record.round).batch.select(torch.from_numpy(record.rows[:, 1]).long())
        mask = batch.response_mask
        advantages = batch.advantages[:, None].expand(mask.shape)[mask].double().numpy()
        ratio = np.exp(record.logprobs.astype(np.float64) - batch.behaviour_logprobs[mask].numpy())
        loss = -np.minimum(ratio * advantages, ratio.clip(0.8, 1.2) * advantages).mean()
        assert outcome.what_if.loss == pytest.approx(loss, abs=1e-6)
        assert outcome.what_if.bounds == (0.8, 1.2)
        clipped = [((advantages > 0) & (ratio > 1.2)).mean(), 0.0, 0.0, ((advantages < 0) & (ratio < 0.8)).mean()]
        assert outcome.what_if.clipped == pytest.approx(clipped, abs=1e-12)
    assert outcome.recorded.loss != outcome.what_if.loss


def parts(run_dir: Path, *overrides: str) -> tuple:
    return build(changed_config(read_config(run_dir), overrides))


def test_overrides_choose_files_and_change_values_of_the_runs_config(run_dir):
    loss, objective = parts(run_dir)
    assert (loss.target_positive_ratio, loss.search_order, objective) == (0.45, "high_first", Objective())
    assert parts(run_dir, "loss=grpo") == (FixedClipLoss(0.8, 1.2), Objective())
    assert parts(run_dir, "loss=grpo", "+loss.dual_clip=3", "loss.clip_high=1.3")[0] == FixedClipLoss(0.8, 1.3, 3)
    assert parts(run_dir, "loss=gspo") == (GspoLoss(0.9997, 1.0004), Objective(aggregation="sequence_mean"))
    assert parts(run_dir, "loss=gspo", "objective=default")[1].aggregation == "sequence_mean"  # as train.py composes them
    assert parts(run_dir, "loss=gspo", "objective.aggregation=token_mean")[1] == Objective()
    reference = parts(run_dir, "loss=bapo_reference", "loss.target_positive_ratio=0.3")[0]
    assert isinstance(reference, BapoLoss)
    assert (reference.target_positive_ratio, reference.mass, reference.clip_low.step) == (0.3, "surrogate", 0.05)
    assert parts(run_dir, "loss=bapo")[0].target_positive_ratio == 0.4
    assert parts(run_dir, "loss=bapo_digit_ops")[0].target_positive_ratio == 0.55
    cfg = read_config(run_dir)
    cfg.objective.correction = "token_tis"
    assert build(changed_config(cfg, ["loss=gspo"]))[1].correction == "token_tis"  # the run's objective stays


def test_a_loss_of_a_users_own_conf_folder_is_a_choice(run_dir, tmp_path):
    (tmp_path / "loss").mkdir()
    (tmp_path / "loss" / "mine.yaml").write_text("_target_: bapo.losses.FixedClipLoss\nclip_low: 0.5\nclip_high: 1.5\n")
    cfg = changed_config(read_config(run_dir), ["loss=mine", "loss.clip_low=0.6"], tmp_path)
    assert build(cfg) == (FixedClipLoss(0.6, 1.5), Objective())
    with pytest.raises(ValueError, match=r"loss=other: it must be one of .*mine"):
        changed_config(read_config(run_dir), ["loss=other"], tmp_path)


REFUSED = {
    "seed=3": "seed=3: a what-if changes loss and objective only",
    "los=grpo": "los=grpo: a what-if changes loss and objective only",
    "optimizer.lr=1": "a what-if changes loss and objective only",
    "loss@objective=grpo": "a what-if changes loss and objective only",
    "loss=nope": "loss=nope: it must be one of adaptive_ratio, asymmetric_high",
    "objective=nope": "objective=nope: it must be one of default",
    "loss=null": "loss=None: it must be one of",
    "loss.target_positive_ratoi=1": "unknown key 'loss.target_positive_ratoi'; nearest: 'loss.target_positive_ratio'",
    "+loss.foo=1": "unknown key 'loss.foo'",
    "~loss.mass": "without ~ and sweeps",
    "loss.target_positive_ratio=0.3,0.4": "without ~ and sweeps",
    "loss.target_positive_ratio=7": "loss.target_positive_ratio is 7; it must be in (0, 1)",
    "loss.target_positive_ratio=abc": "loss.target_positive_ratio is 'abc'; it must be a number",
    "loss.search_order=up": "loss.search_order is 'up'; it must be one of high_first, low_first",
    "loss.clip_low.start=0.95": "loss.clip_low.start is 0.95; it must be <= stop",
    "loss.clip_low=5": "loss.clip_low is 5; it must be a section with a _target_",
    "objective.aggregation=sequence_sum": "objective.sequence_constant is None; aggregation sequence_sum divides by it",
    "loss": "Error parsing override 'loss'",
    "loss={a:1": "",
}


@pytest.mark.parametrize("override", REFUSED)
def test_an_override_that_does_not_fit_ends_in_one_line(run_dir, override):
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - what it says is compared below
        parts(run_dir, override)
    assert REFUSED[override] in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_the_page_says_of_commands_and_files_is_so(run_dir):
    page = (REPOSITORY / "docs" / "whatif.md").read_text()
    commands = re.findall(r"^python -m bapo.analysis.whatif RUN_DIR(.*?)(?: *#.*)?$", page, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        parts(run_dir, *(word for word in command.split() if "=" in word))
    named = {
        name for cells in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", page, re.MULTILINE) for name in re.findall(r"\w+", cells)
    }
    with np.load(record_path(run_dir / "updates", 1)) as file:
        assert set(file) <= named
        facts = json.loads(str(file["facts"]))
    (row,) = re.findall(r"^\| `facts` \| (.*) \|$", page, re.MULTILINE)
    assert set(facts) == set(re.findall(r"`(\w+)`", row))


# Files.


def test_a_copied_folder_needs_neither_model_nor_engine(copy, tmp_path, monkeypatch, capsys):
    cfg = read_config(copy)
    cfg.policy.warm_start, cfg.policy.path = None, "/nowhere/model"
    cfg.rollout.engine._target_ = "no.such.Engine"
    OmegaConf.save(cfg, copy / "config.yaml")
    shutil.rmtree(copy / "checkpoints")
    monkeypatch.chdir(tmp_path)
    main(["copy", "loss=bapo_reference", "loss.target_positive_ratio=0.3"])
    out = capsys.readouterr().out
    folder = Path("copy/whatif/loss=bapo_reference_loss.target_positive_ratio=0.3")
    assert out.rstrip().endswith(str(folder))
    assert sorted(path.name for path in folder.iterdir()) == ["figure.png", "whatif.csv", "whatif.md"]
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "whatif.md").read_text()
    assert page.startswith("# What if: loss=bapo_reference")
    assert "target_positive_ratio: 0.3" in page
    lines = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    assert [line[0].strip("| ") for line in lines] == ["round", "---", "0", "1", "all"]
    with (folder / "whatif.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["trainer/global_step"]) for row in rows] == list(range(1, 9))
    mean = sum(float(row["what_if/clip_high"]) for row in rows) / 8
    before = sum(float(row["recorded/clip_high"]) for row in rows) / 8
    assert lines[-1][lines[0].index("clip_high")] == f"{before:.4f} > {mean:.4f}"
    differ = sum(int(row["bounds_differ"]) for row in rows) / 8
    assert lines[-1][lines[0].index("bounds differ")] == f"{differ:.0%}"


def test_a_name_may_be_given_and_nothing_changed_says_so(run_dir, capsys):
    main([str(run_dir), "--name", "mine/../x"])
    assert (run_dir / "whatif" / "mine_.._x" / "whatif.md").is_file()
    assert "Nothing changed. Largest difference to a recorded loss: 0; other bounds than recorded in 0 of 8 updates.\n" in (
        capsys.readouterr().out
    )
    found = outcomes(run_dir, "loss=grpo")
    assert "Both should be 0" in agreement(found)


def test_one_pool_at_a_time_and_none_before_it_is_due(run_dir, monkeypatch):
    loaded: list[int] = []
    plain = walk_module.load_pool

    def load(folder: Path, number: int):
        loaded.append(number)
        return plain(folder, number)

    monkeypatch.setattr(walk_module, "load_pool", load)
    steps = check_complete(run_dir / "updates")
    seen = [list(loaded) for _ in walk(run_dir, steps, *parts(run_dir))]
    assert seen == [[0]] * 4 + [[0, 1]] * 4


BROKEN = {
    "no update": (lambda run: shutil.rmtree(run / "updates"), "holds no update"),
    "a gap": (lambda run: record_path(run / "updates", 3).unlink(), r"update_000003.npz is missing"),
    "the last one": (lambda run: record_path(run / "updates", 8).unlink(), r"update_000008.npz is missing"),
    "a torn one": (lambda run: record_path(run / "updates", 5).write_bytes(b"PK"), r"update_000005.npz is damaged"),
    "no round": (lambda run: (run / "rounds" / "round_00001.json").unlink(), "holds no complete round 1"),
    "a torn round": (
        lambda run: (run / "rounds" / "round_00001.safetensors").write_bytes(b"x"), r"round_00001.safetensors is damaged",
    ),
    "another round's files": (
        lambda run: [
            shutil.copy(run / "rounds" / f"round_00000.{kind}", run / "rounds" / f"round_00001.{kind}")
            for kind in ("json", "safetensors")
        ],
        r"round_00001.json is the file of round 0",
    ),
    "no config": (lambda run: (run / "config.yaml").unlink(), r"there is no config.yaml in it"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_missing_or_damaged_is_one_clear_line(copy, case):
    damage, message = BROKEN[case]
    damage(copy)
    with pytest.raises(ValueError, match=message) as refused:
        what_if(copy, [])
    assert "\n" not in str(refused.value)
    assert not (copy / "whatif").exists()


@pytest.mark.slow
def test_the_command_prints_its_table_or_one_line(run_dir):
    command = [sys.executable, "-m", "bapo.analysis.whatif", str(run_dir)]
    good = subprocess.run([*command, "loss=grpo"], capture_output=True, text=True, check=False)
    assert good.returncode == 0, good.stderr
    assert "| all | 8 |" in good.stdout
    bad = subprocess.run([*command, "loss=nope"], capture_output=True, text=True, check=False)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("error: loss=nope: it must be one of")
    assert bad.stderr.count("\n") == 1


def test_the_example_of_the_page_computes_what_it_says(copy):
    """The mean ratio of positive tokens, against the run's own metric."""
    page = (REPOSITORY / "docs" / "whatif.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    found: dict = {}
    exec(block.replace("RUN_DIR", str(copy)), found)
    record, positive = found["record"], np.concatenate(found["advantage"]) > 0
    assert record.step == 3
    assert 0 < positive.sum() < len(positive) == record.facts["tokens"]
    assert positive.sum() == record.by_side[2].sum()
    assert found["mean_ratio"] == pytest.approx(found["ratio"][positive].mean())
    with (copy / "metrics.csv").open() as file:
        logged = next(row for row in csv.DictReader(file) if row["trainer/global_step"] == "3")
    assert found["ratio"].mean() == pytest.approx(float(logged["policy/ratio_mean"]), rel=1e-5)
