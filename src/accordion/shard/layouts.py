"""How one sharded parameter lies: mesh, placements and rows, on a mesh of its own and beside other parallelism too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from accordion import _torch
from accordion.engine.layout import Cut
from accordion.shard.tensor_parallel import TensorParallelView
from accordion.shard.topology import device_of


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Mesh and placements of the sharded parameter, how its local tensor before was cut, and what modules see around it.

    `over`: the data-parallel axes, one that shards or two. `rank`: this one among those that have rows of the cut.
    `keeps_dtype`: it computes in its own dtype, whatever the policy says.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    cut: Cut
    rank: int
    over: DeviceMesh
    around: TensorParallelView | None = None
    keeps_dtype: bool = False

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of this rank's part."""
        return self.cut.local_shape(self.rank)


def local_part(param: nn.Parameter) -> Tensor:
    """What data parallelism cuts: the parameter, or this rank's part of it under other parallelism."""
    return _torch.local_of(param).detach() if isinstance(param, DTensor) else param.detach()


def layout_of(param: Any, c: Cut, mesh: DeviceMesh, own: Sequence[Placement]) -> Layout:
    """Where a parameter lies that `mesh` cuts by `own`; a DTensor of other parallelism, on axes of its own, lies on both."""
    rank = mesh.get_local_rank(mesh.ndim - 1)
    if not isinstance(param, DTensor):
        return Layout(mesh, tuple(own), c, rank, mesh)
    inner, placements = param.device_mesh, param.placements
    outer = list(own)
    if isinstance(outer[-1], Shard):
        outer[-1] = cut_on(c, placements, [inner.size(i) for i in range(inner.ndim)])
    around = TensorParallelView(inner, placements, param.shape, device_of(mesh))
    return Layout(_torch.joined_mesh(mesh, inner), (*outer, *placements), c, rank, mesh, around)


def cut_on(c: Cut, after: Sequence[Placement], sizes: Sequence[int]) -> Placement:
    """The placement of a cut that is made on what the axes to its right have left: strided where they cut the same dim."""
    if c.dim is None:
        return Replicate()
    split = 1
    for placement, size in zip(after, sizes, strict=True):
        if isinstance(placement, Shard) and placement.dim == c.dim:
            split *= size
    return _torch.StridedShard(c.dim, split_factor=split) if split > 1 else Shard(c.dim)
