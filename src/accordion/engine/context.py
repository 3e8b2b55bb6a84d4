"""Over which ranks a model is spread, and what follows for one tensor: its rows on this rank, the whole from all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from accordion.engine.communicator import Communicator, gathered_rows
from accordion.engine.gather import Axis
from accordion.engine.layout import Cut
from accordion.engine.shards import ShardBufferMaker
from accordion.engine.streams import SideStream, Waiter


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingContext:
    """Over which ranks a model is spread. `replicate` has one rank where every rank keeps rows of its own.

    `cut_twice`: the optimizer's rows are cut over `replicate` too, and gathered over it once a step: an inner shard.
    `keeps_full`: full copies outlive a step. `scale`: what sums over all ranks are multiplied by. `where`: for messages, which
    ranks these are, if they are not all of the model's.
    """

    shard: Axis
    replicate: Axis
    cut_twice: bool
    keeps_full: bool
    keep_until_backward: bool
    scale: float
    gather_stream: SideStream
    reduce_stream: SideStream
    replicate_stream: SideStream  # what goes on over `replicate`, in a hybrid
    fetch_stream: SideStream  # from shard buffers elsewhere to the device
    waiter: Waiter
    device: torch.device
    shard_buffers: ShardBufferMaker
    where: str = ""

    @property
    def num_ranks(self) -> int:
        return self.shard.num_ranks * self.replicate.num_ranks

    def levels(self, c: Cut) -> list[tuple[Axis, Cut]]:
        """How a tensor is cut, the outermost cut first: over `shard`, then, for an inner shard, over `replicate`.

        Where rows do not divide evenly this is not what torch's strided placement does; its redistribution is never used.
        """
        first = (self.shard, c)
        if not self.cut_twice:
            return [first]
        return [first, (self.replicate, Cut(c.local_shape(self.shard.rank), c.dim, self.replicate.num_ranks))]

    @property
    def cut_communicators(self) -> list[Communicator]:
        """The communicators over whose ranks a sharded tensor has its rows."""
        return [
            a.gather for a in ((self.shard, self.replicate) if self.cut_twice else (self.shard,)) if a.num_ranks > 1
        ]


def own_rows(full: Tensor, c: Cut, context: ShardingContext) -> Tensor:
    """This rank's part of a full tensor, a view."""
    for axis, level in context.levels(c):
        if level.dim is not None:
            start = min(axis.rank * level.chunk, level.rows)
            full = full.narrow(level.dim, start, level.rows_of(axis.rank))
    return full


def gathered(local: Tensor, c: Cut, context: ShardingContext) -> Tensor:
    """The full tensor of which every rank holds `local`, in memory of its own; waits, and is not for the hot path."""
    local = local.detach().to(context.device)
    for axis, level in reversed(context.levels(c)):
        if level.dim is None or axis.num_ranks == 1:
            continue
        shape = list(level.shape)
        shape[level.dim] = level.chunk
        padded = local.new_zeros(shape)
        padded.narrow(level.dim, 0, local.shape[level.dim]).copy_(local)
        rows = gathered_rows(padded.view(-1), axis.gather) if padded.numel() else padded.new_empty(axis.num_ranks, 0)
        chunks = rows.view(axis.num_ranks, *shape).movedim(0, level.dim).flatten(level.dim, level.dim + 1)
        local = chunks.narrow(level.dim, 0, level.rows)
    return local.clone(memory_format=torch.contiguous_format)
