"""Policy losses. Each one counts, chooses its bounds once per update, and is then called on every micro-batch."""

from bapo.losses.bapo import BapoLoss
from bapo.losses.clip_bounds import BoundRange
from bapo.losses.fixed_clip import FixedClipLoss
from bapo.losses.surrogate import clipped_objective, clipped_surrogate_loss, importance_ratio, is_clipped

__all__ = [
    "BapoLoss",
    "BoundRange",
    "FixedClipLoss",
    "clipped_objective",
    "clipped_surrogate_loss",
    "importance_ratio",
    "is_clipped",
]
