"""Shards on disk. Before a gather they are read into a staging buffer, host memory that several units share."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from torch import Tensor

from accordion.engine.shards import local_view, own_storage
from accordion.engine.streams import Transfer
from accordion.offload.arena import page_aligned
from accordion.offload.host_shards import OffDeviceShards, OffloadedGroup
from accordion.offload.swap_file import FileAllocator, Values, in_chunks


@dataclass(eq=False, slots=True)
class StagingBuffer:
    """Host memory for the shards of one unit at a time. `claim` gives it to a unit, whose `DiskShards` then record the file
    reads that fill it in `filling`, and the copies that read it in `emptying`."""

    memory: Tensor  # 1-D uint8
    unit: int = -1
    times: int = 0  # number of changes of the unit
    filling: list[Future[None]] = field(default_factory=list)  # reads of the file
    emptying: dict[int, Transfer] = field(default_factory=dict)  # id of the shard buffer -> its last copy to the device

    def claim(self, unit: int) -> int:
        """Give the buffer to the unit with index `unit`, and return the number of changes of the unit so far. At a change,
        first wait for the reads that fill it and the copies that read it. Raise the error of a failed read."""
        if self.unit != unit:
            self.wait_for_reads()
            for transfer in self.emptying.values():
                transfer.synchronize()
            self.emptying.clear()
            self.unit, self.times = unit, self.times + 1
        return self.times

    def wait_for_reads(self) -> None:
        """Wait for all reads that fill the buffer, and then raise the error of the first failed one."""
        futures, self.filling = self.filling, []
        wait(futures)  # for all, since the buffer is used again after the error of one
        for future in futures:
            future.result()


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskPlace:
    """Place of one group of the unit with index `unit`: its file, and its part of the staging buffer that gathers read."""

    unit: int
    allocator: FileAllocator  # of the file for shards
    staging_buffer: StagingBuffer
    start: int  # offset of the group in the staging buffer, in bytes
    read_ahead: Callable[[], None]  # starts reading the shards of the unit that is gathered next


class DiskShards(OffDeviceShards):
    """The shards of one group on disk: `locals` are mapped from the file, and gathers read from a staging buffer.

    The group's part of the file has first a row for each parameter, the shard in the gathered dtype, and then each shard that
    is stepped in another dtype; all begin at pages. So the rows are one range of the file, which is read for a gather. A step
    reads and writes the file directly, not through the mapping.
    """

    off_device = True

    def __init__(self, group: OffloadedGroup, place: DiskPlace) -> None:
        msg, rank, gathered = group.msg, group.rank, group.gathered
        self._unit, self._read_ahead, self._staging_buffer = place.unit, place.read_ahead, place.staging_buffer
        self._rows = [place.allocator.take(c.shard_numel, gathered) for c in msg.cuts]
        self._shards = [
            row if dtype == gathered else place.allocator.take(c.shard_numel, dtype)
            for row, c, dtype in zip(self._rows, msg.cuts, group.dtypes, strict=True)
        ]
        pairs = list(zip(msg.cuts, self._shards, self._rows, strict=True))
        self.locals = [own_storage(local_view(shard.mapped(), c, rank)) for c, shard, _ in pairs]
        self._mapped_rows = [own_storage(local_view(row.mapped(), c, rank)) for c, _, row in pairs]
        self._low = self._rows[0].offset
        high = self._rows[-1].offset + page_aligned(self._rows[-1].nbytes)
        self._memory = self._staging_buffer.memory[place.start : place.start + high - self._low]
        self.padded = [self._memory[r.offset - self._low :][: r.nbytes].view(gathered) for r in self._rows]
        self.pack_row, self.dtype, self.flats = None, gathered, []  # no memory of its own
        self.tag = group.allocate(msg.num_flags, gathered)
        self._staged: tuple[int, int] | None = None  # (`times` of the buffer, version of the shards) of the last read
        self._set_up(group)

    def write_rows(self) -> None:
        for shard, row, local, mapped in zip(self._shards, self._rows, self.locals, self._mapped_rows, strict=True):
            if shard is not row:
                mapped.copy_(local)
        self.flush()

    def flush(self) -> None:
        self._rows[0].file.flush()

    def row(self, i: int) -> Values | None:
        return None if self._shards[i] is self._rows[i] else self._rows[i]

    def shard(self, i: int) -> Values:
        return self._shards[i]

    def refresh(self, version: int) -> Transfer | None:
        self.begin_read(version)
        self._staging_buffer.wait_for_reads()
        self._read_ahead()
        return None

    def begin_read(self, version: int) -> None:
        """Start reading the rows (shards in the gathered dtype) from the file into the staging buffer, on threads, unless that
        has `version` of them. First copy changed shards into their rows, and wait until earlier uses of the buffer end."""
        self.settle(version)
        times = self._staging_buffer.claim(self._unit)
        if self._staged == (times, version):
            return
        self._staging_buffer.wait_for_reads()
        for transfer in self._reading:  # the last gather of this unit may still copy from the buffer
            transfer.synchronize()
        self._staged = (times, version)
        reads = in_chunks(self._rows[0].file.read, self._low, self._memory)
        self._staging_buffer.filling += [self._pool().submit(read) for read in reads]

    def synchronize(self) -> None:
        super().synchronize()
        self._staging_buffer.wait_for_reads()  # the caller may write the pages that are still being read ahead

    def read_by(self, transfer: Transfer) -> None:
        super().read_by(transfer)
        self._staging_buffer.emptying[id(self)] = transfer

    def mark_stale(self) -> None:
        super().mark_stale()
        self._staged = None
