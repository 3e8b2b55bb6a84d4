"""Vector clocks over streams: find accesses of memory without an order, and memory that is freed while it may be in use."""

from __future__ import annotations

import traceback
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

import accordion
from accordion import _torch

SOURCE = str(Path(accordion.__file__).parent)


class Clock(dict[int, int]):
    """Number of a stream -> the time up to which its work is known to be done."""

    def join(self, other: dict[int, int]) -> None:
        for number, time in other.items():
            if self.get(number, 0) < time:
                self[number] = time


@dataclass(frozen=True, slots=True)
class Access:
    """An access of bytes `begin` to `end` of a memory, at `time` of `stream`."""

    begin: int
    end: int
    writes: bool
    stream: Stream
    time: int
    what: str

    def overlaps(self, other: Access) -> bool:
        return self.begin < other.end and other.begin < self.end

    def is_done(self, clock: Clock) -> bool:
        return clock.get(self.stream.number, 0) >= self.time

    def __str__(self) -> str:
        return f"{'write' if self.writes else 'read'} on {self.stream.name} ({self.what})"


@dataclass(eq=False, slots=True)
class Memory:
    """The memory of a tensor. `stream`: the stream on which it was allocated; None for host memory."""

    stream: Stream | None
    num_bytes: int
    accesses: list[Access] = field(default_factory=list)


class Event:
    """Stands in for a device's event."""

    def __init__(self, checker: Checker) -> None:
        self._checker, self.clock = checker, Clock()

    def record(self, stream: Stream | None = None) -> None:
        self.clock = Clock((stream or self._checker.current).tick())

    def synchronize(self) -> None:
        self._checker.host.join(self.clock)
        self._checker.waits[f"event: {where()}"] += 1

    def query(self) -> bool:
        """Return True; then the host knows that all work before the event is done."""
        self._checker.host.join(self.clock)
        return True


class Stream:
    """Stands in for a device's stream: its work runs after all that the stream or the host has waited for."""

    def __init__(self, checker: Checker, name: str) -> None:
        self._checker, self.name, self.clock = checker, name, Clock()
        self.number = checker.num_streams
        checker.num_streams += 1

    def tick(self) -> Clock:
        self.clock.join(self._checker.host)
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return self.clock

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._checker)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.clock.join(event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.clock.join(other.clock)

    def synchronize(self) -> None:
        self._checker.host.join(self.clock)
        self._checker.waits[f"stream: {where()}"] += 1


class Checker:
    """Records the accesses of each memory on each stream, and counts the problems.

    `problems`: accesses without an order, and memory freed while it may be in use. `waits`: waits of the host by source line.
    """

    def __init__(self) -> None:
        self.num_streams = 0
        self.host = Clock()
        self.problems: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.num_accesses = 0
        self.compute = Stream(self, "compute")
        self._entered: list[Stream] = []
        self._memories: dict[int, Memory] = {}
        self._deaths: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._pinned: list[tuple[int, Memory]] = []  # address, memory

    @property
    def current(self) -> Stream:
        return self._entered[-1] if self._entered else self.compute

    @contextmanager
    def entered(self, stream: Stream | None) -> Iterator[None]:
        self._entered.append(stream or self.current)
        try:
            yield
        finally:
            self._entered.pop()

    def pin(self, memory: Tensor) -> None:
        """Register host memory that the device copies from and to by itself."""
        self._pinned.append((memory.data_ptr(), Memory(None, memory.numel() * memory.itemsize)))

    def born(self, storage: torch.UntypedStorage) -> None:
        """Register a storage that is not known yet as allocated on the current stream."""
        key = _torch.storage_key(storage)
        if key not in self._memories:
            self._memories[key] = Memory(self.current, storage.nbytes())
            self._deaths[key] = weakref.ref(storage, lambda _: self._died(key))

    def run(self, what: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """Record a kernel on the current stream."""
        self.current.tick()
        for tensors, writing in ((reads, False), (writes, True)):
            for tensor in tensors:
                self.born(tensor.untyped_storage())
                self._access(tensor, writing, what)

    def resized(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Call before `storage.resize_(num_bytes)`."""
        key = _torch.storage_key(storage)
        memory = self._memories.get(key)
        if memory is None:
            return
        if storage.nbytes() and num_bytes == storage.nbytes():
            self.problems[f"a storage is resized to the size that it has | {where()}"] += 1
        elif storage.nbytes():
            self._free(memory, "resized")
        self._memories[key] = Memory(self.current if num_bytes else memory.stream, num_bytes)

    def _died(self, key: int) -> None:
        memory = self._memories.pop(key, None)
        self._deaths.pop(key, None)
        if memory is not None:
            self._free(memory, "dropped")

    def _free(self, memory: Memory, how: str) -> None:
        """Record that the next allocation on the memory's stream may reuse it, ordered after that stream alone."""
        assert memory.stream is not None
        clock = Clock(memory.stream.clock)
        clock.join(self.host)
        for access in memory.accesses:
            if access.stream is not memory.stream and not access.is_done(clock):
                self.problems[
                    f"{memory.num_bytes} bytes of {memory.stream.name} are {how} before a {access} | {where()}"
                ] += 1

    def _access(self, tensor: Tensor, writes: bool, what: str) -> None:
        storage = tensor.untyped_storage()
        if not tensor.numel() or not storage.nbytes():
            return
        begin = tensor.storage_offset() * tensor.itemsize
        last = sum((n - 1) * abs(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        memory, end = self._memories.get(_torch.storage_key(storage)), begin + (last + 1) * tensor.itemsize
        for address, pinned in self._pinned:
            if address <= tensor.data_ptr() < address + pinned.num_bytes:
                start = tensor.data_ptr() - address
                memory, begin, end = pinned, start, start + end - begin
        if memory is None:
            return
        self.num_accesses += 1
        stream = self.current
        now = Access(begin, end, writes, stream, stream.clock.get(stream.number, 0), what)
        by_host = memory.stream is None and stream is self.compute  # an operator on host memory runs on the host
        kept = []
        for access in memory.accesses:
            ordered = access.is_done(self.host if by_host else stream.clock) or (
                access.stream is stream and not by_host
            )
            if access.overlaps(now) and (writes or access.writes) and not ordered:
                verb = "writes" if writes else "reads"
                text = f"the host {verb} ({what}) and has not waited for" if by_host else f"a {now} does not wait for"
                self.problems[f"{text} a {access} | {where()}"] += 1
            covered = begin <= access.begin and access.end <= end
            replaced = covered and ordered and (writes or (access.stream is stream and not access.writes))
            if by_host or not replaced:
                kept.append(access)
        memory.accesses = kept if by_host else [*kept, now]


def where() -> str:
    """Return the innermost three source lines of the library, the last call first."""
    frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(SOURCE)]
    return " < ".join(f"{frame.filename[len(SOURCE) + 1 :]}:{frame.lineno}" for frame in frames[::-1][:3])
