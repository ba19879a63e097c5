"""Names for runs that are shown together: what their configs do not share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


def distinguish(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """One label per config: the settings that all of them have and that differ, `BapoLoss, seed 1`.

    Where that leaves some alike, what tells those apart comes after it. Equal configs have equal labels; "" for a single one.
    """
    flat = [flatten(config) for config in configs]
    shared = [key for key in flat[0] if all(key in other for other in flat)]
    differing = [key for key in shared if key != "trainer.max_rounds" and len({repr(other[key]) for other in flat}) > 1]
    labels = [", ".join(_setting(key, other[key]) for key in differing) for other in flat]
    for label, count in Counter(labels).items():
        if 1 < count < len(labels):
            alike = [index for index, other in enumerate(labels) if other == label]
            for index, more in zip(alike, distinguish([configs[index] for index in alike]), strict=True):
                labels[index] = ", ".join(filter(None, (label, more)))
    return labels


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"loss": {"clip_low": 0.8}} -> {"loss.clip_low": 0.8}; lists are values.

    What is null has a null `_target_` too, so that it differs from a section of the same name.
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat |= {f"{prefix}{key}": value} | ({f"{prefix}{key}._target_": None} if value is None else {})
    return flat


def _setting(key: str, value: object) -> str:
    name = key.rsplit(".", 1)[-1]
    if name == "_target_" and value is None:
        return f"no {key.split('.')[-2]}"
    return str(value).rsplit(".", 1)[-1] if name == "_target_" else f"{name} {value}"
