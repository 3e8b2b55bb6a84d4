"""Write the files of a checkpoint: lay out and write one rank's file, and describe the files of all ranks in the manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from accordion.checkpoint.boxes import Box
from accordion.checkpoint.checksums import DIGITS, PIECE_BYTES, SUMMED_BYTES, Buffer, kind_here, pieces, running
from accordion.checkpoint.collective import Team
from accordion.checkpoint.contents import OF_RANKS, Contents, local_data, own_box, rank_prefix, writes
from accordion.checkpoint.format import (
    File,
    Manifest,
    TensorChunk,
    TensorEntry,
    code_of,
    dump,
    entry_name,
    header,
    parse,
    split_entry_name,
)
from accordion.checkpoint.storage.folders import Folder, Reader
from accordion.checkpoint.untrusted_files import LENGTH_BYTES, stored_in
from accordion.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class WritePart:
    """A part of tensor `name`, written by this rank. `key`: name of the part in the file; `data`: elements, on any device."""

    name: str
    key: str
    data: Tensor


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The layout of one rank's file, made by `layout_of` and written by `write`: the header `head` with its length, the
    `parts`, and last JSON with the checksums of the parts, which are of `kind`. `sums_bytes`: length of the JSON."""

    head: bytes
    parts: tuple[WritePart, ...]
    kind: str
    sums_bytes: int

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the parts alone."""
        return sum(part.data.nbytes for part in self.parts)


def layout_of(saved_once: Contents, rank_tensors: Mapping[str, Tensor], team: Team) -> FileLayout:
    """Return the layout of this rank's file: the boxes of `saved_once.tensors` that this rank writes, and all `rank_tensors`
    (name in the checkpoint -> plain tensor, saved whole).

    The last tensor in the file is JSON with the checksums of the parts: {name of a part in the file: [sum of each piece, ...]}.
    Raises `CheckpointError` for a dtype that safetensors lacks, and for placements that a checkpoint cannot hold.
    """
    parts = []
    for name, tensor in saved_once.tensors.items():
        box = own_box(name, tensor)
        is_writer = writes(tensor) if isinstance(tensor, DTensor) else team.leads
        if is_writer and box.numel:
            parts.append(WritePart(name, entry_name(name, box.offset), local_data(tensor)))
    parts += [WritePart(name, entry_name(name, (0,) * t.dim()), t.detach()) for name, t in rank_tensors.items()]
    # Large elements come first, so that each part begins at a multiple of its element's size.
    parts.sort(key=lambda part: -part.data.element_size())
    kind = kind_here()
    zero = "0" * DIGITS[kind]
    empty = {part.key: [zero for _ in pieces(0, part.data.nbytes, PIECE_BYTES)] for part in parts}
    length = len(_as_json(empty))
    words = [(part.key, code_of(part.name, part.data.dtype), tuple(part.data.shape)) for part in parts]
    sums = (entry_name(f"{rank_prefix(team.index)}sums", (0,)), "U8", (length,))
    return FileLayout(header([*words, sums]), tuple(parts), kind, length)


def _as_json(sums: dict[str, list[str]]) -> bytes:
    return json.dumps(sums, separators=(",", ":")).encode()


def write(folder: Folder, name: str, plan: FileLayout, host: memoryview | None) -> None:
    """Create the file `name` in `folder` as `plan` lays it out, with checksums, and wait until it is on the disk. `host`: the
    bytes of all parts, one after the other; if None, parts are copied from their devices one at a time."""
    # safetensors' own writer needs all tensors in host memory at once and refuses views of one storage, which shards are.
    begin = running(plan.kind)
    sums: dict[str, list[str]] = {}
    with folder.create(name) as file:
        file.write(memoryview(plan.head))
        at = 0
        for part in plan.parts:
            if host is None:
                data = bytes_of(part.data.cpu().contiguous())
            else:
                data = host[at : at + part.data.nbytes]
                at += part.data.nbytes
            sums[part.key] = part_sums = []
            for start, end in pieces(0, len(data), PIECE_BYTES):
                total = begin()
                # Summed and written in small blocks, which stay in the processor's cache: a quarter of the time of whole pieces.
                for a, b in pieces(start, end, SUMMED_BYTES):
                    total.update(data[a:b])
                    file.write(data[a:b])
                part_sums.append(total.hexdigest())
        text = _as_json(sums)
        assert len(text) == plan.sums_bytes, "layout_of() computed the length of all checksums"
        file.write(memoryview(text))


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a view, without a copy, of the memory of a contiguous tensor on the host as bytes."""
    return tensor.detach().flatten().view(torch.uint8).numpy().data


# -- the manifest


def described(form: Manifest, folder: Folder) -> Manifest:
    """Return the manifest `form` with files, chunks, and the tensors that each rank saved for itself ("rank/...") added. These
    come from headers and checksums of the files in `folder`, which all ranks have written. Raises `CheckpointError` if the
    chunks do not make up the tensors in `form`, or if `folder` is gone."""
    files: dict[str, File] = {}
    chunks: dict[str, list[TensorChunk]] = {name: [] for name in form.tensors}
    of_ranks: dict[str, TensorEntry] = {}
    begin_sum = running(form.checksum)

    def sum_of(data: Buffer) -> str:
        total = begin_sum()
        total.update(data)
        return str(total.hexdigest())

    try:
        names = sorted(name for name in folder.sizes() if name.endswith(".safetensors"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} was removed during the save; no other job may save under this name.") from None
    for file_name in names:
        with closing(folder.open(file_name)) as reader:
            head = _read(reader, 0, LENGTH_BYTES)
            head = _read(reader, 0, LENGTH_BYTES + int.from_bytes(head, "little"))
            *stored, last = stored_in(head[LENGTH_BYTES:], len(head))  # `layout_of` puts the sums last
            text = _read(reader, last.at, last.end)
        files[file_name] = File(num_bytes=reader.num_bytes, header_bytes=len(head), header_sum=sum_of(head))
        last_sums = [sum_of(text[a:b]) for a, b in pieces(0, len(text), form.piece_bytes)]
        sums = {**json.loads(text), last.name: last_sums}
        for part in (*stored, last):
            name, offset = split_entry_name(part.name)
            chunk = TensorChunk(file_name, Box(offset, part.shape), part.at, tuple(sums[part.name]))
            if name.startswith(OF_RANKS):
                parts = (chunk,) if chunk.box.numel else ()
                of_ranks[name] = TensorEntry(dtype=part.dtype, shape=part.shape, placements=None, chunks=parts)
            else:
                chunks[name].append(chunk)
    tensors = {name: replace(entry, chunks=tuple(chunks[name])) for name, entry in form.tensors.items()}
    manifest = replace(form, files=files, tensors={**tensors, **of_ranks})
    try:
        return parse(dump(manifest))
    except CheckpointError as error:
        raise CheckpointError(
            f"the files in {folder}, {', '.join(files) or 'none'}, do not make a checkpoint ({error}); all ranks must share the "
            "storage, and no other job may write there."
        ) from error


def _read(reader: Reader, at: int, end: int) -> bytes:
    if end > reader.num_bytes:
        raise CheckpointError(f"its header of {end} bytes is longer than the file.")
    data = bytearray(end - at)
    reader.read_into(memoryview(data), at)
    return bytes(data)
