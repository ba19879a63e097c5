"""A run's folder: its place, and its files besides metrics and checkpoints."""

from __future__ import annotations

import fcntl
import importlib.metadata
import logging
import os
import platform
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from omegaconf import DictConfig, ListConfig, OmegaConf

from bapo.files import read_json, write_json_atomic, write_text_atomic

log = logging.getLogger(__name__)

PACKAGES = ("bapo", "torch", "lightning", "transformers", "peft", "hydra-core", "omegaconf", "safetensors", "wandb")
SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
SAMPLES = "samples.jsonl"
"""The file with a few responses of every round, an object in each line."""
CHILD_RUN_DIR = "BAPO_RUN_DIR"  # tells the processes that Lightning starts for further devices which folder is theirs

_STAMP = f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{secrets.token_hex(3)}"


def register_resolvers() -> None:
    """`${bapo.run_dir:name,resume}`, `${bapo.folder_name:name}` and `${bapo.stamp:}` for conf/train.yaml; safe to call again.

    The stamp belongs to the process, not to the moment of resolving: a config that is resolved twice keeps its folder.
    """
    OmegaConf.register_new_resolver("bapo.stamp", lambda: _STAMP, replace=True)
    OmegaConf.register_new_resolver("bapo.folder_name", folder_name, replace=True)
    OmegaConf.register_new_resolver("bapo.run_dir", _run_dir, replace=True)


def _run_dir(name: Any, resume: Any) -> str:
    if child := os.environ.get(CHILD_RUN_DIR):
        return child
    if resume is None:
        return f"outputs/{folder_name(name)}/{_STAMP}"
    if not (Path(str(resume)) / "config.yaml").is_file():
        raise ValueError(f"resume is {str(resume)!r}; it must be a run folder, and there is no config.yaml in it")
    return str(resume)


def is_main_process() -> bool:
    """True on global rank 0, and outside distributed runs."""
    from lightning.pytorch.utilities.rank_zero import rank_zero_only  # Lightning only where a run begins

    return getattr(rank_zero_only, "rank", 0) == 0


def folder_name(name: object) -> str:
    """`name` as one path component: no separators, no leading dot, at most 80 characters.

    Raises ValueError for a name that holds a secret: it would stand in paths, logs and trackers.
    """
    text = str(name)
    if redact(text) != text:
        raise ValueError("name holds the value of an environment variable or an assignment that looks like a secret")
    return re.sub(r"[^\w.=+-]+", "_", text).lstrip(".")[:80] or "run"


def redact(text: str) -> str:
    """`text` without the values of environment variables and assignments that look like secrets."""
    for variable, value in os.environ.items():
        if SECRET_NAME.search(variable) and len(value) >= 6:
            text = text.replace(value, "***")
    return re.sub(r"(\S*(?:api_key|token|secret|password)=)(?!null\b)\S+", r"\1***", text, flags=re.IGNORECASE)


def plain_config(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain containers, resolved, but for values that come from the environment: those stay `${oc.env:...}`."""

    def plain(node: Any) -> Any:
        if isinstance(node, DictConfig):
            return {str(key): _value(node, key) for key in node}
        return [_value(node, index) for index in range(len(node))]

    def _value(node: DictConfig | ListConfig, key: Any) -> Any:
        raw = OmegaConf.to_container(node, resolve=False)[key]  # type: ignore[index]
        if isinstance(raw, str) and "oc.env" in raw:
            return raw
        value = node[key]
        if isinstance(value, DictConfig | ListConfig):
            return plain(value)
        return redact(value) if isinstance(value, str) else value

    return plain(cfg)


@contextmanager
def locked(folder: Path, file: str, what: str, busy: str) -> Iterator[TextIO]:
    """Makes the folder and keeps other processes out of it while open, by a lock on its `file`, which is open to append.

    Raises ValueError if the folder cannot be made, or, for the reason `busy`, if a process is in it. what: it is, for messages.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / file).open("a")
    except OSError as error:
        raise ValueError(f"{what} {str(folder)!r} cannot be written: {error.strerror}") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system lets go of it when its holder dies
        except OSError as error:
            raise ValueError(f"{what} {str(folder)!r} is in use: {busy}") from error
        yield handle


@contextmanager
def open_run_folder(folder: Path, cfg: DictConfig, resume: bool, script: str = "train.py") -> Iterator[None]:
    """Makes the folder, writes config.yaml and provenance.json, and keeps other processes out of it while open.

    A resumed run adds a line to commands.log, and its config.yaml tells what has been changed. Rank 0 alone writes. Raises
    ValueError for a folder that cannot be written, that another process is running in, or, unless resumed, that holds a run.
    """
    if not is_main_process():
        yield
        return
    with locked(folder, "commands.log", "run folder", "a run is in progress in it") as commands:
        if not resume and (folder / "config.yaml").exists():
            again = resume_command(folder, script)
            raise ValueError(f"run folder {str(folder)!r} holds a run already; to resume it: {again}")
        print(datetime.now().isoformat(timespec="seconds"), redact(" ".join(sys.argv)), file=commands, flush=True)
        config = plain_config(cfg)
        write_text_atomic(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(config)))
        if not resume:
            facts = {"run_id": secrets.token_hex(8), "tags": config["tags"], **provenance(), "config": config, "data": {}}
            write_json_atomic(folder / "provenance.json", facts)
        yield


def provenance() -> dict[str, Any]:
    """Command, git revision and package versions."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "command": redact(" ".join([Path(sys.executable).name, *sys.argv])),
        "git_revision": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain")),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
    }


def _git(*args: str) -> str:
    """git's answer about the source tree; "" without git or outside a checkout."""
    try:
        source = Path(__file__).parent
        return subprocess.run(["git", *args], cwd=source, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def read_config(folder: Path) -> DictConfig:
    """The config a run was started with, not yet resolved. Raises ValueError if there is none, or it is damaged."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise ValueError(f"{str(folder)!r} is not a run folder: there is no config.yaml in it")
    try:
        cfg = OmegaConf.load(path)
    except Exception as error:
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())}") from error
    if not isinstance(cfg, DictConfig) or "trainer" not in cfg:
        raise ValueError(f"{path} is damaged: it is not the config of a run")
    return cfg


def write_status(folder: Path, status: str, **facts: Any) -> None:
    """status.json: `running`, `finished`, `interrupted` or `failed`, when, the updates of the last checkpoint, and `facts`.

    Rank 0 alone writes; the file is replaced as a whole.
    """
    if not is_main_process():
        return
    known = {"checkpoint": at} if (at := read_json(folder / "status.json").get("checkpoint")) is not None else {}
    facts = {"status": status, "time": datetime.now().isoformat(timespec="seconds"), **known, **facts}
    write_json_atomic(folder / "status.json", facts)


def resume_command(folder: Path, script: str = "train.py") -> str:
    """The command that resumes a run, quoted for Hydra and for the shell where the path needs it."""
    plain = re.fullmatch(r"[\w./-]+", str(folder))
    return f"python {script} " + (f"resume={folder}" if plain else shlex.quote(f'resume="{folder}"'))


def how_to_resume(folder: Path, again: str, error: BaseException) -> str:
    """Advice after `error`: a wrong config fails again as long as no checkpoint was written."""
    if any((folder / "checkpoints").glob("*.ckpt")):
        return f"to resume from the last checkpoint: {again}"
    if isinstance(error, ValueError):
        return "there is no checkpoint, and the same config would fail again: correct it and start another run"
    return f"there is no checkpoint yet; to start again: {again}"


def log_failure(error: BaseException, folder: Path, sweep: bool) -> None:
    """The traceback of the exception being handled: to the log's file, and to the screen unless one message says it all there.

    It does for a ValueError, and for a file of the run that cannot be written; both end the process. In a sweep others follow.
    """
    record = log.makeRecord(log.name, logging.ERROR, __file__, 0, "%s", (redact(traceback.format_exc()),), None)
    handlers = logging.root.handlers
    own_file = isinstance(error, OSError) and Path(str(error.filename)).is_relative_to(folder)
    if (isinstance(error, ValueError) or own_file) and not sweep:
        handlers = [handler for handler in handlers if isinstance(handler, logging.FileHandler)] or handlers
    for handler in handlers:
        handler.handle(record)


def discard_unused(folder: Path, log_too: bool = False) -> None:
    """Removes a folder that holds nothing but Hydra's log, empty unless `log_too`: the run never started."""
    if folder.name == _STAMP and all(p.suffix == ".log" and (log_too or not p.stat().st_size) for p in folder.glob("*")):
        shutil.rmtree(folder, ignore_errors=True)
        if folder.parent.is_dir() and not any(folder.parent.iterdir()):
            folder.parent.rmdir()
