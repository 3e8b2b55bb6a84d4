"""What a trace is of: how a model is trained, and what an engine makes of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from accordion.config import Strategy
from accordion.sharding import Sharding
from accordion.units import UnitChoice, only_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is trained. `make`: the model on the meta device. `batch`: called for each micro-batch; what it
    gives is handed to `loss`. `make` may be called many times. Tensors that `batch` makes need no values. `attention_share`: of
    attention's operations, what is taken where several samples lie in a row and each looks at itself alone.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    attention_share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """How it is trained. `engine`: accordion, or fsdp2 in its place. `sharding`: as for `accordion.shard`, or its fields.

    `ranks`: those with data of their own. `node`: of them, on one machine. `replicas`: of a hybrid strategy; 0: one a machine.
    `device`: "cuda" traces what a GPU would do; "cpu" the engine on CPU ranks, over gloo. `optimizer`: of OPTIMIZERS. `no_sync`:
    micro-batches but the last do not reduce. `expert_parallel`: neighbours that share the experts of a mixture.
    `reshard_root`, `reshard_last`: FSDP2's `reshard_after_forward` of the root (None: its default, which keeps the root) and of
    the last unit.
    """

    engine: str = "accordion"
    ranks: int = 8
    node: int = 8
    replicas: int = 0
    expert_parallel: int = 1
    accumulate: int = 1
    no_sync: bool = False
    optimizer: str = "adamw"
    sharding: Sharding = field(default_factory=Sharding)
    reshard_root: bool | None = None
    reshard_last: bool = True
    device: Literal["cuda", "cpu"] = "cuda"

    def __post_init__(self) -> None:
        sharding: Any = self.sharding
        if not isinstance(sharding, Sharding):
            object.__setattr__(self, "sharding", Sharding.from_config(sharding))

    @property
    def units(self) -> UnitChoice:
        """What is gathered together. FSDP2's programs name the blocks, and the root gathers the rest."""
        return only_blocks() if self.sharding.units is None and self.engine == "fsdp2" else self.sharding.units

    @property
    def strategy(self) -> Strategy:
        return self.sharding.strategy

    @property
    def shards(self) -> int:
        """Ranks over which parameters are cut."""
        if not self.strategy.hybrid:
            return self.ranks
        return self.ranks // self.replicas if self.replicas else min(self.ranks, self.node)

    @property
    def copy_ranks(self) -> int:
        """Neighbours that keep one copy of each unit from its forward to its backward; 0: none does."""
        return copy_ranks(self.sharding)


COPIES = "secondary"  # the field of a sharding for them


def copy_ranks(sharding: Sharding) -> int:
    """Return how many ranks keep one copy of each unit from its forward to its backward; 0: none does."""
    return sharding.secondary or 0


def with_copies(sharding: Sharding, ranks: int) -> Sharding:
    """Return `sharding` with copies that so many ranks keep from a forward to its backward; 0: none."""
    return replace(sharding, secondary=ranks or None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """A model under an engine, ready for steps. `units`: their names. `clip`: the total norm of gradients to at most that.

    `no_sync`: accumulates without communicating. `owners`: the unit of each storage that stays between steps, by its key.
    """

    optimizer: torch.optim.Optimizer
    units: list[str]
    clip: Callable[[float], object]
    no_sync: Callable[[], AbstractContextManager[None]]
    owners: Callable[[], dict[int, int]]
