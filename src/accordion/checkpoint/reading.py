"""Reading the bytes of a checkpoint: the manifest, and parts of chunks, each held against its checksums before it is used."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from accordion.checkpoint.boxes import Box
from accordion.checkpoint.folders import Folder, Reader
from accordion.checkpoint.format import DTYPES, MANIFEST, Chunk, Entry, Manifest, parse
from accordion.checkpoint.sums import Buffer, pieces, summer
from accordion.checkpoint.writing import bytes_of
from accordion.errors import CheckpointError

LARGEST_MANIFEST = 2**30
SMALL_MANIFEST = 2**26  # of any checkpoint; beyond it a manifest is no larger than the tensors that it describes
SHOWN = 3  # tensors of a file that a message names
AHEAD = 8  # pieces that the disk reads while one is summed
STAGE_BYTES = 2**26  # read at once where a tensor cannot be read in place


def read_manifest(folder: Folder) -> Manifest:
    """The manifest of a checkpoint. Raises `CheckpointError` where there is none or it is damaged."""
    try:
        sizes = folder.sizes()
        if MANIFEST not in sizes:
            raise CheckpointError(f"{folder} is no checkpoint: it has no {MANIFEST}.")
        limit = min(LARGEST_MANIFEST, SMALL_MANIFEST + sum(sizes.values()) - sizes[MANIFEST])
        if sizes[MANIFEST] > limit:
            raise CheckpointError(
                f"{folder}/{MANIFEST} cannot be used: {sizes[MANIFEST]} bytes are absurd beside its files."
            )
        text = folder.read(MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder} is no checkpoint: it has no {MANIFEST}.") from None
    try:
        return parse(text)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}/{MANIFEST} cannot be used: {error}") from error


@dataclass(frozen=True, slots=True)
class Read:
    """The part of a chunk that `box` of the tensor `name` names, and where it goes: a view of a local tensor."""

    name: str
    entry: Entry
    chunk: Chunk
    box: Box
    into: Tensor | None

    def span(self) -> tuple[int, int]:
        """Where in the chunk's bytes the rows lie that hold the part: the dims but the first are read whole."""
        rows, held = self.box.within(self.chunk.box), self.chunk.box.shape
        if not rows:
            return 0, self.entry.num_bytes(self.chunk.box)
        row_bytes = math.prod(held[1:]) * DTYPES[self.entry.dtype].itemsize
        return rows[0].start * row_bytes, rows[0].stop * row_bytes


class Files:
    """The tensor files of one checkpoint. Owns those that were opened, and which pieces of them were found sound."""

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._sum_of = summer(manifest.checksum)
        self._open: dict[str, Reader] = {}
        self._buffer = bytearray()

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def check_sizes(self) -> None:
        """Raise `CheckpointError` where a file is not there or not of its size. Nothing larger than a file is ever read."""
        held = self.folder.sizes()
        wrong = [
            f"{name} has {held[name]} bytes and {file.num_bytes} in the manifest{self._lost(name, held[name])}"
            if name in held
            else f"{name}: No such file{self._lost(name, 0)}"
            for name, file in self.manifest.files.items()
            if held.get(name) != file.num_bytes
        ]
        if wrong:
            raise CheckpointError(f"{self.folder} is damaged: {'; '.join(wrong)}.")

    def _lost(self, file: str, num_bytes: int) -> str:
        """Which tensors a file that is too short lacks."""
        lost = [
            name
            for name, entry, chunk in self.manifest.chunks()
            if chunk.file == file and chunk.at + entry.num_bytes(chunk.box) > num_bytes
        ]
        more = f", and {len(lost) - SHOWN} more" if len(lost) > SHOWN else ""
        return f"; it lacks {', '.join(lost[:SHOWN])}{more}" if lost else ""

    def opened(self, file: str) -> Reader:
        """Raises `CheckpointError` where it cannot be read, or its header is not what the manifest says."""
        if file not in self._open:
            said = self.manifest.files[file]
            try:
                self._open[file] = reader = self.folder.open(file)
                if self._sum_of(self._bytes(reader, 0, said.header_bytes)) != said.header_sum:
                    raise CheckpointError(f"the header of {file} is damaged")
            except OSError as error:
                raise CheckpointError(f"{file}: {error}") from error
        return self._open[file]

    def faults(self, reads: Iterable[Read]) -> list[str]:
        """What is wrong with the bytes that `reads` need, each naming file and tensor; nothing is filled."""
        wanted: dict[tuple[str, int], tuple[str, str]] = {}
        sizes: dict[tuple[str, int], int] = {}
        size = self.manifest.piece_bytes
        for read in reads:
            chunk, (start, end) = read.chunk, read.span()
            length = read.entry.num_bytes(chunk.box)
            for i in range(start // size, -(-end // size)):
                where = chunk.file, chunk.at + i * size
                wanted[where] = read.name, chunk.sums[i]
                sizes[where] = min(size, length - i * size)
        found: dict[str, None] = {}
        order = sorted(wanted.items())
        ahead = iter([*order[AHEAD:], *[None] * AHEAD])
        for (file, at), (name, text) in order:
            try:
                if (soon := next(ahead)) is not None and soon[0][0] in self._open:
                    self._open[soon[0][0]].expect(soon[0][1], sizes[soon[0]])
                if self._sum_of(self._bytes(self.opened(file), at, sizes[file, at])) != text:
                    found[f"{name} is damaged in bytes {at} to {at + sizes[file, at] - 1} of {file}"] = None
            except CheckpointError as error:
                found[str(error)] = None
            except OSError as error:
                found[f"{name} in {file}: {error}"] = None
        return list(found)

    def _bytes(self, reader: Reader, at: int, length: int) -> Buffer:
        """Into one buffer that every call uses again."""
        if at + length > reader.num_bytes:
            raise OSError(f"it ends at byte {reader.num_bytes}")
        if len(self._buffer) < length:
            self._buffer = bytearray(length)
        into = memoryview(self._buffer)[:length]
        reader.read_into(into, at)
        return into

    def fill_all(self, reads: Iterable[Read]) -> None:
        for read in reads:
            self.fill(read)

    def fill(self, read: Read) -> None:
        """Copy what `read` names, straight into place where it lies there as it does in the file."""
        assert read.into is not None
        reader, (start, end) = self.opened(read.chunk.file), read.span()
        dtype, into = DTYPES[read.entry.dtype], read.into
        inner = read.box.within(read.chunk.box)[1:]
        whole = read.box.shape[1:] == read.chunk.box.shape[1:]
        if whole and into.dtype == dtype and into.device.type == "cpu" and into.is_contiguous():
            reader.read_into(bytes_of(into), read.chunk.at + start)
            return
        row_shape = read.chunk.box.shape[1:]
        row_bytes = max(1, math.prod(row_shape) * dtype.itemsize)
        step = max(1, STAGE_BYTES // row_bytes) * row_bytes
        for a, b in pieces(start, end, step):
            stage = torch.empty(b - a, dtype=torch.uint8)
            reader.read_into(bytes_of(stage), read.chunk.at + a)
            if not read.box.shape:
                into.copy_(stage.view(dtype).view(()))
                continue
            rows = stage.view(dtype).view(-1, *row_shape)
            first = (a - start) // row_bytes
            into[first : first + rows.shape[0]].copy_(rows[(slice(None), *inner)])
