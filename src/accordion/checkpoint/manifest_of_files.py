"""The manifest of files that ranks have written, from the files' own headers: no rank is asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace

from accordion.checkpoint.boxes import Box
from accordion.checkpoint.checksums import summer, sums_of
from accordion.checkpoint.format import File, Manifest, TensorChunk, TensorEntry, dump, parse, split_entry_name
from accordion.checkpoint.storage.folders import Folder, Reader
from accordion.checkpoint.writing import SUMS
from accordion.errors import CheckpointError

OF_RANKS = "rank/"  # begins the names of tensors that a rank keeps for itself
LENGTH_BYTES = 8  # before the header of a safetensors file


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file: its bytes [at, end) from the file's first on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    at: int
    end: int


def described(form: Manifest, folder: Folder) -> Manifest:
    """`form` with the chunks that the files of `folder` hold. Raises `CheckpointError` where they do not make it up."""
    files: dict[str, File] = {}
    chunks: dict[str, list[TensorChunk]] = {name: [] for name in form.tensors}
    of_ranks: dict[str, TensorEntry] = {}
    sum_of = summer(form.checksum)
    try:
        names = sorted(name for name in folder.sizes() if name.endswith(".safetensors"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} went away while it was written; no other job may save under this name."
        ) from None
    for file_name in names:
        with closing(folder.open(file_name)) as reader:
            head = read_head(reader)
            stored = list(stored_in(head))
            text = _bytes(reader, stored[-1])
        files[file_name] = File(num_bytes=reader.num_bytes, header_bytes=len(head), header_sum=sum_of(head))
        sums = {**json.loads(text), stored[-1].name: sums_of(memoryview(text), sum_of, form.piece_bytes)}
        assert stored[-1].name.endswith(f"/{SUMS}[0]"), "layout() puts the checksums at the end"
        for held in stored:
            name, offset = split_entry_name(held.name)
            chunk = TensorChunk(file_name, Box(offset, held.shape), held.at, tuple(sums[held.name]))
            if name.startswith(OF_RANKS):
                of_ranks[name] = TensorEntry(dtype=held.dtype, shape=held.shape, placements=None, chunks=(chunk,))
            else:
                chunks[name].append(chunk)
    tensors = {name: replace(entry, chunks=tuple(chunks[name])) for name, entry in form.tensors.items()}
    found = replace(form, files=files, tensors={**tensors, **of_ranks})
    try:
        return parse(dump(found))
    except CheckpointError as error:
        raise CheckpointError(
            f"the files in {folder}, {', '.join(files) or 'none'}, do not make a checkpoint ({error}); it needs storage that all "
            "ranks share, and nobody else writing there."
        ) from error


def read_head(reader: Reader) -> bytes:
    """All of a safetensors file before its data. Raises `CheckpointError` where it is none."""
    length = bytearray(LENGTH_BYTES)
    reader.read_into(memoryview(length), 0)
    num_bytes = LENGTH_BYTES + int.from_bytes(length, "little")
    if num_bytes > reader.num_bytes:
        raise CheckpointError(f"its header of {num_bytes} bytes is longer than the file.")
    head = bytearray(num_bytes)
    reader.read_into(memoryview(head), 0)
    return bytes(head)


def stored_in(head: bytes) -> Iterator[StoredTensor]:
    """The tensors that a header describes, in its order."""
    for name, words in json.loads(head[LENGTH_BYTES:]).items():
        if name != "__metadata__":
            at, end = (len(head) + offset for offset in words["data_offsets"])
            yield StoredTensor(name, words["dtype"], tuple(words["shape"]), at, end)


def _bytes(reader: Reader, stored: StoredTensor) -> bytearray:
    data = bytearray(stored.end - stored.at)
    reader.read_into(memoryview(data), stored.at)
    return data
