"""Policy losses: tally every micro-batch, choose the bounds once per update, then call the loss on every micro-batch."""

from bapo.losses.adaptive_ratio import AdaptiveRatioLoss
from bapo.losses.bapo import BapoLoss
from bapo.losses.cispo import CispoLoss
from bapo.losses.clip_bounds import BoundRange
from bapo.losses.dppo import DppoLoss
from bapo.losses.fixed_clip import FixedClipLoss
from bapo.losses.functional import PRESETS, bapo_loss, search_clip_bounds
from bapo.losses.gspo import GspoLoss
from bapo.losses.m2po import M2poLoss
from bapo.losses.sapo import SapoLoss
from bapo.losses.surrogate import MassRule, clipped_objective, importance_ratio, is_clipped, ratio_and_advantages
from bapo.losses.token_loss import clipped_surrogate_loss, constant_bounds, token_loss

__all__ = [
    "PRESETS",
    "AdaptiveRatioLoss",
    "BapoLoss",
    "BoundRange",
    "CispoLoss",
    "DppoLoss",
    "FixedClipLoss",
    "GspoLoss",
    "M2poLoss",
    "MassRule",
    "SapoLoss",
    "bapo_loss",
    "clipped_objective",
    "clipped_surrogate_loss",
    "constant_bounds",
    "importance_ratio",
    "is_clipped",
    "ratio_and_advantages",
    "search_clip_bounds",
    "token_loss",
]
