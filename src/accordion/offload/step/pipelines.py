"""How the chunks of a step pass: from files through buffers of the host, and from the host through buffers of the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from queue import SimpleQueue
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from accordion import _torch
from accordion.engine.streams import SideStream, Transfer
from accordion.offload.step.chunks import Chunk, Span

NUM_BUFFERS = 4  # chunks under way: one is stepped, the others are written or read
NUM_DEVICE_BUFFERS = 3  # one is stepped, one comes, one goes


class HostPipeline:
    """Owns the host buffers through which chunks pass by themselves, in any order: a thread reads, steps and writes one.

    One is stepped at a time: its kernel has threads of its own.
    """

    def __init__(self, pool: ThreadPoolExecutor, buffers: Sequence[Tensor]) -> None:
        self._pool, self._stepping = pool, Lock()
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        self._num_buffers = len(buffers)
        for buffer in buffers:
            self._free.put(buffer)

    def start(self, chunk: Chunk, step: Callable[[Chunk, list[Tensor]], None]) -> Future[None]:
        """Let a chunk pass, whose future ends when it is where it rests.

        Waits for a free buffer, so that what others ask of the threads is behind a few chunks and not behind all of a step.
        """
        buffer = self._free.get()
        if any(not span.reads for span in chunk.spans[: len(chunk.block.keys)]):
            # States come into being beside the buffer, and what a thread gives back of that its allocator keeps: here, once.
            future: Future[None] = Future()
            try:
                self._pass(chunk, buffer, step)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            return future
        try:
            return self._pool.submit(self._pass, chunk, buffer, step)
        except BaseException:  # the interpreter ends: whoever waits for a buffer is to hear of it too
            self._free.put(buffer)
            raise

    def _pass(self, chunk: Chunk, buffer: Tensor, step: Callable[[Chunk, list[Tensor]], None]) -> None:
        try:
            views = views_of(chunk, buffer)
            read(chunk, views)
            with self._stepping, torch.no_grad():
                step(chunk, views)
            write(chunk, views)
        finally:
            self._free.put(buffer)

    def rest(self) -> None:
        """Wait until no chunk passes."""
        for buffer in [self._free.get() for _ in range(self._num_buffers)]:
            self._free.put(buffer)


class Stream:
    """Owns the host buffers through which chunks pass in their order, and what is read and written meanwhile."""

    def __init__(self, chunks: Sequence[Chunk], pool: ThreadPoolExecutor, buffers: list[Tensor]) -> None:
        self._chunks: list[Chunk | None] = list(chunks)
        self._pool, self._buffers = pool, buffers
        self._ready: list[Future[None]] = [
            pool.submit(self._refill, None, None, i) for i in range(min(NUM_BUFFERS, len(chunks)))
        ]

    def _views(self, which: int, chunk: Chunk) -> list[Tensor]:
        return views_of(chunk, self._buffers[which % NUM_BUFFERS] if self._buffers else None)

    def _refill(self, going: Chunk | None, after: Callable[[], None] | None, coming: int) -> None:
        """Write what was stepped in a buffer, then read another chunk into it."""
        if after is not None:
            after()
        if going is not None:
            write(going, self._views(coming, going))
        chunk = self._chunks[coming] if coming < len(self._chunks) else None
        if chunk is not None:
            read(chunk, self._views(coming, chunk))

    def take(self, which: int) -> tuple[Chunk, list[Tensor]]:
        """A chunk, in their order, and its spans."""
        self._ready[which % NUM_BUFFERS].result()
        chunk = self._chunks[which]
        assert chunk is not None, "a chunk is taken once"
        return chunk, self._views(which, chunk)

    def give(self, which: int, after: Callable[[], None]) -> None:
        """What `take` gave was stepped, once `after` returns."""
        chunk, self._chunks[which] = self._chunks[which], None  # with it go the gradients
        self._ready[which % NUM_BUFFERS] = self._pool.submit(self._refill, chunk, after, which + NUM_BUFFERS)

    def finish(self) -> None:
        """Wait until all is written."""
        for future in self._ready:
            future.result()

    def abandon(self) -> None:
        """Wait until nothing is under way, whatever became of it."""
        wait(self._ready)


def views_of(chunk: Chunk, buffer: Tensor | None, device: torch.device | None = None) -> list[Tensor]:
    """Return the tensor of each span: in memory as it lies, else its part of `buffer`, bytes, in their order.

    `device`: only what lies there stays where it is. On CPU everything would: there what lies in host memory is copied too.
    """
    result: list[Tensor] = []
    at = 0
    for span in chunk.spans:
        memory = span.memory
        if memory is None or (device is not None and (memory.device != device or device.type == "cpu")):
            assert buffer is not None, "there are buffers where something is not at hand"
            memory = buffer[at : at + span.numel * span.dtype.itemsize].view(span.dtype)
            at += span.num_bytes
        result.append(memory)
    return result


def read(chunk: Chunk, views: Sequence[Tensor]) -> None:
    """Bring what of a chunk rests in files."""
    for i, (span, view) in enumerate(zip(chunk.spans, views, strict=True)):
        if span.file is not None and span.reads:
            span.file.read(span.offset, whole_pages(view, span))
        elif not span.reads and i < len(chunk.block.keys) and view.device.type == "cpu":
            view.zero_()  # a state that is not there yet; on a device this thread's stream would not be ordered


def write(chunk: Chunk, views: Sequence[Tensor]) -> None:
    """Take what changed of a chunk back to its files."""
    for span, view in zip(chunk.spans, views, strict=True):
        if span.file is not None and span.writes:
            span.file.write(span.offset, whole_pages(view, span))


class DevicePipeline:
    """Owns the device buffers through which the chunks of a `Stream` pass, for a step on the device.

    All is begun by the thread that runs forward and backward: the chunk after the next one comes, and the one before goes,
    on side streams of their own while one is stepped. Buffers are made before and stay.
    """

    def __init__(
        self, inner: Stream, count: int, buffers: list[Tensor], side_streams: tuple[SideStream, SideStream]
    ) -> None:
        self._inner, self._count, self._buffers = inner, count, buffers
        self._fetch_stream, self._store_stream = side_streams
        self._coming: dict[int, tuple[Transfer, Chunk, list[Tensor], list[Tensor]]] = {}
        self._going: dict[int, Transfer] = {}  # by buffer

    def _fetch(self, which: int) -> None:
        if which >= self._count or which in self._coming:
            return
        chunk, there = self._inner.take(which)
        slot = which % NUM_DEVICE_BUFFERS
        gone = self._going.pop(slot, None)
        if gone is not None:
            gone.join(self._fetch_stream)
        buffer = self._buffers[slot]
        here = views_of(chunk, buffer, buffer.device)
        pairs = [(h, t) for h, t, s in zip(here, there, chunk.spans, strict=True) if h is not t and s.reads]
        transfer = self._fetch_stream.copy(partial(_copy, pairs), [], "brings what is stepped to the device")
        self._coming[which] = (transfer, chunk, here, there)

    def take(self, which: int) -> tuple[Chunk, list[Tensor]]:
        self._fetch(which)
        self._fetch(which + 1)
        transfer, chunk, here, _ = self._coming[which]
        transfer.land()
        return chunk, here

    def give(self, which: int) -> None:
        _, chunk, here, there = self._coming.pop(which)
        pairs = [(t, h) for h, t, s in zip(here, there, chunk.spans, strict=True) if h is not t and s.writes]
        transfer = self._store_stream.copy(partial(_copy, pairs), [], "takes what was stepped from the device")
        if self._store_stream.late:
            transfer.synchronize()
        self._going[which % NUM_DEVICE_BUFFERS] = transfer
        self._inner.give(which, transfer.block)

    def finish(self) -> None:
        """Wait until all is where it rests."""
        for transfer in self._going.values():
            transfer.synchronize()
        self._inner.finish()

    def abandon(self) -> None:
        """What failed has copies under way: they end before their buffers are used again, or go."""
        for transfer in [*self._going.values(), *(transfer for transfer, *_ in self._coming.values())]:
            transfer.synchronize()
        self._inner.abandon()


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    if pairs:
        to, source = zip(*pairs, strict=True)
        _torch.foreach_copy_(list(to), list(source), non_blocking=True)


def whole_pages(view: Tensor, span: Span) -> Tensor:
    """The bytes of a span in a buffer, to the end of its last page."""
    storage: Any = view.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(
        storage, view.storage_offset() * view.itemsize, (span.num_bytes,), (1,)
    )
