"""Moves the chunks of a step: from files through host buffers, and from the host through device buffers."""

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

NUM_BUFFERS = 4  # host buffers: the chunk in one is stepped, those in the others are read or written
NUM_DEVICE_BUFFERS = 3  # the chunk in one is stepped, one is copied in, one is copied out


class HostPipeline:
    """Steps chunks on the host in any order: a thread of `pool` reads, steps and writes one chunk in one of `buffers`.

    Only one chunk is stepped at a time, because its kernel uses several threads itself. `buffers`: 1-D uint8.
    """

    def __init__(self, pool: ThreadPoolExecutor, buffers: Sequence[Tensor]) -> None:
        self._pool, self._stepping = pool, Lock()
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        self._num_buffers = len(buffers)
        for buffer in buffers:
            self._free.put(buffer)

    def start(self, chunk: Chunk, step: Callable[[Chunk, list[Tensor]], None]) -> Future[None]:
        """Start reading `chunk`, calling `step(chunk, views)` and writing it back. Return a future that ends when it is written.

        Blocks until a buffer is free, so that other work for the threads waits for a few chunks, not for all chunks of a step.
        """
        buffer = self._free.get()
        if any(not span.reads for span in chunk.spans[: len(chunk.block.keys)]):
            # This step creates states outside of the buffer. Each thread's allocator would keep that memory after it is freed,
            # so such chunks are stepped on the calling thread.
            future: Future[None] = Future()
            try:
                self._run(chunk, buffer, step)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            return future
        try:
            return self._pool.submit(self._run, chunk, buffer, step)
        except BaseException:  # the interpreter exits: other callers that wait for a buffer must get this error too
            self._free.put(buffer)
            raise

    def _run(self, chunk: Chunk, buffer: Tensor, step: Callable[[Chunk, list[Tensor]], None]) -> None:
        try:
            views = views_of(chunk, buffer)
            read(chunk, views)
            with self._stepping, torch.no_grad():
                step(chunk, views)
            write(chunk, views)
        finally:
            self._free.put(buffer)

    def drain(self) -> None:
        """Wait until no chunk is under way."""
        for buffer in [self._free.get() for _ in range(self._num_buffers)]:
            self._free.put(buffer)


class DiskPipeline:
    """Reads chunks into host buffers in their order and writes them back, on threads, while the caller steps one of them."""

    def __init__(self, chunks: Sequence[Chunk], pool: ThreadPoolExecutor, buffers: list[Tensor]) -> None:
        self._chunks: list[Chunk | None] = list(chunks)
        self._pool, self._buffers = pool, buffers
        self._ready: list[Future[None]] = [
            pool.submit(self._refill, None, None, i) for i in range(min(NUM_BUFFERS, len(chunks)))
        ]

    def _views(self, which: int, chunk: Chunk) -> list[Tensor]:
        return views_of(chunk, self._buffers[which % NUM_BUFFERS] if self._buffers else None)

    def _refill(self, stepped: Chunk | None, after: Callable[[], None] | None, which: int) -> None:
        """Once `after` returns, write the chunk `stepped` and read chunk number `which` into its buffer."""
        if after is not None:
            after()
        if stepped is not None:
            write(stepped, self._views(which, stepped))
        chunk = self._chunks[which] if which < len(self._chunks) else None
        if chunk is not None:
            read(chunk, self._views(which, chunk))

    def take(self, which: int) -> tuple[Chunk, list[Tensor]]:
        """Wait for chunk number `which`. Return it and the tensor of each of its spans. Call once for each, in order."""
        self._ready[which % NUM_BUFFERS].result()
        chunk = self._chunks[which]
        assert chunk is not None, "a chunk is taken once"
        return chunk, self._views(which, chunk)

    def give(self, which: int, after: Callable[[], None]) -> None:
        """Write chunk number `which` back once `after` returns, and read a later one into its buffer."""
        chunk, self._chunks[which] = self._chunks[which], None  # which also frees the gradients
        self._ready[which % NUM_BUFFERS] = self._pool.submit(self._refill, chunk, after, which + NUM_BUFFERS)

    def finish(self) -> None:
        """Wait until all chunks are written."""
        for future in self._ready:
            future.result()

    def abandon(self) -> None:
        """Wait until no read or write is under way, after an error; ignores their errors."""
        wait(self._ready)


def views_of(chunk: Chunk, buffer: Tensor | None, device: torch.device | None = None) -> list[Tensor]:
    """Return one tensor per span of `chunk`: its memory if the step can use that, else the next part of `buffer`, 1-D uint8.

    Args: `device`: use only memory on this device. With "cpu", use `buffer` for all spans, as for an accelerator.
    """
    result: list[Tensor] = []
    at = 0
    for span in chunk.spans:
        memory = span.memory
        if memory is None or (device is not None and (memory.device != device or device.type == "cpu")):
            assert buffer is not None, "there are buffers if a span needs one"
            memory = buffer[at : at + span.numel * span.dtype.itemsize].view(span.dtype)
            at += span.num_bytes
        result.append(memory)
    return result


def read(chunk: Chunk, views: Sequence[Tensor]) -> None:
    """Read the spans of `chunk` that are in files into `views`, and set states on the host that do not exist yet to zero."""
    for i, (span, view) in enumerate(zip(chunk.spans, views, strict=True)):
        if span.file is not None and span.reads:
            span.file.read(span.offset, whole_pages(view, span))
        elif not span.reads and i < len(chunk.block.keys) and view.device.type == "cpu":
            view.zero_()  # a new state; on a device, this thread's stream would not be ordered after the others


def write(chunk: Chunk, views: Sequence[Tensor]) -> None:
    """Write the changed spans of `chunk` that are in files from `views`."""
    for span, view in zip(chunk.spans, views, strict=True):
        if span.file is not None and span.writes:
            span.file.write(span.offset, whole_pages(view, span))


class DevicePipeline:
    """Copies the chunks of a `DiskPipeline` through device buffers, for a step on the device.

    While one chunk is stepped, the next is copied in on one side stream and the last one out on another. All copies are
    started by the thread that runs forward and backward. `count`: number of chunks; `side_streams`: to the device, and back.
    """

    def __init__(
        self,
        disk_pipeline: DiskPipeline,
        count: int,
        buffers: list[Tensor],
        side_streams: tuple[SideStream, SideStream],
    ) -> None:
        self._disk_pipeline, self._count, self._buffers = disk_pipeline, count, buffers
        self._fetch_stream, self._store_stream = side_streams
        # number of the chunk -> copy to the device, chunk, its tensors there, its tensors on the host
        self._fetched: dict[int, tuple[Transfer, Chunk, list[Tensor], list[Tensor]]] = {}
        self._stores: dict[int, Transfer] = {}  # index of the buffer -> the last copy from it to the host

    def _fetch(self, which: int) -> None:
        if which >= self._count or which in self._fetched:
            return
        chunk, host_views = self._disk_pipeline.take(which)
        slot = which % NUM_DEVICE_BUFFERS
        store = self._stores.pop(slot, None)
        if store is not None:
            store.join(self._fetch_stream)
        buffer = self._buffers[slot]
        views = views_of(chunk, buffer, buffer.device)
        pairs = [(v, h) for v, h, s in zip(views, host_views, chunk.spans, strict=True) if v is not h and s.reads]
        transfer = self._fetch_stream.copy(partial(_copy, pairs), [], "copies chunks of a step to the device")
        self._fetched[which] = (transfer, chunk, views, host_views)

    def take(self, which: int) -> tuple[Chunk, list[Tensor]]:
        """Return chunk number `which` and the tensor of each of its spans, on the device. Call once for each, in order."""
        self._fetch(which)
        self._fetch(which + 1)
        transfer, chunk, views, _ = self._fetched[which]
        transfer.land()
        return chunk, views

    def give(self, which: int) -> None:
        """Start copying chunk number `which`, which was stepped, to the host and writing it back."""
        _, chunk, views, host_views = self._fetched.pop(which)
        pairs = [(h, v) for v, h, s in zip(views, host_views, chunk.spans, strict=True) if v is not h and s.writes]
        transfer = self._store_stream.copy(partial(_copy, pairs), [], "copies chunks of a step to the host")
        if self._store_stream.late:
            transfer.synchronize()
        self._stores[which % NUM_DEVICE_BUFFERS] = transfer
        self._disk_pipeline.give(which, transfer.block)

    def finish(self) -> None:
        """Wait until all chunks are copied to the host and written."""
        for transfer in self._stores.values():
            transfer.synchronize()
        self._disk_pipeline.finish()

    def abandon(self) -> None:
        """After an error, wait for all copies, reads and writes under way, so that their buffers can be reused or freed."""
        for transfer in [*self._stores.values(), *(transfer for transfer, *_ in self._fetched.values())]:
            transfer.synchronize()
        self._disk_pipeline.abandon()


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    if pairs:
        to, source = zip(*pairs, strict=True)
        _torch.foreach_copy_(list(to), list(source), non_blocking=True)


def whole_pages(view: Tensor, span: Span) -> Tensor:
    """Return the memory of `view`, 1-D uint8, extended to the end of its last page; it must be part of a buffer."""
    storage: Any = view.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(
        storage, view.storage_offset() * view.itemsize, (span.num_bytes,), (1,)
    )
