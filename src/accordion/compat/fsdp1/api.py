"""Re-export torch's option classes of FullyShardedDataParallel, such as ShardingStrategy and MixedPrecision."""

from torch.distributed.fsdp import OptimStateKeyType, api
from torch.distributed.fsdp.api import *  # noqa: F403

__all__ = ["OptimStateKeyType"]
__all__ += api.__all__
