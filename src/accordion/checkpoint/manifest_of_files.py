"""The manifest of files that ranks have written, from the files' own headers: no rank is asked."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace

from accordion.checkpoint.boxes import Box
from accordion.checkpoint.checksums import Buffer, pieces, running
from accordion.checkpoint.contents import OF_RANKS
from accordion.checkpoint.format import File, Manifest, TensorChunk, TensorEntry, dump, parse, split_entry_name
from accordion.checkpoint.storage.folders import Folder, Reader
from accordion.checkpoint.untrusted_files import LENGTH_BYTES, stored_in
from accordion.errors import CheckpointError


def described(form: Manifest, folder: Folder) -> Manifest:
    """`form` with the chunks that the files of `folder` hold. Raises `CheckpointError` where they do not make it up."""
    files: dict[str, File] = {}
    chunks: dict[str, list[TensorChunk]] = {name: [] for name in form.tensors}
    of_ranks: dict[str, TensorEntry] = {}
    begin_sum = running(form.checksum)

    def sum_of(data: Buffer) -> str:
        total = begin_sum()
        total.update(data)
        return total.hexdigest()

    try:
        names = sorted(name for name in folder.sizes() if name.endswith(".safetensors"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} went away while it was written; no other job may save under this name."
        ) from None
    for file_name in names:
        with closing(folder.open(file_name)) as reader:
            head = _read(reader, 0, LENGTH_BYTES)
            head = _read(reader, 0, LENGTH_BYTES + int.from_bytes(head, "little"))
            *stored, last = stored_in(head[LENGTH_BYTES:], len(head), reader.num_bytes)  # `layout` puts the sums last
            text = _read(reader, last.at, last.end)
        files[file_name] = File(num_bytes=reader.num_bytes, header_bytes=len(head), header_sum=sum_of(head))
        own_sums = [sum_of(text[a:b]) for a, b in pieces(0, len(text), form.piece_bytes)]
        sums = {**json.loads(text), last.name: own_sums}
        for held in (*stored, last):
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


def _read(reader: Reader, at: int, end: int) -> bytes:
    if end > reader.num_bytes:
        raise CheckpointError(f"its header of {end} bytes is longer than the file.")
    data = bytearray(end - at)
    reader.read_into(memoryview(data), at)
    return bytes(data)
