"""Files for offloaded state: unnamed, preallocated, and read and written with O_DIRECT if the file system supports it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from accordion.engine.shards import own_storage
from accordion.engine.streams import Transfer
from accordion.errors import OffloadError
from accordion.offload.arena import ALIGN_BYTES, aligned_buffer, page_aligned

DIRECT: int = getattr(os, "O_DIRECT", 0)
CHUNK_BYTES = 2**23  # bytes that one thread reads or writes at a time


class SwapFile:
    """One file without a name. Its space is freed with this object and its `mapped` tensors, or when the process ends.

    `read` and `write` may run on any thread. Their offsets and lengths must be multiples of a page, and their memory must begin
    at a page. `mapped` returns tensors over the file for access outside of a step. The constructor raises `OffloadError` if it
    cannot create a file in `folder`, or if there is no room for `num_bytes`.
    """

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.folder, self.num_bytes = folder, num_bytes
        self.traffic = {"read": 0, "written": 0}  # bytes
        size = max(num_bytes, ALIGN_BYTES)
        self._plain = self._fast = _unnamed(folder)
        if DIRECT:
            with contextlib.suppress(OSError):
                self._fast = os.open(f"/proc/self/fd/{self._plain}", os.O_RDWR | DIRECT)
        try:
            os.posix_fallocate(self._plain, 0, size)
            self._map = mmap.mmap(self._plain, size)
            if self._fast != self._plain and not self._reads_direct():
                os.close(self._fast)
                self._fast = self._plain
        except OSError as error:
            self.close()
            raise no_room(folder, size, error) from error
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._mincore = ctypes.CDLL(None).mincore  # reports which pages of a mapping are in memory

    def _reads_direct(self) -> bool:
        # Some file systems open a file for direct access and then refuse to read it.
        buffer = aligned_buffer(ALIGN_BYTES)
        try:
            return os.preadv(self._fast, [bytes_of(buffer)], 0) == ALIGN_BYTES
        except OSError:
            return False

    def grow(self, num_bytes: int) -> None:
        """Extend the file by `num_bytes`, whole pages, which `mapped` cannot reach. Raise `OffloadError` without room."""
        try:
            os.posix_fallocate(self._plain, self.num_bytes, num_bytes)
        except OSError as error:
            raise no_room(self.folder, num_bytes, error) from error
        self.num_bytes += num_bytes

    def mapped(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a (numel,) tensor that shares memory with the file from byte `offset` on. Reading it loads pages."""
        return own_storage(self._bytes[offset : offset + numel * dtype.itemsize].view(dtype))

    def flush(self) -> None:
        """Write all changes made through `mapped` to the file."""
        self._map.flush()

    def settle(self, offset: int, num_bytes: int) -> None:
        """Write changes that were made through `mapped` to the file, in `num_bytes` from byte `offset` on, whole pages. Do
        nothing if none of these pages is in the page cache: then none was changed since its last direct write."""
        # Tensor versions cannot replace this check: foreach operators on DTensors do not increment them.
        present = torch.empty(num_bytes // ALIGN_BYTES, dtype=torch.uint8, device="cpu")
        start = ctypes.c_void_p(self._bytes.data_ptr() + offset)
        failed = self._mincore(start, ctypes.c_size_t(num_bytes), ctypes.c_void_p(present.data_ptr()))
        if failed or (present & 1).any():
            self._map.flush(offset, num_bytes)

    def read(self, offset: int, into: Tensor) -> None:
        """Fill `into`, 1-D uint8, from byte `offset` of the file on. Raise `OffloadError` if the disk fails."""
        self._transfer(os.preadv, "read", offset, into)

    def write(self, offset: int, source: Tensor) -> None:
        """Write `source`, 1-D uint8, to the file at `offset`. Raise `OffloadError` if the disk fails."""
        self._transfer(os.pwritev, "written", offset, source)

    def _transfer(self, call: Callable[[int, Any, int], int], what: str, offset: int, memory: Tensor) -> None:
        view, done = bytes_of(memory), 0
        try:
            while done < len(view):
                count = call(self._fast, [view[done:]], offset + done)
                if count == 0:
                    raise OSError(0, "the file ends early")
                done += count
        except OSError as error:
            raise OffloadError(
                f"{len(view)} bytes at {offset} of the swap file in {self.folder} could not be {what}: {error.strerror}. The "
                "last checkpoint is not affected; resume from it when the disk works again, or on another disk."
            ) from error
        self.traffic[what] += done

    def close(self, close_file: Callable[[int], None] = os.close) -> None:
        # `os` is None when the end of the interpreter calls this.
        for handle in {self._plain, self._fast}:
            close_file(handle)

    def __del__(self) -> None:
        if hasattr(self, "_bytes"):  # else the constructor has closed what it opened
            self.close()


def no_room(folder: Path, num_bytes: int, error: OSError) -> OffloadError:
    return OffloadError(
        f"{folder} has no room for {num_bytes} bytes of what is offloaded ({error.strerror}); free space there, name "
        "another folder, or use more ranks."
    )


@dataclass(frozen=True, slots=True)
class FileRange:
    """A 1-D tensor in a file: `numel` elements from byte `offset` on. A slice of a range is a range of the same file."""

    file: SwapFile
    offset: int
    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __getitem__(self, elements: slice) -> FileRange:
        start, stop, _ = elements.indices(self.numel)
        return FileRange(self.file, self.offset + start * self.dtype.itemsize, stop - start, self.dtype)

    def mapped(self) -> Tensor:
        return self.file.mapped(self.offset, self.numel, self.dtype)


Values: TypeAlias = Tensor | FileRange
"""A 1-D tensor in memory or in a file."""


class FileAllocator:
    """Divides a new file of `num_bytes` in `folder` into ranges that begin at pages; `take` returns the next one. Raises
    `OffloadError` if the file cannot be created or has no room."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.file, self._used = SwapFile(folder, num_bytes), 0

    def take(self, numel: int, dtype: torch.dtype) -> FileRange:
        file_range = FileRange(self.file, self._used, numel, dtype)
        self._used += page_aligned(numel * dtype.itemsize)
        assert self._used <= self.file.num_bytes, "the file is sized for all that is taken from it"
        return file_range


def in_chunks(call: Callable[[int, Tensor], None], offset: int, memory: Tensor) -> list[Callable[[], None]]:
    """Return functions without arguments that together do `call(offset, memory)`, each on at most `CHUNK_BYTES`; calls none of
    them. `call`: reads or writes whole pages from byte `offset` of a file on. `memory`: 1-D uint8."""
    starts = range(0, memory.numel(), CHUNK_BYTES)
    return [partial(call, offset + at, memory[at : at + CHUNK_BYTES]) for at in starts]


class DiskCalls:
    """Reads or writes of a file, `calls`, on threads of `pool`. The constructor does not wait: one thread calls `after`, and
    then all start. Use `wait` or `settle` to wait for all."""

    def __init__(
        self, pool: ThreadPoolExecutor, calls: Sequence[Callable[[], None]], after: Callable[[], None] = lambda: None
    ) -> None:
        self._pool, self._calls = pool, calls
        self._started = pool.submit(self._start, after)

    def _start(self, after: Callable[[], None]) -> list[Future[None]]:
        after()
        calls, self._calls = self._calls, ()
        return [self._pool.submit(call) for call in calls]

    def wait(self, *_: Any) -> None:
        """Wait for all calls. Raise `OffloadError` if one failed. Ignore arguments, which `Work.wait` of torch has."""
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
        """Wait for all calls, and ignore errors."""
        wait([self._started])
        if self._started.exception() is None:
            wait(self._started.result())


class CopyToDisk:
    """A copy to host memory, `transfer`, followed by `writes` of that memory to a file on threads of `pool`. Has the methods
    `land` and `synchronize` of a `Transfer`. With `late` (debug="streams"), writes begin only when one of these is called."""

    def __init__(
        self, transfer: Transfer, writes: Sequence[Callable[[], None]], pool: ThreadPoolExecutor, *, late: bool
    ) -> None:
        self._transfer, self._writes, self._pool = transfer, writes, pool
        self._calls: DiskCalls | None = None
        if not late:
            self._begin()

    def _begin(self) -> None:
        writes, self._writes = self._writes, ()
        if writes:
            self._calls = DiskCalls(self._pool, writes, self._transfer.block)

    def land(self) -> None:
        self._transfer.land()
        self._begin()

    def synchronize(self) -> None:
        """Wait until the memory is written, or copied if the writes were cancelled. Raise `OffloadError` if a write failed."""
        self.land()
        if self._calls is None:
            self._transfer.block()
        else:
            self._calls.wait()

    def cancel(self) -> list[DiskCalls]:
        """Cancel the writes if they were not started. Otherwise return them in a list; the caller must wait for them."""
        self._writes = ()
        return [] if self._calls is None else [self._calls]


def _unnamed(folder: Path) -> int:
    """Return the descriptor of a new file without a name. Raise `OffloadError` if none can be created in `folder`."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            return os.dup(file.fileno())
    except OSError as error:
        raise OffloadError(
            f"cannot create a file for offloaded state in {folder}: {error.strerror}; name a folder that exists and is writable."
        ) from error


def check_folder(folder: Path) -> None:
    """Raise `OffloadError` if no file can be created in `folder`."""
    os.close(_unnamed(folder))


def bytes_of(tensor: Tensor) -> memoryview:
    return tensor.numpy().data
