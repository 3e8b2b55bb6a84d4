"""ShardedGradScaler: torch's GradScaler. It finds the overflows of all ranks, because gradients are DTensors."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.distributed.fsdp import sharded_grad_scaler as theirs

SIGNATURE = inspect.signature(theirs.ShardedGradScaler.__init__)


class ShardedGradScaler(torch.amp.GradScaler):
    """Gradient scaler for fp16 with the arguments of torch's ShardedGradScaler. If gradients overflow on one rank, all ranks
    skip the step. `process_group` is ignored, since gradients are DTensors, whose mesh has groups of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        arguments = SIGNATURE.bind(self, *args, **kwargs).arguments
        super().__init__(**{name: value for name, value in arguments.items() if name not in ("self", "process_group")})

    __init__.__signature__ = SIGNATURE  # type: ignore[attr-defined]
