"""One tensor of the model as the engine knows it: its sharded parameter, and what stands for it in modules."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from accordion.engine.communicator import Communicator
from accordion.engine.context import ShardingContext, own_rows
from accordion.engine.layout import Cut


class ParamView(Protocol):
    """What modules see around a full tensor that is itself this rank's part of a larger one: other parallelism.

    `communicators`: over whose ranks it is cut beyond the engine's. `is_first`: this rank is the first on each of them.
    """

    @property
    def communicators(self) -> Sequence[Communicator]: ...

    @property
    def is_first(self) -> bool: ...

    def __call__(self, full: Tensor) -> Tensor:
        """What stands for a full tensor in a module, with a gradient that is the full tensor's."""

    def seen(self, full: Tensor) -> Tensor:
        """The same without a gradient."""

    def whole(self, full: Tensor) -> Tensor:
        """The tensor of the model without any parallelism. A collective."""

    def part_of(self, whole: Tensor) -> Tensor:
        """This rank's part of such a tensor, a view."""


@dataclass(slots=True, weakref_slot=True)
class Param:
    """One tensor of the model: its sharded parameter and every place where a module reads it.

    `grad_dtype`: of its sharded gradient; None takes that of the sum as it is. `grad_like`: a DTensor placed as that lies.
    `extension`: makes of a gathered tensor what stands for it in modules, a tensor subclass. `around`: the DTensor of other
    parallelism around that. `context`: over which ranks it lies, that of its group.
    """

    name: str
    places: list[tuple[weakref.ref[nn.Module], str]]
    cut: Cut
    dtype: torch.dtype  # of the shard
    requires_grad: bool
    grad_dtype: torch.dtype | None
    extension: Callable[[Tensor], Tensor] | None = None
    around: ParamView | None = None
    sharded: nn.Parameter = field(init=False)
    grad_like: Tensor = field(init=False, repr=False)
    context: ShardingContext = field(init=False, repr=False)


def own_part(whole: Tensor, param: Param) -> Tensor:
    """This rank's rows of a parameter of the model without any parallelism, a view."""
    mine = whole if param.around is None else param.around.part_of(whole)
    return own_rows(mine, param.cut, param.context)
