"""The ranks of one mesh axis, the memory of full tensors, and the gather of a group of shards into it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Literal, Protocol

import torch
from torch import Tensor

from accordion import _torch
from accordion.engine.communicator import Communicator, Pending, carried
from accordion.engine.layout import KIB, Cut, Message
from accordion.engine.shards import ShardBuffer
from accordion.engine.streams import Steps

EXCHANGE_BYTES_PER_PEER = 256 * KIB  # below it latency dominates, and a reduce-scatter is one launch


class Axis:
    """The ranks of one mesh axis: communicators for gathers and for reduces, and the choice of the reduce algorithm."""

    def __init__(
        self,
        gather: Communicator,
        reduce: Communicator,
        *,
        one_node: bool,
        algorithm: Literal["auto", "exchange", "reduce_scatter"],
    ) -> None:
        self.gather, self.reduce = gather, reduce
        self.num_ranks, self.rank = gather.num_ranks, gather.rank
        self.one_node, self._algorithm = one_node, algorithm

    def takes_exchange(self, cuts: Sequence[Cut], itemsize: int) -> bool:
        """Return True to reduce gradients of `cuts` by an exchange (all-to-all and a local sum), False for a reduce-scatter."""
        # An exchange sends gradients in their own dtype and sums in float32, but each rank sends to every other one.
        if self._algorithm != "auto":
            return self._algorithm == "exchange"
        if self.reduce.exchanges:
            return True
        per_peer = sum(c.shard_numel for c in cuts) * itemsize
        return self.one_node and per_peer >= EXCHANGE_BYTES_PER_PEER


class FullMemory(Protocol):
    """Protocol for the memory of a group's full parameters.

    `views`: the full parameters. `flat`: its version counter counts writes into them. `storage_keys`: keys of the storages that
    `close` frees. `num_bytes`: the size while the group is gathered.
    """

    flat: Tensor
    views: list[Tensor]

    @property
    def storage_keys(self) -> Collection[int]: ...

    @property
    def num_bytes(self) -> int: ...

    def close(self) -> None:
        """Free the memory."""


class FullBuffer:
    """The storage of a group's full tensors of one dtype, each contiguous and padded to chunk * num_ranks rows.

    Gathers write through tensors whose version counter is not that of `views`: autograd may have saved a view whose storage is
    freed and filled again before the backward reads it. `cut_dim_first`: store tensors with the cut dim first, as shards are
    (inner shards). `poison`: fill unused memory with NaN, to reveal reads without a wait.
    """

    def __init__(
        self,
        cuts: Sequence[Cut],
        offsets: Sequence[int],
        flat: Tensor,
        rank: int,
        *,
        poison: bool = False,
        cut_dim_first: bool = False,
    ) -> None:
        self.flat = flat
        self._poison = poison and flat.is_floating_point()
        self._storage = flat.untyped_storage()
        self.storage_keys, self.num_bytes = (_torch.storage_key(self._storage),), self._storage.nbytes()
        self._is_open = True
        raw = flat.data
        self.views: list[Tensor] = []  # the full tensors in their shapes, with which the model computes
        # Destinations of gathers: padded rows as 1-D if dim 0 is cut; otherwise copies from the packed message go here.
        self.rows: list[Tensor] = []
        self.own_parts: list[Tensor] = []  # dim 0: this rank's part of the padded rows, 1-D; whole: all of it
        for c, at in zip(cuts, offsets, strict=True):
            self.views.append(flat[at : at + c.numel].view(c.shape))
            rows = raw[at : at + (c.padded_numel if c.dim == 0 else c.numel)]
            self.own_parts.append(rows[rank * c.shard_numel : (rank + 1) * c.shard_numel] if c.dim == 0 else rows)
            if c.dim:
                rows = rows.view(c.rows, *c.row_shape).movedim(0, c.dim) if cut_dim_first else rows.view(c.shape)
            self.rows.append(rows)

    def open(self) -> None:
        """Allocate the memory; its contents are undefined."""
        if not self._is_open:  # resizing to the same size would allocate and copy
            self._storage.resize_(self.num_bytes)
            self._is_open = True
        if self._poison:  # otherwise values of the last step would hide a missing wait
            self.flat.data.fill_(float("nan"))

    def stay(self, stays: bool) -> None:
        """Keep the storage allocated until `stay(False)`, also after `close`: graphs of a device record its address."""
        if stays:
            self.open()
            self.close = lambda: None  # type: ignore[method-assign]
        elif vars(self).pop("close", None) is not None:
            self.close()

    def close(self) -> None:
        """Free the storage; with `poison` fill it with NaN instead, to reveal later reads."""
        if self._poison:
            self.flat.data.fill_(float("nan"))
        else:
            self._storage.resize_(0)
            self._is_open = False


class AxisGather:
    """The gather of one group over one axis, from `shard_buffer` into the tensors of `full_buffer`; planned once.

    The packed message (num_ranks, row_numel) has memory between `open` and `close`; its views are made once.
    """

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
        packs = num > 1 and msg.row_numel > 0
        if packs:
            self._pack(full_buffer.flat.new_empty(msg.row_numel * num), shard_buffer, cast)

    def _pack(self, packed: Tensor, shard_buffer: ShardBuffer, cast: bool) -> None:
        """Allocate views for the packed message `packed` (num_ranks * row_numel,): rows of ranks, and parts of tensors."""
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
        """Allocate the packed message; call it before `load`."""
        if self._storage is not None:
            self._storage.resize_(self._num_bytes)

    def close(self) -> None:
        """Free the packed message, after the compute stream waits for the end of the gather."""
        if self._storage is not None:
            self._storage.resize_(0)

    def load(self) -> None:
        """Copy rows out of the shard buffer that cannot be sent from there: those of whole, cast or packed tensors."""
        if self._to:
            _torch.foreach_copy_(self._to, self._source, non_blocking=self.off_device)

    def steps(self, check: Callable[[Tensor], None]) -> Steps:
        """Gather and unpack, as a generator of works to wait for. If the shard buffer is off the device, call `load` first.

        `check`: called with the tags (num_ranks, num_flags) of all ranks after they have arrived.
        """
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
    """Yield views (destination, source) that unpack `part` (num_ranks, chunk * row_numel) of the packed rows into `to`.

    No copies: they may take gigabytes for a tensor cut on another dim.
    """
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
    """Yield each run of equally spaced views of one shape as one stacked view per side, so that nine copies become two."""
    for _, group in groupby(zip(*sides, strict=True), key=lambda views: views[0].shape):
        run = list(group)
        gaps = {b[0].storage_offset() - a[0].storage_offset() for a, b in pairwise(run)}
        for part in [run] if len(gaps) < 2 else [[views] for views in run]:
            yield [stacked(views) for views in zip(*part, strict=True)]


def stacked(views: Sequence[Tensor]) -> Tensor:
    """Return equally spaced views of one storage as one view, stacked on a new dim 0."""
    first, offset = views[0], views[0].storage_offset()
    gap = views[1].storage_offset() - offset if len(views) > 1 else 0
    return first.as_strided((len(views), *first.shape), (gap, *first.stride()), offset)
