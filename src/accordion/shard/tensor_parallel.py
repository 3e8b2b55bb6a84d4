"""Other parallelism inside: what modules see around a gathered tensor, and over which ranks beyond the engine's it is cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from accordion.engine.communicator import Communicator
from accordion.engine.layout import Cut


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
        """What modules see of a gathered tensor."""
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
        """Whether this rank is the first on every axis."""
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
