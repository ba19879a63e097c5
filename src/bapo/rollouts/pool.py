"""A round's pool and its file: what one policy sampled, scored and ready to train on."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bapo.rollouts.groups import Group, load_groups, save_groups
from bapo.types import Batch, Sample


@dataclass(frozen=True)
class Pool:
    """`batch` [N, T]; `rows` names each of the N sequences as (group uid, sample index, seed); `carried` is unfinished.

    `meta` holds plain values only: round, policy_version, next_prompt, carried (how many groups), tokens_total, sampling,
    tokenizer (where it was loaded from), metrics, timing. again: (round, row of that round's file) of the last sequences, those
    that are not this round's own.
    """

    batch: Batch
    rows: tuple[tuple[str, int, int], ...]
    meta: dict[str, Any]
    carried: tuple[Group, ...] = ()
    again: tuple[tuple[int, int], ...] = ()

    def places(self) -> Tensor:
        """(round, row of that round's file) of every sequence, int64 [N, 2]."""
        own = [(self.meta["round"], row) for row in range(len(self.batch) - len(self.again))]
        return torch.tensor([*own, *self.again], dtype=torch.int64).view(-1, 2)

    def save(self, folder: Path) -> None:
        """Two files, and two for what is carried on; the JSON is renamed into place last: it stands for a complete pool."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors, header = _paths(folder, self.meta["round"])
        partial = tensors.with_suffix(".partial")
        save_file({f.name: getattr(self.batch, f.name).contiguous() for f in fields(Batch)}, str(partial))
        os.replace(partial, tensors)
        if self.carried:
            save_groups(self.carried, _carried_path(folder, self.meta["round"]))
        else:  # what a round that was begun before and not completed has left
            for suffix in (".json", ".safetensors"):
                _carried_path(folder, self.meta["round"]).with_suffix(suffix).unlink(missing_ok=True)
        partial = header.with_suffix(".partial")
        partial.write_text(json.dumps({**self.meta, "rows": self.rows}, indent=1) + "\n")
        os.replace(partial, header)


def _paths(folder: Path, round_index: int) -> tuple[Path, Path]:
    stem = folder / f"round_{round_index:05d}"
    return stem.with_suffix(".safetensors"), stem.with_suffix(".json")


def _carried_path(folder: Path, round_index: int) -> Path:
    return folder / f"carried_{round_index:05d}"


def load_carried(folder: Path, round_index: int) -> list[Group]:
    """The groups that a round left unfinished. Raises ValueError for a damaged or missing file."""
    path, meta = _carried_path(folder, round_index), load_meta(folder, round_index) or {}
    groups = load_groups(path)
    if len(groups) != meta.get("carried", len(groups)):
        raise ValueError(f"{path}.json holds {len(groups)} unfinished groups; round {round_index} left {meta['carried']}")
    return groups


def load_meta(folder: Path, round_index: int) -> dict[str, Any] | None:
    """What is known of a round without its tensors; None if it was never completed."""
    header = _paths(folder, round_index)[1]
    if not header.is_file():
        return None
    try:
        meta = json.loads(header.read_text())
    except ValueError as error:
        raise ValueError(f"{header} is damaged: {error}") from error
    if not isinstance(meta, dict):
        raise ValueError(f"{header} is damaged: it holds no object")
    return meta


def load_pool(folder: Path, round_index: int) -> Pool | None:
    """The pool of a round, or None if it was never completed. Raises ValueError for a damaged file."""
    meta = load_meta(folder, round_index)
    if meta is None:
        return None
    tensors, header = _paths(folder, round_index)
    try:
        batch = Batch(**load_file(str(tensors)))
    except Exception as error:
        raise ValueError(f"{tensors} is damaged: {error}") from error
    try:
        rows = tuple((uid, index, seed) for uid, index, seed in meta.pop("rows"))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{header} is damaged: it does not name its rows") from error
    return Pool(batch, rows, meta)


def collate(rollouts: Sequence[Sample], rewards: Tensor, advantages: Tensor, pad_id: int) -> Batch:
    """Rows of token ids -> tensors [N, T]. What a policy scores comes later.

    `behaviour_logprobs` starts as a copy of `sampler_logprobs`.

    Masks come from lengths, never from token values: the end-of-sequence token is trained on even where pad has the same id.
    """
    lengths = [len(r.prompt_ids) + len(r.response_ids) for r in rollouts]
    shape = (len(rollouts), max(lengths, default=0))
    input_ids = torch.full(shape, pad_id)
    attention_mask = torch.zeros(shape, dtype=torch.bool)
    response_mask = torch.zeros(shape, dtype=torch.bool)
    sampler_logprobs = torch.zeros(shape)
    policy_version = torch.full(shape, -1)
    for row, rollout in enumerate(rollouts):
        assert len(rollout.response_ids) == len(rollout.sampler_logprobs) > 0, rollout.uid
        response = slice(len(rollout.prompt_ids), lengths[row])
        input_ids[row, : lengths[row]] = torch.tensor(rollout.prompt_ids + rollout.response_ids)
        attention_mask[row, : lengths[row]] = True
        response_mask[row, response] = True
        sampler_logprobs[row, response] = torch.tensor(rollout.sampler_logprobs)
        policy_version[row, response] = torch.tensor(rollout.versions)
    return Batch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        response_mask=response_mask,
        behaviour_logprobs=sampler_logprobs.clone(),
        sampler_logprobs=sampler_logprobs,
        behaviour_entropy=torch.zeros(shape),
        reference_logprobs=torch.zeros(shape),
        policy_version=policy_version,
        advantages=advantages.float(),
        rewards=rewards.float(),
    )


def without_truncated(batch: Batch, rollouts: Sequence[Sample]) -> Batch:
    """`batch`, whose rows are `rollouts`, with no token left to train on in those that were cut by max_tokens."""
    cut = torch.tensor([r.finish_reason == "length" for r in rollouts])[:, None]
    fields = ("behaviour_logprobs", "sampler_logprobs", "behaviour_entropy")
    masked: dict[str, Any] = {name: getattr(batch, name).masked_fill(cut, 0.0) for name in fields}
    return replace(
        batch, response_mask=batch.response_mask & ~cut, policy_version=batch.policy_version.masked_fill(cut, -1), **masked
    )
