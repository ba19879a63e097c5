"""A Lightning data module that refills itself from rollouts."""

from __future__ import annotations

import concurrent.futures
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch

from bapo.data import background
from bapo.data.epoch import EpochLoader, epoch_minibatches
from bapo.engines.sync_check import PROMPTS, check_sync, sync_gap
from bapo.protocols import PolicyHandle
from bapo.rollouts.collector import Collector
from bapo.rollouts.groups import Group
from bapo.rollouts.pool import Pool, load_meta, load_pool, load_unfinished
from bapo.rollouts.ranks import Ranks
from bapo.rollouts.round_state import RoundState
from bapo.rollouts.schedule import Schedule

log = logging.getLogger(__name__)


class RolloutDataModule(L.LightningDataModule):
    """Epoch n trains on the pool of round n // E. A pool is a file in `rounds_dir`: there -> loaded, not there -> collected.

    With `schedule.lag` k the pools up to round n + k are collected before round n. So `train_dataloader` is idempotent, and a
    resumed run keeps its calendar. `connect` gives it the policy in training; `on_phase` is told "refill", "eval" and "train"
    as they begin. sync_tolerance: nats by which the engine's log-probs may differ from the policy's. run_id: stands in every
    pool's file; one of another run is refused.
    """

    def __init__(
        self, collector: Collector, schedule: Schedule, rounds_dir: Path, seed: int, sync_tolerance: float, run_id: str = ""
    ):
        super().__init__()
        self.collector = collector
        self.schedule = schedule
        self.rounds_dir = rounds_dir
        self.seed = seed
        self.sync_tolerance = sync_tolerance
        self.run_id = run_id
        self.policy: PolicyHandle | None = None
        self.on_phase: Callable[[str], None] = lambda phase: None
        self.newest = -1  # round whose pool is filed; a checkpoint with it needs the files up to here
        self._pool: Pool | None = None
        self._finish_background: Callable[[], None] | None = None
        self._background: concurrent.futures.Future[RoundState] | None = None
        self._group: Any = None

    def state_dict(self) -> dict[str, int]:
        self.wait_for_background()  # a later policy could not generate the same pool
        return {"newest": self.newest}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.newest = state["newest"]

    def connect(self, policy: PolicyHandle) -> None:
        self.policy = policy

    def sync_engine(self, ranks: Ranks) -> dict[str, float]:
        """Loads the policy's weights into the engine and checks that it serves them. Returns the sync's metrics.

        Raises EngineError, on every rank, if the check fails.
        """
        assert self.policy is not None, "connect a policy first"
        self.wait_for_background()
        start = time.perf_counter()
        ranks.gather_from(lambda: self._load_engine(ranks))
        collector, policy = self.collector, self.policy
        sampling, pad_id = collector.options.sampling, int(collector.tokenizer.pad_token_id)
        prompts = [collector.options.prompt.encode(collector.tokenizer, p) for p in collector.prompts[:PROMPTS]]
        gap = max(ranks.gather_from(lambda: sync_gap(collector.engine, policy, prompts, sampling, pad_id)))
        check_sync(gap, self.sync_tolerance, sampling.temperature, policy.version())
        return {"time/sync": time.perf_counter() - start, "mismatch/probe_max_diff": gap}

    def _load_engine(self, ranks: Ranks) -> None:
        assert self.policy is not None
        engine, version = self.collector.engine, self.policy.version()
        if engine.shared and ranks.rank > 0:
            engine.set_version(version)
        elif engine.takes_adapter:
            adapter = self.policy.adapter()
            assert adapter is not None, "the config check refuses lora_sync native without an adapter"
            engine.load_adapter(adapter, version)
        else:
            engine.load_weights(self.policy.named_weights(), version)

    def rest_engine(self) -> None:
        """Lets an engine on the trainer's own device free its memory until the next sync."""
        self.collector.engine.sleep()

    def train_dataloader(self) -> EpochLoader:
        assert self.trainer is not None
        epoch = self.trainer.current_epoch
        ranks = Ranks(self.trainer.global_rank, self.trainer.world_size)
        pool = self.pool(self.schedule.round_of(epoch), ranks)
        self.on_phase("train")
        return EpochLoader(epoch_minibatches(pool, self.schedule, self.seed, epoch, ranks))

    def pool(self, round_index: int, ranks: Ranks) -> Pool:
        """The pool of a round: the one in memory, else from its file, else collected now, with those that are due.

        With `schedule.overlap` the last of those is generated while the policy trains on this one.
        """
        if self._pool is None or self._pool.meta["round"] != round_index:
            assert self.trainer is not None
            self.wait_for_background()
            last = self.schedule.round_of(self.trainer.max_epochs - 1)  # type: ignore[operator]
            due = range(round_index, min(round_index + self.schedule.lag, last) + 1)
            self._pool = self._filed(round_index)
            later = [index for index in due[1:] if index > self.newest and self._filed(index) is None]
            missing = later if self._pool else [round_index, *later]
            for pool in self._refill(missing, round_index, ranks) if missing else ():
                self._pool = pool if pool.meta["round"] == round_index else self._pool
            self.newest = max(self.newest, due[-1] - (self._finish_background is not None))
            if self.schedule.replay and self._pool:
                earlier = [load_pool(self.rounds_dir, index, self.run_id) for index in self.schedule.replay.of(round_index)]
                self._pool = self.schedule.replay.add(
                    self._pool, [pool for pool in earlier if pool], self.seed, self.schedule.most_staleness
                )
        assert self._pool is not None
        return self._pool

    def _filed(self, round_index: int) -> Pool | None:
        try:
            return load_pool(self.rounds_dir, round_index, self.run_id)
        except ValueError as error:
            if round_index <= self.newest:
                raise
            log.warning("%s; nothing has been trained on it, so it is generated again", error)
            return None

    def _refill(self, rounds: list[int], now: int, ranks: Ranks) -> Iterator[Pool]:
        """Collects and files the pools of `rounds`, in order, by the present policy, with one sync.

        With `schedule.overlap` the last one is begun in the background, unless it is that of round `now`.
        """
        assert self.policy is not None, "connect a policy first"
        first = rounds[0]
        before = load_meta(self.rounds_dir, first - 1, self.run_id) if first else {}
        # A later policy would not generate the same round; the round before holds the place in the prompt order.
        if first <= self.newest or before is None:
            missing = first if first <= self.newest else first - 1
            raise FileNotFoundError(f"{self.rounds_dir} holds no complete round {missing}; a run needs its rounds to resume")
        self._warn_of_late(rounds, self.policy.version())
        self.on_phase("refill")
        sync = self.sync_engine(ranks)
        seconds = sync.pop("time/sync")
        least_rows = self.schedule.minibatches_per_epoch * ranks.world  # every rank needs a row of every mini-batch
        unfinished: Sequence[Group] = load_unfinished(self.rounds_dir, first - 1)
        for index in rounds:
            facts = sync | {"time/sync": seconds if index == first else 0.0}
            if self.schedule.overlap and index == rounds[-1] > now:
                self._generate_in_background(index, before, least_rows, unfinished, facts, ranks)
                return
            pool = self.collector.collect(index, before, self.policy, least_rows, ranks, unfinished)
            self._file(pool, facts, ranks)
            before, unfinished = pool.meta, pool.unfinished
            yield pool
        self.rest_engine()

    def _warn_of_late(self, rounds: list[int], version: int) -> None:
        updates, lag = self.schedule.updates_per_round, self.schedule.lag
        if late := [index for index in rounds if version > updates * max(0, index - lag)]:
            log.warning(
                "rounds %d to %d are generated after update %d, so they are less stale than schedule.lag=%d asks: the run was "
                "made longer, or stopped while they were generated",
                late[0], late[-1], version, lag,
            )  # fmt: skip

    def _file(self, pool: Pool, facts: dict[str, float], ranks: Ranks) -> None:
        """Writes a pool, with `facts` measured outside the collector."""
        timing = {name: value for name, value in facts.items() if name.startswith("time/")}
        pool.meta["timing"] |= timing
        pool.meta["metrics"] |= {name: value for name, value in facts.items() if name not in timing}
        if ranks.rank == 0:
            pool.save(self.rounds_dir, self.run_id)
        ranks.gather(None)  # a barrier: the file is there for every rank

    def _generate_in_background(
        self,
        index: int,
        before: dict[str, Any],
        least_rows: int,
        unfinished: Sequence[Group],
        facts: dict[str, float],
        ranks: Ranks,
    ) -> None:
        """Begins to generate a pool in a thread; `wait_for_background` adds the log-probs of a snapshot and files it."""
        assert self.policy is not None
        policy = self.policy.snapshot()
        if ranks.world > 1 and self._group is None:  # training has the default group to itself
            self._group = torch.distributed.new_group(backend="gloo")
        apart = replace(ranks, group=self._group)
        self._background = work = background.start(
            lambda: self.collector.generate(index, before, policy.version(), least_rows, apart, unfinished)
        )

        def finish() -> None:
            start = time.perf_counter()
            state, self._background = background.result_of(work), None
            pool = self.collector.finish(state, before, policy, ranks)
            self._file(pool, facts | {"time/wait": time.perf_counter() - start}, ranks)
            self.newest = max(self.newest, index)
            self.rest_engine()

        self._finish_background = finish

    def wait_for_background(self) -> None:
        """Waits for the pool that is generated in the background, if there is one, and files it."""
        finish, self._finish_background = self._finish_background, None
        if finish is not None:
            finish()

    def abandon(self) -> None:
        """Ends generation in the background without its pool: a process must not end under a thread that computes."""
        if self._background is not None:
            self.collector.engine.close()
            concurrent.futures.wait([self._background], timeout=60)
            self._background = self._finish_background = None

    def teardown(self, stage: str) -> None:
        self._pool = None
