"""Stores for inputs of recomputed units: host memory, or a file that is accessed through a few buffers of host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accordion.engine.communicator import Communicator, Pending
from accordion.engine.streams import SideStream, Steps, Transfer
from accordion.errors import OffloadError
from accordion.offload.arena import ALIGN_BYTES, Arena, ArenaMaker, page_aligned
from accordion.offload.disk_shards import CHUNK_BYTES
from accordion.offload.swap_file import SwapFile

GROWTH = 8  # a buffer that replaces a smaller one is larger than requested by 1 / GROWTH
NUM_STAGES = 3  # host buffers for a file: one is copied into, one is written or read, one waits
STORES, FETCHES = "copies activations to the host", "copies activations to the device"


class HostActivationStore:
    """Host memory for inputs: a buffer for each input that is stored at a time, at least as large as that input."""

    disk_bytes = 0

    def __init__(
        self, device: torch.device, side_streams: tuple[SideStream, SideStream], make_arena: ArenaMaker = Arena
    ) -> None:
        self._device, self.side_streams, self._make_arena = device, side_streams, make_arena
        self.host_bytes = 0
        self._free: list[Arena] = []

    def take(self, num_bytes: int) -> HostSlot:
        """Return a slot of at least `num_bytes`: the smallest free buffer that fits, or a new one."""
        fits = [buffer for buffer in self._free if buffer.num_bytes >= num_bytes]
        if fits:
            buffer = min(fits, key=lambda buffer: buffer.num_bytes)
            self._free.remove(buffer)
            return HostSlot(self, buffer)
        if self._free:  # inputs have grown: replace the largest free buffer by a larger one
            largest = max(self._free, key=lambda buffer: buffer.num_bytes)
            self._free.remove(largest)
            self.host_bytes -= largest.num_bytes
            del largest
            # Larger than requested: if lengths grew a little in each step, each step would pin new memory and wait for it.
            num_bytes = page_aligned(num_bytes + num_bytes // GROWTH)
        buffer = self._make_arena(num_bytes, self._device)
        self.host_bytes += num_bytes
        return HostSlot(self, buffer)

    def give(self, buffer: Arena) -> None:
        self._free.append(buffer)


class HostSlot:
    """A buffer of host memory for one input."""

    def __init__(self, store: HostActivationStore, buffer: Arena) -> None:
        self._store, self._buffer = store, buffer
        self._fetch: Transfer | None = None

    def store(self, tensor: Tensor, like: Tensor) -> Transfer:
        """Start copying the input `tensor` to the host. `like`: a tensor of its shape and dtype, with the strides to store."""
        return self._store.side_streams[1].copy(copying(shaped(self._buffer.memory, like), tensor), [tensor], STORES)

    def fetch(self, into: Tensor) -> Transfer:
        """Start copying the input into `into`, on the device, of the shape and strides of `like`."""
        copies = copying(into, shaped(self._buffer.memory, into))
        self._fetch = self._store.side_streams[0].copy(copies, [into], FETCHES)
        return self._fetch

    def free(self, is_fetched: bool) -> None:
        """Free the buffer; callable on any thread. `is_fetched`: a copy to the device was started and may not have ended."""
        # The host must not wait for the copy: the device may be waiting for ranks that never arrive. Later stores wait for it.
        if is_fetched and self._fetch is not None:
            self._fetch.join(self._store.side_streams[1])
            self._fetch.land()
        self._store.give(self._buffer)


class DiskActivationStore:
    """A file for inputs, which are written and read through `NUM_STAGES` host buffers.

    The file grows if no free range is large enough: in the first forwards, and when inputs get larger.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        side_streams: tuple[SideStream, SideStream],
        pool: Callable[[], ThreadPoolExecutor],
        checksums: bool,
        make_arena: ArenaMaker,
    ) -> None:
        self._device, self.side_streams, self._pool = device, side_streams, pool
        self._make_arena = make_arena
        self.file = SwapFile(folder, 0, checksums=checksums)
        self._free: list[tuple[int, int]] = []  # (start, stop) in bytes of free ranges, sorted, adjacent ones joined
        self._released: deque[tuple[int, int, list[Moves]]] = deque()  # free when their reads and writes have ended
        self._stages = [Stage() for _ in range(NUM_STAGES)]  # the least recently used first

    @property
    def disk_bytes(self) -> int:
        return self.file.num_bytes

    @property
    def host_bytes(self) -> int:
        return sum(stage.buffer.num_bytes for stage in self._stages if stage.buffer is not None)

    def take(self, num_bytes: int) -> DiskSlot:
        """Return a slot of `num_bytes` in the smallest free range that fits, or at the end. Raises `OffloadError`."""
        self._collect()
        fits = [(stop - start, start, stop) for start, stop in self._free if stop - start >= num_bytes]
        if fits:
            _, start, stop = min(fits)
            self._free.remove((start, stop))
            if start + num_bytes < stop:
                self._free = joined([*self._free, (start + num_bytes, stop)])
            return DiskSlot(self, start, num_bytes)
        end = self.file.num_bytes
        start = self._free[-1][0] if self._free and self._free[-1][1] == end else end
        self.file.grow(start + num_bytes - end)
        if start < end:
            self._free.pop()
        return DiskSlot(self, start, num_bytes)

    def _collect(self) -> None:
        while self._released:
            start, stop, moves = self._released.popleft()
            for move in moves:
                move.settle()
            self._free.append((start, stop))
        self._free = joined(self._free)

    def give(self, start: int, stop: int, moves: list[Moves]) -> None:
        """Free a range of the file, in bytes, once `moves` have ended; callable on any thread."""
        self._released.append((start, stop, moves))

    def stage(self, num_bytes: int) -> Stage:
        """Return the least recently used host buffer, of at least `num_bytes`, after its last use has ended."""
        self._stages.append(self._stages.pop(0))
        stage = self._stages[-1]
        stage.clear()
        if stage.buffer is None or stage.buffer.num_bytes < num_bytes:
            stage.buffer = None  # free the smaller one before allocating
            stage.buffer = self._make_arena(num_bytes, self._device)
        return stage

    def move(self, call: Callable[[int, Tensor], None], start: int, memory: Tensor, after: Callable[[], None]) -> Moves:
        """Once `after` returns, call `call(offset, part)` on threads for all parts of `memory`, 1-D uint8, from `start` on."""
        parts = [
            partial(call, start + at, memory[at : at + CHUNK_BYTES]) for at in range(0, memory.numel(), CHUNK_BYTES)
        ]
        return Moves(self._pool(), after, parts)


class Stage:
    """A buffer of host memory between the device and the file."""

    def __init__(self) -> None:
        self.buffer: Arena | None = None
        self.content: object = None  # the `DiskSlot` whose input is in the buffer
        self.uses: list[Callable[[], None]] = []  # each waits for one use of the buffer

    def clear(self) -> None:
        """Wait for all uses of the buffer. Raise the error of a failed one, once."""
        self.content = None
        while self.uses:
            self.uses.pop(0)()

    def memory(self, num_bytes: int) -> Tensor:
        assert self.buffer is not None, "stage() has allocated it"
        return self.buffer.memory[:num_bytes]


class Moves:
    """Reads or writes of a file, `parts`, on threads. One thread waits until `after` returns, so that the others are free."""

    def __init__(
        self, pool: ThreadPoolExecutor, after: Callable[[], None], parts: Sequence[Callable[[], None]]
    ) -> None:
        self._pool, self._parts = pool, parts
        self._started = pool.submit(self._start, after)

    def _start(self, after: Callable[[], None]) -> list[Future[None]]:
        after()
        parts, self._parts = self._parts, ()
        return [self._pool.submit(part) for part in parts]

    def wait(self, *_: Any) -> None:
        """Wait for all parts, as `Work.wait` of a collective; ignores arguments. Raise the error of a part that failed."""
        self.settle()
        try:
            for future in self._started.result():
                future.result()
        except OffloadError as error:
            failed = error.with_traceback(None)
        else:
            return
        # A new error: the traceback of a raised one refers to the caller's frames, and these to the graph with this object.
        raise OffloadError(*failed.args) from failed.__cause__

    def settle(self) -> None:
        """Wait for all parts, and ignore errors."""
        wait([self._started])
        if self._started.exception() is None:
            wait(self._started.result())


class DiskSlot:
    """A range of the file for one input, with its reads and writes under way."""

    def __init__(self, store: DiskActivationStore, start: int, num_bytes: int) -> None:
        self.activation_store, self.start, self.num_bytes = store, start, num_bytes
        self._stage: Stage | None = None
        self._stored: Stored | None = None
        self._fetch: Transfer | None = None
        self._reads: Moves | None = None
        self._is_wanted = True

    def store(self, tensor: Tensor, like: Tensor) -> Stored:
        """Start copying the input `tensor` to the host and writing it to the file. `like`: as for `HostSlot.store`."""
        stage = self.activation_store.stage(self.num_bytes)
        memory = stage.memory(self.num_bytes)
        copy = self.activation_store.side_streams[1].copy(copying(shaped(memory, like), tensor), [tensor], STORES)
        self._stage, self._stored, stage.content = stage, Stored(self.activation_store, self.start, memory, copy), self
        stage.uses.append(partial(self._end, self._stored.finish))
        return self._stored

    def fetch(self, into: Tensor) -> Transfer:
        """Start copying the input back into `into`: from its host buffer if that was not reused, else from the file."""
        assert self._stage is not None, "what is fetched was stored"
        assert self._stored is not None, "what is fetched was stored"
        store, stage, reads = self.activation_store, self._stage, None
        if stage.content is not self:
            self._stored.finish()  # the write has ended, because its buffer was reused: this raises its error
            stage = store.stage(self.num_bytes)
            reads = store.move(store.file.read, self.start, stage.memory(self.num_bytes), lambda: None)
        memory, self._reads = shaped(stage.memory(self.num_bytes), into), reads

        def steps() -> Steps:  # on a device the copy waits for compute work that was started before the reads only
            if reads is not None:
                yield Pending(Communicator(None, torch.device("cpu")), [reads])
            into.copy_(memory, non_blocking=True)

        self._fetch = store.side_streams[0].start(steps(), [into], FETCHES)
        stage.uses.append(partial(self._end, self._fetch.synchronize))
        return self._fetch

    def _end(self, wait: Callable[[], None]) -> None:
        """Call `wait`, and ignore an `OffloadError` if the input is not needed any more."""
        try:
            wait()
        except OffloadError:
            if self._is_wanted:
                raise

    def free(self, is_fetched: bool) -> None:
        """Free the range; callable on any thread. `is_fetched`: a copy to the device was started and may not have ended."""
        self._is_wanted = False
        moves = [] if self._stored is None else self._stored.cancel()
        if is_fetched and self._fetch is not None:
            self._end(self._fetch.land)  # the next use of the stage waits for the copy
        moves += [] if self._reads is None else [self._reads]
        self.activation_store.give(self.start, self.start + self.num_bytes, moves)


class Stored:
    """A copy of an input to a host buffer, followed by its write to the file; has the method `land` of a `Transfer`."""

    def __init__(self, store: DiskActivationStore, start: int, memory: Tensor, transfer: Transfer) -> None:
        self._transfer = transfer
        self._move: Callable[[], Moves] | None = partial(store.move, store.file.write, start, memory, transfer.block)
        self._writes: Moves | None = None
        if not store.side_streams[1].late:  # with debug="streams" the copy runs only when it is waited for
            self._begin()

    def _begin(self) -> None:
        move, self._move = self._move, None
        if move is not None:
            self._writes = move()

    def land(self) -> None:
        self._transfer.land()
        self._begin()

    def finish(self) -> None:
        """Wait until the host buffer can be reused: until the write has ended, or the copy if the write was cancelled."""
        self.land()
        if self._writes is None:
            self._transfer.block()
        else:
            self._writes.wait()

    def cancel(self) -> list[Moves]:
        """Cancel the write if it has not begun. Return the writes under way."""
        self._move = None
        return [] if self._writes is None else [self._writes]


def joined(parts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges (start, stop) sorted, with adjacent ones joined."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(parts):
        if result and result[-1][1] == start:
            start = result.pop()[0]
        result.append((start, stop))
    return result


def shaped(memory: Tensor, like: Tensor) -> Tensor:
    """Return a view of the first bytes of `memory`, 1-D uint8, with dtype, shape and strides of the dense tensor `like`."""
    return memory[: like.nbytes].view(like.dtype).as_strided(like.shape, like.stride())


def copying(to: Tensor, source: Tensor) -> Callable[[], None]:
    def copy() -> None:
        to.copy_(source.detach(), non_blocking=True)

    return copy


def room_for(num_bytes: int) -> int:
    """Return the bytes that an input of `num_bytes` takes in a store: whole pages, at least one."""
    return max(page_aligned(num_bytes), ALIGN_BYTES)
