"""The mini-batches of one epoch: a pool, shuffled and cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bapo.rollouts.pool import Pool
from bapo.rollouts.ranks import Ranks
from bapo.rollouts.schedule import Schedule, deal_minibatches
from bapo.types import MiniBatch


def epoch_minibatches(pool: Pool, schedule: Schedule, seed: int, epoch: int, ranks: Ranks) -> list[MiniBatch]:
    """This rank's rows of each mini-batch of an epoch, with the metrics of the update's row."""
    lengths, places = pool.batch.lengths(), pool.places()
    first_epoch = epoch % schedule.epochs_per_round == 0
    axes = {"rollout/round": pool.meta["round"], "rollout/epoch": epoch, "rollout/tokens_total": pool.meta["tokens_total"]}
    minibatches = []
    for index, part in enumerate(deal_minibatches(len(pool.batch), schedule.minibatches_per_epoch, seed, epoch)):
        # Ranks take turns along the lengths, so that each gets about the same number of tokens.
        rows = part[lengths[part].argsort(descending=True, stable=True)][ranks.rank :: ranks.world]
        metrics = axes | pool.meta["metrics"] | pool.meta["timing"] if first_epoch and index == 0 else axes
        minibatches.append(MiniBatch(pool.batch.select(rows), metrics, places[rows]))
    return minibatches


class EpochLoader:
    """The mini-batches of one epoch. Its state is how many have been returned, so that a run can stop between two of them."""

    def __init__(self, minibatches: Sequence[MiniBatch]):
        self.minibatches = minibatches
        self.handed_out = 0
        self.resume_at = 0

    def __len__(self) -> int:
        return len(self.minibatches)

    def __iter__(self) -> Iterator[MiniBatch]:
        self.handed_out, self.resume_at = self.resume_at, 0
        while self.handed_out < len(self.minibatches):
            self.handed_out += 1
            yield self.minibatches[self.handed_out - 1]

    def state_dict(self) -> dict[str, int]:
        return {"handed_out": self.handed_out}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.resume_at = state["handed_out"]
