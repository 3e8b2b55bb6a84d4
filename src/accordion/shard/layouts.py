"""The mesh, placements and rows of one sharded parameter, also on a mesh of its own and under other parallelism."""

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
from accordion.engine.params import TensorParallelView
from accordion.shard.topology import device_of


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Mesh and placements of a sharded parameter, the cut of its local tensor, and the view that modules see. `over`: the
    data-parallel axes, one or two. `rank`: of this process among the ranks with different rows."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    cut: Cut
    rank: int
    over: DeviceMesh
    around: TensorParallelView | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self.cut.local_shape(self.rank)


def local_part(param: nn.Parameter) -> Tensor:
    """Return the tensor that data parallelism shards, detached: `param`, or the local tensor of a DTensor."""
    return _torch.local_of(param).detach() if isinstance(param, DTensor) else param.detach()


def layout_of(param: Any, c: Cut, mesh: DeviceMesh, placements: Sequence[Placement]) -> Layout:
    """Return the layout of `param`, cut by `c`, over `mesh` with `placements`; if it is a DTensor, its own axes are appended."""
    rank = mesh.get_local_rank(mesh.ndim - 1)
    if not isinstance(param, DTensor):
        return Layout(mesh, tuple(placements), c, rank, mesh)
    inner_mesh, inner = param.device_mesh, param.placements
    outer = list(placements)
    if isinstance(outer[-1], Shard):
        outer[-1] = cut_on(c, inner, [inner_mesh.size(i) for i in range(inner_mesh.ndim)])
    around = TensorParallelView(inner_mesh, inner, param.shape, device_of(mesh))
    return Layout(_torch.joined_mesh(mesh, inner_mesh), (*outer, *inner), c, rank, mesh, around)


def cut_on(c: Cut, after: Sequence[Placement], sizes: Sequence[int]) -> Placement:
    """Return the placement on a mesh axis over which a tensor is divided as `c`. It is strided if axes to the right divide the
    same dim, because these divide the tensor first. `after`, `sizes`: placements and sizes of the axes to the right."""
    if c.dim is None:
        return Replicate()
    split = 1
    for placement, size in zip(after, sizes, strict=True):
        if isinstance(placement, Shard) and placement.dim == c.dim:
            split *= size
    return _torch.StridedShard(c.dim, split_factor=split) if split > 1 else Shard(c.dim)
