"""Loss scaling under fp16 by DeepSpeed's rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from accordion.errors import AccordionError


class LossScaler(torch.amp.GradScaler):
    """torch's GradScaler with DeepSpeed's fixed scale and least scale. Does nothing unless fp16 is enabled. `fp16`: the section
    `fp16` of a `ds_config.json`."""

    def __init__(self, fp16: Mapping[str, Any], device_type: str) -> None:
        self._fixed = float(fp16.get("loss_scale", 0)) or None
        self._least = float(fp16.get("min_loss_scale", 1))
        super().__init__(
            device_type,
            init_scale=self._fixed or 2.0 ** fp16.get("initial_scale_power", 16),
            growth_interval=fp16.get("loss_scale_window", 1000),
            enabled=fp16.get("enabled", False),
        )

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale; call this after each step. Raises `AccordionError` on all ranks if gradients overflow although the
        scale is the least one."""
        before = self.get_scale()
        super().update(self._fixed if new_scale is None else new_scale)
        if not self.is_enabled() or new_scale is not None or self.get_scale() >= min(before, self._least):
            return
        if before <= self._least:
            raise AccordionError(
                f"gradients overflow at the least loss scale, {before}. Lower the learning rate, or train in bf16."
            )
        super().update(self._least)
