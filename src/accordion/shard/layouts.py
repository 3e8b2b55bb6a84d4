"""How one sharded parameter lies: mesh, placements and rows, on a mesh of its own and beside other parallelism too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from accordion import _torch
from accordion.engine.communicator import Communicator
from accordion.engine.layout import Cut
from accordion.shard.topology import device_of


class TensorParallelView:
    """The DTensor that a parameter was before data parallelism cut its local tensor.

    `mesh`, `placements`, `shape`: its own. `summed`: the axes of `mesh` over which the engine itself adds up gradients;
    the parameter is replicated on them.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        shape: Sequence[int],
        device: torch.device,
        summed: Sequence[int] = (),
    ) -> None:
        self.mesh, self.placements, self.shape, self.summed = mesh, tuple(placements), torch.Size(shape), tuple(summed)
        self.stride = torch.empty(self.shape, device="meta").stride()
        cut = [i for i, p in enumerate(self.placements) if isinstance(p, Shard)]
        self.communicators = [Communicator(mesh.get_group(i), device) for i in cut if mesh.size(i) > 1]

    def __call__(self, full: Tensor) -> Tensor:
        """Return the tensor that modules see in place of a gathered one."""
        if self.summed:
            return _Seen.apply(full, self)  # type: ignore[no-untyped-call, no-any-return]
        return self.seen(full)

    def seen(self, full: Tensor) -> DTensor:
        return DTensor.from_local(
            full, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def whole(self, full: Tensor) -> Tensor:
        """The tensor of the model without any parallelism. Collective over `mesh`."""
        return self.seen(full.detach()).full_tensor()

    def part_of(self, whole: Tensor) -> Tensor:
        """This rank's part of such a tensor, which every rank has; a view."""
        for i, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                c = Cut(tuple(whole.shape), placement.dim % len(whole.shape), self.mesh.size(i))
                rank = self.mesh.get_local_rank(i)
                whole = whole.narrow(placement.dim, min(rank * c.chunk, c.rows), c.rows_of(rank))
        return whole

    @property
    def is_first(self) -> bool:
        """Return True if this rank is the first on every axis."""
        return not any(self.mesh.get_coordinate() or ())


class _Seen(torch.autograd.Function):
    """`TensorParallelView.seen`, whose gradient stays a sum to come on the axes over which the engine adds up."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, around: TensorParallelView) -> DTensor:
        ctx.around = around
        return around.seen(full.detach())

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        around: TensorParallelView = ctx.around
        wanted = [
            given if i in around.summed else own
            for i, (given, own) in enumerate(zip(grad.placements, around.placements, strict=True))
        ]
        if wanted != list(grad.placements):
            grad = grad.redistribute(placements=wanted)
        return grad.to_local(), None


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
