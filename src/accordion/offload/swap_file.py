"""Files for offloaded state: unnamed, preallocated, and read and written with O_DIRECT if the file system supports it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accordion.engine.shards import own_storage
from accordion.errors import OffloadError
from accordion.offload.arena import ALIGN_BYTES, page_aligned

DIRECT: int = getattr(os, "O_DIRECT", 0)
NEVER_NAMED: int = getattr(os, "O_TMPFILE", 0)
PREFIX = ".accordion-swap-"


@cache
def _mincore() -> Any:
    # The system call that reports which pages of a mapping are in memory. A step calls it for each gradient.
    return ctypes.CDLL(None).mincore


class SwapFile:
    """One file without a name: its space is freed when the process ends, however it ends, and no two jobs share it.

    `read` and `write` may run on any thread. Their offsets and lengths are multiples of a page, and their memory begins at a
    page. `mapped` returns tensors over the file for access outside of a step; their pages are loaded when they are read.
    """

    def __init__(self, folder: Path, num_bytes: int, *, direct: bool = True) -> None:
        self.folder, self.num_bytes = folder, num_bytes
        self.traffic = {"read": 0, "written": 0}  # bytes
        self._plain, self._fast = _unnamed(folder, direct)
        self.is_direct = self._fast != self._plain
        try:
            os.posix_fallocate(self._plain, 0, max(num_bytes, ALIGN_BYTES))
            self._map = mmap.mmap(self._plain, max(num_bytes, ALIGN_BYTES))
            if self.is_direct and not self._reads_direct():
                os.close(self._fast)
                self._fast, self.is_direct = self._plain, False
        except OSError as error:
            self.close()
            raise no_room(folder, max(num_bytes, ALIGN_BYTES), error) from error
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def _reads_direct(self) -> bool:
        # Some file systems open a file for direct access and then refuse to read it.
        buffer = aligned_buffer(ALIGN_BYTES)
        try:
            return os.preadv(self._fast, [bytes_of(buffer)], 0) == ALIGN_BYTES
        except OSError:
            return False

    def mapped(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a (numel,) tensor that shares memory with the file at `offset` bytes."""
        return own_storage(self._bytes[offset : offset + numel * dtype.itemsize].view(dtype))

    def flush(self) -> None:
        """Write all changes made through `mapped` to the file."""
        self._map.flush()

    def settle(self, offset: int, num_bytes: int) -> None:
        """Write changes of a range of whole pages that were made through `mapped` to the file.

        Does nothing if no page of the range is in the page cache, because then no page was changed since its last direct write.
        """
        # Tensor versions cannot replace this check: foreach operators on DTensors do not increment them.
        present = torch.empty(num_bytes // ALIGN_BYTES, dtype=torch.uint8, device="cpu")
        start = ctypes.c_void_p(self._bytes.data_ptr() + offset)
        failed = _mincore()(start, ctypes.c_size_t(num_bytes), ctypes.c_void_p(present.data_ptr()))
        if failed or (present & 1).any():
            self._map.flush(offset, num_bytes)

    def read(self, offset: int, into: Tensor) -> None:
        """Fill `into`, 1-D uint8. Raise `OffloadError` if the disk fails."""
        self._transfer(os.preadv, "read", offset, into)

    def write(self, offset: int, source: Tensor) -> None:
        """Write `source`, 1-D uint8. Raise `OffloadError` if the disk fails."""
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
    """A 1-D tensor in a file, `numel` elements that begin at a page, at `offset` bytes; nothing else uses its last page."""

    file: SwapFile
    offset: int
    numel: int
    dtype: torch.dtype

    def mapped(self) -> Tensor:
        return self.file.mapped(self.offset, self.numel, self.dtype)


class FileAllocator:
    """Divides a new file of `num_bytes` bytes in `folder` into ranges of whole pages, each taken once."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.file, self._used = SwapFile(folder, num_bytes), 0

    def take(self, numel: int, dtype: torch.dtype) -> FileRange:
        file_range = FileRange(self.file, self._used, numel, dtype)
        self._used += page_aligned(numel * dtype.itemsize)
        assert self._used <= self.file.num_bytes, "the file is sized for all that is taken from it"
        return file_range


def _unnamed(folder: Path, direct: bool) -> tuple[int, int]:
    """Return two handles of a new unnamed file, for ordinary and for direct access; the same one if direct is impossible."""
    try:
        plain = _opened(folder)
    except OSError as error:
        raise OffloadError(
            f"cannot create a file for offloaded state in {folder}: {error.strerror}; name a folder that exists and is writable."
        ) from error
    try:
        return plain, os.open(f"/proc/self/fd/{plain}", os.O_RDWR | DIRECT) if direct and DIRECT else plain
    except OSError:
        return plain, plain


def _opened(folder: Path) -> int:
    # A file system without O_TMPFILE needs a name, which is removed at once; names left by killed jobs are removed too.
    if NEVER_NAMED:
        with contextlib.suppress(OSError):
            return os.open(folder, os.O_RDWR | NEVER_NAMED, 0o600)
    for path in folder.glob(f"{PREFIX}*"):  # safe for a running job: it has opened its file and is about to do the same
        path.unlink(missing_ok=True)
    plain, name = tempfile.mkstemp(prefix=PREFIX, dir=folder)
    Path(name).unlink(missing_ok=True)
    return plain


def check_folder(folder: Path) -> None:
    """Raise `OffloadError` if no file can be created in `folder`."""
    for handle in set(_unnamed(folder, direct=False)):
        os.close(handle)


def aligned_buffer(num_bytes: int) -> Tensor:
    """Return uninitialised memory, (num_bytes,) uint8, that begins at a page."""
    whole = torch.empty(page_aligned(num_bytes) + ALIGN_BYTES, dtype=torch.uint8, device="cpu")
    start = -whole.data_ptr() % ALIGN_BYTES
    return whole[start : start + num_bytes]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a 1-D uint8 tensor as a buffer for system calls."""
    return tensor.numpy().data
