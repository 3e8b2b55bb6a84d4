"""ShardedGradScaler: torch's GradScaler, which sees through DTensors to all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist


class ShardedGradScaler(torch.amp.GradScaler):
    """Scale losses under fp16; ranks agree on overflows.

    Arguments are those of torch's class. `process_group` is not needed: gradients are DTensors, which know theirs.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            device,
            init_scale=init_scale,
            backoff_factor=backoff_factor,
            growth_factor=growth_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
