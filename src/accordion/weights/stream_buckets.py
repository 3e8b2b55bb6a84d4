"""The gather of one bucket of a stream of weights: full tensors on the ranks that receive, from the shards of all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from accordion.engine.communicator import Communicator, carried
from accordion.engine.streams import SideStream, Steps, Transfer
from accordion.weights.stream_items import Item, ItemPart


class Receivers(NamedTuple):
    """The global `ranks` that receive. `has_this_rank`: True if this rank is one of them."""

    ranks: frozenset[int]
    has_this_rank: bool


class RowGather:
    """The gather of one tensor over up to two mesh axes. The sharded dim is moved to the front, so that nothing is unpacked."""

    def __init__(self, part: ItemPart, to: Receivers) -> None:
        self._part, self._to = part, to
        # The ranks of tensor parallelism make the larger tensor together, so each of them receives.
        self.receives = to.has_this_rank or part.around is not None
        levels = [(axis.gather, level) for axis, level in reversed(part.context.levels(part.cut))]
        self.levels = [(each, level.chunk) for each, level in levels if level.dim is not None and each.num_ranks > 1]
        local = part.local()
        rows = local if part.cut.dim is None else local.movedim(part.cut.dim, 0)
        # Rows that a rank lacks are sent as padding with any contents, since the receivers drop them.
        if self.levels and (rows.shape[0] < self.levels[0][1] or not rows.is_contiguous()):
            padded = local.new_empty(self.levels[0][1], *part.cut.row_shape)
            padded[: rows.shape[0]].copy_(rows)
            rows = padded
        self._rows = [rows]  # sent at each level, and received at the last one: (rows, *row_shape) each
        for depth, (communicator, chunk) in enumerate(self.levels):
            following = [next_chunk for _, next_chunk in self.levels[depth + 1 :]]
            num_received = communicator.num_ranks * chunk if following or self.receives else 0
            self._rows.append(local.new_empty(max(num_received, *following, 0), *part.cut.row_shape))

    def message(self, depth: int) -> tuple[Tensor, Tensor, list[int], list[int]]:
        """Return (output, input, output split sizes, input split sizes) of the collective at level `depth`. Tensors are 1-D; the
        sizes, in elements by rank, are [] if all ranks receive."""
        communicator, chunk = self.levels[depth]
        sent = carried(self._rows[depth][:chunk].view(-1))
        out = carried(self._rows[depth + 1][: chunk * communicator.num_ranks].view(-1))
        to_all = depth + 1 < len(self.levels) or self._part.around is not None
        to = [to_all or rank in self._to.ranks for rank in communicator.ranks]
        if all(to):
            return out, sent, [], []
        received = [sent.numel() if self.receives else 0] * len(to)
        return out, sent.repeat(sum(to)) if sum(to) > 1 else sent, received, [sent.numel() * each for each in to]

    def full(self) -> Tensor:
        """Return the full tensor, contiguous and in memory of its own. A collective with tensor parallelism."""
        cut, around, rows = self._part.cut, self._part.around, self._rows[-1]
        full = rows if cut.dim is None else rows[: cut.rows].movedim(0, cut.dim)
        full = full.contiguous() if self.levels else full.clone(memory_format=torch.contiguous_format)
        return full if around is None else around.whole(full)


def _part_bytes(part: ItemPart, num_receivers: int) -> int:
    """Return the most bytes of device memory that any rank needs to gather `part`."""
    cut, context = part.cut, part.context
    if cut.dim is None:
        return 2 * cut.numel * part.dtype.itemsize
    num_replicas = context.replicate.num_ranks if context.cut_twice else 0
    own_rows = -(-cut.chunk // max(num_replicas, 1))
    num_sent = num_receivers if num_receivers < context.num_ranks else 0
    rows = own_rows * (1 + num_replicas) + cut.chunk * (context.shard.num_ranks + num_sent)
    numel = rows * cut.row_numel + (cut.numel if cut.dim else 0)
    for communicator in () if part.around is None else part.around.communicators:
        numel += cut.numel * communicator.num_ranks
    return numel * part.dtype.itemsize


def in_buckets(items: Sequence[Item], num_receivers: int, most_bytes: int) -> list[list[Item]]:
    """Return `items` in order, in lists. To gather and deliver a list, no rank needs more than `most_bytes` of device memory; an
    item that needs more is alone in its list. `num_receivers`: number of ranks that the items are delivered to."""
    buckets, left = list[list[Item]](), -1
    for item in items:
        sizes = [_part_bytes(part, num_receivers) for part in item.parts]
        size = sum(sizes) + (2 * sizes[0] if item.merge or item.split else 0)
        if size > left:
            buckets.append([])
            left = most_bytes
        buckets[-1].append(item)
        left -= size
    return buckets


class Bucket:
    """The items of a stream that are gathered together. `what`: describes, in messages, a rank that waits for the gather."""

    def __init__(self, items: Sequence[Item], to: Receivers, stream: SideStream, what: str) -> None:
        self._items, self._to, self._stream, self._what = items, to, stream, what
        self._gathers = deque[RowGather]()
        self._transfer: Transfer | None = None

    def begin(self) -> Transfer:
        """Begin the gather, unless it has begun; return its transfer."""
        if self._transfer is None:
            self._gathers.extend(RowGather(part, self._to) for item in self._items for part in item.parts)
            self._transfer = self._stream.start(_steps(list(self._gathers)), [], self._what)
        return self._transfer

    def land(self) -> deque[tuple[str, deque[tuple[str, Tensor]]]]:
        """Let the compute stream wait for the gather. Return (name of the item, (name, full tensor) of each tensor of the item)
        for each item; nothing if this rank only sends."""
        self.begin().land()
        result = deque[tuple[str, deque[tuple[str, Tensor]]]]()
        for item in self._items:
            gathers = [self._gathers.popleft() for _ in item.parts]
            fulls = [gather.full() for gather in gathers if gather.receives]
            if self._to.has_this_rank:
                full = (fulls[0] if item.merge is None else item.merge(fulls)).to(item.dtype)
                tensors = {item.name: full} if item.split is None else item.split({item.name: full})
                result.append((item.name, deque((name, tensor.contiguous()) for name, tensor in tensors.items())))
        return result


def _steps(gathers: list[RowGather]) -> Steps:
    """Yield the collectives of `gathers`, level by level, the inner ones first, with one call for each communicator and kind of
    message. Empties `gathers` at the end."""
    for depth in range(max((len(gather.levels) for gather in gathers), default=0)):
        by_communicator: dict[int, tuple[Communicator, list[RowGather]]] = {}
        for gather in [gather for gather in gathers if depth < len(gather.levels)]:
            communicator = gather.levels[depth][0]
            by_communicator.setdefault(id(communicator), (communicator, []))[1].append(gather)
        for communicator, members in by_communicator.values():
            messages = [gather.message(depth) for gather in members]
            whole = [(out, sent) for out, sent, sizes, _ in messages if not sizes and sent.numel()]
            if whole:
                yield communicator.gather([out for out, _ in whole], [sent for _, sent in whole])
            if to_some := [message for message in messages if sum(message[3])]:
                yield communicator.exchange(to_some)
    gathers.clear()
