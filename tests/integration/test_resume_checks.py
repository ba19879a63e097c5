"""Nothing recorded is lost: a resume names what it cannot use, what has changed and what it moves, before it writes."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from omegaconf import OmegaConf
from support import SMALL, run_experiment
from support.tasks import dataset

from bapo.records.files import load_update
from bapo.rollouts.pool import Pool, load_pool, load_unfinished
from bapo.training.callbacks.checkpoint import Checkpoints
from bapo.training.checks import data_digests
from bapo.training.resume import checkpoint_steps, content_digest, differences, newest_checkpoint, read_checkpoint
from bapo.updates import UpdateModule

ROUNDS = 3


@pytest.fixture(scope="module")
def small(cache_dir: Path) -> tuple[str, ...]:
    return (*SMALL, f"policy.warm_start.cache_dir={cache_dir}")


@pytest.fixture(scope="module")
def finished(small: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 updates in 3 rounds, which has left groups unfinished, with its checkpoints of 4, 8 and 12 updates."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bapo.training.callbacks.checkpoint.checkpoint_steps", lambda folder: {})
        patch.setattr(Checkpoints, "_remove_checkpoint", lambda *arguments: None)
        run_experiment(
            folder, *small, "+rollout/partial=default", "rollout.partial.tokens_per_round=5", "rollout.max_attempts=6"
        )
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return shutil.copytree(finished, tmp_path / "run")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def refused(folder: Path, *overrides: str) -> str:
    """The message with which a resume is refused, which has changed no file."""
    before = contents(folder)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is what is tested
        run_experiment(folder, f"resume={folder}", *overrides)
    assert contents(folder) == before
    return str(caught.value)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def flip_in_tensor(path: Path, name: str) -> None:
    """Flips a bit of one tensor of a safetensors file."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    flip(path, 8 + size + json.loads(data[8 : 8 + size])[name]["data_offsets"][0])


# Checkpoints.


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-500])


def plain_dict(path: Path) -> None:
    torch.save({"weights": torch.zeros(3)}, path)


def crafted(path: Path) -> None:
    torch.save({"global_step": os.system}, path)


def flipped(path: Path) -> None:
    flip(path, path.read_bytes().index(b"model.embed") + 200_000 if path.stat().st_size > 400_000 else path.stat().st_size // 2)


def of_another_run(path: Path) -> None:
    checkpoint = torch.load(path, weights_only=True) | {"run_id": "0123456789abcdef"}
    checkpoint.pop("digest")
    torch.save(checkpoint | {"digest": content_digest(checkpoint)}, path)


def one_weight_off(path: Path) -> None:
    checkpoint = torch.load(path, weights_only=True)
    name = next(iter(checkpoint["state_dict"]))
    checkpoint["state_dict"][name].view(-1)[0] += 1e-7
    torch.save(checkpoint, path)


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "torn": (torn, "is damaged: it is no whole zip file"),
    "11 bytes": (lambda path: path.write_bytes(b"not a model"), "is damaged: it is no whole zip file"),
    "empty": (lambda path: path.write_bytes(b""), "is damaged: it is no whole zip file"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "cannot be read: Is a directory"),
    "a plain dict": (plain_dict, "is not the checkpoint of a run: it has no digest, epoch"),
    "a crafted pickle": (crafted, "is damaged: Weights only load failed"),
    "a bit flipped": (flipped, "is damaged"),
    "one weight off": (one_weight_off, "is damaged: its contents do not match its checksum"),
    "of another run": (of_another_run, "is the checkpoint of another run, 0123456789abcdef; this run is "),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_checkpoint_that_cannot_be_used_stops_the_resume(run: Path, kind: str) -> None:
    break_, message = BROKEN[kind]
    break_(run / "checkpoints" / "update=000012.ckpt")
    text = refused(run)
    assert "update=000012.ckpt" in text
    assert message in text
    assert text.endswith("resume_from=UPDATES chooses a checkpoint (there is 4, 8, 12), resume_from=start none")


def test_a_checkpoint_that_may_not_be_read_now_stops_the_resume(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Path.open

    def locked(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.suffix == ".ckpt":
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", locked)
        with pytest.raises(ValueError, match=r"update=0000\d\d.ckpt cannot be read: Permission denied; resume_from="):
            run_experiment(run, f"resume={run}")
    assert len((run / "metrics.csv").read_text().splitlines()) == 14
    run_experiment(run, f"resume={run}")
    assert len((run / "metrics.csv").read_text().splitlines()) == 14


def test_resume_from_goes_back_and_moves_later_records_aside(finished: Path, run: Path) -> None:
    (run / "checkpoints" / "update=000099.ckpt").write_bytes(b"not a model")
    run_experiment(run, f"resume={run}", "resume_from=4")
    for name in ("metrics.csv", "samples.jsonl"):
        assert (run / name).read_bytes() == (finished / name).read_bytes(), name
    ours, theirs = (read_checkpoint(folder / "checkpoints" / "update=000012.ckpt")["state_dict"] for folder in (run, finished))
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    (aside,) = (run / "superseded").iterdir()
    kept = contents(aside)
    assert {name for name in kept if name.startswith("checkpoints")} == {
        "checkpoints/update=000008.ckpt", "checkpoints/update=000012.ckpt", "checkpoints/update=000099.ckpt",
    }  # fmt: skip
    assert sorted(int(Path(name).stem.split("_")[1]) for name in kept if name.startswith("updates")) == list(range(5, 13))
    assert {name[:18] for name in kept if name.startswith("rounds/round")} == {"rounds/round_00001", "rounds/round_00002"}
    for name, data in kept.items():
        if name.startswith(("rounds", "updates")) or name in ("metrics.csv", "timing.csv", "samples.jsonl"):
            assert data == (finished / name).read_bytes(), name


def test_resume_from_start_begins_again_and_loses_nothing(finished: Path, run: Path) -> None:
    run_experiment(run, f"resume={run}", "resume_from=start")
    assert (run / "metrics.csv").read_bytes() == (finished / "metrics.csv").read_bytes()
    (aside,) = (run / "superseded").iterdir()
    assert contents(aside).keys() >= {f"updates/update_{n:06d}.npz" for n in range(1, 13)} | {"metrics.csv", "timing.csv"}


@pytest.mark.parametrize(("value", "message"), [("5", "there is 4, 8, 12"), ("last", "there is 4, 8, 12")])
def test_resume_from_something_else_is_named(run: Path, value: str, message: str) -> None:
    assert message in refused(run, f"resume_from={value}")


def test_resume_from_goes_with_resume(small: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="resume_from is 4; it goes with resume=RUN_DIR"):
        run_experiment(tmp_path, *small, "resume_from=4")


@pytest.mark.parametrize("whole", [True, False])
def test_checkpoints_that_are_gone_are_not_a_new_beginning(run: Path, whole: bool) -> None:
    for path in (run / "checkpoints").iterdir():
        path.unlink()
    if whole:
        (run / "checkpoints").rmdir()
    assert "holds no checkpoint; one was written after update 12: put it back" in refused(run)


def test_pruning_spares_the_last_file_that_was_written(small: tuple[str, ...], tmp_path: Path) -> None:
    """A file of more updates appears while the run goes: it is no reason to delete those that the run has written."""

    class Appear(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            (tmp_path / "checkpoints").mkdir(exist_ok=True)
            (tmp_path / "checkpoints" / "update=000099.ckpt").write_bytes(b"not a model")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "on_train_batch_start", Appear.on_train_batch_start, raising=False)
        run_experiment(tmp_path, *small, "trainer.max_rounds=1")
    assert set(checkpoint_steps(tmp_path / "checkpoints").values()) == {4, 99}
    with pytest.raises(ValueError, match=r"update=000099.ckpt is damaged"):
        newest_checkpoint(tmp_path)
    assert read_checkpoint(tmp_path / "checkpoints" / "update=000004.ckpt")["global_step"] == 4


# Pools.


@pytest.mark.parametrize(
    "name", ["advantages", "input_ids", "behaviour_logprobs", "sampler_logprobs", "rewards", "response_mask"]
)
def test_a_flipped_bit_of_a_pool_is_named(run: Path, name: str) -> None:
    flip_in_tensor(run / "rounds" / "round_00001.safetensors", name)
    with pytest.raises(ValueError, match=r"round_00001.safetensors is damaged: its contents do not match the checksum"):
        load_pool(run / "rounds", 1)


def test_a_flipped_bit_of_unfinished_groups_is_named(run: Path) -> None:
    assert load_unfinished(run / "rounds", 1)
    flip_in_tensor(run / "rounds" / "unfinished_00001.safetensors", "versions")
    with pytest.raises(ValueError, match=r"unfinished_00001.safetensors is damaged"):
        load_unfinished(run / "rounds", 1)


@pytest.mark.parametrize("change", [{"next_prompt": 3}, {"policy_version": 1}, {"rows": []}, {"round": 0}])
def test_an_edited_header_is_named(run: Path, change: dict[str, Any]) -> None:
    header = run / "rounds" / "round_00001.json"
    header.write_text(json.dumps(json.loads(header.read_text()) | change))
    with pytest.raises(ValueError, match=r"round_00001.json is damaged: its contents do not match its checksum"):
        load_pool(run / "rounds", 1)


@pytest.mark.parametrize("key", ["rows", "digest", "next_prompt", "metrics", "files", "round"])
def test_a_header_without_a_key_is_named(run: Path, key: str) -> None:
    header = run / "rounds" / "round_00002.json"
    header.write_text(json.dumps({k: v for k, v in json.loads(header.read_text()).items() if k != key}))
    with pytest.raises(ValueError, match=r"round_00002.json is damaged"):
        run_experiment(run, f"resume={run}", "trainer.max_rounds=4")
    assert len((run / "metrics.csv").read_text().splitlines()) == 14


def test_one_rounds_files_in_anothers_place_are_named(run: Path) -> None:
    rounds = run / "rounds"
    shutil.copy(rounds / "round_00000.safetensors", rounds / "round_00001.safetensors")
    with pytest.raises(ValueError, match=r"round_00001.safetensors is damaged"):
        load_pool(rounds, 1)
    shutil.copy(rounds / "round_00000.json", rounds / "round_00001.json")
    with pytest.raises(ValueError, match=r"round_00001.json is the file of round 0"):
        load_pool(rounds, 1)


def test_a_round_of_another_run_is_named(run: Path) -> None:
    rounds = run / "rounds"
    assert load_pool(rounds, 2, json.loads((run / "provenance.json").read_text())["run_id"]) is not None
    with pytest.raises(ValueError, match=r"round_00002.json is of another run, [0-9a-f]{16}; this run is 0123"):
        load_pool(rounds, 2, "0123")


def test_files_of_a_run_are_readable_alike(finished: Path) -> None:
    modes = {path.suffix: oct(path.stat().st_mode & 0o777) for path in finished.rglob("*") if path.is_file()}
    umask = os.umask(0)
    os.umask(umask)
    assert set(modes.values()) == {oct(0o666 & ~umask)}, modes


@pytest.mark.parametrize("kind", ["checkpoint", "pool", "header", "unfinished", "record"])
def test_a_bit_flipped_anywhere_is_named_or_changes_nothing(run: Path, kind: str) -> None:
    rounds, updates = run / "rounds", run / "updates"
    path, read = {
        "checkpoint": (run / "checkpoints" / "update=000012.ckpt", lambda: content_digest(read_checkpoint(path))),
        "pool": (rounds / "round_00001.safetensors", lambda: content_digest(vars(whole(load_pool(rounds, 1)).batch))),
        "header": (rounds / "round_00001.json", lambda: json.dumps(whole(load_pool(rounds, 1)).meta)),
        "unfinished": (rounds / "unfinished_00001.safetensors", lambda: repr(load_unfinished(rounds, 1))),
        "record": (updates / "update_000007.npz", lambda: repr(vars(load_update(updates, 7)))),
    }[kind]
    intact, data, named = read(), path.read_bytes(), 0
    for offset in random.Random(0).sample(range(len(data)), 40):
        flip(path, offset)
        try:
            assert read() == intact, offset
        except ValueError as error:
            named += path.name in str(error)
        path.write_bytes(data)
    assert named >= 20


def whole(pool: Pool | None) -> Pool:
    assert pool is not None
    return pool


def test_a_record_in_anothers_place_is_named(run: Path) -> None:
    updates = run / "updates"
    shutil.copy(updates / "update_000003.npz", updates / "update_000004.npz")
    with pytest.raises(ValueError, match=r"update_000004.npz is damaged: it is the record of update 3, rank 0"):
        load_update(updates, 4)
    facts = json.loads((run / "provenance.json").read_text())
    (run / "provenance.json").write_text(json.dumps(facts | {"run_id": "0123"}))
    with pytest.raises(ValueError, match=r"update_000003.npz is of another run, [0-9a-f]{16}; this run is 0123"):
        load_update(updates, 3)


# What has changed.


def edit(run: Path, key: str, value: Any) -> None:
    cfg = OmegaConf.load(run / "config.yaml")
    OmegaConf.update(cfg, key, value)
    OmegaConf.save(cfg, run / "config.yaml")


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("seed", 7, "config.seed: 0 -> 7"),
        ("rollout.group_size", 6, "config.rollout.group_size: 4 -> 6"),
        ("schedule.minibatches_per_epoch", 1, "config.schedule.minibatches_per_epoch: 2 -> 1"),
        ("loss.target_positive_ratio", 0.25, "config.loss.target_positive_ratio: 0.55 -> 0.25"),
    ],
)
def test_an_edited_config_stops_the_resume(run: Path, key: str, value: Any, line: str) -> None:
    edit(run, key, value)
    text = refused(run)
    assert line in text
    assert "allow_changes=true continues" in text


def test_allowed_changes_are_recorded_and_then_no_news(run: Path) -> None:
    edit(run, "loss.target_positive_ratio", 0.25)
    run_experiment(run, f"resume={run}", "allow_changes=true", "trainer.max_rounds=4")
    (entry,) = json.loads((run / "provenance.json").read_text())["resumed"]
    assert entry["global_step"] == 12
    assert set(entry["changes"]) == {"config.loss.target_positive_ratio: 0.55 -> 0.25", "config.trainer.max_rounds: 3 -> 4"}
    run_experiment(run, f"resume={run}")
    assert json.loads((run / "provenance.json").read_text())["resumed"][1]["changes"] == []


def test_other_packages_stop_the_resume(run: Path) -> None:
    facts = json.loads((run / "provenance.json").read_text())
    installed, facts["packages"]["torch"] = facts["packages"]["torch"], "1.0"
    (run / "provenance.json").write_text(json.dumps(facts))
    assert f"packages.torch: '1.0' -> '{installed}'" in refused(run)


def test_other_data_stop_the_resume(run: Path) -> None:
    facts = json.loads((run / "provenance.json").read_text())
    assert facts["data"].keys() == {"train", "test"}
    facts["data"]["train"] = "0" * 16
    (run / "provenance.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=r"data.train: '0{16}' -> '[0-9a-f]{16}'; allow_changes=true continues"):
        run_experiment(run, f"resume={run}", "trainer.max_rounds=4")
    assert len((run / "metrics.csv").read_text().splitlines()) == 14


def test_a_changed_data_file_has_another_digest(tmp_path: Path) -> None:
    rows = [{"question": f"{n}?", "answer": str(n)} for n in range(5)]
    versions = [rows, [{**rows[0], "answer": "5"}, *rows[1:]], rows[1:], [*rows, {"question": "9?", "answer": "9"}], rows[::-1]]
    found = []
    for number, version in enumerate(versions):
        file = tmp_path / f"{number}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in version))
        task = dataset("files", train=str(file), test=str(file))
        found.append(data_digests(task, {})["train"])
    assert len(set(found)) == len(versions)


def test_differences_name_every_value() -> None:
    nan = float("nan")
    before, now = {"a": {"b": 1, "c": [1]}, "d": nan, "e": None}, {"a": {"b": 2, "c": [1]}, "d": nan, "f": 0}
    assert differences(before, now) == ["a.b: 1 -> 2", "f: None -> 0"]


# Faults while it runs.


@pytest.mark.parametrize("lost", ["metrics.csv", "rounds"])
def test_records_that_vanish_while_a_run_goes_end_it_with_their_name(
    small: tuple[str, ...], tmp_path: Path, lost: str, caplog
) -> None:
    class Lose(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            path = tmp_path / "run" / lost
            if trainer.global_step == 5 and path.exists():
                path.rename(tmp_path / "elsewhere")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "on_train_batch_start", Lose.on_train_batch_start, raising=False)
        with pytest.raises(OSError, match=lost):
            run_experiment(tmp_path / "run", *small)
    assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "failed"


def test_a_disk_that_fills_up_leaves_a_status(small: tuple[str, ...], tmp_path: Path, monkeypatch) -> None:
    """The partial checkpoint takes the last block, and status.json cannot be written while it is there."""
    plain = Path.write_text

    def full(checkpoint: Any, path: Path) -> None:
        path.write_bytes(b"half a file")
        raise OSError(28, "No space left on device", str(path))

    def write_text(path: Path, *arguments: Any, **options: Any) -> int:
        if list(tmp_path.rglob("*.ckpt.partial")):
            raise OSError(28, "No space left on device", str(path))
        return plain(path, *arguments, **options)

    monkeypatch.setattr("bapo.training.callbacks.checkpoint.torch.save", full)
    monkeypatch.setattr(Path, "write_text", write_text)
    with pytest.raises(OSError, match="No space left"):
        run_experiment(tmp_path, *small)
    facts = json.loads((tmp_path / "status.json").read_text())
    assert facts["status"] == "failed"
    assert "No space left on device" in facts["error"]


@pytest.mark.parametrize("skipped", [2, 3, 5, 8])
def test_a_stop_after_a_skipped_update_leaves_the_counters_of_the_uninterrupted_run(
    small: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skipped: int
) -> None:
    plain, stop = UpdateModule._step, [False]

    def step(self: UpdateModule, row: dict[str, float], loss: float, tokens: float) -> bool:
        number = self.trainer.current_epoch * 2 + self.trainer.fit_loop.epoch_loop.batch_idx + 1
        done = plain(self, row, float("nan") if number == skipped else loss, tokens)
        if stop[0] and number == skipped:
            os.kill(os.getpid(), signal.SIGTERM)
        return done

    monkeypatch.setattr(UpdateModule, "_step", step)
    run_experiment(tmp_path / "whole", *small)
    stop[0] = True
    with pytest.raises(SystemExit):
        run_experiment(tmp_path / "cut", *small)
    stop[0] = False
    run_experiment(tmp_path / "cut", f"resume={tmp_path / 'cut'}")
    whole, cut = (torch.load(newest_checkpoint(tmp_path / name), weights_only=True) for name in ("whole", "cut"))
    assert whole["global_step"] == 11
    assert differences(whole["loops"], cut["loops"]) == []
    assert content_digest(whole["state_dict"]) == content_digest(cut["state_dict"])
    assert (tmp_path / "whole" / "metrics.csv").read_bytes() == (tmp_path / "cut" / "metrics.csv").read_bytes()
