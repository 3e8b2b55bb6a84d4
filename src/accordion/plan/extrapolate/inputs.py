"""Offloaded inputs of recomputed units: their bytes on host and disk, and the events of disk reads and writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from accordion.offload.activations.stores import NUM_STAGES, room_for
from accordion.plan.events import (
    COMPUTE,
    DISK_STREAM,
    FETCH,
    HOST,
    STORE,
    Enter,
    Event,
    Land,
    Launch,
    Log,
    Mark,
    Op,
    Wait,
    begins,
)

COPIED = 2  # a copy reads and writes


def inputs_of(log: Log) -> list[int]:
    """Return the bytes of each offloaded input of a micro-batch, rounded up to whole pages; of several, the largest one's."""
    batches: list[list[int]] = [[]]
    for event in log.events:
        if isinstance(event, Enter) and begins(event.place):
            batches.append([])
        elif isinstance(event, Op) and event.stream == STORE:
            batches[-1].append(room_for(event.num_bytes // COPIED))
    return max(batches, key=sum)


def staged_bytes(inputs: list[int]) -> int:
    """Return the bytes of the staging buffers through which `inputs` (bytes of each) are copied to and from a disk."""
    return NUM_STAGES * max(inputs, default=0)


def inputs_on_disk(log: Log) -> Log:
    """Return the log of a step with inputs on disk. `log`: with inputs on the host, and no other offload."""
    return replace(log, events=list(_DiskWalk(log).events()))


@dataclass(slots=True)
class _Batch:
    """Transfers of one micro-batch so far, in order."""

    writes: list[int] = field(default_factory=list)  # ends of writes to the disk
    copies: list[int] = field(default_factory=list)  # copies back to the device


class _DiskWalk:
    """Adds the events of a disk to a log with inputs on the host, as `offload/activations/stores.py` does it.

    Forward: an input is written to disk once it is on the host. With three staging buffers (`NUM_STAGES`), the caller waits for
    the third last write before it reuses that buffer. Backward: inputs are needed in reverse order. The last three are still in
    host memory. The others are read from disk, starting when the unit after theirs is recomputed, and the caller waits for them.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._transfers = max((e.transfer for e in log.events if isinstance(e, (Launch, Mark))), default=0)
        self._batch = _Batch()
        self._reads: dict[int, tuple[int, Op]] = {}  # by transfer: (end of its disk read, the copy that follows)

    def events(self) -> Iterator[Event]:
        last: Launch | None = None  # the last launch of a copy
        for event in self._log.events:
            if isinstance(event, Enter) and begins(event.place):
                self._batch = _Batch()
            if isinstance(event, Launch) and event.stream in (STORE, FETCH):
                last = event
            if isinstance(event, Launch) and event.stream == STORE and len(self._batch.writes) >= NUM_STAGES:
                yield Wait(self._batch.writes[-NUM_STAGES], HOST)
            if isinstance(event, Op) and event.stream == STORE and last is not None:
                yield event
                yield from self._write(last, event)
            elif isinstance(event, Op) and event.stream == FETCH and last is not None:
                yield from self._fetch(last, event)
            else:
                yield from self._landed(event)
                yield event

    def _next(self) -> int:
        self._transfers += 1
        return self._transfers

    def _write(self, launch: Launch, copy: Op) -> Iterator[Event]:
        written = self._next()
        self._batch.writes.append(written)
        yield Wait(launch.transfer, DISK_STREAM)
        yield Op("inputs to the disk", 0.0, copy.num_bytes // COPIED, "", DISK_STREAM)
        yield Mark(written, DISK_STREAM)

    def _fetch(self, launch: Launch, copy: Op) -> Iterator[Event]:
        batch = self._batch
        at = len(batch.writes) - 1 - len(batch.copies)  # index of the input that is copied back
        batch.copies.append(launch.transfer)
        if at >= len(batch.writes) - NUM_STAGES or at < 0:
            yield copy
            return
        yield Wait(batch.copies[-1 - NUM_STAGES], HOST)
        yield Wait(batch.writes[at], HOST)
        yield Op("inputs from the disk", 0.0, copy.num_bytes // COPIED, "", DISK_STREAM)
        self._reads[launch.transfer] = self._next(), copy
        yield Mark(self._reads[launch.transfer][0], DISK_STREAM)

    def _landed(self, event: Event) -> Iterator[Event]:
        """If `event` waits for an input that was read from disk, yield its copy to the device first."""
        if isinstance(event, Land) and event.transfer in self._reads:
            read, copy = self._reads.pop(event.transfer)
            copied = self._next()
            self._batch.copies[self._batch.copies.index(event.transfer)] = copied
            yield Wait(read, HOST)
            yield copy
            yield Mark(copied, FETCH)
            yield Wait(copied, COMPUTE)
