"""Model folders that are made once and kept.

An entry is a Hugging Face folder and a mark that lists its files with their digests. The mark is written last and the folder
gets its name last, so that a stop at any time leaves nothing that looks whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

MARK = "warm_start.json"


def kept_folder(cache_dir: str, name: str, build: Callable[[Path], Mapping[str, Any]], what: str = "warm start") -> Path:
    """The folder `cache_dir`/warm_start/`name`, absolute; built if it is not there whole. Processes that race share one build.

    build: fills an empty folder and returns what the mark should say besides. what: it is, to people. Raises ValueError where
    nothing can be written.
    """
    root = Path(cache_dir).absolute() / "warm_start"
    folder = root / name
    if _is_whole(folder):
        log.info("%s: cached in %s", what, folder)
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / f".{name}.lock").open("w")
    except OSError as error:
        raise ValueError(f"cache_dir is {cache_dir!r}; it cannot be written: {error}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system lets go of it when its holder dies
        if not _is_whole(folder):
            building = root / f".{name}.building"
            for leftover in (folder, building):
                if leftover.exists() or leftover.is_symlink():
                    log.warning("%s: %s is broken or was interrupted; building it again", what, leftover)
                    shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()
            building.mkdir()
            facts = build(building)
            digests = {path.name: _digest(path) for path in sorted(building.iterdir())}
            (building / MARK).write_text(json.dumps({"files": digests, **facts}, indent=2))
            building.rename(folder)
    return folder


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_whole(folder: Path) -> bool:
    """Does the folder hold its mark, and every file as the mark says?"""
    try:
        files = json.loads((folder / MARK).read_text())["files"]
        return bool(files) and all(_digest(folder / name) == digest for name, digest in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
