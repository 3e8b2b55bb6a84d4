"""Shards on disk: read ahead of their gather into a piece of host memory that units share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from accordion.engine.layout import Message
from accordion.engine.shards import local_view, own_storage
from accordion.engine.streams import Transfer
from accordion.offload.arena import page_aligned
from accordion.offload.host_shards import Means, OffDeviceShards
from accordion.offload.swap_file import FileAllocator, FileRange

CHUNK_BYTES = 2**23  # read at a time by one thread


@dataclass(eq=False, slots=True)
class StagingBuffer:
    """Owns a piece of host memory into which the shards of one unit at a time are read, and what still reads or fills it."""

    memory: Tensor  # bytes
    unit: int = -1
    times: int = 0  # how often it went to another unit
    filling: list[Future[None]] = field(default_factory=list)
    emptying: dict[int, Transfer] = field(default_factory=dict)  # by id of the shard buffer

    def claim(self, unit: int) -> int:
        """Give it to `unit` once nothing is under way in it; returns which tenancy that is."""
        if self.unit != unit:
            self.wait()
            self.unit, self.times = unit, self.times + 1
        return self.times

    def wait(self) -> None:
        self.filled()
        for transfer in self.emptying.values():
            transfer.synchronize()
        self.emptying.clear()

    def filled(self) -> None:
        """Wait for what is being read into it."""
        futures, self.filling = self.filling, []
        for future in futures:
            future.result()


class DiskShards(OffDeviceShards):
    """Owns the shards of one group on disk: `locals` are mapped from the file; rows travel through a staging buffer.

    Each shard begins at a page of the file, as in the staging buffer; rows that are gathered in another dtype lie beside it:
    one run of the file is what is read for a gather. A step reads and writes the file past the map.
    """

    off_device = True

    def __init__(
        self,
        msg: Message,
        rank: int,
        dtypes: Sequence[torch.dtype],
        gathered: torch.dtype,
        means: Means,
        *,
        allocator: FileAllocator,
        staging_buffer: tuple[StagingBuffer, int],
        place: tuple[int, Callable[[], None]],
    ) -> None:
        self._unit, self._ahead = place
        self._staging_buffer, start = staging_buffer
        self._rows = [allocator.take(c.shard_numel, gathered) for c in msg.cuts]
        self._own = [
            row if dtype == gathered else allocator.take(c.shard_numel, dtype)
            for row, c, dtype in zip(self._rows, msg.cuts, dtypes, strict=True)
        ]
        pairs = list(zip(msg.cuts, self._own, self._rows, strict=True))
        self.locals = [own_storage(local_view(own.mapped(), c, rank)) for c, own, _ in pairs]
        self._shown_rows = [own_storage(local_view(row.mapped(), c, rank)) for c, _, row in pairs]
        self._low = self._rows[0].offset
        self._high = self._rows[-1].offset + page_aligned(self._rows[-1].numel * gathered.itemsize)
        self._memory = self._staging_buffer.memory[start : start + self._high - self._low]
        self.padded = [
            self._memory[r.offset - self._low :][: r.numel * gathered.itemsize].view(gathered) for r in self._rows
        ]
        self.pack_row, self.dtype, self.flats = None, gathered, []
        self.tag = means.allocate(msg.num_flags, gathered)
        self._held: tuple[int, int] | None = (
            None  # the tenancy and the version of the shards that are in the staging buffer
        )
        self._furnish(msg, rank, dtypes, means)
        self._pool = means.pool

    def num_bytes(self) -> int:
        return 0  # of memory

    def write_rows(self) -> None:
        for own, row, local, shown in zip(self._own, self._rows, self.locals, self._shown_rows, strict=True):
            if own is not row:
                shown.copy_(local)
        self.flush()

    def flush(self) -> None:
        self._rows[0].file.flush()

    def row(self, i: int) -> Tensor | FileRange | None:
        return None if self._own[i] is self._rows[i] else self._rows[i]

    def own_range(self, i: int) -> FileRange | None:
        return self._own[i]

    def refresh(self, version: int) -> Transfer | None:
        self.begin_read(version)
        self._staging_buffer.filled()
        self._ahead()
        return None

    def begin_read(self, version: int) -> None:
        """Let threads bring the shards of `version` into the staging buffer, unless they are there, or on their way."""
        self.settle(version)
        tenancy = self._staging_buffer.claim(self._unit)
        if self._held == (tenancy, version):
            return
        self._staging_buffer.filled()
        for transfer in self._reading:  # the last gather of this unit may still copy from it
            transfer.synchronize()
        self._held = (tenancy, version)
        file = self._rows[0].file
        for at in range(0, self._high - self._low, CHUNK_BYTES):
            part = self._memory[at : at + CHUNK_BYTES]
            self._staging_buffer.filling.append(self._pool().submit(file.read, self._low + at, part))

    def synchronize(self) -> None:
        super().synchronize()
        self._staging_buffer.filled()  # what was read ahead for nothing, of pages that may be written now

    def read_by(self, transfer: Transfer) -> None:
        super().read_by(transfer)
        self._staging_buffer.emptying[id(self)] = transfer

    def mark_stale(self) -> None:
        super().mark_stale()
        self._held = None
