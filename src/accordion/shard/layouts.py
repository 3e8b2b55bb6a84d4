"""The mesh, placements and rows of one sharded parameter, also on a mesh of its own and under other parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from accordion import _torch
from accordion.engine.layout import Cut
from accordion.engine.params import TensorParallelView
from accordion.shard.topology import device_of


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Mesh and placements of a sharded parameter, and its division into rows. `over`: the part of `mesh` with the data-parallel
    axes, one or two. `cut`: the division over the last of these axes, on which `rank` is this process's index; what is divided
    is the parameter, or its local tensor if it was a DTensor before `shard`. `around`: for such a DTensor, makes the DTensor
    that modules see from the gathered tensor; otherwise None."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    cut: Cut
    rank: int
    over: DeviceMesh
    around: TensorParallelView | None = None


def local_part(param: nn.Parameter) -> Tensor:
    """Return the tensor that data parallelism shards, detached: `param`, or its local tensor if it is a DTensor."""
    return _torch.local_of(param).detach() if isinstance(param, DTensor) else param.detach()


def layout_of(param: Any, c: Cut, mesh: DeviceMesh, placements: Sequence[Placement]) -> Layout:
    """Return the layout of `param` over `mesh`, the data-parallel axes, with `placements`. A DTensor's own are appended; a last
    `Shard` of a dim that these divide too becomes strided. `c`: how the last axis of `mesh` divides `local_part(param)`."""
    rank = mesh.get_local_rank(mesh.ndim - 1)
    if not isinstance(param, DTensor):
        return Layout(mesh, tuple(placements), c, rank, mesh)
    inner_mesh, inner = param.device_mesh, param.placements
    outer = list(placements)
    # Strided if the DTensor's own axes divide the same dim, because these divide the tensor first.
    split = prod(inner_mesh.size(i) for i, p in enumerate(inner) if isinstance(p, Shard) and p.dim == c.dim)
    if isinstance(outer[-1], Shard) and c.dim is not None and split > 1:
        outer[-1] = _torch.StridedShard(c.dim, split_factor=split)
    around = TensorParallelView(inner_mesh, inner, param.shape, device_of(mesh))
    return Layout(_torch.joined_mesh(mesh, inner_mesh), (*outer, *inner), c, rank, mesh, around)
