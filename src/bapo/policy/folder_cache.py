"""Model folders that are made once and kept in a cache.

An entry is a Hugging Face folder and a mark that lists its files with their digests. The mark is written last and the folder
gets its name last, so a kill at any time leaves nothing that looks whole.
"""

from __future__ import annotations

import fcntl
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bapo.files import file_digest

log = logging.getLogger(__name__)

MARK = "warm_start.json"


def kept_folder(cache_dir: str, name: str, build: Callable[[Path], Mapping[str, Any]], kind: str = "warm start") -> Path:
    """The folder `cache_dir`/warm_start/`name`, absolute; built unless it is there whole. Processes that race share one build.

    build: fills an empty folder and returns further facts for the mark. kind: of the model, for messages. Raises ValueError
    if nothing can be written.
    """
    root = Path(cache_dir).absolute() / "warm_start"
    folder = root / name
    if _is_whole(folder):
        log.info("%s: cached in %s", kind, folder)
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / f".{name}.lock").open("w")
    except OSError as error:
        raise ValueError(f"cache_dir is {cache_dir!r}; it cannot be written: {error}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases it when its holder dies
        if not _is_whole(folder):
            building = root / f".{name}.building"
            for leftover in (folder, building):
                if leftover.exists() or leftover.is_symlink():
                    log.warning("%s: %s is broken or was interrupted; building it again", kind, leftover)
                    shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()
            building.mkdir()
            facts = build(building)
            digests = {path.name: file_digest(path) for path in sorted(building.iterdir())}
            (building / MARK).write_text(json.dumps({"files": digests, **facts}, indent=2))
            building.rename(folder)
    return folder


def _is_whole(folder: Path) -> bool:
    """True if the folder has its mark, and every file has the digest in it."""
    try:
        files = json.loads((folder / MARK).read_text())["files"]
        return bool(files) and all(file_digest(folder / name) == digest for name, digest in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
