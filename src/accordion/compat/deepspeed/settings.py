"""What a DeepSpeed configuration says, in the words of this package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accordion.compat.deepspeed.optimizers import OptimizerChoice
from accordion.compat.deepspeed.scaling import LossScale, LossScaler
from accordion.compat.deepspeed.schedules import Schedule
from accordion.errors import UsageError
from accordion.sharding import Sharding


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """`train_batch` = `micro_batch` x `accumulation` x ranks, in samples."""

    train_batch: int
    micro_batch: int
    accumulation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A `ds_config.json`, read.

    `clip`: largest gradient norm, 0: no clipping. `optimizer`, `scheduler`: None where the file leaves them to the program.
    `group_ranks`: ranks that hold one sharded copy, where the file asks for a hybrid. `said`: keys that stand in the file,
    dotted, with their values after `"auto"`; `autos`: those that were. `ignored`: keys in it that are not needed here.
    """

    sharding: Sharding
    clip: float
    optimizer: OptimizerChoice | None
    scheduler: Schedule | None
    loss_scale: LossScale | None
    group_ranks: int | None
    said: dict[str, Any]
    autos: tuple[str, ...]
    ignored: tuple[str, ...]

    def mesh(self, device_type: str = "cpu") -> DeviceMesh | None:
        """The mesh that `shard` needs, over all ranks; None where its own default will do. Call it on every rank."""
        if self.group_ranks is None:
            return None
        replicas = self.replicas(dist.get_world_size())
        return init_device_mesh(device_type, (replicas, self.group_ranks), mesh_dim_names=("replicate", "shard"))

    def replicas(self, num_ranks: int) -> int:
        """Sharded copies of the model over `num_ranks` ranks."""
        if self.group_ranks is None:
            return 1
        if num_ranks % self.group_ranks:
            raise UsageError(
                f"zero_optimization asks for groups of {self.group_ranks} ranks, which do not divide {num_ranks} ranks; take a "
                f"divisor of {num_ranks}."
            )
        return num_ranks // self.group_ranks

    def scaler(self, device_type: str = "cpu") -> LossScaler:
        """The gradient scaler; one that does nothing unless fp16 is enabled."""
        return LossScaler(self.loss_scale, device_type)

    def batch(self, num_ranks: int) -> BatchSizes:
        """The three batch sizes, what is missing from what is there. Raises `UsageError` where they do not fit `num_ranks`."""
        keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        train, micro, accumulation = (self.said.get(key) for key in keys)
        if train is None and micro is None:
            raise UsageError(f"neither {keys[0]} nor {keys[1]} is given; give one of them.")
        if accumulation is None:
            accumulation = 1 if train is None or micro is None else train // micro // num_ranks
        if micro is None:
            assert train is not None
            micro = train // num_ranks // accumulation
        if train is None:
            train = micro * accumulation * num_ranks
        if micro < 1 or accumulation < 1 or train != micro * accumulation * num_ranks:
            raise UsageError(
                f"{keys[0]} is {train}, which is not {keys[1]} x {keys[2]} x ranks = {micro} x {accumulation} x {num_ranks}; "
                "leave one of them out, or change the number of ranks."
            )
        return BatchSizes(train_batch=train, micro_batch=micro, accumulation=accumulation)
