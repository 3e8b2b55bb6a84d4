"""Move the chunks of a step: from files through host buffers, and from the host through device buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from queue import SimpleQueue
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from accordion import _torch
from accordion.engine.streams import Transfer
from accordion.offload.arena import page_aligned
from accordion.offload.host_shards import Resources
from accordion.offload.step.chunks import Chunk
from accordion.offload.swap_file import FileRange

NUM_BUFFERS = 4  # host buffers: the chunk in one is stepped, those in the others are read or written
NUM_DEVICE_BUFFERS = 3  # the chunk in one is stepped, one is copied in, one is copied out


class HostPipeline:
    """Steps chunks on the host, in any order: each thread of `pool` reads one chunk into one of `buffers` (1-D uint8), steps it
    and writes it. Only one chunk is stepped at a time, because the kernel of a step uses several threads itself."""

    def __init__(self, pool: ThreadPoolExecutor, buffers: Sequence[Tensor]) -> None:
        self._pool, self._stepping = pool, Lock()
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        self._num_buffers = len(buffers)
        for buffer in buffers:
            self._free.put(buffer)

    def start(self, chunk: Chunk, step: Callable[[Chunk, list[Tensor]], None]) -> Future[None]:
        """Read `chunk`, call `step(chunk, views)` and write the chunk back, on a thread. Return a future that is done after the
        write. `views`: a tensor for each span of the chunk. Blocks until a buffer is free. If a state of the chunk does not
        exist yet, all of that is done by the calling thread before this returns."""
        buffer = self._free.get()
        if any(not span.reads for span in chunk.spans[: len(chunk.block.runs)]):
            # This step creates states outside of the buffer. Each thread's allocator would keep that memory after it is freed,
            # so such chunks are stepped on the calling thread.
            self._run(chunk, buffer, step)
            ended: Future[None] = Future()
            ended.set_result(None)
            return ended
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
        """Wait until all chunks that were started are stepped and written."""
        for buffer in [self._free.get() for _ in range(self._num_buffers)]:
            self._free.put(buffer)


class DevicePipeline:
    """Steps chunks on the device, in their order, through buffers of the host and of the device.

    Threads, which the constructor starts, read chunks into `host_buffers`, [] if no chunk is in a file, and write them back.
    While one chunk is stepped, the next is copied to the device on one side stream, and the previous one back on another. The
    thread that calls `run` starts all copies.
    """

    def __init__(
        self,
        chunks: Iterable[Chunk],
        resources: Resources,
        host_buffers: Sequence[Tensor],
        device_buffers: Sequence[Tensor],
    ) -> None:
        self._chunks = dict(enumerate(chunks))  # those that are not stepped yet, by number
        self._pool, self._host_buffers, self._device_buffers = resources.pool(), host_buffers, device_buffers
        self._fetch_stream, self._store_stream = resources.fetch_stream, resources.store_stream
        # Number of the chunk -> (the copy to the device, tensors on the device).
        self._fetched: dict[int, tuple[Transfer, list[Tensor]]] = {}
        self._stores: dict[int, Transfer] = {}  # index of the device buffer -> the last copy from it to the host
        self._refills: list[Future[None]] = [
            self._pool.submit(self._refill, None, None, i) for i in range(min(NUM_BUFFERS, len(self._chunks)))
        ]

    def run(self, step: Callable[[Chunk, list[Tensor]], None]) -> None:
        """Call `step(chunk, views)` for each chunk, and wait until all chunks are copied back and written. `views`: a tensor on
        the device for each span of the chunk. Can be called once."""
        try:
            for which in list(self._chunks):
                self._fetch(which)
                self._fetch(which + 1)
                transfer, views = self._fetched[which]
                transfer.land()
                step(self._chunks[which], views)
                self._store(which)
            for transfer in self._stores.values():
                transfer.synchronize()
            for future in self._refills:
                future.result()
        except BaseException:
            # Their buffers are reused or freed after this.
            for transfer in [*self._stores.values(), *(transfer for transfer, _ in self._fetched.values())]:
                transfer.synchronize()
            wait(self._refills)
            raise

    def _host_views(self, which: int, chunk: Chunk) -> list[Tensor]:
        return views_of(chunk, self._host_buffers[which % NUM_BUFFERS] if self._host_buffers else None)

    def _refill(self, stepped: Chunk | None, after: Callable[[], None] | None, which: int) -> None:
        """Call `after`, which waits until a host buffer has the results of the chunk `stepped`, and write these to their files.
        Then read chunk number `which`, if there is one, into the buffer. `after` and `stepped` are None at the first use."""
        if after is not None:
            after()
        if stepped is not None:
            write(stepped, self._host_views(which, stepped))
        chunk = self._chunks.get(which)
        if chunk is not None:
            read(chunk, self._host_views(which, chunk))

    def _fetch(self, which: int) -> None:
        """Wait until chunk number `which` is read into host memory, and start copying it to the device. Do nothing if there is
        no such chunk, or if that was started already."""
        if which not in self._chunks or which in self._fetched:
            return
        self._refills[which % NUM_BUFFERS].result()
        chunk, slot = self._chunks[which], which % NUM_DEVICE_BUFFERS
        if slot in self._stores:
            self._stores.pop(slot).join(self._fetch_stream)
        buffer = self._device_buffers[slot]
        views, host_views = views_of(chunk, buffer, buffer.device), self._host_views(which, chunk)
        pairs = [(v, h) for v, h, s in zip(views, host_views, chunk.spans, strict=True) if v is not h and s.reads]
        transfer = self._fetch_stream.copy(partial(_copy, pairs), [], "copies chunks of a step to the device")
        self._fetched[which] = transfer, views

    def _store(self, which: int) -> None:
        """Start copying chunk number `which`, which was stepped, to the host. A thread then writes it to its files, and reads
        the next chunk for that host buffer."""
        (_, views), chunk = self._fetched.pop(which), self._chunks.pop(which)
        host_views = self._host_views(which, chunk)
        pairs = [(h, v) for v, h, s in zip(views, host_views, chunk.spans, strict=True) if v is not h and s.writes]
        transfer = self._store_stream.copy(partial(_copy, pairs), [], "copies chunks of a step to the host")
        if self._store_stream.late:
            transfer.synchronize()
        self._stores[which % NUM_DEVICE_BUFFERS] = transfer
        self._refills[which % NUM_BUFFERS] = self._pool.submit(self._refill, chunk, transfer.block, which + NUM_BUFFERS)


def views_of(chunk: Chunk, buffer: Tensor | None, device: torch.device | None = None) -> list[Tensor]:
    """Return one tensor per span of `chunk`: its values in memory, or the next part of `buffer`, 1-D uint8, to copy them to.

    Spans in files always use `buffer`. `device`: None if no other span uses `buffer`; an accelerator if all spans that are not
    on that device use it; the CPU if all spans use it.
    """
    result: list[Tensor] = []
    at = 0
    for span in chunk.spans:
        values = span.values
        if isinstance(values, FileRange) or (device is not None and (values.device != device or device.type == "cpu")):
            assert buffer is not None, "there are buffers if a span needs one"
            values = buffer[at : at + values.nbytes].view(values.dtype)
            at += page_aligned(values.nbytes)
        result.append(values)
    return result


def read(chunk: Chunk, views: Sequence[Tensor]) -> None:
    """Read the spans of `chunk` that are in files into `views`. Set views on the host of new states to zero."""
    for i, (span, view) in enumerate(zip(chunk.spans, views, strict=True)):
        if isinstance(span.values, FileRange) and span.reads:
            span.values.file.read(span.values.offset, whole_pages(view))
        elif not span.reads and i < len(chunk.block.runs) and view.device.type == "cpu":
            view.zero_()  # a new state; on a device, this thread's stream would not be ordered after the others


def write(chunk: Chunk, views: Sequence[Tensor]) -> None:
    """Write `views` to the files of `chunk`, except views of spans that a step does not change."""
    for span, view in zip(chunk.spans, views, strict=True):
        if isinstance(span.values, FileRange) and span.writes:
            span.values.file.write(span.values.offset, whole_pages(view))


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    if pairs:
        to, source = zip(*pairs, strict=True)
        _torch.foreach_copy_(list(to), list(source), non_blocking=True)


def whole_pages(view: Tensor) -> Tensor:
    """Return the memory of `view`, a part of a buffer, up to the end of its last page, as a 1-D uint8 tensor."""
    storage: Any = view.untyped_storage()
    offset, size = view.storage_offset() * view.itemsize, (page_aligned(view.nbytes),)
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, offset, size, (1,))
