"""Shards in host memory: what every shard buffer off the device has, and copies on streams of their own to the device."""

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
from accordion.offload.arena import page_aligned
from accordion.offload.gradient_slots import Gradients, Slot
from accordion.offload.step.optimizer_copy import flat_of
from accordion.offload.swap_file import FileAllocator, FileRange

ALIGNED_ITEMSIZE = 4  # of what never travels: only where each tensor begins depends on it


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What shard buffers off the device are made with: host memory, the landing of this group's gradients, streams and threads.

    `grads`: the file in which gradients rest; None: in host memory.
    """

    allocate: Allocate
    landing: Tensor
    grads: FileAllocator | None
    device: torch.device
    fetch_stream: SideStream
    store_stream: SideStream
    pool: Callable[[], ThreadPoolExecutor]


class OffDeviceShards(ShardBuffer):
    """A shard buffer off the device: `locals`, which the optimizer steps, are host memory or mapped from a file.

    Gradients come back into slots. Owns the steps of its shards that are under way, and the copies that read it.
    """

    is_memory_of_locals = False

    def _furnish(self, msg: Message, rank: int, dtypes: Sequence[torch.dtype], means: Means) -> None:
        """What does not depend on where the shards are. `locals` are there."""
        if means.grads is None:
            plain = some_of(msg, range(len(msg.cuts)))
            slots = [Slot(local) for local in FlatShards(plain, rank, dtypes, means.allocate).locals]
        else:
            file_ranges = [means.grads.take(c.shard_numel, d) for c, d in zip(msg.cuts, dtypes, strict=True)]
            slots = [Slot(local_view(s.mapped(), c, rank), s) for s, c in zip(file_ranges, msg.cuts, strict=True)]
        self.grads = Gradients(slots, means.landing, self.locals, means.store_stream, means.pool)
        self._shown = NO_VERSION  # version of the shards in the rows that travel
        self._reading: list[Transfer] = []
        self.steps: list[Callable[[], None]] = []  # under way; each returns when it has ended
        self._is_written = False  # the rows that travel are those of a step that has ended

    def put(
        self,
        chosen: Sequence[int],
        rows: Sequence[Tensor | None],
        adding: Sequence[bool],
        after: Transfer | None = None,
    ) -> tuple[Sequence[Tensor | None], Transfer | None]:
        return self.grads.put(chosen, rows, adding, after)

    def defer(self, wait: Callable[[], None]) -> None:
        """A step of these shards is under way, which writes the rows that travel; `wait` returns when it has ended."""
        self.steps.append(wait)

    def ready(self) -> None:
        while self.steps:
            self.steps.pop(0)()
            self._is_written = True

    def settle(self, version: int) -> None:
        """Before rows travel: they are the shards of `version`, whoever wrote these."""
        if self._shown != version and not self._is_written:
            self.synchronize()
            self.write_rows()
        self._shown, self._is_written = version, False

    def read_by(self, transfer: Transfer) -> None:
        self._reading = [transfer]  # of one side stream, so that it ends after those before it

    def synchronize(self) -> None:
        self.ready()
        self._is_written = False  # a caller who waits may write
        for transfer in self._reading:
            transfer.synchronize()
        self._reading.clear()

    def mark_stale(self) -> None:
        self._shown, self._is_written = NO_VERSION, False

    @abstractmethod
    def write_rows(self) -> None:
        """Let the rows that travel be what `locals` are; nothing reads them then."""

    @abstractmethod
    def row(self, i: int) -> Tensor | FileRange | None:
        """Parameter `i` as it travels, (numel,), where a step writes it too; None: as it is stepped."""

    def flush(self) -> None:
        """What was written into `locals` is where they rest."""

    def own_range(self, i: int) -> FileRange | None:
        """Where the shard of parameter `i` is on disk; None where it is in memory."""
        return None


class HostShards(OffDeviceShards):
    """Owns the shards of one group in host memory, and the rows of them that travel to the device.

    `locals`: each in its own dtype. Rows travel in the dtype in which they are gathered, so what is kept in another one has a
    second row, written before it travels. With `keeps` rows also lie on the device, and are copied there once a step; else
    each gather copies them.
    """

    def __init__(
        self,
        msg: Message,
        rank: int,
        dtypes: Sequence[torch.dtype],
        gathered: torch.dtype,
        means: Means,
        *,
        keeps: bool,
    ) -> None:
        self._travel = FlatShards(msg, rank, [gathered] * len(dtypes), means.allocate)
        self._wide = [i for i, dtype in enumerate(dtypes) if dtype != gathered]
        own = [dtypes[i] for i in self._wide]
        self.locals, self.flats = list(self._travel.locals), list(self._travel.flats)
        if self._wide:
            masters = FlatShards(some_of(msg, self._wide), rank, own, means.allocate)
            self.flats += masters.flats
            for i, local in zip(self._wide, masters.locals, strict=True):
                self.locals[i] = local
        self._stage = FlatShards(msg, rank, [gathered] * len(dtypes), zeros_on(means.device)) if keeps else None
        source = self._travel if self._stage is None else self._stage
        self.padded, self.pack_row, self.dtype = source.padded, source.pack_row, source.dtype
        self.off_device = self._stage is None
        self.tag = self._travel.tag
        self._fetch_stream = means.fetch_stream
        self._staged = NO_VERSION  # version of the shards in `_stage`
        self._furnish(msg, rank, dtypes, means)

    def write_rows(self) -> None:
        if self._wide:
            rows = self._travel.locals
            _torch.foreach_copy_([rows[i] for i in self._wide], [self.locals[i] for i in self._wide])

    def row(self, i: int) -> Tensor | FileRange | None:
        return flat_of(self._travel.locals[i], self._travel.locals[i]) if i in self._wide else None

    def refresh(self, version: int) -> Transfer | None:
        self.settle(version)
        if self._stage is None or self._staged == version:
            return None
        self._staged = version
        copies = partial(_torch.foreach_copy_, self._stage.flats, self._travel.flats, non_blocking=True)
        self.read_by(self._fetch_stream.copy(copies, [], "copies shards to the device"))
        return self._reading[-1]

    def mark_stale(self) -> None:
        super().mark_stale()
        self._staged = NO_VERSION


def allocated_bytes(msg: Message, dtypes: Sequence[torch.dtype]) -> int:
    """Return what `FlatShards` of a message take of an arena."""
    return sum(page_aligned(part.shard_numel * dtype.itemsize) for dtype, _, part in flats_of(msg, dtypes))


def paged_bytes(msg: Message, dtypes: Sequence[torch.dtype]) -> int:
    """What shards take where each begins at a page: on disk, and where gradients land."""
    return sum(page_aligned(c.shard_numel * dtype.itemsize) for c, dtype in zip(msg.cuts, dtypes, strict=True))


def some_of(msg: Message, chosen: Sequence[int]) -> Message:
    """Return the message of some of these tensors, with nothing behind them."""
    return message([msg.cuts[i] for i in chosen], ALIGNED_ITEMSIZE)
