"""ShardedGradScaler: torch's GradScaler, which sees through DTensors to all ranks."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.distributed.fsdp import sharded_grad_scaler as theirs

SIGNATURE = inspect.signature(theirs.ShardedGradScaler.__init__)


class ShardedGradScaler(torch.amp.GradScaler):
    """Scale losses under fp16; ranks agree on overflows.

    Arguments are those of torch's class. `process_group` is not needed: gradients are DTensors, which know theirs.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        arguments = SIGNATURE.bind(self, *args, **kwargs).arguments
        super().__init__(**{name: value for name, value in arguments.items() if name not in ("self", "process_group")})

    __init__.__signature__ = SIGNATURE  # type: ignore[attr-defined]
