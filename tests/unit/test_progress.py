import io
import logging
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from rich.console import Console

from bapo.training.callbacks.progress import Pace, ProgressDisplay, clock, shown

LENGTHS = (4, 4, 6, 6, 2, 2)  # updates of each epoch; two epochs per round
UPDATE, REFILL, EVAL = 2.0, 10.0, 5.0  # seconds


class Clock:
    """A clock that the toy run moves."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Toy(L.LightningModule):
    def __init__(self, now: Clock, at_update: Callable[[int], None]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.now = now
        self.at_update = at_update
        self.latest: dict[str, float] = {}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.weight], lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.now.seconds += UPDATE
        self.manual_backward(self.weight.sum())
        self.optimizers().step()
        row = {"policy/entropy": 0.5, "bounds/clip_low": 0.6, "bounds/clip_high": 1.2 + self.global_step / 100}
        if batch_idx == 0 and self.current_epoch % 2 == 0:
            row |= {"rollout/reward_mean": 0.2 + self.current_epoch / 10}
        self.latest |= row | {"bounds/positive_ratio": 0.4}
        self.at_update(self.global_step)


class ToyData(L.LightningDataModule):
    schedule = SimpleNamespace(epochs_per_round=2)

    def __init__(self, now: Clock) -> None:
        super().__init__()
        self.now = now
        self.on_phase: Callable[[str], None] = lambda phase: None

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        if self.trainer.current_epoch % 2 == 0:
            self.on_phase("refill")
            self.now.seconds += REFILL
            logging.getLogger("toy").warning("refilled round %d", self.trainer.current_epoch // 2)
        self.on_phase("train")
        return torch.utils.data.DataLoader(range(LENGTHS[self.trainer.current_epoch]))  # type: ignore[arg-type]


class ToyEvaluation(L.Callback):
    def __init__(self, now: Clock, on_phase: Callable[[str], None]) -> None:
        self.now = now
        self.on_phase = on_phase

    def evaluate(self, module: Any, value: float) -> None:
        self.on_phase("eval")
        self.now.seconds += EVAL
        module.latest["eval/test/avg@1"] = value
        self.on_phase("train")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.evaluate(pl_module, 0.1)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if trainer.is_last_batch and trainer.current_epoch % 2 == 1:
            self.evaluate(pl_module, 0.2 + trainer.current_epoch / 10)


@pytest.mark.filterwarnings("ignore")
def toy_fit(
    live: bool | None, display_first: bool = True, at_update: Callable[[int], None] = lambda step: None
) -> ProgressDisplay:
    now = Clock()
    display = ProgressDisplay(live, now)
    data = ToyData(now)
    data.on_phase = display.phase
    callbacks = [display, ToyEvaluation(now, display.phase)]
    trainer = L.Trainer(
        max_epochs=len(LENGTHS),
        reload_dataloaders_every_n_epochs=1,
        callbacks=callbacks if display_first else callbacks[::-1],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Toy(now, at_update), data)
    return display


def test_a_line_has_the_held_out_loss_only_where_it_was_looked_at_since_the_last_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display = ProgressDisplay(False, Clock())
    display._pace = Pace(Clock(), 4, 1, 0.0, unit="epoch")
    display._numbers = shown({"sft/loss": 1.0, "sft/test_loss": 2.0})
    for looked in (True, False):
        display._evaluated, display._since_report = looked, 1
        display._report()
    first, second = capsys.readouterr().out.splitlines()
    assert "loss 1.000  held-out loss 2.000" in first
    assert "loss 1.000" in second
    assert "held-out" not in second


# Elapsed: refill 10 + evaluation 5, then per round its updates x 2 s + evaluation 5, the next refill coming after the line.
# ETA: updates to come x 2 s + rounds to come x (elapsed - updates x 2 s) / rounds begun.
LINES = """\
training for 3 rounds of 2 epochs
before training  test avg@1 0.100
round 1/3  epoch 2/2  updates  8/24  reward 0.200  test avg@1 0.300  entropy 0.500  clip_low 0.600  clip_high 1.280  \
positive_ratio 0.400  elapsed 0:36  ETA 1:12
round 2/3  epoch 2/2  updates 20/32  reward 0.400  test avg@1 0.500  entropy 0.500  clip_low 0.600  clip_high 1.400  \
positive_ratio 0.400  elapsed 1:15  ETA 0:42
round 3/3  epoch 2/2  updates 24/24  reward 0.600  test avg@1 0.700  entropy 0.500  clip_low 0.600  clip_high 1.440  \
positive_ratio 0.400  elapsed 1:38  ETA 0:00
"""


@pytest.mark.parametrize("display_first", [True, False])
def test_plain_lines(capsys: pytest.CaptureFixture[str], display_first: bool) -> None:
    """Totals follow the epochs' changing lengths, and the order of the callbacks does not matter."""
    toy_fit(None, display_first)
    assert capsys.readouterr().out == LINES


def test_a_line_has_the_held_out_accuracy_of_its_own_round_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = ToyEvaluation.evaluate
    monkeypatch.setattr(ToyEvaluation, "evaluate", lambda self, module, value: value == 0.5 or evaluate(self, module, value))
    toy_fit(None)
    lines = capsys.readouterr().out.splitlines()
    assert [re.findall(r"avg@1 \S+", line) for line in lines] == [[], ["avg@1 0.100"], ["avg@1 0.300"], [], ["avg@1 0.700"]]


def test_the_last_line_tells_where_a_run_broke_off(capsys: pytest.CaptureFixture[str]) -> None:
    def boom(step: int) -> None:
        if step == 10:
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        toy_fit(None, at_update=boom)
    assert capsys.readouterr().out.splitlines()[-1].startswith("round 2/3  epoch 1/2  updates  9/32  reward 0.400")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a terminal of 100 columns receives."""
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=100, height=30, color_system=None)
    monkeypatch.setattr("bapo.training.callbacks.progress.get_console", lambda: console)
    return written


def screen(written: str) -> list[str]:
    """The lines left on a screen, from text, carriage returns, line feeds, and the codes to go up a line and to erase one."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part[0] not in "\x1b\r":
            lines[row] += part
    return [line.rstrip() for line in lines]


def test_live_display_keeps_log_lines_whole_and_gives_the_terminal_back(terminal: io.StringIO) -> None:
    streams = sys.stdout, sys.stderr
    handler = logging.StreamHandler(sys.stdout)  # as Hydra makes it: it holds the stream itself
    logging.getLogger("toy").addHandler(handler)
    try:
        toy_fit(True, at_update=lambda step: print(f"printed at {step}") if step == 9 else None)
    finally:
        logging.getLogger("toy").removeHandler(handler)
    assert handler.stream is streams[0]
    assert (sys.stdout, sys.stderr) == streams
    written = terminal.getvalue()
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l"), "the cursor stays hidden"
    left = screen(written)
    assert left[:4] == ["refilled round 0", "refilled round 1", "printed at 9", "refilled round 2"]
    assert re.sub(" +", " ", left[4]) == "round 3/3 epoch 2/2 train elapsed 1:38 ETA 0:00"
    assert left[5].endswith("━  24/24 updates")
    assert left[6] == "reward 0.600  test avg@1 0.700  entropy 0.500  clip_low 0.600  clip_high 1.440  positive_ratio 0.400"
    assert left[7:] == [""]


def test_live_display_ends_with_an_exception(terminal: io.StringIO) -> None:
    streams = sys.stdout, sys.stderr

    def interrupt(step: int) -> None:
        if step == 9:
            raise KeyboardInterrupt

    with pytest.raises(SystemExit):
        toy_fit(True, at_update=interrupt)
    assert (sys.stdout, sys.stderr) == streams
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l")
    assert any(line.endswith("  8/32 updates") for line in screen(terminal.getvalue()))


def test_other_ranks_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    display = ProgressDisplay(None)
    other: Any = SimpleNamespace(is_global_zero=False, global_step=3)
    display.phase("refill")
    display.on_fit_start(other, other)
    display.on_train_start(other, other)
    display.on_train_epoch_start(other, other)
    display.on_train_batch_start(other)
    display.on_train_batch_end(other, other, None, None, 0)
    display.on_train_end(other, other)
    assert capsys.readouterr().out == ""


def test_total_of_a_run_resumed_inside_an_epoch() -> None:
    pace = Pace(Clock(), max_epochs=8, epochs_per_round=4, began=0.0, epoch=2)
    pace.expect(updates=40, left_in_epoch=10, per_epoch=16)
    assert pace.total == 40 + 10 + 5 * 16
    assert pace.left() is None  # no update yet to take a pace from
    pace.expect(updates=40, left_in_epoch=float("inf"), per_epoch=float("inf"))
    assert (pace.total, pace.updates_of()) == (None, "40/?")


def test_labels_and_times() -> None:
    metrics = {"eval/b/avg@4": 0.5, "policy/lr": 1.0, "eval/a/avg@1": 0.25, "rollout/reward_mean": torch.tensor(1 / 3)}
    assert list(shown(metrics).items()) == [("reward", "0.333"), ("a avg@1", "0.250"), ("b avg@4", "0.500")]
    assert [clock(seconds) for seconds in (0.4, 65, 3599.6, 3725.4)] == ["0:00", "1:05", "1:00:00", "1:02:05"]


def test_an_unknown_phase_is_named() -> None:
    with pytest.raises(ValueError, match="phase is 'fill'; it must be one of refill, train, eval"):
        ProgressDisplay().phase("fill")
