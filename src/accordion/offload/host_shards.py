"""Shards and gradients in host memory, and their copies on side streams; base class of all shard buffers off the device."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import cast

import torch
from torch import Tensor

from accordion import _torch
from accordion.engine.layout import Message, message
from accordion.engine.shards import (
    NO_VERSION,
    Allocate,
    FlatShards,
    ShardBuffer,
    flats_of,
    local_view,
    own_storage,
    zeros_on,
)
from accordion.engine.streams import SideStream, Transfer
from accordion.offload.arena import ArenaMaker, page_aligned
from accordion.offload.step.optimizer_copy import flat_of
from accordion.offload.swap_file import CopyToDisk, FileAllocator, FileRange, Values

ALIGNED_ITEMSIZE = 4  # for buffers that are never gathered: it only determines at which offsets tensors begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Streams, threads and the source of host memory that everything offloaded from one model uses."""

    device: torch.device
    fetch_stream: SideStream  # for copies to the device
    store_stream: SideStream  # for copies to the host
    pool: Callable[[], ThreadPoolExecutor]  # threads that read and write files
    make_arena: ArenaMaker


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadedGroup:
    """Layout, and memory off the device, for the shards of one group, parameters of a unit that are gathered in one dtype: an
    argument of `HostShards` and `DiskShards`. `dtypes`: dtype in which each shard of `msg` is stepped."""

    msg: Message  # layout of the shards
    rank: int  # of this process, among those that share the group
    dtypes: Sequence[torch.dtype]
    gathered: torch.dtype  # in which all shards are gathered
    allocate: Allocate  # takes host memory from the arena
    landing: Tensor  # this group's part of the landing buffer, 1-D uint8
    grads: FileAllocator | None  # of the file for gradients; None if they are in host memory
    resources: Resources


class Slot:
    """Memory off the device for the gradient of one parameter, reused in every step. `memory`: a tensor of the shape and dtype
    of the shard. If the slot is on disk, `memory` is mapped from `file_range`."""

    def __init__(self, memory: Tensor, file_range: FileRange | None = None) -> None:
        self._memory, self.file_range = own_storage(memory), file_range
        self.num_holders = _torch.holders_of_memory(self._memory)  # references while no gradient uses the slot

    def take(self) -> Tensor:
        """Return a tensor in the slot's memory; in new host memory if a gradient of an earlier step still uses the slot."""
        if _torch.holders_of_memory(self._memory) > self.num_holders:
            return torch.empty_like(self._memory)
        return self._memory.detach()

    def file_range_of(self, grad: Tensor) -> FileRange | None:
        """Return the place of `grad` in the file; None if the slot is in memory, or if `grad` is not in this slot."""
        return None if self.file_range is None or grad.data_ptr() != self._memory.data_ptr() else self.file_range

    def settle(self) -> None:
        """If the slot is on disk, write changes that a caller made to the mapped gradient to the file; else do nothing."""
        if self.file_range is not None and self._memory.numel():
            self.file_range.file.settle(self.file_range.offset, page_aligned(self._memory.nbytes))


class OffDeviceShards(ShardBuffer):
    """Base class of shard buffers off the device: `locals`, which the optimizer steps, are host memory or mapped from a file.
    Gathers read the rows: for each parameter its shard as a 1-D tensor in the gathered dtype. Reduced gradients are copied into
    `slots`, one for each parameter. On an accelerator, a gradient that is added to an earlier one, or whose slot is on disk, is
    first copied into this group's part of the landing buffer, and added or written from there. All units share the landing
    buffer, so the engine waits for its copies before the next unit's gradients are reduced."""

    is_memory_of_locals = False

    def _set_up(self, group: OffloadedGroup) -> None:
        """Create the gradient slots and the other attributes of this class. Subclasses first set `locals`, then call this."""
        msg, rank, dtypes = group.msg, group.rank, group.dtypes
        if group.grads is None:
            plain = some_of(msg, range(len(msg.cuts)))
            self.slots = [Slot(local) for local in FlatShards(plain, rank, dtypes, group.allocate).locals]
        else:
            file_ranges = [group.grads.take(c.shard_numel, d) for c, d in zip(msg.cuts, dtypes, strict=True)]
            self.slots = [Slot(local_view(s.mapped(), c, rank), s) for s, c in zip(file_ranges, msg.cuts, strict=True)]
        # For each parameter its part of the landing buffer, uint8.
        ends = accumulate((page_aligned(local.nbytes) for local in self.locals), initial=0)
        self._landing = [group.landing[start:stop] for start, stop in pairwise(ends)]
        self._store_stream, self._pool = group.resources.store_stream, group.resources.pool
        self.grads_come_from_device = self._store_stream.sleeps  # on the CPU gradients are added without a copy
        self._row_version = NO_VERSION  # version of the shards that the rows hold
        self._reading: list[Transfer] = []
        self.steps: list[Callable[[], None]] = []  # steps under way; each returns when it has ended
        self._is_written = False  # a step that has ended wrote the rows

    def put(
        self,
        chosen: Sequence[int],
        rows: Sequence[Tensor | None],
        adding: Sequence[bool],
        after: Transfer | None = None,
    ) -> tuple[Sequence[Tensor | None], Transfer | None]:
        """Start copying `rows`, reduced gradients of the parameters with the indices `chosen`, off the device.

        Returns (for each row the tensor that gets its values, None if the row is None; the transfer, None if there is nothing
        to copy). On the CPU, a row to add is returned itself. `adding`: True for rows that the caller only adds to a gradient
        and then drops. `after`: the transfer after which the copies start; None: after the work on the compute stream.
        """
        to: list[Tensor] = []
        source: list[Tensor] = []
        result: list[Tensor | None] = []
        writes: list[Callable[[], None]] = []
        for i, row, is_added in zip(chosen, rows, adding, strict=True):
            if row is None or (is_added and not self.grads_come_from_device):
                result.append(row)
                continue
            landing = self._landing[i][: row.nbytes].view(row.dtype).as_strided(row.shape, self.locals[i].stride())
            target = grad = landing if is_added else self.slots[i].take()
            if not is_added and (file_range := self.slots[i].file_range_of(grad)) is not None:
                target = landing
                if row.numel():
                    writes.append(partial(file_range.file.write, file_range.offset, self._landing[i]))
            to.append(target)
            source.append(row)
            result.append(grad)
        if not to:
            return result, None
        copies = partial(_torch.foreach_copy_, to, source, non_blocking=True)
        transfer = self._store_stream.copy(copies, source, "copies gradients to the host", after)
        if writes:
            transfer = cast(Transfer, CopyToDisk(transfer, writes, self._pool(), late=self._store_stream.late))
        return result, transfer

    def defer(self, wait: Callable[[], None]) -> None:
        """Register an optimizer step, which writes these shards. `ready` calls `wait()`, which blocks until the step ends."""
        self.steps.append(wait)

    def ready(self) -> None:
        while self.steps:
            self.steps.pop(0)()
            self._is_written = True

    def settle(self, version: int) -> None:
        """Before a gather, copy `locals` into the rows (the shards in the gathered dtype), unless these have `version` of
        the shards or a step wrote them. Before the copy, wait for optimizer steps and for transfers that read the rows."""
        if self._row_version != version and not self._is_written:
            self.synchronize()
            self.write_rows()
        self._row_version, self._is_written = version, False

    def read_by(self, transfer: Transfer) -> None:
        self._reading = [transfer]  # all run on one side stream, so this one ends after those before it

    def synchronize(self) -> None:
        self.ready()
        self._is_written = False  # a caller that waits may write the shards
        for transfer in self._reading:
            transfer.synchronize()
        self._reading.clear()

    def mark_stale(self) -> None:
        self._row_version, self._is_written = NO_VERSION, False

    @abstractmethod
    def write_rows(self) -> None:
        """Copy each shard in `locals` into its copy in the gathered dtype, if any, which no transfer may read meanwhile."""

    @abstractmethod
    def row(self, i: int) -> Values | None:
        """Return shard `i` in the gathered dtype, (numel,): a copy that steps must write too; None if it has that dtype."""

    def shard(self, i: int) -> Values:
        """Return the elements of the shard of parameter `i`, (numel,), in the dtype in which it is stepped."""
        return flat_of(self.locals[i], self.locals[i])

    def stored(self, i: int) -> list[Values]:
        """Return [shard, gradient, shard in the gathered dtype] of parameter `i`, to read dtypes and which are on disk
        (`FileRange`). The last is left out if the shard has that dtype. The shard represents a gradient in memory."""
        slot, row = self.slots[i], self.row(i)
        return [self.shard(i), slot.file_range or self.locals[i], *([] if row is None else [row])]

    def flush(self) -> None:
        """Write changes that callers made to `locals` to the file, if the shards are on disk. Here they are not: do nothing."""


class HostShards(OffDeviceShards):
    """The shards of one group in host memory, each in the dtype in which it is stepped, and the rows that gathers read.

    A shard in the gathered dtype is its own row. The row of any other shard is a second copy, cast before a gather. With
    `keeps` the device has a copy of all rows, updated before the first gather after a step; otherwise each gather copies them.
    """

    def __init__(self, group: OffloadedGroup, *, keeps: bool) -> None:
        msg, rank, dtypes, gathered = group.msg, group.rank, group.dtypes, group.gathered
        self._rows = FlatShards(msg, rank, [gathered] * len(dtypes), group.allocate)
        self._cast = [i for i, dtype in enumerate(dtypes) if dtype != gathered]
        self.locals, self.flats = list(self._rows.locals), list(self._rows.flats)
        if self._cast:
            stepped = [dtypes[i] for i in self._cast]
            masters = FlatShards(some_of(msg, self._cast), rank, stepped, group.allocate)
            self.flats += masters.flats
            for i, local in zip(self._cast, masters.locals, strict=True):
                self.locals[i] = local
        self._device_rows: FlatShards | None = None
        if keeps:
            self._device_rows = FlatShards(msg, rank, [gathered] * len(dtypes), zeros_on(group.resources.device))
        source = self._device_rows or self._rows
        self.padded, self.pack_row, self.dtype = source.padded, source.pack_row, source.dtype
        self.off_device = self._device_rows is None
        self.tag = self._rows.tag
        self._fetch_stream = group.resources.fetch_stream
        self._device_version = NO_VERSION  # version of the shards in `_device_rows`
        self._set_up(group)

    def write_rows(self) -> None:
        if self._cast:
            rows = self._rows.locals
            _torch.foreach_copy_([rows[i] for i in self._cast], [self.locals[i] for i in self._cast])

    def row(self, i: int) -> Values | None:
        return flat_of(self._rows.locals[i], self._rows.locals[i]) if i in self._cast else None

    def refresh(self, version: int) -> Transfer | None:
        self.settle(version)
        if self._device_rows is None or self._device_version == version:
            return None
        self._device_version = version
        copies = partial(_torch.foreach_copy_, self._device_rows.flats, self._rows.flats, non_blocking=True)
        self.read_by(self._fetch_stream.copy(copies, [], "copies shards to the device"))
        return self._reading[-1]

    @property
    def caches(self) -> list[Tensor]:
        return [] if self._device_rows is None else self._device_rows.flats

    def mark_stale(self) -> None:
        super().mark_stale()
        self._device_version = NO_VERSION


def allocated_bytes(msg: Message, dtypes: Sequence[torch.dtype]) -> int:
    """Return the bytes of shards of the layout `msg`, each in its dtype of `dtypes`, in an arena: a flat buffer per dtype."""
    return sum(page_aligned(part.shard_numel * dtype.itemsize) for dtype, _, part in flats_of(msg, dtypes))


def paged_bytes(msg: Message, dtypes: Sequence[torch.dtype]) -> int:
    """Return the bytes of shards of the layout `msg`, each in its dtype of `dtypes`, if each begins at a page, as on disk."""
    return sum(page_aligned(c.shard_numel * dtype.itemsize) for c, dtype in zip(msg.cuts, dtypes, strict=True))


def some_of(msg: Message, chosen: Sequence[int]) -> Message:
    """Return the layout of the tensors of `msg` with the indices `chosen`, for memory that is never gathered: `num_flags`
    is 0."""
    return message([msg.cuts[i] for i in chosen], ALIGNED_ITEMSIZE)
