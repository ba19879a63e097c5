"""A clip range of one width that follows the balance of masses from update to update; a community baseline, without a paper."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bapo.losses.clip_bounds import positive_ratio
from bapo.losses.surrogate import MassRule, clipped_objective, ratio_and_advantages, token_weights
from bapo.losses.token_loss import clipped_surrogate_loss
from bapo.ops.masked import keep
from bapo.protocols import Loss
from bapo.types import ClipBounds, LossInputs, LossOutput


@dataclass
class AdaptiveRatioLoss(Loss):
    """PPO's clip with a width e that grows while negative tokens outweigh positive ones, and shrinks once they are few.

    g = N / P, each a sum of |clipped objective| at (1 - e, 1 + e). If g > 1, negative tokens get the width e (1 + g / 2) in
    this update: bounds (1 - e (1 + g / 2), 1 + e), the lower one not below 0. After it e <- min(grow e, widest) if g > 1,
    e <- max(shrink e, narrowest) if g < 0.5. Without positive mass g is infinite, without any mass 1. The write-up adds an
    entropy bonus of 0.01, which is objective.entropy_bonus here. Masses are the surrogate's.

    width: the first e, as a ratio's distance from 1. e is training state, so the class is not frozen: every `choose` moves it.
    It stays on the tally's device until `state_dict` reads it.
    Errors: ValueError unless 0 < narrowest <= width <= widest < 1, grow >= 1 and 0 < shrink <= 1.
    """

    width: float = 0.2
    narrowest: float = 0.1
    widest: float = 0.5
    grow: float = 1.1
    shrink: float = 0.9
    adaptive = True
    _width: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.narrowest > 0:
            raise ValueError(f"narrowest is {self.narrowest}; it must be > 0")
        if not self.widest < 1:
            raise ValueError(f"widest is {self.widest}; it must be < 1, so that the lower bound stays above 0")
        if not 1 <= self.grow < math.inf:
            raise ValueError(f"grow is {self.grow}; it must be >= 1 and finite")
        if not 0 < self.shrink <= 1:
            raise ValueError(f"shrink is {self.shrink}; it must be in (0, 1]")
        self.load_state_dict({"width": self.width})

    def state_dict(self) -> dict[str, float]:
        """{"width": e}: the width of the next update; reads the device."""
        return {"width": float(self._width)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Errors: ValueError for a width outside [narrowest, widest]."""
        if not self.narrowest <= state["width"] <= self.widest:
            raise ValueError(f"width is {state['width']}; it must be in [{self.narrowest}, {self.widest}]")
        self._width = torch.tensor(state["width"], dtype=torch.float64)

    @torch.no_grad()
    def tally(self, inputs: LossInputs) -> Tensor:
        """P and N at (1 - e, 1 + e), float64 [2]."""
        ratio, _, advantages = ratio_and_advantages(inputs)
        width = self._on(ratio.device)
        objective = clipped_objective(ratio, advantages, 1 - width, 1 + width).double() * token_weights(inputs).double()
        return torch.stack([keep(objective, advantages > 0).sum(), -keep(objective, advantages < 0).sum()])

    @torch.no_grad()
    def choose(self, tally: Tensor) -> ClipBounds:
        """The bounds of this update; moves the width to that of the next one."""
        positive, negative = tally
        width = self._on(tally.device)
        imbalance = torch.where(positive + negative == 0, 1.0, negative / positive)
        heavy = imbalance > 1
        clip_low = 1 - torch.where(heavy, width * (1 + imbalance / 2), width)
        wider, narrower = (width * self.grow).clamp(max=self.widest), (width * self.shrink).clamp(min=self.narrowest)
        self._width = torch.where(heavy, wider, torch.where(imbalance < 0.5, narrower, width))
        start = {"bounds/positive_ratio_start": positive_ratio(positive, negative)}
        return ClipBounds(clip_low.clamp(min=0), 1 + width, metrics=start)

    def __call__(self, inputs: LossInputs, bounds: ClipBounds, denominator: Tensor) -> LossOutput:
        return clipped_surrogate_loss(inputs, bounds, denominator, MassRule("surrogate"))

    def _on(self, device: torch.device) -> Tensor:
        self._width = self._width.to(device)
        return self._width
