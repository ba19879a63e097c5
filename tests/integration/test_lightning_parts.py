"""Stock parts of Lightning, Hydra and torch work as they are: callbacks, loggers, Trainer flags, optimizers, debug overlays."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Timer
from support import SMALL, run_experiment
from support.configs import parts_of

CALLBACKS = "lightning.pytorch.callbacks"
LOGGERS = "lightning.pytorch.loggers"
SHORT = (*SMALL, "callbacks.report=null", "trainer.max_rounds=1")


@pytest.fixture
def short(cache_dir: Path) -> tuple[str, ...]:
    """A run of one round: two epochs of two updates."""
    return (*SHORT, f"policy.warm_start.cache_dir={cache_dir}")


@pytest.fixture
def unevaluated(short: tuple[str, ...]) -> tuple[str, ...]:
    """`short` for overlays that leave the evaluation out."""
    return tuple(override for override in short if not override.startswith("callbacks.evaluate"))


def rows_of(folder: Path, name: str = "metrics.csv") -> list[dict[str, str]]:
    with (folder / name).open() as file:
        return list(csv.DictReader(file))


def status(folder: Path) -> str:
    return json.loads((folder / "status.json").read_text())["status"]


def test_learning_rate_monitor_logs_beside_our_rows(short: tuple[str, ...], tmp_path: Path) -> None:
    run_experiment(
        tmp_path, *short, f"+callbacks.lr._target_={CALLBACKS}.LearningRateMonitor", "+callbacks.lr.logging_interval=step"
    )
    rates = [float(row["lr-AdamW"]) for row in rows_of(tmp_path) if row["lr-AdamW"]]
    assert len(rates) >= 4
    assert set(rates) <= {1.5e-4, 3e-4}


def test_device_stats_monitor_logs_to_timing(short: tuple[str, ...], tmp_path: Path) -> None:
    run_experiment(
        tmp_path, *short, f"+callbacks.stats._target_={CALLBACKS}.DeviceStatsMonitor", "+callbacks.stats.cpu_stats=true"
    )
    values = [row[name] for row in rows_of(tmp_path, "timing.csv") for name in row if name.startswith("DeviceStatsMonitor")]
    assert [value for value in values if value and float(value) >= 0]
    assert not any(name.startswith("DeviceStats") for name in rows_of(tmp_path)[0])  # no seed can repeat it


def test_model_summary_prints_the_policy(short: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_experiment(tmp_path, *short, f"+callbacks.summary._target_={CALLBACKS}.RichModelSummary")
    assert "CausalLMPolicy" in capsys.readouterr().out


def test_early_stopping_ends_a_run_that_resumes(short: tuple[str, ...], tmp_path: Path) -> None:
    stop = (f"+callbacks.stop._target_={CALLBACKS}.EarlyStopping", "+callbacks.stop.monitor=policy/entropy")
    stop += ("+callbacks.stop.stopping_threshold=100", "trainer.max_rounds=3")  # entropy is below it at once
    metrics = run_experiment(tmp_path, *short, *stop)
    assert metrics["trainer/global_step"] == 2  # at the end of the first epoch
    assert [path.name for path in (tmp_path / "checkpoints").glob("*.ckpt")] == ["update=000002.ckpt"]
    assert status(tmp_path) == "finished"


def test_early_stopping_on_a_metric_that_is_not_logged_names_it(short: tuple[str, ...], tmp_path: Path) -> None:
    stop = (f"+callbacks.stop._target_={CALLBACKS}.EarlyStopping", "+callbacks.stop.monitor=policy/entrpy")
    with pytest.raises(RuntimeError, match="policy/entrpy"):
        run_experiment(tmp_path, *short, *stop)


def test_model_checkpoint_keeps_the_best_by_a_metric(short: tuple[str, ...], tmp_path: Path) -> None:
    best = {"monitor": "policy/entropy", "mode": "min", "filename": "best", "every_n_train_steps": 1}
    overrides = [
        f"+callbacks.best._target_={CALLBACKS}.ModelCheckpoint",
        *(f"+callbacks.best.{k}={v}" for k, v in best.items()),
    ]
    run_experiment(tmp_path, *short, *overrides, "trainer.max_rounds=2")
    (path,) = tmp_path.rglob("best*.ckpt")
    state = torch.load(path, weights_only=True)
    (saved,) = [value for key, value in state["callbacks"].items() if "policy/entropy" in key]
    logged = [float(row["policy/entropy"]) for row in rows_of(tmp_path)[1:]]
    assert float(saved["best_model_score"]) == pytest.approx(min(logged))
    assert int(state["global_step"]) == 1 + logged.index(min(logged))


def test_rich_progress_bar_replaces_ours(short: tuple[str, ...], tmp_path: Path) -> None:
    run_experiment(tmp_path, *short, f"+callbacks.bar._target_={CALLBACKS}.RichProgressBar", "callbacks.progress=null")
    assert rows_of(tmp_path)[-1]["trainer/global_step"] == "4"


def test_timer_counts_the_run(short: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = []
    end = Timer.on_train_end
    monkeypatch.setattr(Timer, "on_train_end", lambda self, *a: (end(self, *a), seconds.append(self.time_elapsed())))
    run_experiment(tmp_path, *short, f"+callbacks.timer._target_={CALLBACKS}.Timer")
    assert seconds[0] > 0


def test_csv_logger_of_lightning_gets_every_row(short: tuple[str, ...], tmp_path: Path) -> None:
    run_experiment(tmp_path, *short, f"+logger.own._target_={LOGGERS}.CSVLogger")
    (file,) = tmp_path.glob("lightning_logs/version_0/metrics.csv")
    with file.open() as lines:
        theirs = [row["policy/loss"] for row in csv.DictReader(lines) if row["policy/loss"]]
    assert [float(value) for value in theirs] == [float(row["policy/loss"]) for row in rows_of(tmp_path)[1:]]


def test_tensorboard_logger_of_lightning_gets_every_row(short: tuple[str, ...], tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_experiment(tmp_path, *short, f"+logger.own._target_={LOGGERS}.TensorBoardLogger")
    (folder,) = {path.parent for path in tmp_path.rglob("events.*")}
    events = EventAccumulator(str(folder)).Reload().Scalars("bounds/clip_low")
    assert [event.step for event in events] == [1, 2, 3, 4]


def test_wandb_logger_of_lightning_runs_offline(
    short: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_experiment(tmp_path, *short, f"+logger.own._target_={LOGGERS}.WandbLogger", "+logger.own.project=x")
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"bounds/clip_low" in file.read_bytes()


def test_mlflow_logger_of_lightning_gets_every_row(
    short: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file:{tmp_path / 'mlruns'}"
    run_experiment(tmp_path, *short, f"+logger.own._target_={LOGGERS}.MLFlowLogger", f"+logger.own.tracking_uri={uri}")
    client = mlflow.tracking.MlflowClient(uri)
    (run,) = [run for e in client.search_experiments() for run in client.search_runs([e.experiment_id])]
    history = client.get_metric_history(run.info.run_id, "bounds/clip_low")
    assert [point.step for point in history] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("SGD", ["~optimizer.betas", "~optimizer.eps"]),
        ("RMSprop", ["~optimizer.betas"]),
        ("AdamW", []),
        ("Adagrad", ["~optimizer.betas"]),
    ],
)
def test_any_torch_optimizer_trains(name: str, overrides: list[str], short: tuple[str, ...], tmp_path: Path) -> None:
    metrics = run_experiment(tmp_path, *short, f"optimizer._target_=torch.optim.{name}", *overrides)
    assert metrics["trainer/global_step"] == 4
    state = torch.load(tmp_path / "checkpoints" / "update=000004.ckpt", weights_only=True)["optimizer_states"][0]
    assert ("betas" in state["param_groups"][0]) == (name == "AdamW")


@pytest.mark.parametrize("name", ["sgd", "rmsprop", "adamw"])
@pytest.mark.parametrize("schedule", ["constant", "constant_with_warmup", "linear", "cosine"])
def test_every_optimizer_file_goes_with_every_schedule(name: str, schedule: str) -> None:
    parts = parts_of(f"optimizer={name}", f"lr_schedule={schedule}")
    assert parts["optimizer"]([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]["lr"] > 0


def test_limit_train_batches_shortens_every_epoch(short: tuple[str, ...], tmp_path: Path) -> None:
    metrics = run_experiment(tmp_path, *short, "+trainer.limit_train_batches=1")
    assert metrics["trainer/global_step"] == 2  # one update of two in each epoch


def test_max_time_stops_with_a_checkpoint(short: tuple[str, ...], tmp_path: Path) -> None:
    run_experiment(tmp_path, *short, "trainer.max_rounds=500", "+trainer.max_time='00:00:00:01'", "callbacks.evaluate=null")
    steps = int(rows_of(tmp_path)[-1]["trainer/global_step"])
    assert 0 < steps < 2000
    assert [path.name for path in (tmp_path / "checkpoints").glob("*.ckpt")] == [f"update={steps:06d}.ckpt"]


def test_profiler_simple_prints_its_table(short: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        run_experiment(tmp_path, *short, "+trainer.profiler=simple")
    assert "run_training_batch" in caplog.text


def test_debug_fast_makes_one_update_and_keeps_nothing(unevaluated: tuple[str, ...], tmp_path: Path) -> None:
    metrics = run_experiment(tmp_path, *unevaluated, "debug=fast")
    assert metrics["trainer/global_step"] == 1
    assert not (tmp_path / "metrics.csv").exists()
    assert not list(tmp_path.rglob("*.ckpt"))


def test_debug_overfit_trains_on_one_pool(unevaluated: tuple[str, ...], tmp_path: Path) -> None:
    metrics = run_experiment(tmp_path, *unevaluated, "debug=overfit", "schedule.epochs_per_round=5")
    assert metrics["trainer/global_step"] == 10
    assert [path.name for path in (tmp_path / "rounds").glob("*.safetensors")] == ["round_00000.safetensors"]


def test_debug_profiler_prints_its_table(
    unevaluated: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        run_experiment(tmp_path, *unevaluated, "debug=profiler", "trainer.max_rounds=1")
    assert "run_training_batch" in caplog.text
