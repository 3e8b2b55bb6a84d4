"""Re-export torch's classes of options for FullyShardedDataParallel."""

from torch.distributed.fsdp import OptimStateKeyType, api
from torch.distributed.fsdp.api import *  # noqa: F403

__all__ = ["OptimStateKeyType"]
__all__ += api.__all__
