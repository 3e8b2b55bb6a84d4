"""The gather of one bucket of a stream of weights: full tensors on the ranks that receive, from the shards of all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from accordion.engine.communicator import Communicator, carried
from accordion.engine.engine import Engine
from accordion.engine.params import Param
from accordion.engine.streams import Steps
from accordion.weights.stream_items import Item, ItemPart

Ranks = frozenset[int]
"""The global ranks that receive."""


class RowGather:
    """The gather of one parameter over one or two mesh axes, with its cut dim first, so that nothing is unpacked."""

    def __init__(self, part: ItemPart, param: Param, ranks: Ranks, rank: int) -> None:
        cut, context = param.cut, param.context
        self.param, self._ranks = param, ranks
        # The ranks of tensor parallelism make the larger tensor together, so each of them receives.
        self.receives = param.around is not None or rank in ranks
        levels = [(axis.gather, level) for axis, level in reversed(context.levels(cut)) if level.dim is not None]
        self.levels = [(communicator, level.chunk) for communicator, level in levels if communicator.num_ranks > 1]
        local = part.local(context.device)
        self._rows = local if cut.dim is None else local.movedim(cut.dim, 0)
        self._outs: list[Tensor] = []  # received at each level, (num_ranks * chunk or more, *row_shape)
        # Rows that a rank lacks are sent as padding with any contents, since the receivers drop them.
        if self.levels and (self._rows.shape[0] < self.levels[0][1] or not self._rows.is_contiguous()):
            padded = local.new_empty(self.levels[0][1], *cut.row_shape)
            padded[: self._rows.shape[0]].copy_(self._rows)
            self._rows = padded
        following = [*(chunk for _, chunk in self.levels[1:]), 0]
        for (communicator, chunk), next_chunk in zip(self.levels, following, strict=False):
            num_rows = max(communicator.num_ranks * chunk, next_chunk) if next_chunk or self.receives else 0
            self._outs.append(local.new_empty(num_rows, *cut.row_shape))

    def message(self, depth: int) -> tuple[Tensor, Tensor, list[int], list[int]]:
        """Return (received, sent, output split sizes, input split sizes) at a level, 1-D; no sizes if all ranks receive."""
        communicator, chunk = self.levels[depth]
        sent = carried((self._rows if depth == 0 else self._outs[depth - 1])[:chunk].view(-1))
        out = carried(self._outs[depth][: chunk * communicator.num_ranks].view(-1))
        to_all = depth + 1 < len(self.levels) or self.param.around is not None
        to = [to_all or rank in self._ranks for rank in communicator.ranks]
        if all(to):
            return out, sent, [], []
        received = [sent.numel() if self.receives else 0] * len(to)
        return out, sent.repeat(sum(to)) if sum(to) > 1 else sent, received, [sent.numel() * each for each in to]

    def full(self) -> Tensor:
        """Return the full tensor, contiguous and in memory of its own. A collective with tensor parallelism."""
        cut, around = self.param.cut, self.param.around
        rows = self._outs[-1][: cut.rows] if self.levels else self._rows.clone()
        full = rows if cut.dim is None else rows.movedim(0, cut.dim).contiguous()
        return full if around is None else around.whole(full)


def item_bytes(item: Item, ranks: Ranks) -> int:
    """Return the most bytes of device memory that any rank needs to gather and deliver `item`."""
    sizes = [_part_bytes(part, ranks) for part in item.parts]
    return sum(sizes) + (2 * sizes[0] if item.merge is not None else 0)


def _part_bytes(part: ItemPart, ranks: Ranks) -> int:
    param = part.param
    if param is None or param.cut.dim is None:
        return part.value.nbytes
    cut, context = param.cut, param.context
    own, rows = cut.chunk, cut.chunk * context.shard.num_ranks
    if context.cut_twice:
        own = -(-cut.chunk // context.replicate.num_ranks)
        rows += own * context.replicate.num_ranks
    if len(ranks) < context.num_ranks:
        rows += len(ranks) * cut.chunk
    numel = (rows + own) * cut.row_numel + (cut.numel if cut.dim else 0)
    for communicator in () if param.around is None else param.around.communicators:
        numel += cut.numel * communicator.num_ranks
    return numel * part.dtype.itemsize


def in_buckets(items: Sequence[Item], sizes: Sequence[int], most: int) -> list[list[Item]]:
    """Return `items` in order, in lists whose `sizes` add up to at most `most`; a larger item is alone."""
    buckets, left = list[list[Item]](), -1
    for item, size in zip(items, sizes, strict=True):
        if size > left:
            buckets.append([])
            left = most
        buckets[-1].append(item)
        left -= size
    return buckets


class Bucket:
    """The items of a stream that are gathered together; their gather begins at once."""

    def __init__(self, engine: Engine, items: Sequence[Item], ranks: Ranks, rank: int, what: str) -> None:
        self._items, self._receives = items, rank in ranks
        parts = [part for item in items for part in item.parts]
        self._gathers = deque(RowGather(part, part.param, ranks, rank) for part in parts if part.param is not None)
        self._transfer = engine.context.gather_stream.start(_steps(list(self._gathers)), [], what)

    def land(self) -> deque[tuple[str, Tensor]]:
        """Let the compute stream wait for the gather; return (name, full tensor) of each item, none if this rank only sends."""
        self._transfer.land()
        result = deque[tuple[str, Tensor]]()
        for item in self._items:
            fulls = []
            for part in item.parts:
                gather = self._gathers.popleft() if part.param is not None else None
                if gather is None and self._receives:
                    fulls.append(part.value.detach().clone())
                elif gather is not None and gather.receives:
                    fulls.append(gather.full())
            if self._receives:
                result.append((item.name, (fulls[0] if item.merge is None else item.merge(fulls)).to(item.dtype)))
        return result


def _steps(gathers: list[RowGather]) -> Steps:
    """Gather level by level, the inner ones first, with one call for each communicator and kind of message."""
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
