"""Files that are whole or absent, and digests of what decides a result."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_atomic(target: Path, write: Callable[[Path], object], sync: bool = True) -> None:
    """Replaces `target` by what `write(path)` writes, in one step: a kill leaves the old file or the new one.

    The partial file lies beside the target as NAME.partial; the folder is made if it does not exist. Without `sync`
    a power cut, unlike a kill, may leave an empty file.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    write(partial)
    if sync:
        with partial.open("rb") as file:
            os.fsync(file.fileno())
    os.replace(partial, target)


def write_text_atomic(target: Path, text: str) -> None:
    """Replaces `target` by `text`, as UTF-8, in one step."""
    write_atomic(target, lambda path: path.write_text(text, encoding="utf-8"))


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(*parts: Any) -> str:
    """16 hex digits that stand for `parts`, which JSON can hold."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
