"""Random numbers that depend on what they are for, never on who asks or in which order."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from its parts, say (run seed, "train", round, prompt uid, sample index)."""
    digest = hashlib.sha256("\x1f".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
