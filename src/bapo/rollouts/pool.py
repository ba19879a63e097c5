"""A round's pool and its file: samples with advantages and behaviour log-probs, ready to train on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bapo.files import digest, file_digest, write_atomic, write_json_atomic
from bapo.rollouts.groups import Group, load_groups, save_groups, stats_of
from bapo.types import Batch, Sample


@dataclass(frozen=True)
class Pool:
    """`batch` [N, T]; `rows` names each of the N sequences as (group uid, sample index, seed); `unfinished`: groups left.

    `meta` holds plain values only: round, policy_version, next_prompt, unfinished (number of groups), tokens_total, sampling,
    tokenizer (where it was loaded from), metrics, timing. again: (round, row of that round's file) of the last sequences, those
    that are not this round's own.
    """

    batch: Batch
    rows: tuple[tuple[str, int, int], ...]
    meta: dict[str, Any]
    unfinished: tuple[Group, ...] = ()
    again: tuple[tuple[int, int], ...] = ()

    def places(self) -> Tensor:
        """(round, row of that round's file) of every sequence, int64 [N, 2]."""
        own = [(self.meta["round"], row) for row in range(len(self.batch) - len(self.again))]
        return torch.tensor([*own, *self.again], dtype=torch.int64).view(-1, 2)

    def save(self, folder: Path, run_id: str = "") -> None:
        """Two files, and two for unfinished groups; the JSON is renamed into place last: it stands for a complete pool.

        It holds the checksums of all four, and the run they belong to.
        """
        tensors, header = _paths(folder, self.meta["round"])
        values = {f.name: getattr(self.batch, f.name).contiguous() for f in fields(Batch)}
        write_atomic(tensors, lambda path: save_file(values, str(path)))
        unfinished = _unfinished_paths(folder, self.meta["round"])
        if self.unfinished:
            save_groups(self.unfinished, unfinished[0].with_suffix(""))
        else:  # files of an earlier attempt at this round, stopped before it was complete
            for path in unfinished:
                path.unlink(missing_ok=True)
        files = {path.name: file_digest(path) for path in (tensors, *unfinished) if path.exists()}
        meta = {**self.meta, "rows": self.rows, "run_id": run_id, "files": files}
        write_json_atomic(header, meta | {"digest": digest(meta)})


def _paths(folder: Path, round_index: int) -> tuple[Path, Path]:
    stem = folder / f"round_{round_index:05d}"
    return stem.with_suffix(".safetensors"), stem.with_suffix(".json")


def _unfinished_paths(folder: Path, round_index: int) -> tuple[Path, Path]:
    stem = folder / f"unfinished_{round_index:05d}"
    return stem.with_suffix(".safetensors"), stem.with_suffix(".json")


def _check_files(folder: Path, meta: Mapping[str, Any], paths: Sequence[Path]) -> None:
    """ValueError for a file that is missing, or not the one that the round's JSON was written for."""
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path} is missing; round {meta['round']} was filed with it")
        if file_digest(path) != meta["files"].get(path.name):
            raise ValueError(f"{path} is damaged: its contents do not match the checksum of round {meta['round']}")


def load_unfinished(folder: Path, round_index: int) -> list[Group]:
    """The groups that a round left unfinished. Raises ValueError for a damaged or missing file."""
    meta = load_meta(folder, round_index)
    if meta is None or not meta["unfinished"]:
        return []
    paths = _unfinished_paths(folder, round_index)
    _check_files(folder, meta, paths)
    return load_groups(paths[0].with_suffix(""))


def load_meta(folder: Path, round_index: int, run_id: str | None = None) -> dict[str, Any] | None:
    """The meta of a round, without its tensors; None if it was never completed. ValueError if it is damaged or misplaced.

    run_id: the run that it must belong to; None for any.
    """
    header = _paths(folder, round_index)[1]
    if not header.is_file():
        return None
    try:
        meta = json.loads(header.read_text())
    except ValueError as error:
        raise ValueError(f"{header} is damaged: {error}") from error
    if not isinstance(meta, dict) or meta.pop("digest", None) != digest(meta):
        raise ValueError(f"{header} is damaged: its contents do not match its checksum")
    if meta["round"] != round_index:
        raise ValueError(f"{header} is the file of round {meta['round']}")
    if run_id is not None and meta["run_id"] != run_id:
        raise ValueError(f"{header} is of another run, {meta['run_id']}; this run is {run_id}")
    return meta


def load_pool(folder: Path, round_index: int, run_id: str | None = None) -> Pool | None:
    """The pool of a round, or None if it was never completed. ValueError as `load_meta`."""
    meta = load_meta(folder, round_index, run_id)
    if meta is None:
        return None
    tensors = _paths(folder, round_index)[0]
    _check_files(folder, meta, [tensors])
    rows = tuple((uid, index, seed) for uid, index, seed in meta.pop("rows"))
    return Pool(Batch(**load_file(str(tensors))), rows, meta)


def collate(samples: Sequence[Sample], pad_id: int, rewards: Tensor | None = None, advantages: Tensor | None = None) -> Batch:
    """Rows of token ids -> tensors [N, T]; policy stats where the samples have them, else 0.

    Masks come from lengths, never from token values: the end-of-sequence token is trained on even where pad has the same id.
    """
    lengths = [len(s.input_ids) for s in samples]
    shape = (len(samples), max(lengths, default=0))
    input_ids = torch.full(shape, pad_id)
    attention_mask = torch.zeros(shape, dtype=torch.bool)
    response_mask = torch.zeros(shape, dtype=torch.bool)
    sampler_logprobs = torch.zeros(shape)
    policy_version = torch.full(shape, -1)
    stats = torch.zeros(3, *shape)
    for row, sample in enumerate(samples):
        assert sample.response_ids, sample.uid
        begin = len(sample.prompt_ids)
        response, known = slice(begin, lengths[row]), stats_of(sample)
        input_ids[row, : lengths[row]] = torch.tensor(sample.input_ids)
        attention_mask[row, : lengths[row]] = True
        response_mask[row, response] = True
        sampler_logprobs[row, response] = torch.tensor(sample.sampler_logprobs)
        policy_version[row, response] = torch.tensor(sample.versions)
        stats[:, row, begin : begin + known.shape[1]] = known
    zeros = torch.zeros(len(samples))
    return Batch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        response_mask=response_mask,
        behaviour_logprobs=stats[0],
        sampler_logprobs=sampler_logprobs,
        behaviour_entropy=stats[1],
        reference_logprobs=stats[2],
        policy_version=policy_version,
        advantages=(zeros if advantages is None else advantages).float(),
        rewards=(zeros if rewards is None else rewards).float(),
    )


def without_truncated(batch: Batch, samples: Sequence[Sample]) -> Batch:
    """`batch`, whose rows are `samples`, with no token left to train on in those that were cut by max_tokens."""
    cut = torch.tensor([s.finish_reason == "length" for s in samples])[:, None]
    fields = ("behaviour_logprobs", "sampler_logprobs", "behaviour_entropy")
    masked: dict[str, Any] = {name: getattr(batch, name).masked_fill(cut, 0.0) for name in fields}
    return replace(
        batch, response_mask=batch.response_mask & ~cut, policy_version=batch.policy_version.masked_fill(cut, -1), **masked
    )
