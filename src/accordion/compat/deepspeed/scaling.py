"""Loss scaling under fp16 by DeepSpeed's rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from accordion.errors import AccordionError


class LossScaler(torch.amp.GradScaler):
    """torch's GradScaler with DeepSpeed's hysteresis, least scale and fixed scale. Does nothing unless fp16 is enabled. `fp16`:
    the section `fp16` of a `ds_config.json`."""

    def __init__(self, fp16: Mapping[str, Any], device_type: str) -> None:
        fixed = float(fp16.get("loss_scale", 0))
        self._is_fixed, self._least = fixed > 0, float(fp16.get("min_loss_scale", 1))
        # Number of overflows before the scale is halved, and how many of them are left.
        self._hysteresis = self._left = fp16.get("hysteresis", 2)
        self._resets = fp16.get("consecutive_hysteresis", False)
        super().__init__(
            device_type,
            init_scale=fixed or 2.0 ** fp16.get("initial_scale_power", 16),
            growth_interval=fp16.get("loss_scale_window", 1000),
            enabled=fp16.get("enabled", False),
        )

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale; call after each step. Raises `AccordionError` on all ranks on an overflow at the least scale."""
        if not self.is_enabled() or new_scale is not None:
            super().update(new_scale)
            return
        before = self.get_scale()
        if self._is_fixed:
            super().update(before)
            return
        super().update()
        after = self.get_scale()
        if after >= before:
            if self._resets or after > before:
                self._left = self._hysteresis
        elif self._left > 1:
            self._left -= 1
            super().update(before)
        elif before <= self._least:
            raise AccordionError(
                f"gradients overflow at the least loss scale, {before}. Lower the learning rate, or train in bf16."
            )
        else:
            super().update(max(before * self.get_backoff_factor(), self._least))

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "hysteresis_left": self._left} if state else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        self._left = state.pop("hysteresis_left", self._left)
        super().load_state_dict(state)
