"""How the pieces of a step pass: from files through buffers of the host, and from the host through buffers of the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accordion import _torch
from accordion.engine.streams import Flight, Lane
from accordion.memory.pieces import Piece, Strip

NUM_BUFFERS = 4  # pieces in flight: one is stepped, the others are written or read
NUM_DEVICE_BUFFERS = 3  # one is stepped, one comes, one goes


class Stream:
    """Owns the host buffers through which the pieces of one step pass, in order, and what is read and written meanwhile."""

    def __init__(self, pieces: Sequence[Piece], pool: ThreadPoolExecutor, buffers: list[Tensor]) -> None:
        self._pieces: list[Piece | None] = list(pieces)
        self._pool, self._buffers = pool, buffers
        self._broken: BaseException | None = None
        self._ready: list[Future[None]] = [
            pool.submit(self._refill, [], None, i) for i in range(min(NUM_BUFFERS, len(pieces)))
        ]

    def _views(self, which: int, piece: Piece) -> list[Tensor]:
        """The tensor of each strip: in memory as it lies, else in the piece's buffer."""
        buffer = self._buffers[which % NUM_BUFFERS] if self._buffers else None
        return views_in(buffer, piece.strips, lambda strip: strip.memory)

    def _refill(self, writes: list[tuple[Strip, Tensor]], after: Callable[[], None] | None, coming: int | None) -> None:
        """Write what was stepped in a buffer, then read another piece into it."""
        if after is not None:
            after()
        for strip, view in writes:
            assert strip.file is not None, "only files are written"
            strip.file.write(strip.offset, whole_pages(view, strip))
        writes.clear()
        piece = self._pieces[coming] if coming is not None and coming < len(self._pieces) else None
        if piece is None or coming is None:
            return
        for i, (strip, view) in enumerate(zip(piece.strips, self._views(coming, piece), strict=True)):
            if strip.file is not None and strip.reads:
                strip.file.read(strip.offset, whole_pages(view, strip))
            elif not strip.reads and i < len(piece.area.keys) and view.device.type == "cpu":
                view.zero_()  # a state that is not there yet; on a device this thread's stream would not be ordered

    def take(self, which: int) -> tuple[Piece, list[Tensor]]:
        """A piece, in their order, and its strips."""
        self._ready[which % NUM_BUFFERS].result()
        piece = self._pieces[which]
        assert piece is not None, "a piece is taken once"
        return piece, self._views(which, piece)

    def give(self, which: int, after: Callable[[], None] | None = None) -> Future[None]:
        """What `take` gave was stepped, once `after` returns; when the future ends it is on disk."""
        piece = self._pieces[which]
        assert piece is not None, "a piece is given back once"
        views = self._views(which, piece)
        writes = [(s, v) for s, v in zip(piece.strips, views, strict=True) if s.file is not None and s.writes]
        self._pieces[which] = None  # with it go the gradients
        slot = which % NUM_BUFFERS
        self._ready[slot] = self._pool.submit(self._refill, writes, after, which + NUM_BUFFERS)
        return self._ready[slot]

    @contextmanager
    def unbroken(self) -> Iterator[None]:
        """What fails inside ends the stream: later pieces would be taken for others."""
        if self._broken is not None:
            raise self._broken
        try:
            yield
        except BaseException as error:
            self._broken = error
            raise

    def finish(self) -> None:
        """Wait until all is written."""
        for future in self._ready:
            future.result()


class DeviceStream:
    """Owns the device buffers through which the pieces of a `Stream` pass, for a step on the device.

    All is begun by the thread that runs forward and backward: the piece after the next one comes, and the one before goes,
    on lanes of their own while one is stepped. Buffers are made before and stay.
    """

    def __init__(self, inner: Stream, count: int, buffers: list[Tensor], lanes: tuple[Lane, Lane]) -> None:
        self._inner, self._count, self._buffers = inner, count, buffers
        self._fetch_lane, self._store_lane = lanes
        self._coming: dict[int, tuple[Flight, Piece, list[Tensor], list[Tensor]]] = {}
        self._going: dict[int, Flight] = {}  # by buffer

    def _fetch(self, which: int) -> None:
        if which >= self._count or which in self._coming:
            return
        piece, there = self._inner.take(which)
        slot = which % NUM_DEVICE_BUFFERS
        gone = self._going.pop(slot, None)
        if gone is not None:
            gone.join(self._fetch_lane)
        buffer = self._buffers[slot]
        here = views_in(buffer, piece.strips, lambda strip: strip.memory if _is_on(strip, buffer.device) else None)
        pairs = [(h, t) for h, t, s in zip(here, there, piece.strips, strict=True) if h is not t and s.reads]
        flight = self._fetch_lane.copy(partial(_copy, pairs), [], "brings what is stepped to the device")
        self._coming[which] = (flight, piece, here, there)

    def take(self, which: int) -> tuple[Piece, list[Tensor]]:
        self._fetch(which)
        self._fetch(which + 1)
        flight, piece, here, _ = self._coming[which]
        flight.land()
        return piece, here

    def give(self, which: int) -> None:
        _, piece, here, there = self._coming.pop(which)
        pairs = [(t, h) for h, t, s in zip(here, there, piece.strips, strict=True) if h is not t and s.writes]
        flight = self._store_lane.copy(partial(_copy, pairs), [], "takes what was stepped from the device")
        if self._store_lane.late:
            flight.synchronize()
        self._going[which % NUM_DEVICE_BUFFERS] = flight
        self._inner.give(which, flight.block)

    def finish(self) -> None:
        """Wait until all is where it rests."""
        for flight in self._going.values():
            flight.synchronize()
        self._inner.finish()


def _is_on(strip: Strip, device: torch.device) -> bool:
    """Whether a strip lies on the device. On CPU everything would: there what lies in host memory is copied all the same."""
    return strip.memory is not None and strip.memory.device == device and device.type != "cpu"


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    if pairs:
        to, source = zip(*pairs, strict=True)
        _torch.foreach_copy_(list(to), list(source), non_blocking=True)


def views_in(buffer: Tensor | None, strips: Sequence[Strip], given: Callable[[Strip], Tensor | None]) -> list[Tensor]:
    """For each strip what is `given`, else its part of `buffer`, bytes, in their order."""
    result: list[Tensor] = []
    at = 0
    for strip in strips:
        memory = given(strip)
        if memory is None:
            assert buffer is not None, "there are buffers where something is not at hand"
            memory = buffer[at : at + strip.numel * strip.dtype.itemsize].view(strip.dtype)
            at += strip.num_bytes
        result.append(memory)
    return result


def whole_pages(view: Tensor, strip: Strip) -> Tensor:
    """The bytes of a strip in a buffer, to the end of its last page."""
    storage: Any = view.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(
        storage, view.storage_offset() * view.itemsize, (strip.num_bytes,), (1,)
    )
