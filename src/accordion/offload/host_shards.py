"""Shards in host memory, and their copies to the device on a side stream; base class of all shard buffers off the device."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from accordion import _torch
from accordion.engine.layout import Message, message
from accordion.engine.shards import NO_VERSION, Allocate, FlatShards, ShardBuffer, flats_of, local_view, zeros_on
from accordion.engine.streams import SideStream, Transfer
from accordion.offload.arena import ArenaMaker, page_aligned
from accordion.offload.gradient_slots import Gradients, Slot
from accordion.offload.step.optimizer_copy import flat_of
from accordion.offload.swap_file import FileAllocator, Values

ALIGNED_ITEMSIZE = 4  # for buffers that are never gathered: it only determines at which offsets tensors begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Streams, threads and a source of host memory for all that is offloaded from one model."""

    device: torch.device
    fetch_stream: SideStream  # for copies to the device
    store_stream: SideStream  # for copies to the host
    pool: Callable[[], ThreadPoolExecutor]  # threads that read and write files
    make_arena: ArenaMaker


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMemory:
    """Memory for the shard buffer of one group off the device."""

    allocate: Allocate  # takes host memory from the arena
    landing: Tensor  # this group's part of the landing buffer, 1-D uint8
    grads: FileAllocator | None  # of the file for gradients; None if they are in host memory
    resources: Resources


class OffDeviceShards(ShardBuffer):
    """Base class of shard buffers off the device: `locals`, which the optimizer steps, are host memory or mapped from a file.

    Gathers read the rows: for each parameter its shard as a 1-D tensor in the gathered dtype. `grads` stores the gradients.
    """

    is_memory_of_locals = False

    def _set_up(self, msg: Message, rank: int, dtypes: Sequence[torch.dtype], memory: GroupMemory) -> None:
        """Create the gradient slots and the other attributes. Subclasses call this after they have set `locals`."""
        if memory.grads is None:
            plain = some_of(msg, range(len(msg.cuts)))
            slots = [Slot(local) for local in FlatShards(plain, rank, dtypes, memory.allocate).locals]
        else:
            file_ranges = [memory.grads.take(c.shard_numel, d) for c, d in zip(msg.cuts, dtypes, strict=True)]
            slots = [Slot(local_view(s.mapped(), c, rank), s) for s, c in zip(file_ranges, msg.cuts, strict=True)]
        store_stream, pool = memory.resources.store_stream, memory.resources.pool
        self.grads = Gradients(slots, memory.landing, self.locals, store_stream, pool)
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
        return self.grads.put(chosen, rows, adding, after)

    def defer(self, wait: Callable[[], None]) -> None:
        """Register a step that runs on these shards and writes their rows. `wait`: blocks until the step has ended; the next
        `ready` calls it once."""
        self.steps.append(wait)

    def ready(self) -> None:
        while self.steps:
            self.steps.pop(0)()
            self._is_written = True

    def settle(self, version: int) -> None:
        """Before a gather, copy `locals` into the rows, unless the rows have `version` of the shards, or a step wrote the rows. A
        copy first waits for optimizer steps under way and for transfers that read the rows."""
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
        """Copy each shard in `locals` into its row, unless the shard is its own row. No transfer may read rows meanwhile."""

    @abstractmethod
    def row(self, i: int) -> Values | None:
        """Return the row of parameter `i`, (numel,), which a step must write too; None if the shard itself is the row."""

    def shard(self, i: int) -> Values:
        """Return the elements of the shard of parameter `i`, (numel,)."""
        return flat_of(self.locals[i], self.locals[i])

    def stored(self, i: int) -> list[Values]:
        """Return [shard, gradient, row] of parameter `i`, for callers that read their dtypes, and which of them are on disk
        (`FileRange`). The row is the copy that gathers read; it is left out if the shard itself is the row. For a gradient in
        memory, the shard is returned in its place, since both have one dtype."""
        slot, row = self.grads.slots[i], self.row(i)
        return [self.shard(i), slot.file_range or self.locals[i], *([] if row is None else [row])]

    def flush(self) -> None:
        """If the shards are on disk, write changes that callers made to `locals` to the file."""


class HostShards(OffDeviceShards):
    """The shards of one group in host memory, each in the dtype in which it is stepped, and the rows that gathers read.

    A shard that is stepped in the gathered dtype is its own row; any other has a second copy, cast before it is gathered. With
    `keeps` the device has a copy of all rows, updated once a step; otherwise each gather copies them to the device.
    """

    def __init__(
        self,
        msg: Message,
        rank: int,
        dtypes: Sequence[torch.dtype],
        gathered: torch.dtype,
        memory: GroupMemory,
        *,
        keeps: bool,
    ) -> None:
        self._rows = FlatShards(msg, rank, [gathered] * len(dtypes), memory.allocate)
        self._cast = [i for i, dtype in enumerate(dtypes) if dtype != gathered]
        self.locals, self.flats = list(self._rows.locals), list(self._rows.flats)
        if self._cast:
            stepped = [dtypes[i] for i in self._cast]
            masters = FlatShards(some_of(msg, self._cast), rank, stepped, memory.allocate)
            self.flats += masters.flats
            for i, local in zip(self._cast, masters.locals, strict=True):
                self.locals[i] = local
        self._device_rows: FlatShards | None = None
        if keeps:
            self._device_rows = FlatShards(msg, rank, [gathered] * len(dtypes), zeros_on(memory.resources.device))
        source = self._device_rows or self._rows
        self.padded, self.pack_row, self.dtype = source.padded, source.pack_row, source.dtype
        self.off_device = self._device_rows is None
        self.tag = self._rows.tag
        self._fetch_stream = memory.resources.fetch_stream
        self._device_version = NO_VERSION  # version of the shards in `_device_rows`
        self._set_up(msg, rank, dtypes, memory)

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
    """Return the bytes that shards of the layout `msg` and `dtypes`, in one flat buffer for each dtype, take from an arena."""
    return sum(page_aligned(part.shard_numel * dtype.itemsize) for dtype, _, part in flats_of(msg, dtypes))


def paged_bytes(msg: Message, dtypes: Sequence[torch.dtype]) -> int:
    """Return the bytes of the shards of `msg` if each begins at a page, as on disk and in the landing buffer."""
    return sum(page_aligned(c.shard_numel * dtype.itemsize) for c, dtype in zip(msg.cuts, dtypes, strict=True))


def some_of(msg: Message, chosen: Sequence[int]) -> Message:
    """Return the layout of the tensors of `msg` with the indices `chosen`, without flags, for memory that is never gathered."""
    return message([msg.cuts[i] for i in chosen], ALIGNED_ITEMSIZE)
