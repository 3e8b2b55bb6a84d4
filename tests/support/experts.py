"""A mixture-of-experts model as users write it: an all-to-all sends tokens to the ranks of their experts, another one back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.devices import device
from tests.support import compare

EXPERTS, WIDTH, HIDDEN, VOCAB = 4, 16, 24, 32


class AllToAll(torch.autograd.Function):
    """All-to-all of rows, and of their gradients in the backward. `sends`, `receives`: number of rows to and from each rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sends: list[int], receives: list[int], group: Any) -> Tensor:
        ctx.sends, ctx.receives, ctx.group = sends, receives, group
        return _exchanged(x, sends, receives, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _exchanged(grad, ctx.receives, ctx.sends, ctx.group), None, None, None


def _exchanged(x: Tensor, sends: list[int], receives: list[int], group: Any) -> Tensor:
    out = x.new_empty(sum(receives), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), receives, sends, group=group)
    return out


class Experts(nn.Module):
    """`EXPERTS` two-layer networks. After `parallelize(mesh)` each rank of `mesh` has a shard of them, in DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN))
        self.down = nn.Parameter(torch.empty(EXPERTS, HIDDEN, WIDTH))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.up, std=WIDTH**-0.5)
        nn.init.normal_(self.down, std=HIDDEN**-0.5)

    def parallelize(self, mesh: Any) -> None:
        for name, p in list(self.named_parameters()):
            setattr(self, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        """`x`: rows (rows, WIDTH), sorted by expert. `counts`: number of rows of each expert that this rank has."""
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        parts = zip(x.split(counts), up, down, strict=True)
        return torch.cat([F.gelu(rows @ first) @ second for rows, first, second in parts])


class Mixture(nn.Module):
    """A layer that sends each token to one expert, chosen by a router. `group`: process group of the ranks over which the
    experts are sharded; None: each rank has all experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts()
        self.group: Any = None

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=EXPERTS)
        rows = x[order]
        out = self.experts(rows, counts.tolist()) if self.group is None else self._elsewhere(rows, counts)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return x + weights[:, None] * out[back]

    def _elsewhere(self, rows: Tensor, counts: Tensor) -> Tensor:
        num = self.group.size()
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        sends = counts.view(num, -1).sum(1).tolist()
        receives = theirs.view(num, -1).sum(1).tolist()
        come = AllToAll.apply(rows, sends, receives, self.group)
        own = EXPERTS // num
        expert = torch.arange(own, device=rows.device).repeat(num).repeat_interleave(theirs)
        order = expert.argsort(stable=True)
        out = self.experts(come[order], torch.bincount(expert, minlength=own).tolist())
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return AllToAll.apply(out[back], receives, sends, self.group)


class Model(nn.Module):
    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Mixture() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens.view(-1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self(tokens), tokens.view(-1).roll(-1))


def seeded() -> Model:
    """Return a `Model` with the same random weights on every rank, on the device of the tests."""
    return compare.seeded(Model)  # type: ignore[return-value]


def spread(mesh: Any, dtype: torch.dtype = torch.float32, axis: str = "ep") -> Model:
    """Return the model of `seeded` in `dtype`, with experts sharded over one axis of `mesh`."""
    return parallelized(seeded().to(dtype), mesh[axis])


def parallelized(model: Model, mesh: Any) -> Model:
    for block in model.blocks:
        block.group = mesh.get_group()
        block.experts.parallelize(mesh)
    return model


def tokens(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(VOCAB, (3, 7), generator=generator).to(device())
