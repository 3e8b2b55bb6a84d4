"""Checksums of the bytes in a checkpoint: which kinds there are, and which one this process writes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import TypeAlias

from accordion.errors import CheckpointError

Buffer: TypeAlias = bytes | bytearray | memoryview
PIECE_BYTES = (
    4 * 2**20
)  # a chunk has one checksum for so many bytes: who reads a part of it checks little more than that
LONGEST_PIECE = 2**28
DIGITS: Mapping[str, int] = {"xxh3_64": 16, "crc32": 8}  # hexadecimal, lower case


def kind_here() -> str:
    """xxh3 where the package `xxhash` is installed, else zlib's crc32, which every Python has.

    On two busy cores xxh3 took 4.7 GB/s, zlib's crc32 0.7 to 1.6, a copy in memory 4.3: crc32 is dear beside a fast disk.
    """
    return "xxh3_64" if find_spec("xxhash") else "crc32"


def summer(kind: str) -> Callable[[Buffer], str]:
    """The function that sums a buffer. Raises `CheckpointError` where its package is not installed."""
    if kind == "crc32":
        return _crc32
    assert kind == "xxh3_64", "parse() knows the kinds"
    if find_spec("xxhash") is None:
        raise CheckpointError("its checksums are xxh3, which needs the package xxhash; pip install xxhash.")
    import xxhash

    return lambda buffer: str(xxhash.xxh3_64_hexdigest(buffer))


def _crc32(buffer: Buffer) -> str:
    return f"{zlib.crc32(buffer):08x}"


def pieces(start: int, end: int, piece_bytes: int) -> Iterable[tuple[int, int]]:
    """The pieces [a, b) that make up [start, end)."""
    return ((at, min(at + piece_bytes, end)) for at in range(start, end, piece_bytes))


def sums_of(data: memoryview, sum_of: Callable[[Buffer], str], piece_bytes: int = PIECE_BYTES) -> list[str]:
    """A checksum for each piece of `data`."""
    return [sum_of(data[a:b]) for a, b in pieces(0, len(data), piece_bytes)]
