"""Inputs of recomputed units off the device: what they take of the host and of the disk, and the disk's reads and writes."""

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
    """Bytes of each input that waits elsewhere at once, in whole pages; of the micro-batch that has most of them."""
    batches: list[list[int]] = [[]]
    for event in log.events:
        if isinstance(event, Enter) and begins(event.place):
            batches.append([])
        elif isinstance(event, Op) and event.stream == STORE:
            batches[-1].append(room_for(event.num_bytes // COPIED))
    return max(batches, key=sum)


def staged_bytes(inputs: list[int]) -> int:
    """Host memory through which they pass on their way to a disk."""
    return NUM_STAGES * max(inputs, default=0)


def inputs_on_disk(log: Log) -> Log:
    """`log`, whose inputs wait on the host and which has no other copies, with a disk behind the host's memory."""
    return replace(log, events=list(_DiskWalk(log).events()))


@dataclass(slots=True)
class _Batch:
    """What a micro-batch has moved so far, in order: ends of writes, and of copies back to the device."""

    writes: list[int] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)


class _DiskWalk:
    """Owns the walk over a log of inputs that wait on the host.

    What the engine does (`offload/activations/stores.py`): an input is written when it is on the host. The caller waits for the
    write before the last two when it needs that memory for the next one. Inputs come back in reverse: the last three from where
    they are, the others by a read that begins with the recomputation of the unit behind, and for whose end the caller waits.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._transfers = max((e.transfer for e in log.events if isinstance(e, (Launch, Mark))), default=0)
        self._batch = _Batch()
        self._read: dict[int, tuple[int, Op]] = {}  # by transfer: the end of its read, and the copy that follows

    def events(self) -> Iterator[Event]:
        last: Launch | None = None  # of a copy
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
        at = len(batch.writes) - 1 - len(batch.copies)  # which input comes back
        batch.copies.append(launch.transfer)
        if at >= len(batch.writes) - NUM_STAGES or at < 0:
            yield copy
            return
        yield Wait(batch.copies[-1 - NUM_STAGES], HOST)
        yield Wait(batch.writes[at], HOST)
        yield Op("inputs from the disk", 0.0, copy.num_bytes // COPIED, "", DISK_STREAM)
        self._read[launch.transfer] = self._next(), copy
        yield Mark(self._read[launch.transfer][0], DISK_STREAM)

    def _landed(self, event: Event) -> Iterator[Event]:
        """What is read goes to the device when somebody wants it there."""
        if isinstance(event, Land) and event.transfer in self._read:
            read, copy = self._read.pop(event.transfer)
            copied = self._next()
            self._batch.copies[self._batch.copies.index(event.transfer)] = copied
            yield Wait(read, HOST)
            yield copy
            yield Mark(copied, FETCH)
            yield Wait(copied, COMPUTE)
