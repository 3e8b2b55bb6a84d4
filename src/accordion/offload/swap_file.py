"""Files in which what is offloaded rests: preallocated, nameless, and accessed past the page cache where that is possible."""

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
from threading import Lock
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
    """The system's: which pages of a mapping are in memory; looked up once, since a step asks for each gradient."""
    return ctypes.CDLL(None).mincore


class SwapFile:
    """Owns one file that has no name: its space is given back with the process, however that ends, and no two jobs share one.

    `read` and `write` take offsets and lengths that are multiples of a page and memory that begins at one; they run on any
    thread. `mapped` shows parts of the file as tensors to whoever wants to see them outside of a step: nothing of them is
    in memory until it is looked at. With `checksums` each page that is read is what was last written there.
    """

    def __init__(self, folder: Path, num_bytes: int, *, checksums: bool = False, direct: bool = True) -> None:
        self.folder, self.num_bytes = folder, num_bytes
        self.traffic = {"read": 0, "written": 0}  # bytes
        pages = page_aligned(num_bytes) // ALIGN_BYTES if checksums else 0
        self._is_summed, self._lock = checksums, Lock()  # of the sums, which `grow` replaces
        self._sums = torch.zeros(pages, dtype=torch.int64, device="cpu")
        self._known = torch.zeros(pages, dtype=torch.bool, device="cpu")
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
        """Some file systems open a file for direct access and refuse it then."""
        buffer = aligned_buffer(ALIGN_BYTES)
        try:
            return os.preadv(self._fast, [bytes_of(buffer)], 0) == ALIGN_BYTES
        except OSError:
            return False

    def grow(self, num_bytes: int) -> None:
        """Allocate so many bytes more, whole pages, behind the others; they are not mapped."""
        try:
            os.posix_fallocate(self._plain, self.num_bytes, num_bytes)
        except OSError as error:
            raise no_room(self.folder, num_bytes, error) from error
        self.num_bytes += num_bytes
        if self._is_summed:
            pages = self.num_bytes // ALIGN_BYTES - len(self._sums)
            with self._lock:
                self._sums = torch.cat([self._sums, self._sums.new_zeros(pages)])
                self._known = torch.cat([self._known, self._known.new_zeros(pages)])

    def mapped(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """(numel,) of the file, shared with it."""
        return own_storage(self._bytes[offset : offset + numel * dtype.itemsize].view(dtype))

    def flush(self) -> None:
        """What was written through `mapped` is in the file, and what was summed before is no longer expected."""
        self._map.flush()
        self._known.fill_(False)

    def settle(self, offset: int, num_bytes: int) -> None:
        """What was written through `mapped` there, whole pages, is in the file, and no other sum is expected.

        Versions of tensors do not tell: foreach operators on DTensors count nowhere. But what was written past the cache and
        not looked at since is not in the cache.
        """
        present = torch.empty(num_bytes // ALIGN_BYTES, dtype=torch.uint8, device="cpu")
        where = ctypes.c_void_p(self._bytes.data_ptr() + offset)
        failed = _mincore()(where, ctypes.c_size_t(num_bytes), ctypes.c_void_p(present.data_ptr()))
        if failed or (present & 1).any():
            self._map.flush(offset, num_bytes)
            with self._lock:
                self._known[offset // ALIGN_BYTES : (offset + num_bytes) // ALIGN_BYTES] = False

    def read(self, offset: int, into: Tensor) -> None:
        """Fill the bytes `into`. Raises `OffloadError` where the disk fails, or gives other bytes than were written."""
        self._transfer(os.preadv, "read", offset, into)
        if self._is_summed:
            pages, found = slice(offset // ALIGN_BYTES, (offset + into.numel()) // ALIGN_BYTES), sums_of(into)
            with self._lock:
                wrong = (self._known[pages] & (self._sums[pages] != found)).nonzero()
            if len(wrong):
                raise OffloadError(
                    f"{ALIGN_BYTES} bytes at {offset + int(wrong[0]) * ALIGN_BYTES} of the swap file in {self.folder} are not "
                    "what was written there; the disk or its memory is faulty. Go on from the last checkpoint, on another disk."
                )

    def write(self, offset: int, source: Tensor) -> None:
        if self._is_summed:
            pages, sums = slice(offset // ALIGN_BYTES, (offset + source.numel()) // ALIGN_BYTES), sums_of(source)
            with self._lock:
                self._sums[pages], self._known[pages] = sums, True
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
                "last checkpoint is not touched by this; go on from it when the disk is well, or on another."
            ) from error
        self.traffic[what] += done

    def close(self) -> None:
        for handle in {self._plain, self._fast}:
            os.close(handle)

    def __del__(self) -> None:
        if hasattr(self, "_bytes"):  # else the constructor has closed what it opened
            self.close()


def no_room(folder: Path, num_bytes: int, error: OSError) -> OffloadError:
    return OffloadError(
        f"{folder} has no room for {num_bytes} bytes of what is offloaded ({error.strerror}); free some, name another "
        "folder, or use more ranks."
    )


def sums_of(memory: Tensor) -> Tensor:
    """(pages,) int64 of whole pages, bytes: the sum of their words, each times an odd number, so that any changed word shows."""
    words = memory.view(torch.int64).view(-1, ALIGN_BYTES // 8)
    return (words * torch.arange(1, ALIGN_BYTES // 4, 2, device="cpu")).sum(1)


@dataclass(frozen=True, slots=True)
class FileRange:
    """Where `numel` elements lie in a file: from a page on, with the rest of their last page to themselves."""

    file: SwapFile
    offset: int
    numel: int
    dtype: torch.dtype

    def mapped(self) -> Tensor:
        return self.file.mapped(self.offset, self.numel, self.dtype)


class FileAllocator:
    """Owns a file of a given size and hands out its pages, each once."""

    def __init__(self, folder: Path, num_bytes: int, *, checksums: bool) -> None:
        self.file, self._used = SwapFile(folder, num_bytes, checksums=checksums), 0

    def take(self, numel: int, dtype: torch.dtype) -> FileRange:
        file_range = FileRange(self.file, self._used, numel, dtype)
        self._used += page_aligned(numel * dtype.itemsize)
        assert self._used <= self.file.num_bytes, "the file is sized for all that is taken from it"
        return file_range


def _unnamed(folder: Path, direct: bool) -> tuple[int, int]:
    """A new file without a name, opened for ordinary and for direct access (the same handle where there is none)."""
    try:
        plain = _opened(folder)
    except OSError as error:
        raise OffloadError(
            f"what is offloaded cannot rest in {folder}: {error.strerror}; name a folder that exists and can be written."
        ) from error
    try:
        return plain, os.open(f"/proc/self/fd/{plain}", os.O_RDWR | DIRECT) if direct and DIRECT else plain
    except OSError:
        return plain, plain


def _opened(folder: Path) -> int:
    """A file that never has a name; where the file system has no such files, one whose name goes at once.

    Names left by a job that was killed in between are taken away then.
    """
    if NEVER_NAMED:
        with contextlib.suppress(OSError):
            return os.open(folder, os.O_RDWR | NEVER_NAMED, 0o600)
    for left in folder.glob(f"{PREFIX}*"):  # a job that is about to do this itself needs its name no more
        left.unlink(missing_ok=True)
    plain, name = tempfile.mkstemp(prefix=PREFIX, dir=folder)
    Path(name).unlink(missing_ok=True)
    return plain


def check_folder(folder: Path) -> None:
    """Raise `OffloadError` where no file can be made."""
    for handle in set(_unnamed(folder, direct=False)):
        os.close(handle)


def aligned_buffer(num_bytes: int) -> Tensor:
    """(num_bytes,) uint8 that begins at a page."""
    whole = torch.empty(page_aligned(num_bytes) + ALIGN_BYTES, dtype=torch.uint8, device="cpu")
    start = -whole.data_ptr() % ALIGN_BYTES
    return whole[start : start + num_bytes]


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a 1-D uint8 tensor."""
    return tensor.numpy().data
