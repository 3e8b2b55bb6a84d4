"""Where inputs of recomputed blocks wait off the device: in host memory, or in a file behind a few pieces of it."""

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

GROWTH = 8  # a piece that takes the place of a smaller one has this share of its size beyond what is asked for
NUM_STAGES = 3  # pieces of host memory on the way to a file and back: one is filled, one is written or read, one waits
STORES, FETCHES = "takes activations from the device", "brings activations back"


class HostActivationStore:
    """Owns host memory in pieces: as many as ever waited at once, each as large as the largest of those that were in it."""

    disk_bytes = 0

    def __init__(
        self, device: torch.device, side_streams: tuple[SideStream, SideStream], make_arena: ArenaMaker = Arena
    ) -> None:
        self._device, self.side_streams, self._make_arena = device, side_streams, make_arena
        self.host_bytes = 0
        self._free: list[Arena] = []

    def take(self, num_bytes: int) -> HostSlot:
        fits = [piece for piece in self._free if piece.num_bytes >= num_bytes]
        if fits:
            piece = min(fits, key=lambda piece: piece.num_bytes)
            self._free.remove(piece)
            return HostSlot(self, piece)
        if self._free:  # inputs have grown: a larger one in place of the next smaller one
            largest = max(self._free, key=lambda piece: piece.num_bytes)
            self._free.remove(largest)
            self.host_bytes -= largest.num_bytes
            del largest
            # Beyond what is asked for: else lengths that grow a little at a time have each step pin memory, and wait for it.
            num_bytes = page_aligned(num_bytes + num_bytes // GROWTH)
        piece = self._make_arena(num_bytes, self._device)
        self.host_bytes += num_bytes
        return HostSlot(self, piece)

    def give(self, piece: Arena) -> None:
        self._free.append(piece)


class HostSlot:
    """Owns a piece of host memory while an input waits in it."""

    def __init__(self, store: HostActivationStore, piece: Arena) -> None:
        self._store, self._piece = store, piece
        self._coming: Transfer | None = None

    def store(self, tensor: Tensor, like: Tensor) -> Transfer:
        """Begin to take an input there. `like`: its shape and strides, without gaps."""
        return self._store.side_streams[1].copy(copying(shaped(self._piece.memory, like), tensor), [tensor], STORES)

    def fetch(self, into: Tensor) -> Transfer:
        """Begin to bring it back into a tensor of the same shape and strides."""
        copies = copying(into, shaped(self._piece.memory, into))
        self._coming = self._store.side_streams[0].copy(copies, [into], FETCHES)
        return self._coming

    def free(self, is_coming: bool) -> None:
        """Nobody wants it any more, though it may be on its way; on any thread."""
        if is_coming and self._coming is not None:  # the host cannot wait: a device may wait for ranks that never come
            self._coming.join(self._store.side_streams[1])
            self._coming.land()
        self._store.give(self._piece)


class DiskActivationStore:
    """Owns a file, and the host memory through which inputs pass on their way there and back.

    The file grows where no part of it is free that is large enough, in the first passes or with inputs that are larger.
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
        self._free: list[tuple[int, int]] = []  # (start, stop) in the file, in order, none beside another
        self._given: deque[tuple[int, int, list[Moves]]] = deque()  # free as soon as nothing is moved there
        self._stages = [Stage() for _ in range(NUM_STAGES)]

    @property
    def disk_bytes(self) -> int:
        return self.file.num_bytes

    @property
    def host_bytes(self) -> int:
        return sum(stage.piece.num_bytes for stage in self._stages if stage.piece is not None)

    def take(self, num_bytes: int) -> DiskSlot:
        """A part of the file, free or new. Raises `OffloadError` where the disk has no room."""
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
        while self._given:
            start, stop, moves = self._given.popleft()
            for move in moves:
                move.rest()
            self._free.append((start, stop))
        self._free = joined(self._free)

    def give(self, start: int, stop: int, moves: list[Moves]) -> None:
        """A part of the file is free once `moves` have ended; on any thread."""
        self._given.append((start, stop, moves))

    def stage(self, num_bytes: int) -> Stage:
        """The piece of host memory that was used longest ago, once what it had is where it belongs."""
        self._stages.append(self._stages.pop(0))
        stage = self._stages[-1]
        stage.clear()
        if stage.piece is None or stage.piece.num_bytes < num_bytes:
            stage.piece = None  # what is too small is freed first
            stage.piece = self._make_arena(num_bytes, self._device)
        return stage

    def move(self, call: Callable[[int, Tensor], None], start: int, memory: Tensor, after: Callable[[], None]) -> Moves:
        """Let threads read or write `memory` at `start`, part by part, once `after` returns."""
        parts = [
            partial(call, start + at, memory[at : at + CHUNK_BYTES]) for at in range(0, memory.numel(), CHUNK_BYTES)
        ]
        return Moves(self._pool(), after, parts)


class Stage:
    """Owns a piece of host memory that is used again and again, and knows what it has and until when that is needed."""

    def __init__(self) -> None:
        self.piece: Arena | None = None
        self.has: object = None
        self.needed: list[Callable[[], None]] = []  # each returns when what it has is needed no longer

    def clear(self) -> None:
        """Return when nobody needs what it has. Raises what that raises, once."""
        self.has = None
        while self.needed:
            self.needed.pop(0)()

    def memory(self, num_bytes: int) -> Tensor:
        assert self.piece is not None, "it was made to fit"
        return self.piece.memory[:num_bytes]


class Moves:
    """Reads or writes under way on threads. One of them waits for what comes before; the others have work meanwhile."""

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
        """Wait for the end of all, as what a collective gives does. Raises what one of them raised."""
        self.rest()
        try:
            for future in self._started.result():
                future.result()
        except OffloadError as error:
            failed = error.with_traceback(None)
        else:
            return
        # Another one: what is raised knows the frames of who waits, and with them the graph that holds this.
        raise OffloadError(*failed.args) from failed.__cause__

    def rest(self) -> None:
        """Wait for the end, whatever it is."""
        wait([self._started])
        if self._started.exception() is None:
            wait(self._started.result())


class DiskSlot:
    """Owns a part of the file while an input waits in it, and what is moved there."""

    def __init__(self, store: DiskActivationStore, start: int, num_bytes: int) -> None:
        self.activation_store, self.start, self.num_bytes = store, start, num_bytes
        self._stage: Stage | None = None
        self._stored: Stored | None = None
        self._coming: Transfer | None = None
        self._reads: Moves | None = None
        self._is_wanted = True

    def store(self, tensor: Tensor, like: Tensor) -> Stored:
        stage = self.activation_store.stage(self.num_bytes)
        memory = stage.memory(self.num_bytes)
        transfer = self.activation_store.side_streams[1].copy(copying(shaped(memory, like), tensor), [tensor], STORES)
        self._stage, self._stored, stage.has = stage, Stored(self.activation_store, self.start, memory, transfer), self
        stage.needed.append(partial(self._end, self._stored.finish))
        return self._stored

    def fetch(self, into: Tensor) -> Transfer:
        """From the file, or from the memory in which it went there, where nothing else has come since."""
        assert self._stage is not None, "what is fetched was stored"
        assert self._stored is not None, "what is fetched was stored"
        store, stage, reads = self.activation_store, self._stage, None
        if stage.has is not self:
            self._stored.finish()  # before the memory was used again; here for what it raised then
            stage = store.stage(self.num_bytes)
            reads = store.move(store.file.read, self.start, stage.memory(self.num_bytes), lambda: None)
        memory, self._reads = shaped(stage.memory(self.num_bytes), into), reads

        def steps() -> Steps:  # on a device it waits only for what came before the reads
            if reads is not None:
                yield Pending(Communicator(None, torch.device("cpu")), [reads])
            into.copy_(memory, non_blocking=True)

        self._coming = store.side_streams[0].start(steps(), [into], FETCHES)
        stage.needed.append(partial(self._end, self._coming.synchronize))
        return self._coming

    def _end(self, wait: Callable[[], None]) -> None:
        """Before host memory is used again. What fails is not told where nobody asks any more."""
        try:
            wait()
        except OffloadError:
            if self._is_wanted:
                raise

    def free(self, is_coming: bool) -> None:
        self._is_wanted = False
        moves = [] if self._stored is None else self._stored.let_go()
        if is_coming and self._coming is not None:
            self._end(self._coming.land)  # who uses the stage again waits for the copy
        moves += [] if self._reads is None else [self._reads]
        self.activation_store.give(self.start, self.start + self.num_bytes, moves)


class Stored:
    """An input on its way from the device to host memory and from there to the file."""

    def __init__(self, store: DiskActivationStore, start: int, memory: Tensor, transfer: Transfer) -> None:
        self._transfer = transfer
        self._move: Callable[[], Moves] | None = partial(store.move, store.file.write, start, memory, transfer.block)
        self._writes: Moves | None = None
        if not store.side_streams[1].late:  # else nothing has arrived before it is waited for
            self._begin()

    def _begin(self) -> None:
        move, self._move = self._move, None
        if move is not None:
            self._writes = move()

    def land(self) -> None:
        self._transfer.land()
        self._begin()

    def finish(self) -> None:
        """Return when it is in the file or, where nobody wants it, in host memory: that is used again then."""
        self.land()
        if self._writes is None:
            self._transfer.block()
        else:
            self._writes.wait()

    def let_go(self) -> list[Moves]:
        """Nobody wants it any more; what is under way all the same."""
        self._move = None
        return [] if self._writes is None else [self._writes]


def joined(parts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Parts of a file in order, neighbours as one."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(parts):
        if result and result[-1][1] == start:
            start = result.pop()[0]
        result.append((start, stop))
    return result


def shaped(memory: Tensor, like: Tensor) -> Tensor:
    """The beginning of `memory`, bytes, with dtype, shape and strides of a dense tensor."""
    return memory[: like.nbytes].view(like.dtype).as_strided(like.shape, like.stride())


def copying(to: Tensor, source: Tensor) -> Callable[[], None]:
    def copy() -> None:
        to.copy_(source.detach(), non_blocking=True)

    return copy


def room_for(num_bytes: int) -> int:
    """Return the bytes that an input takes."""
    return max(page_aligned(num_bytes), ALIGN_BYTES)
