"""What a trace is of: how a model is trained, and what an engine makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from accordion.config import FULL_SHARD, Strategy
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
    """How it is trained. `engine`: accordion, or fsdp2 in its place. `sharding`: the keyword arguments of `shard`.

    `ranks`: those with data of their own. `node`: of them, on one machine. `replicas`: of a hybrid strategy; 0: one a machine.
    `device`: "cuda" traces what a GPU would do; "cpu" the engine on CPU ranks, over gloo. `optimizer`: of OPTIMIZERS. `no_sync`:
    micro-batches but the last do not reduce. `expert_parallel`: neighbours that share the experts of a mixture.
    """

    engine: str = "accordion"
    ranks: int = 8
    node: int = 8
    replicas: int = 0
    expert_parallel: int = 1
    accumulate: int = 1
    no_sync: bool = False
    optimizer: str = "adamw"
    sharding: Mapping[str, Any] = field(default_factory=dict)
    device: Literal["cuda", "cpu"] = "cuda"

    @property
    def units(self) -> UnitChoice:
        """What is gathered together. FSDP2's programs name the blocks, and the root gathers the rest."""
        units: UnitChoice = self.sharding.get("units")
        return only_blocks() if units is None and self.engine == "fsdp2" else units

    @property
    def strategy(self) -> Strategy:
        strategy: Strategy = self.sharding.get("strategy", FULL_SHARD)
        return strategy

    @property
    def shards(self) -> int:
        """Ranks over which parameters are cut."""
        if not self.strategy.hybrid:
            return self.ranks
        return self.ranks // self.replicas if self.replicas else min(self.ranks, self.node)


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
