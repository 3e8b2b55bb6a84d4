"""Plain data for a trace: the model with its loss and batches, how it is trained, and the optimizer of the sharded model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from accordion.config import Strategy
from accordion.sharding import Sharding


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The training to trace: functions that create the model and its micro-batches, and that compute its loss."""

    make: Callable[[], nn.Module]  # creates the model on the meta device; may be called many times
    batch: Callable[[], Any]  # creates a micro-batch, which is passed to `loss`; its tensors need no values
    loss: Callable[[nn.Module, Any], Tensor]  # (model, micro-batch) -> loss, a tensor of one element


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """The setup in which a `Subject` is trained: engine, sharding, numbers of ranks, accumulation and optimizer."""

    engine: str = "accordion"  # or "fsdp2"
    ranks: int = 8  # data parallel ranks
    node: int = 8  # ranks of one machine
    replicas: int = 0  # copies of the model under a hybrid strategy; 0: one for each machine
    expert_parallel: int = 1  # neighbouring ranks that share the experts of a mixture
    sequence: int = 1  # neighbouring ranks that share each sequence
    accumulate: int = 1  # micro-batches per step
    no_sync: bool = False  # only the last micro-batch reduces gradients
    optimizer: str = "adamw"  # a key of `OPTIMIZERS`
    sharding: Sharding = field(default_factory=Sharding)
    # FSDP2's `reshard_after_forward` of the root (None: its default, which keeps the root unsharded) and of the last unit.
    reshard_root: bool | None = None
    reshard_last: bool = True
    device: Literal["cuda", "cpu"] = "cuda"  # "cpu": the engine on CPU ranks with gloo

    @property
    def strategy(self) -> Strategy:
        return self.sharding.strategy

    @property
    def shards(self) -> int:
        """Number of ranks over which the strategy shards: all, or under a hybrid strategy those of one replica."""
        if not self.strategy.hybrid:
            return self.ranks
        return self.ranks // self.replicas if self.replicas else min(self.ranks, self.node)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedTraining:
    """Result of an engine's `build`: the optimizer of the sharded model, and functions that a trace calls to run steps."""

    optimizer: torch.optim.Optimizer
    units: list[str]  # names of the units, by index
    clip: Callable[[float], object]  # clips the gradients to a total norm
    no_sync: Callable[[], AbstractContextManager[None]]  # context in which gradients accumulate without communication
    owners: Callable[[], dict[int, int]]  # after a step: storage key -> unit index, of storages that persist
