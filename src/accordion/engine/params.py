"""One tensor of the model: its sharded parameter, and the places where modules read it."""

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
    """Protocol for other parallelism: a full tensor of the engine is itself this rank's part of a larger tensor.

    `communicators`: of the ranks over which the larger tensor is cut. `is_first`: True on the first rank of each of them.
    """

    @property
    def communicators(self) -> Sequence[Communicator]: ...

    @property
    def is_first(self) -> bool: ...

    def __call__(self, full: Tensor) -> Tensor:
        """Return the tensor that modules see in place of `full`, such as a DTensor, connected to `full` in autograd's graph."""

    def seen(self, full: Tensor) -> Tensor:
        """Return the tensor that modules see in place of `full`, not connected to autograd's graph."""

    def whole(self, full: Tensor) -> Tensor:
        """Return the larger tensor, of which `full` is this rank's part. A collective."""

    def part_of(self, whole: Tensor) -> Tensor:
        """Return this rank's part of the larger tensor `whole` as a view."""


@dataclass(slots=True, weakref_slot=True)
class Param:
    """One tensor of the model: its sharded parameter, and each (module, attribute) where a module reads it.

    `grad_dtype`: of the sharded gradient; None keeps that of the sum. `grad_like`: a DTensor with that dtype and placement.
    `extension`: makes the tensor subclass that modules see out of a gathered tensor; `around` wraps it as the DTensor of other
    parallelism. `context`: the ranks over which the parameter is sharded, those of its group.
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
    """Return this rank's rows of `whole`, the tensor of the model without any parallelism, as a view."""
    full = whole if param.around is None else param.around.part_of(whole)
    return own_rows(full, param.cut, param.context)
