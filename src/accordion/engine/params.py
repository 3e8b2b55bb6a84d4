"""A sharded parameter of the model, the modules that read it, and the DTensor that they see under tensor parallelism."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from accordion.engine.communicator import Communicator
from accordion.engine.context import ShardingContext, own_rows
from accordion.engine.layout import Cut


class TensorParallelView:
    """The DTensor that a parameter was before `shard` (tensor parallelism); the engine shards its local tensor. Called with the
    gathered local tensor, this object returns the DTensor, connected to that tensor in autograd's graph. `mesh`, `placements`,
    `shape`: the DTensor's. `communicators`: one for each mesh axis of several ranks over which the DTensor is divided."""

    def __init__(
        self, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], device: torch.device
    ) -> None:
        self.mesh, self.placements, self.shape = mesh, tuple(placements), torch.Size(shape)
        self.stride = torch.empty(self.shape, device="meta").stride()
        cut = [i for i, p in enumerate(self.placements) if isinstance(p, Shard)]
        self.communicators = [Communicator(mesh.get_group(i), device) for i in cut if mesh.size(i) > 1]

    def __call__(self, full: Tensor) -> DTensor:
        return DTensor.from_local(
            full, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def whole(self, full: Tensor) -> Tensor:
        """Return `full_tensor()` of the DTensor whose local tensor on each rank of `mesh` is `full`. A collective."""
        return self(full.detach()).full_tensor()

    def part_of(self, whole: Tensor) -> Tensor:
        """Return this rank's local tensor as a view of the full tensor `whole`."""
        for i, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                c = Cut(tuple(whole.shape), placement.dim % len(whole.shape), self.mesh.size(i))
                rank = self.mesh.get_local_rank(i)
                whole = whole.narrow(placement.dim, min(rank * c.chunk, c.rows), c.rows_of(rank))
        return whole

    @property
    def is_first(self) -> bool:
        """True on the first rank of `mesh`."""
        return not any(self.mesh.get_coordinate() or ())


@dataclass(slots=True, weakref_slot=True)
class Param:
    """A parameter of the model and its sharded form. `places`: (weak reference to a module, name) of each attribute that is it.

    `cut`: the rows that each rank keeps. `grad_dtype`: dtype of the sharded gradient; None: that in which it is summed. Modules
    see the gathered tensor, or what `extension` (a tensor subclass) and then `around` (tensor parallelism) return for it. Set
    later: `context`, the ranks that share the rows, by the `Group`; `sharded`, by the code that replaces the parameter; and
    `grad_like`, a DTensor with dtype and placement of the gradient, by the `Unit`.
    """

    name: str
    places: list[tuple[weakref.ref[nn.Module], str]]
    cut: Cut
    dtype: torch.dtype  # of the shard
    requires_grad: bool
    grad_dtype: torch.dtype | None
    extension: Callable[[Tensor], Tensor] | None = None
    around: TensorParallelView | None = None
    is_filled: bool = True  # False if it was on the meta device at `shard`
    sharded: nn.Parameter = field(init=False)
    grad_like: Tensor = field(init=False, repr=False)
    context: ShardingContext = field(init=False, repr=False)


def own_part(whole: Tensor, param: Param) -> Tensor:
    """Return the rows of `param` that this rank keeps, as a view of `whole`, the tensor of the unsharded model."""
    full = whole if param.around is None else param.around.part_of(whole)
    return own_rows(full, param.cut, param.context)
