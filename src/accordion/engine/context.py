"""The ranks, streams and device of a sharded model; take this rank's rows of a tensor, or gather the rows of all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from accordion.engine.communicator import Axis, Communicator, gathered_rows
from accordion.engine.layout import Cut
from accordion.engine.shards import ShardBufferMaker
from accordion.engine.streams import SideStream, Waiter


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingContext:
    """The ranks, side streams and device over which a model, or one group of parameters, is sharded.

    `shard`: axis whose ranks keep different rows. `replicate`: axis whose ranks keep equal rows, unless `cut_twice`: then their
    rows are divided over this axis once more, as the optimizer steps them. An axis that the mesh lacks has one rank.
    `keeps_full`: full parameters stay in memory between steps. `keep_until_backward`: they stay from a forward to its backward.
    `scale`: by which sums of gradients over ranks are multiplied. `shard_buffers`: makes the buffer of a group's shards.
    `where`: suffix of messages that names the ranks; "" if these are all ranks of the model.
    """

    shard: Axis
    replicate: Axis
    cut_twice: bool
    keeps_full: bool
    keep_until_backward: bool
    scale: float
    gather_stream: SideStream
    reduce_stream: SideStream
    replicate_stream: SideStream  # reduces over `replicate`, with hybrid strategies
    fetch_stream: SideStream  # copies from shard buffers off the device to the device
    waiter: Waiter
    device: torch.device
    shard_buffers: ShardBufferMaker
    where: str = ""

    @property
    def num_ranks(self) -> int:
        return self.shard.num_ranks * self.replicate.num_ranks

    def levels(self, c: Cut) -> list[tuple[Axis, Cut]]:
        """Return (axis, division over it) for each axis that divides a tensor: (`shard`, `c`); then, if `cut_twice`,
        (`replicate`, the division of this rank's rows)."""
        # If rows do not divide evenly, torch's strided placement assigns other rows; the engine never uses its redistribution.
        first = (self.shard, c)
        if not self.cut_twice:
            return [first]
        return [first, (self.replicate, Cut(c.local_shape(self.shard.rank), c.dim, self.replicate.num_ranks))]

    @property
    def cut_communicators(self) -> list[Communicator]:
        """The communicators, for gathers, of the mesh axes of several ranks over which shards differ."""
        axes = (self.shard, self.replicate) if self.cut_twice else (self.shard,)
        return [axis.gather for axis in axes if axis.num_ranks > 1]


def own_rows(full: Tensor, c: Cut, context: ShardingContext) -> Tensor:
    """Return this rank's rows of the tensor `full`, as a view. `c`: the division of `full` over the `shard` axis."""
    for axis, level in context.levels(c):
        if level.dim is not None:
            start = min(axis.rank * level.chunk, level.rows)
            full = full.narrow(level.dim, start, level.rows_of(axis.rank))
    return full


def gathered(local: Tensor, c: Cut, context: ShardingContext) -> Tensor:
    """All-gather `local`, the rows of each rank, into a new, detached full tensor on the device, and return it. The host waits,
    unless the backend is stream-ordered. `c`: the division of the full tensor over the `shard` axis. A collective."""
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
