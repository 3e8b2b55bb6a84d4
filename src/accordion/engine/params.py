"""A sharded parameter of the model, and the modules that read it."""

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
    """Protocol for a parameter whose gathered tensor is only this rank's part of a larger one, as in tensor parallelism.

    `communicators`: of the ranks over which the larger tensor is divided. `is_first`: True if this is the first rank of each.
    """

    @property
    def communicators(self) -> Sequence[Communicator]: ...

    @property
    def is_first(self) -> bool: ...

    def __call__(self, full: Tensor) -> Tensor:
        """Return the tensor that modules see in place of `full`, such as a DTensor, connected to `full` in autograd's graph."""

    def whole(self, full: Tensor) -> Tensor:
        """Return the larger tensor, made of the part `full` of each rank. A collective."""

    def part_of(self, whole: Tensor) -> Tensor:
        """Return this rank's part of the larger tensor `whole` as a view."""


@dataclass(slots=True, weakref_slot=True)
class Param:
    """A parameter of the model and its sharded form. `places`: (module, attribute name) of each module that reads it.

    `cut`: the rows that each rank keeps. `grad_dtype`: dtype of the sharded gradient; None: that in which it is summed.
    `grad_like`: a DTensor with dtype and placement of the gradient. `extension`: makes the tensor subclass that modules see out
    of a gathered tensor. `around`: makes the DTensor of tensor parallelism out of it. `context`: the ranks that share the rows.
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
    """Return the rows of `param` that this rank keeps, as a view of `whole`, the tensor of the unsharded model."""
    full = whole if param.around is None else param.around.part_of(whole)
    return own_rows(full, param.cut, param.context)
