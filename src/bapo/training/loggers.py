"""Loggers of a run: two CSV files always, any of Lightning's by choice, several at once.

Every logger receives the same rows by `log_metrics(row, step)`: step = completed optimizer updates, known names as in
`bapo.metrics`.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, SupportsFloat

from hydra.utils import get_object, instantiate
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from bapo.files import write_atomic
from bapo.metrics import METRICS, WALL_CLOCK_PREFIXES
from bapo.training.run_folder import is_main_process, redact

log = logging.getLogger(__name__)

STEP = "trainer/global_step"


def _cell(value: SupportsFloat) -> str:
    """An int unchanged, a float by `repr` (reads back to the same float), NaN as nothing."""
    if isinstance(value, int):
        return str(int(value))
    number = float(value)
    return "" if math.isnan(number) else repr(number)


class _Table:
    """A CSV file of numbers by step that is whole on disk after every `put`. No cell ever needs quoting."""

    def __init__(self, path: Path, keep_to: int | None) -> None:
        """keep_to: last step to keep of an existing file; a later or torn row is dropped. None: there must be no file."""
        self.path = path
        self.columns: list[str] = []
        self.last: dict[str, str] = {}
        self.last_offset = 0
        if not path.exists():
            return
        if keep_to is None:
            raise ValueError(f"{path} exists; it is not overwritten: choose a new run folder, or resume this one")
        # Whole rows only: a kill inside a write leaves a row without its line feed, or a remainder with cells missing.
        try:
            lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        if lines:
            self.columns = lines[0].rstrip("\n").split(",")
        whole = (line for line in lines[1:] if line.count(",") == len(self.columns) - 1)
        rows = [line for line in whole if int(line.split(",", 1)[0]) <= keep_to]
        if rows:
            self.last = dict(zip(self.columns, rows[-1].rstrip("\n").split(","), strict=True))
        if keep_to and (self.step or 0) < keep_to:
            log.warning("%s lacks the rows from step %d to the checkpoint's, %d", path, (self.step or 0) + 1, keep_to)
        self._replace([*lines[:1], *rows])

    @property
    def step(self) -> int | None:
        return int(self.last[STEP]) if self.last else None

    def put(self, cells: Mapping[str, str], step: int) -> None:
        """Append the row of `step`, or merge into the last row when it has that step."""
        merge = self.step == step
        self._grow([key for key in (STEP, *cells) if key not in self.columns])
        self.last = {**(self.last if merge else {}), STEP: str(step), **cells}
        with self.path.open("r+b") as file:
            file.seek(self.last_offset if merge else 0, os.SEEK_SET if merge else os.SEEK_END)
            self.last_offset = file.tell()
            file.write((",".join(self.last.get(key, "") for key in self.columns) + "\n").encode())
            file.truncate()

    def _grow(self, new: Sequence[str]) -> None:
        if not new:
            return
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.columns else []
        self.columns += new
        self._replace([",".join(self.columns) + "\n", *(line + "," * len(new) + "\n" for line in lines[1:])])

    def _replace(self, lines: Sequence[str]) -> None:
        write_atomic(self.path, lambda path: path.write_bytes("".join(lines).encode()), sync=False)
        self.last_offset = sum(len(line.encode()) for line in lines[:-1])


class CsvLogger(Logger):
    """RUN/metrics.csv: one row per update, the same bytes for the same seed. RUN/timing.csv: what no seed can repeat.

    A second row of the same step is merged into the first. Columns stand in order of first appearance; a missing value and NaN
    are empty cells; a row is on disk when `log_metrics` returns. Only global rank 0 touches the files.
    """

    def __init__(self, run_dir: str | Path, resume_step: int | None = None) -> None:
        """resume_step: the checkpoint's global step; later rows are dropped, they will be made again. None: a new run.

        Raises ValueError when a new run finds a metrics.csv or timing.csv in `run_dir`.
        """
        super().__init__()
        self.run_dir = Path(run_dir)
        if is_main_process():
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._metrics = _Table(self.run_dir / "metrics.csv", resume_step)
            self._timing = _Table(self.run_dir / "timing.csv", resume_step)

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.run_dir)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, SupportsFloat], step: int | None = None) -> None:
        """A step that is missing or below the last one, as Lightning's own callbacks count, adds to the last row."""
        last = max((table.step for table in (self._metrics, self._timing) if table.step is not None), default=0)
        step = max(step or 0, last)
        values: dict[str, str] = {}
        timing: dict[str, str] = {}
        for name, value in metrics.items():
            if name != STEP:
                (timing if name.startswith(WALL_CLOCK_PREFIXES) else values)[name] = _cell(value)
        if values:
            self._metrics.put(values, step)
        if timing:
            self._timing.put(timing, step)

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run folder has config.yaml."""


def make_loggers(sections: Mapping[str, Any], folder: Path, resume_step: int | None) -> Iterator[Logger]:
    """The CSV logger, then the logger of each section, in the run folder unless the section says where.

    resume_step: updates of the checkpoint that a run resumes from, for loggers that ask for it; None for a new run.
    """
    yield CsvLogger(folder, resume_step)
    for section in filter(None, sections.values()):
        known = inspect.signature(get_object(section["_target_"])).parameters
        filled = {"save_dir": str(folder), "resume_step": resume_step}
        yield instantiate(section | {k: v for k, v in filled.items() if k in known and k not in section}, _convert_="all")


def wandb_logger(
    save_dir: str | Path,
    project: str = "bapo",
    name: str | None = None,
    group: str | None = None,
    tags: Iterable[str] = (),
    resume_step: int | None = None,
) -> WandbLogger:
    """A new W&B run of its own, written below `save_dir`; online when W&B finds a key, offline otherwise, and never a prompt.

    WANDB_MODE decides when it is set. The key is looked for where W&B looks: WANDB_API_KEY, its settings files, the netrc entry
    of its host. An offline run cannot be resumed, so a resumed job opens a new run, whatever `resume_step`: give both the same
    `group`. Console, code, git state and command line are not captured; the run folder has them. Close it with `finish`.
    Raises ValueError when WANDB_MODE asks for an online run and there is no key.
    """
    import wandb

    Path(save_dir).mkdir(parents=True, exist_ok=True)
    run = None
    if is_main_process():
        run = wandb.init(
            dir=str(save_dir),
            project=redact(project),
            name=name and redact(name),
            group=group and redact(group),
            tags=[redact(tag) for tag in tags],
            mode=_wandb_mode(),
            reinit="create_new",  # a run that another job of this process left open is not joined
            settings=wandb.Settings(
                console="off",
                save_code=False,
                disable_code=True,
                disable_git=True,
                x_save_requirements=False,
                x_disable_meta=True,  # it holds the command line, where a key may stand
                x_stats_sampling_interval=60.0,
            ),
        )
        for axis in (STEP, "rollout/round", "rollout/tokens_total"):
            run.define_metric(axis)
        for namespace in sorted({name.split("/")[0] for name in METRICS} - {"trainer", "rollout"} | {"eval"}):
            run.define_metric(f"{namespace}/*", step_metric=STEP)
        run.define_metric("rollout/*", step_metric="rollout/round")
    return WandbLogger(project=project, name=name, save_dir=save_dir, experiment=run)


def _wandb_mode() -> Literal["online", "offline"] | None:
    """None leaves it to WANDB_MODE."""
    import wandb

    wished = os.environ.get("WANDB_MODE")
    if wished in ("offline", "dryrun", "disabled"):
        return None
    found = wandb.login(prompt=False, verify=False)
    if wished and not found:
        raise ValueError(f"WANDB_MODE is {wished} but W&B finds no key; set WANDB_API_KEY or unset WANDB_MODE")
    if wished:
        return None
    return "online" if found else "offline"


def tensorboard_logger(save_dir: str | Path, resume_step: int | None = None) -> TensorBoardLogger:
    """Event files in `save_dir`/tensorboard; after a resume TensorBoard hides what was logged beyond `resume_step`."""
    purge_step = None if resume_step is None else resume_step + 1
    return TensorBoardLogger(save_dir, name="tensorboard", version="", default_hp_metric=False, purge_step=purge_step)


def finish(loggers: Iterable[Logger], exit_code: int = 0) -> None:
    """Close every logger, the rest too when one of them raises, and tell W&B how the run ended. Again does no harm."""
    with ExitStack() as stack:
        for logger in loggers:
            if isinstance(logger, WandbLogger):
                stack.callback(logger.experiment.finish, exit_code=exit_code)
            else:
                stack.callback(logger.finalize, "success" if exit_code == 0 else "failed")
