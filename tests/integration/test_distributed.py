"""Two real processes (gloo) make the update that one makes."""

from __future__ import annotations

import csv
import os
import socket
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from support import REPOSITORY, SMALL, random_batch, run_experiment
from support.updates import BAPO, Rounds, Rows, adamw, behaviour_of

from bapo.losses import M2poLoss
from bapo.losses.objective import Objective
from bapo.module import BapoModule
from bapo.policy.causal_lm import CausalLMPolicy, load_model
from bapo.protocols import EngineError, Loss
from bapo.rollouts.ranks import Ranks
from bapo.types import Batch, MiniBatch

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def train_rank(
    rank: int, world: int, port: int, folder: Path, batches: list[Batch], out: Path, loss: Loss, objective: Objective
) -> None:
    """One rank's fit on its rows of every mini-batch; writes weights, log rows and counts of what went over the wire."""
    os.environ |= {
        "LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    counts = {"gradient": 0, "gather": 0}
    plain = torch.distributed.all_gather

    def all_gather(*args, **kwargs):
        counts["gather"] += 1
        return plain(*args, **kwargs)

    torch.distributed.all_gather = all_gather

    class Counting(BapoModule):
        def on_train_start(self):
            counts["gather"] = 0  # start-up has collectives of its own

            def hook(state, bucket):
                counts["gradient"] += 1
                work = torch.distributed.all_reduce(bucket.buffer().div_(world), async_op=True)
                return work.get_future().then(lambda future: future.value()[0])

            if world > 1:
                self.trainer.strategy.model.register_comm_hook(None, hook)

    mine = [batch.select(torch.arange(len(batch))[rank::world]) for batch in batches]
    module = Counting(CausalLMPolicy(load_model(folder)), loss, objective, adamw(1e-2), 24, 100)
    rows = Rows()
    trainer = L.Trainer(
        accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto", max_epochs=1, logger=rows,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(module, datamodule=Rounds([mine]))
    weights = torch.cat([p.detach().flatten() for p in module.policy.parameters()])
    torch.save({"weights": weights, "rows": [row for _, row in rows.rows], "counts": counts}, out / f"{world}_{rank}.pt")


def test_the_data_classes_travel_whole():
    batch = MiniBatch(random_batch(2), {"rollout/round": 0})
    assert batch.to("cpu").metrics == batch.metrics
    assert torch.equal(batch.to("cpu").sequences.input_ids, batch.sequences.input_ids)


@pytest.mark.parametrize(
    ("loss", "objective", "gathers"),
    [
        (BAPO, Objective(), 2),  # tally and counts; then the metrics
        (M2poLoss(0.04), Objective(aggregation="sequence_mean", top_entropy_frac=0.5), 3),  # where the filter cuts, first
    ],
    ids=["bapo", "m2po, filtered"],
)
def test_two_ranks_make_the_update_of_one(model_folder, tmp_path, loss, objective, gathers):
    # Rank 1 gets rows of one sign only in the first batch, and in every batch other micro-batches than rank 0.
    batches = [behaviour_of(model_folder, random_batch(8, seed=s)) for s in range(3)]
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0, -1.0, -1.0])
    batches[0].advantages.copy_(batches[0].advantages.abs() * signs)
    for world in (1, 2):
        args = (world, free_port(), model_folder, batches, tmp_path, loss, objective)
        torch.multiprocessing.spawn(train_rank, args, nprocs=world, join=True)
    one, first, second = (torch.load(tmp_path / name, weights_only=True) for name in ("1_0.pt", "2_0.pt", "2_1.pt"))

    assert torch.equal(first["weights"], second["weights"])
    # AdamW divides a gradient by its own size, so rounding in one that is nearly 0 shows in the weight.
    torch.testing.assert_close(first["weights"], one["weights"], atol=1e-5, rtol=1e-5)
    assert len(one["rows"]) == 3
    for alone, left, right in zip(one["rows"], first["rows"], second["rows"], strict=True):
        assert left.keys() == right.keys() == alone.keys()
        for name, value in alone.items():
            if name.startswith(("time/", "perf/")):
                continue
            assert left[name] == right[name], name
            if name in ("bounds/clip_low", "bounds/clip_high"):
                assert left[name] == value, name
            assert left[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    for part in (first, second):
        assert part["counts"]["gradient"] == 3  # one bucket, once per update, whatever the number of micro-batches
        assert part["counts"]["gather"] == gathers * 3


def fail_on_one(rank: int, port: int, out: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)

    def work() -> str:
        if rank == 1:
            raise EngineError("the server is gone")
        return "drawn"

    ranks = Ranks(rank, 2)
    assert ranks.gather_from(lambda: rank * 10) == [0, 10]
    try:
        ranks.gather_from(work)
    except EngineError as error:
        (out / f"{rank}.txt").write_text(str(error))


def test_an_engine_that_fails_on_one_rank_stops_all_of_them(tmp_path):
    torch.multiprocessing.spawn(fail_on_one, (free_port(), tmp_path), nprocs=2, join=True)
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)] == ["rank 1: the server is gone"] * 2


def test_every_job_of_a_sweep_starts_ranks_of_its_own(cache_dir, tmp_path):
    command = [
        sys.executable,
        str(REPOSITORY / "train.py"),
        "-m",
        *SMALL,
        f"policy.warm_start.cache_dir={cache_dir}",
        "seed=0,1",
    ]
    sizes = ["trainer.devices=2", "trainer.strategy=ddp", "trainer.max_rounds=1", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    done = subprocess.run([*command, *sizes], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for job in "01":
        assert len((tmp_path / "sweep" / job / "metrics.csv").read_text().splitlines()) == 6


def test_a_run_of_two_processes_has_one_folder_and_the_curves_of_one_process(cache_dir, tmp_path):
    small = (*SMALL, f"policy.warm_start.cache_dir={cache_dir}")
    run_experiment(tmp_path / "one", *small)
    folder = tmp_path / "two"
    command = [sys.executable, str(REPOSITORY / "train.py"), *small, "trainer.devices=2", "trainer.strategy=ddp"]
    done = subprocess.run(
        [*command, f"hydra.run.dir={folder}"], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "outputs").exists()
    assert len((folder / "commands.log").read_text().splitlines()) == 1
    one, two = (list(csv.DictReader((f / "metrics.csv").open())) for f in (tmp_path / "one", folder))
    assert [row.keys() for row in one] == [row.keys() for row in two]
    assert len(one) == len(two) == 13
    for row, other in zip(one, two, strict=True):
        for name, value in row.items():
            assert bool(value) == bool(other[name]), name
            if value and not name.startswith("mismatch/"):
                assert float(other[name]) == pytest.approx(float(value), rel=2e-3, abs=1e-4), (row["trainer/global_step"], name)
