"""The records of the updates: what they hold, that a resumed run has each once, and what is counted of the clipped tokens."""

from __future__ import annotations

import csv
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support import REPOSITORY, SMALL, random_batch, run_experiment

from bapo.analysis.report import write_report
from bapo.analysis.token_figures import EntropyChanges, TokenSummary, correlation, staleness_of_tokens
from bapo.analysis.whatif.config import build, changed_config
from bapo.analysis.whatif.walk import walk
from bapo.losses import BapoLoss, BoundRange, CispoLoss, FixedClipLoss, GspoLoss
from bapo.losses.objective import Objective
from bapo.metrics import MetricParts
from bapo.module import BapoModule
from bapo.ops.microbatch import MicroBatch, SeenPart
from bapo.records.clipping import PROBABILITY_EDGES, RATIO_EDGES, clip_statistics
from bapo.records.files import (
    ARRAYS,
    UpdateRecord,
    check_complete,
    forget_after,
    load_update,
    record_path,
    recorded_steps,
    save_record,
)
from bapo.rollouts.pool import load_pool
from bapo.training.callbacks.record import EDGES, record_of
from bapo.training.run_folder import read_config
from bapo.types import ClipBounds, LossInputs, MiniBatch


@pytest.fixture(scope="module")
def small(cache_dir) -> tuple[str, ...]:
    """Two micro-batches or more in each update."""
    return (*SMALL, f"policy.warm_start.cache_dir={cache_dir}", "trainer.micro_batch_tokens=120")


@pytest.fixture(scope="module")
def uninterrupted(small, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    run_experiment(folder, *small)
    return folder


def logged(folder: Path) -> list[dict[str, float]]:
    """The rows of metrics.csv that are updates."""
    with (folder / "metrics.csv").open() as file:
        rows = [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]
    return [row for row in rows if "policy/loss" in row]


def records(folder: Path) -> list[UpdateRecord]:
    return [load_update(folder / "updates", step) for step in check_complete(folder / "updates")]


# What a file holds.


def test_every_update_of_a_run_is_recorded_with_its_rows(uninterrupted):
    found = records(uninterrupted)
    assert [record.step for record in found] == list(range(1, 13))
    for record, row in zip(found, logged(uninterrupted), strict=True):
        pool = load_pool(uninterrupted / "rounds", record.round)
        assert record.round == row["rollout/round"]
        assert record.facts["epoch"] == row["rollout/epoch"]
        for fact, name in (
            ("loss", "policy/loss"), ("clip_low", "bounds/clip_low"), ("clip_high", "bounds/clip_high"),
            ("positive_ratio", "bounds/positive_ratio"), ("entropy_clip_cov", "policy/entropy_clip_cov"),
        ):  # fmt: skip
            assert record.facts[fact] == row[name], fact
        assert len(record.micro_batches) >= 2
        assert (record.bounds == [row["bounds/clip_low"], row["bounds/clip_high"]]).all()
        rows = record.rows[:, 1].astype(int).tolist()
        assert record.lengths.tolist() == pool.batch.response_mask[rows].sum(dim=1).tolist()
        assert record.logprobs.dtype == record.entropy.dtype == np.float32
        assert record.entropy.mean(dtype=np.float64) == pytest.approx(row["policy/entropy"], rel=1e-6)
    for epoch in range(6):  # every row of the pool once in each epoch
        rows = np.concatenate([r.rows for r in found if r.facts["epoch"] == epoch])
        pool = load_pool(uninterrupted / "rounds", epoch // 2)
        assert sorted(map(tuple, rows.tolist())) == [(epoch // 2, row) for row in range(len(pool.batch))]


def test_log_probs_are_those_of_the_rows_before_the_step(uninterrupted):
    """In the first update after a pool was drawn they are the behaviour log-probs of the file; later they have moved."""
    for step, fresh in ((1, True), (5, True), (2, False)):
        record = load_update(uninterrupted / "updates", step)
        batch = load_pool(uninterrupted / "rounds", record.round).batch.select(torch.from_numpy(record.rows[:, 1]).long())
        behaviour = batch.behaviour_logprobs[batch.response_mask].numpy()
        assert (np.abs(record.logprobs - behaviour).max() < 1e-5) == fresh


def test_what_is_counted_agrees_with_what_is_logged_and_with_the_tokens(uninterrupted):
    """The covariance token by token, from the files alone, in numpy."""
    for record, row in zip(records(uninterrupted), logged(uninterrupted), strict=True):
        tokens = record.facts["tokens"]
        assert record.by_side.sum() == record.histogram.sum() == tokens == len(record.logprobs)
        assert record.by_side[:, :, 1].sum() / tokens == pytest.approx(row["policy/clip_frac"], abs=1e-12)
        assert record.by_side[2, 2, 1] / tokens == pytest.approx(row["policy/clip_frac_high"], abs=1e-12)
        assert record.by_side[0, 0, 1] / tokens == pytest.approx(row["policy/clip_frac_low"], abs=1e-12)
        assert record.by_side[0].sum() / tokens == pytest.approx(row["policy/negative_token_frac"], abs=1e-12)
        assert record.entropy_by_ratio.sum() / tokens == pytest.approx(row["policy/entropy"], rel=1e-6)
        assert record.staleness.tolist() == [[row["staleness/max"], tokens]]
        batch = load_pool(uninterrupted / "rounds", record.round).batch.select(torch.from_numpy(record.rows[:, 1]).long())
        mask = batch.response_mask
        behaviour = batch.behaviour_logprobs[mask].numpy()
        advantages = batch.advantages[:, None].expand(mask.shape)[mask].double().numpy()
        ratio = np.exp(record.logprobs - behaviour)
        low, high = record.bounds[0].astype(np.float32)
        if (np.abs(ratio - low) < 1e-5).any() or (np.abs(ratio - high) < 1e-5).any():
            continue  # too near to a bound for another exp
        pushed = np.where(((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low)), 0, advantages)
        assert row["policy/entropy_clip_cov"] == pytest.approx(np.cov(record.logprobs, pushed, bias=True)[0, 1], abs=1e-9)


def test_rows_of_earlier_rounds_say_from_where_they_are(small, tmp_path):
    run_experiment(tmp_path, *small, "+schedule/replay=default", "schedule.replay.groups=4", "trainer.max_rounds=2")
    older = 0
    for record in records(tmp_path):
        for (number, row), length in zip(record.rows.tolist(), record.lengths.tolist(), strict=True):
            older += number < record.round
            assert number <= record.round
            assert int(load_pool(tmp_path / "rounds", number).batch.response_mask[row].sum()) == length
    assert older > 0


def test_a_file_is_no_larger_than_its_tokens_ask_for(uninterrupted):
    files = list((uninterrupted / "updates").iterdir())
    assert len(files) == 12
    assert max(path.stat().st_size for path in files) < 8000
    with np.load(files[0]) as file:
        assert np.array_equal(file["ratio_edges"], RATIO_EDGES)
        assert np.array_equal(file["probability_edges"], PROBABILITY_EDGES)


# Off, resumed, damaged.


def test_null_turns_it_off_and_changes_nothing_else(uninterrupted, small, tmp_path, monkeypatch):
    monkeypatch.setattr(MicroBatch, "seen", lambda *args: pytest.fail("nobody observes"))
    run_experiment(tmp_path, *small, "callbacks.record=null")
    assert not (tmp_path / "updates").exists()
    assert (tmp_path / "metrics.csv").read_bytes() == (uninterrupted / "metrics.csv").read_bytes()


@pytest.mark.parametrize("update", [3, 4, 6])
def test_a_stopped_and_resumed_run_has_every_update_once(uninterrupted, small, tmp_path, monkeypatch, update):
    plain = BapoModule.log_row

    def log_row(self, row):
        plain(self, row)
        if self.global_step == update and "policy/loss" in row:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(
        "bapo.analysis.report.write_report", lambda folder: folder / "report.html"
    )  # most of the time of so short a run
    with monkeypatch.context() as patch:
        patch.setattr(BapoModule, "log_row", log_row)
        with pytest.raises(SystemExit):
            run_experiment(tmp_path, *small)
    updates = tmp_path / "updates"
    assert recorded_steps(updates) == list(range(1, update + 1))
    # What a kill between a record and the next checkpoint leaves: records that will be made again, one half written.
    for step in (update + 1, 40):
        record_path(updates, step).write_bytes(b"of a time that never was")
        record_path(updates, step, rank=1).write_bytes(b"likewise")
    (updates / "update_000041.npz.partial").write_bytes(b"half")
    run_experiment(tmp_path, f"resume={tmp_path}")
    assert sorted(path.name for path in updates.iterdir()) == sorted(p.name for p in (uninterrupted / "updates").iterdir())
    for step in recorded_steps(updates):
        ours, theirs = load_update(updates, step), load_update(uninterrupted / "updates", step)
        assert {**ours.facts, "run_id": ""} == {**theirs.facts, "run_id": ""}
        for name in ARRAYS:
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))


def small_record(step: int = 1, world: int = 1, rows: int = 2, start: int = 0) -> UpdateRecord:
    facts = {"step": step, "round": 0, "epoch": 0, "world": world, "tokens": 3, "entropy": 1.0, "entropy_clip_cov": 0.0}
    lengths = np.arange(1, rows + 1, dtype=np.int32)
    tokens = np.arange(lengths.sum(), dtype=np.float32) + start
    places = np.stack([np.zeros(rows, np.int32), np.arange(rows, dtype=np.int32) + start], axis=1)
    return UpdateRecord(
        facts, places, lengths, np.array([rows], np.int32), np.array([[0.8, 1.2]]), -tokens, tokens,
        np.array([[start, 2], [7, 1]]),
        np.full((3, 3, 2), start), np.full((3, 24, 41), start, np.int32), np.full(41, float(start)),
    )  # fmt: skip


def test_the_files_of_all_ranks_become_one_update(tmp_path):
    save_record(tmp_path, small_record(world=2, start=1), 0, EDGES)
    with pytest.raises(ValueError, match=r"update_000001_rank001.npz is missing"):
        load_update(tmp_path, 1)
    save_record(tmp_path, small_record(world=2, start=10), 1, EDGES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["update_000001.npz", "update_000001_rank001.npz"]
    record = load_update(tmp_path, 1)
    assert record.rows[:, 1].tolist() == [1, 2, 10, 11]
    assert record.entropy.tolist() == [1, 2, 3, 10, 11, 12]
    assert record.micro_batches.tolist() == [2, 2]
    assert record.staleness.tolist() == [[1, 2], [7, 1], [10, 2], [7, 1]]
    assert (record.by_side == 11).all()
    assert (record.entropy_by_ratio == 11).all()


def test_what_is_missing_or_damaged_is_said_in_a_line(tmp_path):
    with pytest.raises(ValueError, match=r"holds no update; a run writes them unless callbacks\.record is null"):
        check_complete(tmp_path)
    for step in (1, 2, 4):
        save_record(tmp_path, small_record(step), 0, EDGES)
    with pytest.raises(ValueError, match=r"update_000003.npz is missing$"):
        check_complete(tmp_path)
    forget_after(tmp_path, 2)
    assert check_complete(tmp_path) == check_complete(tmp_path, last=2) == [1, 2]
    with pytest.raises(ValueError, match=r"update_000003.npz is missing$"):
        check_complete(tmp_path, last=3)
    path = record_path(tmp_path, 2)
    whole = path.read_bytes()
    for broken in (whole[:100], whole[: len(whole) // 2], b"", whole[:200] + b"\0" * 50 + whole[250:]):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"update_000002.npz is damaged: [^\n]*$"):
            load_update(tmp_path, 2)
    short = replace(small_record(2), lengths=np.array([1, 1], np.int32))
    save_record(tmp_path, short, 0, EDGES)
    with pytest.raises(ValueError, match="its parts do not fit together"):
        load_update(tmp_path, 2)
    save_record(tmp_path, replace(short, facts={**short.facts, "format": 9}), 0, EDGES)
    with pytest.raises(ValueError, match="has format 9; this version reads 1"):
        load_update(tmp_path, 2)


# Who is clipped.


def bounds(low: float, high: float) -> ClipBounds:
    return ClipBounds(torch.tensor(low, dtype=torch.float64), torch.tensor(high, dtype=torch.float64))


def inputs_of(ratios: list[float], advantages: list[float], probability: list[float], masked: int = 1) -> LossInputs:
    """One row whose first `masked` slots are not trained on, and hold NaN."""
    now = torch.tensor([[math.nan] * masked + [math.log(p) for p in probability]])
    behaviour = torch.tensor([[math.nan] * masked + [math.log(p / r) for p, r in zip(probability, ratios, strict=True)]])
    mask = torch.tensor([[False] * masked + [True] * len(ratios)])
    return LossInputs(now, behaviour, torch.tensor([[0.0] * masked + advantages]), mask)


RATIOS, ADVANTAGES = [1.5, 1.5, 0.5, 0.5, 1.0, 1.5], [1.0, -1.0, 1.0, -1.0, 2.0, 0.0]
PROBABILITY = [0.9, 0.9, 0.2, 0.2, 0.0001, 1e-9]


def part_of(loss, clip: ClipBounds, entropy: list[float] | None = None) -> SeenPart:
    inputs = inputs_of(RATIOS, ADVANTAGES, PROBABILITY)
    output = loss(inputs, clip, inputs.response_mask.sum())
    values = torch.tensor([[math.nan, *(entropy or [0.0] * 6)]])
    return SeenPart(torch.tensor([0]), inputs, values, clip, output.ratio, output.clipped)


def test_signs_and_sides_by_hand():
    clip = bounds(0.8, 1.2)
    counts = clip_statistics(part_of(FixedClipLoss(0.8, 1.2), clip))["by_side"]
    expected = torch.zeros(3, 3, 2, dtype=torch.int64)
    expected[2, 2, 1] = 1  # A > 0, above: clipped
    expected[0, 2, 0] = 1  # A < 0, above: keeps its gradient
    expected[2, 0, 0] = 1
    expected[0, 0, 1] = 1
    expected[2, 1, 0] = 1  # inside
    expected[1, 2, 0] = 1  # A = 0 is never clipped
    assert torch.equal(counts, expected)
    dual = clip_statistics(part_of(FixedClipLoss(0.8, 1.2, dual_clip=1.4), clip))["by_side"]
    assert (dual[0, 2, 1], dual[0, 2, 0]) == (1, 0)
    # CISPO cuts every weight outside, whatever the sign; without a word of the loss PPO's rule counts.
    cut = clip_statistics(part_of(CispoLoss(0.8, 1.2), clip))["by_side"]
    assert (cut[:, 1, 1].sum(), cut[2, 0, 1], cut[0, 2, 1], cut[1, 2, 1]) == (0, 1, 1, 0)
    silent = replace(part_of(CispoLoss(0.8, 1.2), clip), ratio=None, clipped=None)
    assert torch.equal(clip_statistics(silent)["by_side"], expected)


def test_gspo_is_counted_by_the_ratio_of_the_response():
    clip = bounds(0.9, 1.5)
    mean = math.exp(sum(map(math.log, RATIOS)) / 6)
    assert 0.9 < mean < 1.5
    counts = clip_statistics(part_of(GspoLoss(0.9, 1.5), clip))
    assert counts["by_side"][:, 1, 0].tolist() == [2, 1, 3]
    (bin_of_mean,) = torch.nonzero(counts["histogram"].sum(dim=(0, 1))).flatten().tolist()
    assert RATIO_EDGES[bin_of_mean] <= mean < RATIO_EDGES[bin_of_mean + 1]


def test_the_histogram_and_the_entropy_by_ratio_by_hand():
    found = clip_statistics(part_of(FixedClipLoss(0.8, 1.2), bounds(0.8, 1.2), [1.0, 2.0, 3.0, 5.0, 7.0, 11.0]))
    at_one, up, down = (int(np.searchsorted(RATIO_EDGES, r, side="right")) - 1 for r in (1.0, 1.5, 0.5))
    assert at_one == 20  # the middle of 41
    likely, some, rare = (int(np.searchsorted(PROBABILITY_EDGES, p, side="right")) - 1 for p in (0.9, 0.2, 0.0001001))
    expected = torch.zeros(3, 24, 41, dtype=torch.int64)
    for sign, probability, ratio in (
        (2, likely, up), (0, likely, up), (2, some, down), (0, some, down), (2, rare, at_one), (1, 0, up)
    ):  # fmt: skip
        expected[sign, probability, ratio] += 1
    assert found["histogram"].sum() == 6
    # 0.0001 is an edge: float32 may put it on either side.
    assert (found["histogram"] != expected).sum() in (0, 2)
    assert torch.equal(found["histogram"].sum(dim=1), expected.sum(dim=1))
    entropy = {ratio: float(found["entropy_by_ratio"][ratio]) for ratio in (up, down, at_one)}
    assert entropy == {up: 1 + 2 + 11, down: 3 + 5, at_one: 7}
    assert found["entropy_by_ratio"].sum() == 29


def test_the_bins_hold_everything_outside_at_their_ends():
    ratios, probability = [100.0, 0.001, 8.0, 0.125], [1.0, 1e-12, 1e-6, 0.5]
    inputs = inputs_of(ratios, [1.0] * 4, probability)
    part = SeenPart(torch.tensor([0]), inputs, torch.zeros(1, 5), bounds(0.8, 1.2), None, None)
    histogram = clip_statistics(part)["histogram"][2]
    assert histogram.sum() == 4
    assert (histogram[23, 40], histogram[0, 0]) == (1, 1)
    assert histogram[:, 40].sum() == histogram[:, 0].sum() == 2


def covariance(loss, parts: list[LossInputs], clip: ClipBounds) -> dict[str, float]:
    sums, tokens = MetricParts(), sum(int(part.response_mask.sum()) for part in parts)
    for part in parts:
        sums.add(loss(part, clip, torch.tensor(tokens)).metrics)
    return sums.reduce(lambda vector: vector[None], tokens)


def test_the_covariance_by_hand_and_however_it_is_cut():
    x = [math.log(p) for p in PROBABILITY]
    clip = bounds(0.8, 1.2)
    whole = inputs_of(RATIOS, ADVANTAGES, PROBABILITY)
    halves = [inputs_of(*(values[cut] for values in (RATIOS, ADVANTAGES, PROBABILITY))) for cut in (slice(0, 2), slice(2, 6))]
    for loss, y in (
        (FixedClipLoss(0.8, 1.2), [0.0, -1.0, 1.0, 0.0, 2.0, 0.0]),
        (CispoLoss(0.8, 1.2), ADVANTAGES),  # its clip takes no gradient away
    ):
        expected = np.mean(np.multiply(x, y)) - np.mean(x) * np.mean(y)
        for parts in ([whole], halves):
            row = covariance(loss, parts, clip)
            assert row["policy/entropy_clip_cov"] == pytest.approx(expected, rel=1e-6)
            assert row["policy/logprob_mean"] == pytest.approx(np.mean(x), rel=1e-6)
            assert row["policy/unclipped_advantage_mean"] == pytest.approx(np.mean(y), rel=1e-6)


def test_the_parts_of_an_update_make_its_record():
    batch = random_batch(5, seed=1)
    loss = BapoLoss(0.5, BoundRange(0.6, 0.9, 0.1), BoundRange(1.2, 2.0, 0.1))
    places = torch.tensor([[3, 10], [3, 11], [2, 0], [3, 13], [3, 14]])
    parts = []
    for rows in (torch.tensor([4, 2]), torch.tensor([0, 1, 3])):
        part = batch.select(rows)
        weights, metrics = Objective().weights(part.response_mask, part.behaviour_logprobs, part.sampler_logprobs)
        micro = MicroBatch(part, weights, metrics)
        inputs = micro.loss_inputs((part.behaviour_logprobs + 0.3).requires_grad_())
        output = loss(inputs, bounds(0.7, 1.3), torch.tensor(9))
        parts.append(micro.seen(rows, inputs, part.behaviour_entropy, bounds(0.7, 1.3), output))
    assert not any(part.inputs.logprobs.requires_grad for part in parts)
    batch.policy_version[batch.response_mask] = torch.tensor([6, 4, 4, 2]).repeat(99)[: int(batch.response_mask.sum())]
    record = record_of(MiniBatch(batch, {}, places), parts, {"step": 7})
    versions = batch.policy_version[batch.response_mask].tolist()
    assert record.staleness.tolist() == [[0, versions.count(6)], [2, versions.count(4)], [4, versions.count(2)]]
    assert record.rows.tolist() == [[3, 14], [2, 0], [3, 10], [3, 11], [3, 13]]
    order = torch.tensor([4, 2, 0, 1, 3])
    assert record.lengths.tolist() == batch.response_mask.sum(dim=1)[order].tolist()
    expected = [(batch.behaviour_logprobs[row] + 0.3)[batch.response_mask[row]] for row in order]
    assert np.array_equal(record.logprobs, torch.cat(expected).numpy())
    assert record.bounds.tolist() == [[0.7, 1.3]] * 2
    assert record.by_side.sum() == len(record.entropy) == int(batch.response_mask.sum())


# Entropy.


def entropy_record(step: int, epoch: int, rows: list[int], entropy: list[list[float]], logged: float) -> tuple:
    facts = {"step": step, "round": 0, "epoch": epoch, "entropy": logged, "entropy_clip_cov": step / 10}
    lengths = np.array(list(map(len, entropy)), np.int32)
    tokens = np.array([value for row in entropy for value in row], np.float32)
    places = np.array([[0, row] for row in rows], np.int32)
    return facts, places, lengths, tokens


def test_entropy_changes_by_hand():
    """Rows 0 and 1 are trained on in updates 1 and 2, then in the next epoch in 4 and 3, then one of them two epochs later."""
    changes = EntropyChanges()
    changes.add(*entropy_record(1, 0, [0, 5], [[1.0, 2.0], [9.0]], 1.0))
    changes.add(*entropy_record(2, 0, [1], [[4.0]], 1.5))
    changes.add(*entropy_record(3, 1, [1], [[3.0]], 1.25))
    changes.add(*entropy_record(4, 1, [0], [[0.5, 1.0]], 1.0))
    changes.add(*entropy_record(5, 3, [0, 5], [[0.0, 0.0], [0.0]], 0.5))
    same = changes.same_rows()
    assert same[0] == pytest.approx((1.5 - 3.0) / 3 / 2)  # three updates later, over the two tokens of row 0
    assert same[1] == pytest.approx(3.0 - 4.0)
    assert all(math.isnan(value) for value in same[2:])  # epoch 3 does not follow epoch 1
    assert changes.logged()[:4] == [0.5, -0.25, -0.25, -0.5]
    assert math.isnan(changes.logged()[4])
    assert changes.covariances == [0.1, 0.2, 0.3, 0.4, 0.5]


def test_a_correlation_takes_finite_pairs_only():
    assert correlation([1, 2, 3, 4], [2, 4, 6, math.nan]) == (pytest.approx(1.0), 3)
    assert correlation([1, 2, 3], [3, 2, 1]) == (pytest.approx(-1.0), 3)
    assert math.isnan(correlation([1, 2], [1, 2])[0])
    assert math.isnan(correlation([1, 2, 3], [2, 2, 2])[0])
    assert correlation([], [])[1] == 0


def test_a_record_of_another_update_is_noticed(tmp_path):
    save_record(tmp_path, small_record(step=6), 0, EDGES)
    record_path(tmp_path, 6).rename(record_path(tmp_path, 5))
    with pytest.raises(ValueError, match=r"update_000005.npz is damaged: it is the record of update 6"):
        load_update(tmp_path, 5)


# The pictures.


def test_the_report_has_the_figures_of_single_tokens(uninterrupted):
    page = (uninterrupted / "report.html").read_text()
    for stem in ("clipped_tokens", "probability_ratio", "entropy_clip", "token_staleness"):
        assert (uninterrupted / "figures" / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
        assert f'alt="{stem}"' in page
    assert "Eq. 6 predicts" in page


def test_a_report_without_whole_records_says_so_or_nothing(uninterrupted, tmp_path):
    for name in ("metrics.csv", "config.yaml"):
        (tmp_path / name).write_bytes((uninterrupted / name).read_bytes())
    assert "clipped_tokens" not in write_report(tmp_path).read_text()
    (tmp_path / "updates").mkdir()
    record_path(tmp_path / "updates", 1).write_bytes(b"torn")
    page = write_report(tmp_path).read_text()
    assert "Figures of single tokens are not drawn:" in page
    assert "update_000001.npz is damaged" in page


@pytest.mark.slow
def test_two_ranks_record_what_one_records(uninterrupted, small, tmp_path):
    command = [sys.executable, str(REPOSITORY / "train.py"), *small, "trainer.devices=2", "trainer.strategy=ddp"]
    done = subprocess.run(
        [*command, f"hydra.run.dir={tmp_path}"], cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((tmp_path / "updates").iterdir())) == 24
    for one, two in zip(records(uninterrupted), records(tmp_path), strict=True):
        assert sorted(map(tuple, one.rows.tolist())) == sorted(map(tuple, two.rows.tolist()))
        assert two.by_side.sum() == two.facts["tokens"] == one.facts["tokens"]
        assert two.facts["entropy_clip_cov"] == pytest.approx(one.facts["entropy_clip_cov"], rel=2e-3, abs=1e-4)
    again = list(walk(tmp_path, range(1, 13), *build(changed_config(read_config(tmp_path), []))))
    for outcome, row in zip(again, logged(tmp_path), strict=True):
        assert outcome.what_if.bounds == (row["bounds/clip_low"], row["bounds/clip_high"])
        assert outcome.what_if.loss == pytest.approx(row["policy/loss"], abs=1e-6)


def test_the_picture_of_staleness_has_every_token_in_its_cell():
    """Three updates with tokens of two stalenesses; the shares of a column add up to one."""
    pairs = [np.array([[0, 3], [4, 1]]), np.array([[1, 5]]), np.array([[2, 2], [6, 6]])]
    (axes, _) = staleness_of_tokens(TokenSummary(steps=[1, 2, 3], staleness=pairs)).axes
    (mesh,) = axes.collections
    share = np.ma.filled(mesh.get_array(), 0.0)
    assert share.shape == (7, 3)
    assert share.nonzero()[0].tolist() == [0, 1, 2, 4, 6]
    assert share[[0, 4, 1, 2, 6], [0, 0, 1, 2, 2]].tolist() == [0.75, 0.25, 1, 0.25, 0.75]
    many = [np.array([[age, 1]]) for age in range(1000)]
    (axes, _) = staleness_of_tokens(TokenSummary(steps=list(range(1, 1001)), staleness=many)).axes
    assert np.ma.filled(axes.collections[0].get_array(), 0.0).sum(axis=0) == pytest.approx(1)
