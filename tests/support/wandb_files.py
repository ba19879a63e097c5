"""Reads W&B's files of offline runs."""

from __future__ import annotations

import struct
from pathlib import Path


def wandb_records(run_dir: Path) -> list:
    """The records of an offline run's file: LevelDB log blocks of 32 KiB after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    data, position, whole, records = file.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            records.append(Record.FromString(whole))
            whole = b""
    return records
