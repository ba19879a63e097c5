"""Resuming a run: its checkpoints, checked before they are used, and what differs from when it was started."""

from __future__ import annotations

import json
import logging
import re
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from bapo.files import digest, read_json, write_json_atomic

log = logging.getLogger(__name__)

START = "start"
"""`resume_from` of a run that begins again."""
PARTS = {"epoch", "global_step", "state_dict", "loops", "optimizer_states", "digest", "run_id"}
TABLES = ("metrics.csv", "timing.csv", "samples.jsonl")
NUMBERED = {"checkpoints": r"update=(\d+)\.ckpt", "updates": r"update_(\d+).*", "rounds": r"(?:round|unfinished)_(\d+)\..*"}
"""Folder of a run -> name of its files, with the update or round."""


def checkpoint_steps(folder: Path) -> dict[Path, int]:
    """Completed updates of every checkpoint file in `folder`, by name."""
    names = {path: re.fullmatch(NUMBERED["checkpoints"], path.name) for path in folder.glob("*.ckpt")}
    return {path: int(match[1]) for path, match in names.items() if match}


def content_digest(value: Any) -> str:
    """A checksum of nested dicts and lists of tensors and plain values."""
    return digest(list(_leaves(value)))


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    import torch  # not for --help

    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(part, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _leaves(part, f"{path}/{index}")
    elif isinstance(value, torch.Tensor):
        data: Any = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        yield path, f"{value.dtype} {tuple(value.shape)} {zlib.crc32(data)}"
    else:
        yield path, repr(value)


def read_checkpoint(path: Path) -> Any:
    """The dict of a checkpoint file, its tensors mapped into memory, on the CPU.

    ValueError if it is damaged, or not the checkpoint of a run.
    """
    import torch

    try:
        with path.open("rb"):  # torch says of any file that it may not read that it is damaged
            whole = zipfile.is_zipfile(path)
        checkpoint: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True) if whole else None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # zip, pickle and torch each have their own
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())[:200]}") from error
    if not whole:
        raise ValueError(f"{path} is damaged: it is no whole zip file, as torch.save writes it")
    if missing := PARTS - checkpoint.keys() if isinstance(checkpoint, dict) else PARTS:
        raise ValueError(f"{path} is not the checkpoint of a run: it has no {', '.join(sorted(missing))}")
    if checkpoint["digest"] != content_digest({key: value for key, value in checkpoint.items() if key != "digest"}):
        raise ValueError(f"{path} is damaged: its contents do not match its checksum")
    return checkpoint


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of the most updates in `folder`/checkpoints; None if there is none. ValueError if it cannot be used."""
    steps = checkpoint_steps(folder / "checkpoints")
    newest = max(steps, key=steps.__getitem__, default=None)
    if newest is not None:
        read_checkpoint(newest)
    return newest


def chosen_checkpoint(folder: Path, resume_from: int | str | None) -> Path | None:
    """The checkpoint that a run resumes from, None to begin at update 0. resume_from: its updates, or "start".

    ValueError if it cannot be used, and, unless `resume_from` says which one is meant, if any other cannot, or if all that
    were written are gone.
    """
    steps = checkpoint_steps(folder / "checkpoints")
    there = f"there is {', '.join(str(step) for step in sorted(steps.values())) or 'no checkpoint'}"
    if resume_from == START:
        return None
    if resume_from is not None:
        path = next((path for path, step in steps.items() if str(step) == str(resume_from)), None)
        if path is None:
            raise ValueError(f"resume_from is {resume_from!r}; it must be the updates of a checkpoint or {START}: {there}")
        return _of_run(path, folder)
    try:
        for path in steps:
            _of_run(path, folder)
    except ValueError as error:
        raise ValueError(f"{error}; resume_from=UPDATES chooses a checkpoint ({there}), resume_from={START} none") from error
    status = read_json(folder / "status.json")
    if not steps and status.get("checkpoint") is not None:
        raise ValueError(
            f"{folder / 'checkpoints'} holds no checkpoint; one was written after update {status['checkpoint']}: put it back, "
            f"or begin again with resume_from={START}"
        )
    return max(steps, key=steps.__getitem__, default=None)


def _of_run(path: Path, folder: Path) -> Path:
    found, own = read_checkpoint(path)["run_id"], read_provenance(folder)["run_id"]
    if found != own:
        raise ValueError(f"{path} is the checkpoint of another run, {found}; this run is {own}")
    return path


def read_provenance(folder: Path) -> dict[str, Any]:
    """provenance.json of a run. ValueError if it is missing or damaged."""
    facts = read_json(folder / "provenance.json")
    if missing := {"run_id", "config", "packages"} - facts.keys():
        raise ValueError(f"{folder / 'provenance.json'} is missing or damaged: it has no {', '.join(sorted(missing))}")
    return facts


def check_unchanged(folder: Path, now: Mapping[str, Any], allow_changes: bool) -> None:
    """ValueError that lists what differs between `now` and the same keys of provenance.json, unless `allow_changes`."""
    recorded = read_provenance(folder)
    before = {key: recorded[key] for key in now if recorded.get(key)}
    if lines := differences(before, {key: json.loads(json.dumps(now[key])) for key in before}):
        if not allow_changes:
            raise ValueError(
                f"{folder} differs from when the run was last started: {'; '.join(lines)}; allow_changes=true continues with "
                "what there is now, and records it"
            )
        log.warning("changed since the run was last started: %s", "; ".join(lines))


def record_run(folder: Path, now: dict[str, Any], resume_step: int | None) -> None:
    """Writes to provenance.json what the run is made of now and, unless `resume_step` is None, what had changed by then."""
    facts = read_provenance(folder)
    now = json.loads(json.dumps(now))
    changes = differences({key: facts[key] for key in now if facts.get(key)}, {key: now[key] for key in now if facts.get(key)})
    entry = {"time": datetime.now().isoformat(timespec="seconds"), "global_step": resume_step, "changes": changes}
    resumed = facts.get("resumed", []) + ([] if resume_step is None else [entry])
    write_json_atomic(folder / "provenance.json", facts | now | {"resumed": resumed})


def set_aside(folder: Path, step: int, rounds: int) -> Path | None:
    """Moves what a run recorded after update `step` and from round `rounds` on to RUN/superseded/<time>.

    Tables are copied whole; the run cuts its own. Returns the folder, None if nothing was there.
    """
    limits = {"checkpoints": step + 1, "updates": step + 1, "rounds": rounds}
    later = [
        path
        for name, pattern in NUMBERED.items()
        for path in sorted((folder / name).glob("*"))
        if (match := re.fullmatch(pattern, path.name)) and int(match[1]) >= limits[name]
    ]
    tables = [path for name in TABLES if (path := folder / name).is_file()]
    if not later and not tables:
        return None
    aside = folder / "superseded" / f"{datetime.now():%Y-%m-%d_%H-%M-%S_%f}"
    for path in [*tables, *later]:
        target = aside / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copy2 if path in tables else shutil.move)(path, target)
    return aside


def differences(before: Mapping[str, Any], now: Mapping[str, Any], what: str = "") -> list[str]:
    """`loss.clip_low: 0.8 -> 0.7` for every value in nested dicts that differs."""
    lines: list[str] = []
    for key in dict.fromkeys([*before, *now]):
        one, other = before.get(key), now.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            lines += differences(one, other, f"{what}{key}.")
        elif repr(one) != repr(other):  # a NaN is not equal to itself
            lines.append(f"{what}{key}: {one!r} -> {other!r}")
    return lines
