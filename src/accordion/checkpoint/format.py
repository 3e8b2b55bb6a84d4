"""The manifest of a checkpoint, to and from text. `docs/checkpoint.md` describes the format.

A checkpoint is a folder with `manifest.json` and safetensors files, one for each rank that wrote tensors. The manifest is
written last; a folder without one is no checkpoint. A value that JSON lacks is an object such as {"$float": "nan"}.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch

from accordion.checkpoint.boxes import Box
from accordion.checkpoint.checksums import DIGITS, LONGEST_PIECE
from accordion.checkpoint.json_values import Json
from accordion.errors import CheckpointError
from accordion.garbage import without_collections

SCHEMA = 2
MANIFEST = "manifest.json"
PLAIN_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*\.safetensors")  # neither a path nor hidden
TAIL = re.compile(rb',"crc32":"([0-9a-f]{8})"}\n')
MOST_DIMS = 64  # the limit of torch
MOST_ELEMENTS = 2**59  # torch can still count their bytes; dims of size 0 count as 1
REST = ("checksum", "piece_bytes", "saved_by", "aliases", "extra", "optimizer")  # keys that hold plain values
TAIL_BYTES = len(b',"crc32":"01234567"}\n')
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES: Mapping[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorChunk:
    """The part `box` of a tensor, in row-major order from byte `at` of `file` on. `sums`: one checksum for every
    `Manifest.piece_bytes` bytes of the part, the last one for the rest."""

    file: str
    box: Box
    at: int
    sums: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor of a checkpoint, which `chunks` make up. `placements`: those of the saved DTensor as text ("S(0)", "R"), one for
    each mesh axis; None for a plain tensor."""

    dtype: str  # a key of `DTYPES`
    shape: tuple[int, ...]
    placements: tuple[str, ...] | None
    chunks: tuple[TensorChunk, ...]

    def num_bytes(self, box: Box) -> int:
        return box.numel * DTYPES[self.dtype].itemsize

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return True if `tensor` has the shape of this entry and the saved values may be cast to the dtype of `tensor`."""
        return self.shape == tuple(tensor.shape) and holds(tensor.dtype, DTYPES[self.dtype])


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A safetensors file of a checkpoint: its size, and size and checksum of all bytes before the data, the header and its
    length. Chunks fill the rest of the file."""

    num_bytes: int
    header_bytes: int
    header_sum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of `manifest.json`, which `parse` reads and `dump` writes: the description of a checkpoint, without the
    elements of its tensors. `files`, `tensors`: by name. `aliases`: other name of a tied tensor -> its name in `tensors`."""

    checksum: str  # kind of the checksums
    piece_bytes: int  # size of a piece: each chunk has one checksum for every so many bytes
    files: Mapping[str, File]
    tensors: Mapping[str, TensorEntry]
    aliases: Mapping[str, str]
    optimizer: Json  # class names, groups and states; None if saved without an optimizer
    extra: Json  # the argument of `save`
    saved_by: Json  # {"torch": version, "num_ranks": number, "meshes": [...]}

    def chunks(self) -> Iterable[tuple[str, TensorEntry, TensorChunk]]:
        """Iterate over all chunks, as (name of the tensor, its entry, chunk)."""
        return ((name, entry, chunk) for name, entry in self.tensors.items() for chunk in entry.chunks)


def holds(to: torch.dtype, saved: torch.dtype) -> bool:
    """Return True if values of dtype `saved` may be cast to `to`: floats to floats, complex to complex, bool to bool, and
    integers to an integer dtype that has their whole range."""
    if saved == to:
        return True
    if saved.is_floating_point or saved.is_complex:
        return saved.is_floating_point == to.is_floating_point and saved.is_complex == to.is_complex
    if to.is_floating_point or to.is_complex or torch.bool in (saved, to):
        return False
    a, b = torch.iinfo(saved), torch.iinfo(to)
    return b.min <= a.min and a.max <= b.max


def entry_name(name: str, offset: Sequence[int]) -> str:
    """Return `NAME[OFFSET]`, the name in a safetensors file of the chunk of the tensor `name` at `offset`: "model/w[4,0]"."""
    return f"{name}[{','.join(map(str, offset))}]"


def split_entry_name(text: str) -> tuple[str, tuple[int, ...]]:
    """Return (name of the tensor, offset of the chunk) for `text`, a result of `entry_name`."""
    name, _, offset = text.removesuffix("]").rpartition("[")
    return name, tuple(int(number) for number in offset.split(",") if number)


def code_of(name: str, dtype: torch.dtype) -> str:
    """Return the safetensors code of `dtype`. Raises `CheckpointError` if it has none; `name` is for the message."""
    if dtype not in CODES:
        raise CheckpointError(f"{name} has dtype {dtype}, which safetensors cannot hold; cast it before saving.")
    return CODES[dtype]


def header(entries: Sequence[tuple[str, str, tuple[int, ...]]], about: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of a safetensors file before its data: the length of the header, and the header. `entries`: (name, code of
    the dtype, shape) of each tensor, in the order of the data. `about`: texts for the header's metadata; None for no metadata."""
    words: dict[str, Json] = {} if about is None else {"__metadata__": dict(about)}
    at = 0
    for name, code, shape in entries:
        end = at + math.prod(shape) * DTYPES[code].itemsize
        words[name] = {"dtype": code, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(words, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def dump(manifest: Manifest) -> bytes:
    """Return the bytes of `manifest.json`: one line of JSON. Its last entry, "crc32", is a checksum of all bytes before it."""
    chunks = {
        name: [
            {"file": c.file, "offset": c.box.offset, "shape": c.box.shape, "at": c.at, "sums": c.sums}
            for c in entry.chunks
        ]
        for name, entry in manifest.tensors.items()
    }
    words = {
        "schema": SCHEMA,
        **{key: getattr(manifest, key) for key in REST},
        "files": {
            name: {"bytes": file.num_bytes, "header_bytes": file.header_bytes, "header_sum": file.header_sum}
            for name, file in manifest.files.items()
        },
        "tensors": {
            name: {"dtype": e.dtype, "shape": e.shape, "placements": e.placements, "chunks": chunks[name]}
            for name, e in manifest.tensors.items()
        },
    }
    body = json.dumps(words, allow_nan=False, separators=(",", ":")).removesuffix("}").encode()
    return body + f',"crc32":"{zlib.crc32(body):08x}"}}\n'.encode()


def parse(text: bytes) -> Manifest:
    """Return the manifest in `text`, the bytes of `manifest.json`, after checking all file names, boxes and byte ranges. Raises
    `CheckpointError` with the fault; the caller adds the path."""
    try:
        with without_collections():
            return _parsed(text)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"it is damaged: {type(error).__name__}: {str(error)[:300]}.") from error


def _parsed(text: bytes) -> Manifest:
    words = json.loads(text, object_pairs_hook=without_twins)
    if words["schema"] != SCHEMA:
        way = (
            "if it is newer, update Accordion; else export it to safetensors with the version of Accordion that wrote it "
            "(`accordion export --format safetensors`) and convert that (`accordion checkpoint convert`)"
        )
        raise CheckpointError(f"it has schema {repr(words['schema'])[:20]} and this version reads {SCHEMA}; {way}.")
    tail = TAIL.fullmatch(text[-TAIL_BYTES:])
    if tail is None or int(tail[1], 16) != zlib.crc32(text[:-TAIL_BYTES]):
        raise CheckpointError("it is damaged: its own checksum does not fit.")
    kind, piece_bytes = words["checksum"], words["piece_bytes"]
    if kind not in DIGITS:
        raise CheckpointError(f"its checksums are {str(kind)[:100]!r} and this version knows {', '.join(DIGITS)}.")
    if not 1 <= _size(piece_bytes) <= LONGEST_PIECE:
        raise CheckpointError(f"piece_bytes is {piece_bytes}; it must be between 1 and {LONGEST_PIECE}.")
    files = {name: _file(name, value) for name, value in words["files"].items()}
    tensors = {name: _entry(name, value) for name, value in words["tensors"].items()}
    lost = [name for name, target in words["aliases"].items() if target not in tensors]
    if lost:
        raise CheckpointError(f"these names are aliases of tensors that it does not list: {', '.join(lost)}.")
    twice = [name for name in words["aliases"] if name in tensors]
    if twice:
        raise CheckpointError(f"these names are aliases of other tensors and have data too: {', '.join(twice)}.")
    _check_values(words["optimizer"], words["saved_by"])
    manifest = Manifest(files=files, tensors=tensors, **{key: words[key] for key in REST})
    _check_bytes(manifest)
    return manifest


def without_twins(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """Hook for `json.loads` that returns an object as a dict. Raises `ValueError` if a key occurs twice."""
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("an object has a key twice")
    return values


def _check_values(optimizer: Json, saved_by: Json) -> None:
    """Raise an error unless the entries "optimizer" and "saved_by" of a manifest have the structure that a load needs: a
    `CheckpointError`, or one of the errors that `parse` turns into that."""
    if not isinstance(saved_by, dict):
        raise CheckpointError("its saved_by is no object.")
    if optimizer is None:
        return
    groups, states = optimizer["groups"], (optimizer["state"], optimizer.get("shared", {}))
    dicts, names = [*states, *(group["options"] for group in groups)], [n for group in groups for n in group["params"]]
    if not (all(isinstance(value, dict) for value in dicts) and all(isinstance(name, str) for name in names)):
        raise CheckpointError("its optimizer does not consist of groups and state.")
    if not all(isinstance(name, str) for name in optimizer.get("kind", [])):
        raise CheckpointError("its optimizer's kind is not a list of names.")


def _file(name: str, words: Json) -> File:
    if not is_plain(name):
        raise CheckpointError(f"it lists {name!r}, which is not the plain name of a safetensors file.")
    return File(
        num_bytes=_size(words["bytes"]), header_bytes=_size(words["header_bytes"]), header_sum=words["header_sum"]
    )


def _check_bytes(manifest: Manifest) -> None:
    """Raise `CheckpointError` unless chunks fill each file from its header to its end, without gaps or overlaps, and all
    checksums have the right number and kind."""
    spans: dict[str, list[tuple[int, int, str]]] = {name: [] for name in manifest.files}
    sums = {name: [file.header_sum] for name, file in manifest.files.items()}
    for name, entry, chunk in manifest.chunks():
        if chunk.file not in spans:
            raise CheckpointError(f"a chunk of {name} is in {chunk.file!r}, which is none of its files.")
        length = entry.num_bytes(chunk.box)
        if len(chunk.sums) != -(-length // manifest.piece_bytes):
            raise CheckpointError(f"a chunk of {name} has {length} bytes and {len(chunk.sums)} checksums.")
        spans[chunk.file].append((chunk.at, chunk.at + length, name))
        sums.setdefault(name, []).extend(chunk.sums)
    for name, texts in sums.items():
        if not all(isinstance(text, str) and len(text) == DIGITS[manifest.checksum] for text in texts):
            raise CheckpointError(f"the checksums of {name} are not of the kind {manifest.checksum}.")
    for file_name, file in manifest.files.items():
        at = file.header_bytes
        for start, end, name in sorted(spans[file_name]):
            if start != at:
                raise CheckpointError(
                    f"{name} is at byte {start} of {file_name}, and the data before it do not end there."
                )
            at = end
        if at != file.num_bytes:
            raise CheckpointError(f"{file_name} has {file.num_bytes} bytes and its chunks end at {at}.")


def _entry(name: str, words: Json) -> TensorEntry:
    dtype, shape, placements = words["dtype"], _sizes(words["shape"]), words["placements"]
    if dtype not in DTYPES:
        raise CheckpointError(f"{name} has the unknown dtype {str(dtype)[:100]!r}.")
    if math.prod(shape if all(shape) else [max(1, rows) for rows in shape]) > MOST_ELEMENTS:
        raise CheckpointError(f"{name} of shape {str(shape)[:100]} is too large for any tensor.")
    chunks = tuple([_chunk(name, chunk) for chunk in words["chunks"]])
    if not make_up([chunk.box for chunk in chunks], shape):
        raise CheckpointError(
            f"the chunks of {name} do not make up its shape {shape}: one is missing, or some overlap."
        )
    return TensorEntry(
        dtype=dtype, shape=shape, placements=None if placements is None else tuple(map(str, placements)), chunks=chunks
    )


def make_up(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Return True if `boxes`, none of them empty, cover a tensor of `shape` completely and without overlaps. To bound the work,
    return False too if the grid of all boxes' edges has many more cells than boxes. No save writes such boxes."""
    ends = [(box, [start + size for start, size in zip(box.offset, box.shape, strict=True)]) for box in boxes]
    inside = all(len(end) == len(shape) and all(a <= b for a, b in zip(end, shape, strict=True)) for _, end in ends)
    if not inside or sum(box.numel for box in boxes) != math.prod(shape):
        return False
    if len(boxes) < 2:
        return True
    edges = [sorted({*(box.offset[d] for box in boxes), *(end[d] for _, end in ends)}) for d in range(len(shape))]
    index = [{edge: i for i, edge in enumerate(line)} for line in edges]
    taken: set[tuple[int, ...]] = set()
    cells_left = 4 * len(boxes) + 64
    for box, end in ends:
        spans = [range(line[a], line[b]) for line, a, b in zip(index, box.offset, end, strict=True)]
        cells_left -= math.prod(map(len, spans))
        cells = set(product(*spans)) if cells_left >= 0 else taken
        if not taken.isdisjoint(cells):
            return False
        taken |= cells
    return True


def _chunk(name: str, words: Json) -> TensorChunk:
    file, box = words["file"], Box(_sizes(words["offset"]), _sizes(words["shape"]))
    if not is_plain(file):
        raise CheckpointError(f"a chunk of {name} names {file!r}, which is not the plain name of a safetensors file.")
    if not box.numel:
        raise CheckpointError(f"a chunk of {name} is empty.")
    return TensorChunk(file, box, _size(words["at"]), tuple(words["sums"]))


@lru_cache(maxsize=4096)
def is_plain(file: str) -> bool:
    """Return True if `file` is a name that ends in ".safetensors", of letters, digits, "_", "-" and single dots; not hidden."""
    return PLAIN_FILE.fullmatch(file) is not None and ".." not in file


def _size(word: Json) -> int:
    if type(word) is not int or word < 0:
        raise CheckpointError(f"{str(word)[:100]!r} is no size.")
    return word


def _sizes(words: Json) -> tuple[int, ...]:
    if len(words) > MOST_DIMS:
        raise CheckpointError(f"a tensor has {len(words)} dims, more than torch allows.")
    for word in words:  # a manifest has hundreds of thousands of sizes, so no call for each
        if type(word) is not int or word < 0:
            _size(word)
    return tuple(words)
