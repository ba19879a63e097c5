"""Files that are whole or absent, and digests of what decides a result."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

UMASK = os.umask(0)
os.umask(UMASK)


def write_atomic(target: Path, write: Callable[[Path], object], sync: bool = True) -> None:
    """Replaces `target` by what `write(path)` writes, in one step: a kill leaves the old file or the new one.

    The partial file lies beside the target as NAME.partial; the folder is made if it does not exist. Without `sync`
    a power cut, unlike a kill, may leave an empty file. A write that fails leaves no partial file: on a full disk it would keep
    the rest of the run from saying so. Readable as any file that the process makes, whatever mode `write` gives it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    try:
        write(partial)
        partial.chmod(0o666 & ~UMASK)
        if sync:
            with partial.open("rb") as file:
                os.fsync(file.fileno())
        os.replace(partial, target)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def write_text_atomic(target: Path, text: str) -> None:
    """Replaces `target` by `text`, as UTF-8, in one step."""
    write_atomic(target, lambda path: path.write_text(text, encoding="utf-8"))


def write_json_atomic(target: Path, value: Any) -> None:
    """Replaces `target` by `value` as indented JSON, in one step."""
    write_text_atomic(target, json.dumps(value, indent=1) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if there is none that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(*parts: Any) -> str:
    """16 hex digits that stand for `parts`, which JSON can hold."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
