"""Rows of a data set, from the hub or from local files, by the library datasets. No code of a data set ever runs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bapo.files import digest, file_digest

Row = Mapping[str, Any]

EXACT = 2.0**53
"""From here on not every whole number is a float."""
BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


class BadRowError(ValueError):
    """A row that no prompt can be made of; the message completes `rows ...`: `without a question`."""


@dataclass(frozen=True)
class Rows:
    """Location of the rows of one split.

    path: a data set of the hub; or a local file, which is the split; or a local folder with a file of the split's name, or with
    a README.md that says where its splits are, as a snapshot of the hub has. split: as the data set calls it. name, revision:
    which config of it, and which commit; they do not count for plain local files. key: of the config, for messages.
    """

    path: str
    split: str
    name: str | None = None
    revision: str | None = None
    key: str = "task.path"

    def read(self, columns: Sequence[str]) -> Any:
        """A `datasets.Dataset` with these columns; for `a.b`, a field of a column, with the column.

        Raises ValueError, in one line, for data that cannot be loaded.
        """
        import datasets  # takes a second

        datasets.disable_progress_bars()
        try:
            loaded = datasets.load_dataset(**self._source(), split=self.split, trust_remote_code=False)
        except Exception as error:  # no network, no such data set, no such split, broken files: each with a class of its own
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ValueError(f"{self} could not be loaded: {reason}") from error
        columns = list(dict.fromkeys(top(column, loaded.column_names) for column in columns))
        if missing := sorted(set(columns) - set(loaded.column_names)):
            raise ValueError(f"{self} has no column {', '.join(missing)} (it has {', '.join(loaded.column_names)})")
        return loaded.select_columns(columns)

    def _source(self) -> dict[str, Any]:
        """Arguments of `load_dataset`, besides the split."""
        local = Path(self.path).expanduser()
        if not local.exists():
            return {"path": self.path, "name": self.name, "revision": self.revision}
        if local.is_dir() and (local / "README.md").is_file():
            return {"path": str(local), "name": self.name, "download_mode": "force_redownload"}  # see below
        files = [local] if local.is_file() else self._files_in(local)
        builders = {BUILDERS.get(file.suffix) for file in files}
        if not files or len(builders) > 1 or None in builders:
            names = ", ".join(f"{self.split}{end}" for end in (*BUILDERS, "-*.parquet"))
            raise FileNotFoundError(f"it must be a file ({', '.join(BUILDERS)}), or a folder with one of {names}")
        # The library knows a file that it has read by its path and time alone; here it is known by what is in it.
        name = digest([file_digest(file) for file in files])
        return {"path": builders.pop(), "name": name, "data_files": {self.split: [str(file) for file in files]}}

    def _files_in(self, folder: Path) -> list[Path]:
        """The split's files: `train.jsonl`, or `train-00000-of-00002.parquet` and its like, there or in a folder `data`."""
        for where in (folder, folder / "data"):
            if found := [file for suffix in BUILDERS if (file := where / f"{self.split}{suffix}").is_file()]:
                return found
            if found := sorted(where.glob(f"{self.split}-*.parquet")):
                of = re.search(r"-of-(\d+)\.parquet$", found[0].name)
                if of and int(of[1]) != len(found):
                    raise FileNotFoundError(f"it must have {int(of[1])} files like {found[0].name}; it has {len(found)}")
                return found
        return []

    def __str__(self) -> str:
        return f"{self.key} is {self.path!r}; split {self.split!r}"


def text(value: Any, what: str) -> str:
    """A text of a row without white space around it, or a number as text. Raises BadRowError if there is none."""
    if isinstance(value, float) and abs(value) >= EXACT and math.isfinite(value):
        raise BadRowError(f"with {what} that is too large a number to be read exactly: write it as a text")
    if isinstance(value, float) and math.isfinite(value):  # whole numbers with a gap among them come as floats
        value = int(value) if value.is_integer() else str(value)
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise BadRowError(f"without {what}")
    return value.strip()


def member(value: Any, path: str) -> Any:
    """The value at a dotted path of keys, which may hold dots themselves; None where there is none."""
    if not isinstance(value, Mapping):
        return None
    key = top(path, value)
    return value.get(path) if key == path else member(value.get(key), path[len(key) + 1 :])


def top(path: str, keys: Iterable[str]) -> str:
    """The key that `path` begins with; its first part if it begins with none."""
    return next((key for key in keys if path == key or path.startswith(f"{key}.")), path.partition(".")[0])
