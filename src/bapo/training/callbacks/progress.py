"""Progress of a run: a live display on a terminal, one plain line per round everywhere else."""

from __future__ import annotations

import logging
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from rich import get_console
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

PHASES = ("refill", "train", "eval")
HELD_OUT = "held-out loss"


def shown(metrics: Mapping[str, Any]) -> dict[str, str]:
    """The numbers a reader follows, label -> three decimals: reward, every held-out accuracy there is, entropy, bounds."""
    labels = {"rollout/reward_mean": "reward"}
    labels |= {name: name.removeprefix("eval/").replace("/", " ") for name in sorted(metrics) if re.search(r"/avg@\d+$", name)}
    labels |= {"sft/loss": "loss", "sft/test_loss": HELD_OUT, "policy/entropy": "entropy"}
    labels |= {f"bounds/{name}": name for name in ("clip_low", "clip_high", "positive_ratio")}
    return {label: f"{float(metrics[name]):.3f}" for name, label in labels.items() if name in metrics}


def clock(seconds: float) -> str:
    """3725.4 -> '1:02:05', 65 -> '1:05'."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


@dataclass
class Pace:
    """Position and speed of the run. Seconds are those of `now()`."""

    now: Callable[[], float]
    max_epochs: int
    epochs_per_round: int
    began: float
    epoch: int = 0
    updates: int = 0
    total: int | None = None
    trained: float = 0.0  # seconds inside updates; this, `batches` and `rounds` are of this process, not of the resumed run
    batches: int = 0
    rounds: int = 0
    batch_began: float | None = None
    unit: Literal["round", "epoch"] = "round"

    @property
    def max_rounds(self) -> int:
        return math.ceil(self.max_epochs / self.epochs_per_round)

    @property
    def round(self) -> int:
        return self.epoch // self.epochs_per_round

    def where(self) -> str:
        width = len(str(self.max_rounds))
        if self.unit == "epoch":
            return f"epoch {self.epoch + 1:>{width}}/{self.max_epochs}"
        epoch = self.epoch % self.epochs_per_round + 1
        return f"round {self.round + 1:>{width}}/{self.max_rounds}  epoch {epoch}/{self.epochs_per_round}"

    def updates_of(self) -> str:
        total = "?" if self.total is None else str(self.total)
        return f"{self.updates:>{len(total)}}/{total}"

    def times(self) -> str:
        left = self.left()
        return f"elapsed {clock(self.now() - self.began)}  ETA {'-' if left is None else clock(left)}"

    def pause(self) -> None:
        """Ends the time of the update in progress."""
        if self.batch_began is not None:
            self.trained += self.now() - self.batch_began
            self.batch_began = None

    def expect(self, updates: int, left_in_epoch: float, per_epoch: float) -> None:
        """Only the present epoch's length is known; those to come are taken to be like it."""
        total = updates + left_in_epoch + (self.max_epochs - self.epoch - 1) * per_epoch
        self.updates, self.total = updates, int(total) if math.isfinite(total) else None

    def left(self) -> float | None:
        """Seconds to the end: the updates to come, plus what the rounds to come spend between updates (refill, evaluation)."""
        if self.total is None or not self.batches:
            return None
        between = (self.now() - self.began - self.trained) / max(self.rounds, 1)
        return (self.total - self.updates) * self.trained / self.batches + (self.max_rounds - self.round - 1) * between


class ProgressDisplay(Callback):
    """Shows round, epoch, phase, updates of the whole run, the main metrics and the time left. Global rank 0 only.

    live: a display that redraws itself (True), plain lines (False), or what suits stdout (None). now: a clock in seconds.
    unit: epoch, where nothing is generated and a round is one epoch. every_n_updates: a plain line besides that of every round.
    Rounds are counted from 1. Reads `trainer.max_epochs`, `trainer.datamodule.schedule` and the module's `latest` metrics.
    """

    def __init__(
        self,
        live: bool | None = None,
        now: Callable[[], float] = time.monotonic,
        unit: Literal["round", "epoch"] = "round",
        every_n_updates: int | None = None,
    ) -> None:
        if every_n_updates is not None and every_n_updates < 1:
            raise ValueError(f"callbacks.progress.every_n_updates is {every_n_updates}; it must be >= 1, or null")
        self.live = live
        self.now = now
        self.unit = unit
        self.every_n_updates = every_n_updates
        self._numbers: dict[str, str] = {}
        self._evaluated = False
        self._phase = "refill"
        self._since_report = 0
        self._trainer: Trainer | None = None
        self._pace: Pace | None = None
        self._display = ExitStack()
        self._is_live = False

    def phase(self, name: str) -> None:
        """Say what the run does now: refill, train or eval. Raises ValueError for anything else."""
        if name not in PHASES:
            raise ValueError(f"phase is {name!r}; it must be one of {', '.join(PHASES)}")
        self._phase = name
        self._evaluated |= name == "eval"
        if self._pace is not None:
            self._pace.pause()
            self._look()
        if name == "refill":
            self._report()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        schedule = trainer.datamodule.schedule  # type: ignore[attr-defined]
        assert trainer.max_epochs is not None
        self._trainer = trainer
        self._pace = Pace(self.now, trainer.max_epochs, schedule.epochs_per_round, self.now(), unit=self.unit)
        console = get_console()
        self._is_live = self.live if self.live is not None else console.file.isatty() and not console.is_dumb_terminal
        if self._is_live:
            self._display.enter_context(live_display(self._render))
        rounds, epochs = self._pace.max_rounds, schedule.epochs_per_round
        self._line(f"training for {rounds} " + (f"rounds of {epochs} epochs" if self.unit == "round" else "epochs"))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._pace is not None and trainer.global_step:
            self._line(f"resumed after update {trainer.global_step}")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if (pace := self._pace) is None:
            return
        if trainer.global_step == 0 and self._numbers:
            self._line("before training  " + _joined(self._numbers))
        if trainer.current_epoch // pace.epochs_per_round != pace.round or not pace.rounds:
            self._report()
            pace.rounds += 1
        pace.epoch = trainer.current_epoch
        # Taken to start at its beginning; after a resume inside an epoch the next update sets it right.
        pace.expect(trainer.global_step, trainer.num_training_batches, trainer.num_training_batches)
        self._phase = "train"

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if self._pace is not None:
            self._pace.epoch = trainer.current_epoch  # a fit resumed inside an epoch does not start one
            self._pace.batch_began = self.now()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (pace := self._pace) is None:
            return
        pace.pause()
        pace.batches += 1
        pace.expect(trainer.global_step, trainer.num_training_batches - batch_idx - 1, trainer.num_training_batches)
        self._look()
        self._since_report += 1
        if self.every_n_updates and trainer.global_step % self.every_n_updates == 0:
            self._report()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop()

    def _look(self) -> None:
        assert self._trainer is not None
        latest: Any = self._trainer.lightning_module.latest
        self._numbers = shown(latest)

    def _report(self) -> None:
        """One line of the round so far. Called when the next one begins, after the evaluation that follows the last update."""
        if (pace := self._pace) is None or not self._since_report:
            return
        old = [label for label in self._numbers if "avg@" in label or label == HELD_OUT] if not self._evaluated else []
        changed = {label: value for label, value in self._numbers.items() if label not in old}
        self._line(f"{pace.where()}  updates {pace.updates_of()}  {_joined(changed)}  {pace.times()}")
        self._since_report, self._evaluated = 0, False

    def _line(self, line: str) -> None:
        if not self._is_live:
            print(line, flush=True)

    def _stop(self) -> None:
        """Leave the terminal as it was, with the last state on it."""
        self._report()
        self._display.close()
        self._pace = self._trainer = None

    def _render(self) -> Group:
        pace = self._pace
        assert pace is not None
        top = Table.grid(expand=True)
        top.add_column()
        top.add_column(justify="right")
        top.add_row(Text.assemble((pace.where(), "bold"), "  ", (self._phase, "cyan")), Text(pace.times()))
        bar = Table.grid(expand=True, padding=(0, 2, 0, 0))
        bar.add_column(ratio=1)
        bar.add_column(justify="right")
        bar.add_row(ProgressBar(total=pace.total, completed=pace.updates), f"{pace.updates_of()} updates")
        numbers = Text("  ").join(Text.assemble((label, "dim"), f" {value}") for label, value in self._numbers.items())
        return Group(top, bar, numbers)


def _joined(values: Mapping[str, str]) -> str:
    return "  ".join(f"{label} {value}" for label, value in values.items())


@contextmanager
def live_display(render: Callable[[], RenderableType]) -> Iterator[None]:
    """Redraws `render()` four times a second below whatever is printed or logged meanwhile."""
    streams = (sys.stdout, sys.stderr)
    # A stderr that is a file stays one.
    live = Live(get_renderable=render, console=get_console(), refresh_per_second=4, redirect_stderr=sys.stderr.isatty())
    with live:
        # Log handlers made before hold the terminal's own streams and would write into the display.
        replaced = {id(old): new for old, new in zip(streams, (sys.stdout, sys.stderr), strict=True) if old is not new}
        loggers = [logging.root, *(x for x in logging.root.manager.loggerDict.values() if isinstance(x, logging.Logger))]
        handlers = {h for logger in loggers for h in logger.handlers if isinstance(h, logging.StreamHandler)}
        moved = [(handler, handler.stream) for handler in handlers if id(handler.stream) in replaced]
        for handler, stream in moved:
            handler.setStream(replaced[id(stream)])
        try:
            yield
        finally:
            for handler, stream in moved:
                handler.setStream(stream)
