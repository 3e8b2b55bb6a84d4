"""Files in which optimizer states rest: preallocated, without a name, and accessed past the page cache where that is possible."""

from __future__ import annotations

import mmap
import os
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accordion.engine.home import own_storage
from accordion.errors import OffloadError
from accordion.memory.arena import ALIGN_BYTES, page_aligned

DIRECT: int = getattr(os, "O_DIRECT", 0)


class SwapFile:
    """Owns one file that has no name: its space is given back with the process, however that ends, and no two jobs share one.

    `read` and `write` take offsets and lengths that are multiples of a page and memory that begins at one; they run on any
    thread. `mapped` shows parts of the file as tensors to whoever wants to see them outside of a step: nothing of them is
    in memory until it is looked at. With `checksums` each block that is read is what was last written there.
    """

    def __init__(self, folder: Path, num_bytes: int, *, checksums: bool = False, direct: bool = True) -> None:
        self.folder, self.num_bytes = folder, num_bytes
        self.traffic = {"read": 0, "written": 0}  # bytes
        self._sums: dict[tuple[int, int], int] | None = {} if checksums else None
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
            raise OffloadError(
                f"{folder} has no room for {num_bytes} bytes of optimizer states ({error.strerror}); free some, name another "
                "folder, or use more ranks."
            ) from error
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def _reads_direct(self) -> bool:
        """Some file systems open a file for direct access and refuse it then."""
        buffer = aligned_buffer(ALIGN_BYTES)
        try:
            return os.preadv(self._fast, [bytes_of(buffer)], 0) == ALIGN_BYTES
        except OSError:
            return False

    def mapped(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """(numel,) of the file, shared with it."""
        return own_storage(self._bytes[offset : offset + numel * dtype.itemsize].view(dtype))

    def flush(self) -> None:
        """What was written through `mapped` is in the file, and what was summed before is no longer expected."""
        self._map.flush()
        if self._sums is not None:
            self._sums.clear()

    def read(self, offset: int, into: Tensor) -> None:
        """Fill the bytes `into`. Raises `OffloadError` where the disk fails, or gives other bytes than were written."""
        self._transfer(os.preadv, "read", offset, into)
        if self._sums is not None:
            expected = self._sums.get((offset, into.numel()))
            if expected is not None and expected != zlib.crc32(bytes_of(into)):
                raise OffloadError(
                    f"{into.numel()} bytes at {offset} of the swap file in {self.folder} are not what was written there; the "
                    "disk or its memory is faulty. Go on from the last checkpoint, on another disk."
                )

    def write(self, offset: int, source: Tensor) -> None:
        if self._sums is not None:
            self._sums[offset, source.numel()] = zlib.crc32(bytes_of(source))
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


def _unnamed(folder: Path, direct: bool) -> tuple[int, int]:
    """A new file opened twice, for ordinary and for direct access (the same handle where there is none), and its name removed."""
    try:
        plain, name = tempfile.mkstemp(prefix=".accordion-swap-", dir=folder)
    except OSError as error:
        raise OffloadError(
            f"optimizer states cannot rest in {folder}: {error.strerror}; name a folder that exists and can be written."
        ) from error
    try:
        fast = os.open(name, os.O_RDWR | DIRECT) if direct and DIRECT else plain
    except OSError:
        fast = plain
    finally:
        os.unlink(name)
    return plain, fast


def check_folder(folder: Path) -> None:
    """Raise `OffloadError` where no file can be made."""
    for handle in set(_unnamed(folder, direct=False)):
        os.close(handle)


def aligned_buffer(num_bytes: int) -> Tensor:
    """(num_bytes,) uint8 that begins at a page."""
    whole = torch.empty(page_aligned(num_bytes) + ALIGN_BYTES, dtype=torch.uint8)
    start = -whole.data_ptr() % ALIGN_BYTES
    return whole[start : start + num_bytes]


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a 1-D uint8 tensor."""
    return tensor.numpy().data
