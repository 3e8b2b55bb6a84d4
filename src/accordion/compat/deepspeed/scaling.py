"""Loss scaling under fp16 by DeepSpeed's rules, which torch's GradScaler has in part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from accordion.errors import AccordionError


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """The `fp16` section. `fixed`: the scale does not move; `hysteresis`: overflows before it is halved."""

    initial: float
    fixed: bool
    window: int
    hysteresis: int
    consecutive_hysteresis: bool
    least: float


class LossScaler(torch.amp.GradScaler):
    """torch's GradScaler with hysteresis, a least scale and fixed scales. Owns how many overflows are left."""

    def __init__(self, rules: LossScale | None, device_type: str) -> None:
        self.rules = rules
        self._left = 1 if rules is None else rules.hysteresis
        if rules is None:
            super().__init__(device_type, enabled=False)
        else:
            super().__init__(device_type, init_scale=rules.initial, growth_interval=rules.window)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """After each step. Raises `AccordionError` on all ranks where a dynamic scale would fall below its least."""
        rules = self.rules
        if rules is None or new_scale is not None:
            super().update(new_scale)
            return
        before = self.get_scale()
        if rules.fixed:
            super().update(before)
            return
        super().update()
        after = self.get_scale()
        if after < before:
            super().update(self._after_overflow(before, rules))
        elif rules.consecutive_hysteresis or after > before:
            self._left = rules.hysteresis

    def _after_overflow(self, scale: float, rules: LossScale) -> float:
        if self._left > 1:
            self._left -= 1
            return scale
        if scale <= rules.least:
            raise AccordionError(
                f"gradients overflow at the least loss scale, {scale}; lower the learning rate, or train in bf16."
            )
        return max(scale * self.get_backoff_factor(), rules.least)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "hysteresis_left": self._left} if state else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        self._left = state.pop("hysteresis_left", self._left)
        super().load_state_dict(state)
