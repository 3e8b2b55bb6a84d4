"""FullyShardedDataParallel run by Accordion's engine: import from `accordion.compat.fsdp1` instead of `torch.distributed.fsdp`.

Submodules have torch's names: `accordion.compat.fsdp1.wrap`, `.sharded_grad_scaler`, `.fully_sharded_data_parallel`, `.api`.
"""

from accordion.compat.fsdp1 import api
from accordion.compat.fsdp1.api import *  # noqa: F403
from accordion.compat.fsdp1.fully_sharded_data_parallel import FullyShardedDataParallel
from accordion.compat.fsdp1.sharded_grad_scaler import ShardedGradScaler

__all__ = ["FullyShardedDataParallel", "ShardedGradScaler"]
__all__ += api.__all__
