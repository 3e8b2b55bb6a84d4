"""Files of this machine's file systems: written past the system's page cache if possible, read through it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from accordion.offload.arena import page_aligned
from accordion.offload.swap_file import DIRECT, aligned_buffer, bytes_of

BUFFER_BYTES = 4 * 2**20
IN_FLIGHT = 4  # buffers that are written at the same time
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def created(path: Path, num_bytes: int) -> Iterator[LocalWriter]:
    """Context manager for a writer of a new file of `num_bytes`; at its end the file is on the disk (`fsync`)."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        direct = num_bytes > BUFFER_BYTES and _passes_cache(handle, page_aligned(num_bytes))
        with ThreadPoolExecutor(IN_FLIGHT) as threads:
            file = LocalWriter(handle, direct, min(BUFFER_BYTES, page_aligned(num_bytes)), threads)
            yield file
            file.finish(num_bytes)
        os.fsync(handle)
    finally:
        os.close(handle)


def _passes_cache(handle: int, num_bytes: int) -> bool:
    """Make writes bypass the page cache; return False if the file system cannot. Raises `OSError` if the disk is full."""
    # This saves half of the processor's time. Space is allocated first, else the system would write one buffer after the other.
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, DIRECT)
    except OSError:
        return False
    if DIRECT:  # not posix_fallocate, which writes to every page where a file system has no call for it
        allocate = ctypes.CDLL(None, use_errno=True).fallocate
        if allocate(handle, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes)) and ctypes.get_errno() in NO_ROOM:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return bool(DIRECT)


class LocalWriter:
    """Writes a file in order: fills page-aligned buffers, and passes full ones to threads that write them."""

    def __init__(self, handle: int, direct: bool, buffer_bytes: int, threads: ThreadPoolExecutor) -> None:
        self._handle, self._direct, self._buffer_bytes, self._threads = handle, direct, buffer_bytes, threads
        self._out: deque[tuple[Future[None], Tensor]] = deque()
        self._buffer: Tensor | None = None
        self._at = self._filled = 0  # position of the buffer in the file, and its bytes so far

    def write(self, data: memoryview, /) -> None:
        """Append `data`. Raises `OSError` if this or earlier data cannot be written."""
        while data:
            if self._buffer is None:
                self._filled = 0
                if len(self._out) < IN_FLIGHT:
                    self._buffer = aligned_buffer(self._buffer_bytes)
                else:
                    written, self._buffer = self._out.popleft()
                    written.result()
            step = data[: self._buffer_bytes - self._filled]
            self._buffer.numpy()[self._filled : self._filled + len(step)] = step  # numpy releases the GIL meanwhile
            self._filled, data = self._filled + len(step), data[len(step) :]
            if self._filled == self._buffer_bytes:
                self._submit()

    def finish(self, num_bytes: int) -> None:
        """Wait until all data are written, and cut the file to `num_bytes`."""
        self._submit()
        assert self._at == num_bytes, "the file must have the length with which it was created"
        while self._out:
            self._out.popleft()[0].result()
        os.ftruncate(self._handle, num_bytes)

    def _submit(self) -> None:
        """Have a thread write the current buffer, if there is one."""
        if self._buffer is not None:
            data = bytes_of(self._buffer)[: page_aligned(self._filled) if self._direct else self._filled]
            try:
                self._out.append((self._threads.submit(self._put, data, self._at), self._buffer))
            except RuntimeError:  # the program is ending, and thread pools take no more work
                self._put(data, self._at)
            self._at, self._buffer = self._at + self._filled, None

    def _put(self, data: memoryview, at: int) -> None:
        start, end = at, at + len(data)
        while data:
            direct = self._direct
            try:
                count = os.pwrite(self._handle, data, at)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                # Some file systems open a file for direct writes and refuse them afterwards.
                fcntl.fcntl(self._handle, fcntl.F_SETFL, 0)
                self._direct = False
            else:
                at, data = at + count, data[count:]
        if not self._direct and hasattr(os, "posix_fadvise"):  # starts the write now instead of in `fsync`
            os.posix_fadvise(self._handle, start, end - start, os.POSIX_FADV_DONTNEED)


class LocalReader:
    """A file that is open for reading; `close` it."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        self.num_bytes = os.fstat(self._file.fileno()).st_size

    def read_into(self, into: memoryview, at: int) -> None:
        while into:
            count = os.preadv(self._file.fileno(), [into], at)
            if count == 0:
                raise OSError(f"it ends at byte {at}")
            into, at = into[count:], at + count

    def close(self) -> None:
        self._file.close()
