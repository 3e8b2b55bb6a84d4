"""The all-gather of a group of shards over one mesh axis into full tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise

import torch
from torch import Tensor

from accordion import _torch
from accordion.engine.communicator import Axis, Pending, carried
from accordion.engine.full_buffer import FullBuffer
from accordion.engine.layout import Cut, Message
from accordion.engine.shards import ShardBuffer
from accordion.engine.streams import Steps


class AxisGather:
    """The all-gather of one group over one mesh axis, from `shard_buffer` into `full_buffer`; every step uses the same object:
    `open`, then `steps`, then `close`. Between these, the message (num_ranks, row_numel) of small shards has memory."""

    def __init__(self, axis: Axis, msg: Message, shard_buffer: ShardBuffer, full_buffer: FullBuffer) -> None:
        num = axis.num_ranks
        self._axis, self._msg, self._full_buffer = axis, msg, full_buffer
        cast = shard_buffer.dtype != full_buffer.flat.dtype or num == 1 or shard_buffer.off_device
        self.off_device = shard_buffer.off_device
        # With one rank on the axis everything is copied, as hybrid strategies with an inner shard need.
        copied = range(len(msg.cuts)) if num == 1 else [*msg.whole, *(msg.direct if cast else ())]
        self._to, self._source = [full_buffer.own_parts[i] for i in copied], [shard_buffer.padded[i] for i in copied]
        self._fulls = [full_buffer.rows[i] for i in msg.direct]
        self._shards = [(full_buffer.own_parts if cast else shard_buffer.padded)[i] for i in msg.direct]
        self._own = [] if cast else [full_buffer.own_parts[i] for i in msg.direct]
        self._arrive, self._travel = [carried(t) for t in self._fulls], [carried(t) for t in self._shards]
        self._storage: torch.UntypedStorage | None = None
        if num > 1 and msg.row_numel > 0:
            self._pack(full_buffer.flat.new_empty(msg.row_numel * num), shard_buffer, cast)

    def _pack(self, packed: Tensor, shard_buffer: ShardBuffer, cast: bool) -> None:
        """Store the views that fill and unpack the message `packed` (num_ranks * row_numel,), then free its memory. `cast`:
        True if shards must be copied into the message; False to send the shard buffer's own row, if there is one."""
        msg, num = self._msg, self._axis.num_ranks
        sizes = [msg.cuts[i].shard_numel for i in msg.packed]
        rows = packed.view(num, -1)
        row = rows[self._axis.rank] if cast or shard_buffer.pack_row is None else shard_buffer.pack_row
        if row is not shard_buffer.pack_row:
            if shard_buffer.off_device and shard_buffer.pack_row is not None:  # in one copy to the device
                self._to, self._source = [*self._to, row], [*self._source, shard_buffer.pack_row]
            else:
                self._to += row.split([*sizes, msg.num_flags])
                self._source += [*(shard_buffer.padded[i] for i in msg.packed), shard_buffer.tag]
        self._arrive.append(carried(packed))
        self._travel.append(carried(row))
        self._tags, self._rows = rows[:, msg.pack_numel :], rows
        self._sizes = [*sizes, msg.num_flags] if msg.num_flags else sizes
        parts = rows[:, : msg.pack_numel].split(sizes, dim=1)
        pairs = zip(msg.packed, parts, strict=True)
        places = [both for i, part in pairs for both in unpacked(msg.cuts[i], self._full_buffer.rows[i], part)]
        self._outs, self._parts = [to for to, _ in places], [part for _, part in places]
        plain = bool(places) and all(msg.cuts[i].dim == 0 for i in msg.packed)
        self._one_kernel = plain and packed.device.type != "cpu"
        if self._one_kernel and msg.num_flags:  # the kernel takes whole rows only, tags included
            self._tags = packed.new_empty(self._tags.shape)
            self._outs.append(self._tags)
        elif plain and not self._one_kernel:
            self._outs, self._parts = map(list, zip(*in_runs(self._outs, self._parts), strict=True))
        self._tags = carried(self._tags)
        self._storage, self._num_bytes = packed.untyped_storage(), packed.nbytes
        self._storage.resize_(0)

    def open(self) -> None:
        """Allocate the packed message, if shards are packed. Call this before `load` and `steps`."""
        if self._storage is not None:
            self._storage.resize_(self._num_bytes)

    def close(self) -> None:
        """Free the packed message. Call this when the compute stream waits for the end of the gather."""
        if self._storage is not None:
            self._storage.resize_(0)

    def load(self) -> None:
        """Copy everything that is not sent from the shard buffer itself to the full buffer or the packed message. Copied are
        tensors that every rank has whole, shards that are cast or off the device, and small shards that are not contiguous in
        the shard buffer; on an axis of one rank, all."""
        if self._to:
            _torch.foreach_copy_(self._to, self._source, non_blocking=self.off_device)

    def steps(self, check: Callable[[Tensor], None]) -> Steps:
        """Generator: gather into the full buffer and unpack; yields works to wait for. Calls `load` first, unless shards are
        off the device: the caller must. `check`: called with all ranks' tags, unit numbers (num_ranks, num_flags), if any."""
        if self._to and not self.off_device:
            self.load()
        if self._axis.num_ranks == 1:
            return
        yield self._communicate()
        if self._storage is None:
            return
        if self._one_kernel and self._msg.pack_numel:
            torch.split_with_sizes_copy(self._rows, self._sizes, dim=1, out=self._outs)
        elif self._msg.pack_numel:
            # On the CPU that kernel is a loop over slices; copies between views made once take at most half of its time.
            _torch.foreach_copy_(self._outs, self._parts)
        if self._msg.num_flags:
            check(self._tags)

    def _communicate(self) -> Pending:
        return self._axis.gather.gather(self._arrive, self._travel)


def unpacked(c: Cut, to: Tensor, part: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of views (destination, source); copying each pair unpacks `part` (num_ranks, chunk * row_numel), the rows of
    all ranks, into the full tensor `to`, divided as `c`."""
    # No temporary copies: for a tensor that is not cut on dim 0 they may take gigabytes.
    if c.dim == 0:
        yield to.view(c.num_ranks, -1), part
        return
    assert c.dim is not None, "a tensor that is not cut is not sent"
    by_rank = part.unflatten(1, (c.chunk, *c.row_shape))
    num_full, rest = divmod(c.rows, c.chunk)  # ranks whose chunk is full, and rows of the one after them
    if num_full:
        whole = to.narrow(c.dim, 0, num_full * c.chunk).unflatten(c.dim, (num_full, c.chunk))
        yield whole.movedim((c.dim, c.dim + 1), (0, 1)), by_rank[:num_full]
    if rest:
        yield to.narrow(c.dim, num_full * c.chunk, rest).movedim(c.dim, 0), by_rank[num_full, :rest]


def in_runs(*sides: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Stack neighbouring views of equal shape (a run), to save copies. `sides`: lists of equal length, such as destinations and
    sources of copies. Yields, for each run, a list with one stacked view per side. If a run is not equally spaced in memory in
    the first side, its views are yielded one by one, with a new dim 0 of size 1; else it must be so in the other sides too."""
    for _, group in groupby(zip(*sides, strict=True), key=lambda views: views[0].shape):
        run = list(group)
        gaps = {b[0].storage_offset() - a[0].storage_offset() for a, b in pairwise(run)}
        for part in [run] if len(gaps) < 2 else [[views] for views in run]:
            yield [stacked(views) for views in zip(*part, strict=True)]


def stacked(views: Sequence[Tensor]) -> Tensor:
    """Return equally spaced views of one storage as one view with a new dim 0, without a copy."""
    first, offset = views[0], views[0].storage_offset()
    gap = views[1].storage_offset() - offset if len(views) > 1 else 0
    return first.as_strided((len(views), *first.shape), (gap, *first.stride()), offset)
