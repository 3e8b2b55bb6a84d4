"""Checksums of the bytes in a checkpoint: the known kinds, and the one that this process writes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any, TypeAlias

from accordion.errors import CheckpointError

Buffer: TypeAlias = bytes | bytearray | memoryview
# A checksum covers so many bytes (a piece), so that reading a part of a tensor checks little more than that part.
PIECE_BYTES = 4 * 2**20
SUMMED_BYTES = 2**18  # summed at once: unlike a whole piece, they stay in the processor's cache until they are used
LONGEST_PIECE = 2**28  # largest `piece_bytes` that a manifest may have
DIGITS: Mapping[str, int] = {"xxh3_64": 16, "crc32": 8}  # hexadecimal, lower case


def kind_here() -> str:
    """Return the kind of checksum that saves write: "xxh3_64" if the package `xxhash` is installed, else "crc32" (of zlib)."""
    # On two busy cores xxh3 took 4.7 GB/s, crc32 0.7 to 1.6, a copy in memory 4.3: with a fast disk crc32 costs much.
    return "xxh3_64" if find_spec("xxhash") else "crc32"


class _Crc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Buffer, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def running(kind: str) -> Callable[[], Any]:
    """Return the class for checksums of `kind`, "xxh3_64" or "crc32", with the methods `update` and `hexdigest` of hashlib.
    Raises `CheckpointError` for "xxh3_64" if the package `xxhash` is not installed."""
    if kind == "crc32":
        return _Crc32
    assert kind == "xxh3_64", "parse() refuses other kinds"
    if find_spec("xxhash") is None:
        raise CheckpointError(
            "its checksums are xxh3, which needs the package xxhash; pip install 'accordion-fsdp[checkpoint]'."
        )
    from xxhash import xxh3_64

    return xxh3_64


def pieces(start: int, end: int, piece_bytes: int) -> Iterable[tuple[int, int]]:
    """Iterate over the ranges (a, b), each of `piece_bytes` except a shorter last one, that make up the range [start, end)."""
    return ((at, min(at + piece_bytes, end)) for at in range(start, end, piece_bytes))
