"""The plain data that FullyShardedDataParallel takes: torch's own classes."""

from torch.distributed.fsdp import OptimStateKeyType, api
from torch.distributed.fsdp.api import *  # noqa: F403

__all__ = ["OptimStateKeyType"]
__all__ += api.__all__
