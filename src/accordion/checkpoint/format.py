"""The manifest of a checkpoint and the header of its tensor files, to and from text: no tensor data, no ranks.

A checkpoint is a folder with `manifest.json` and safetensors files, one for each rank that wrote something:

    {"schema": 1, "saved_by": {...}, "aliases": {name: name}, "optimizer": {...} or null, "extra": ...,
     "tensors": {name: {"dtype": "F32", "shape": [9, 4], "placements": ["S(0)"],
                        "chunks": [{"file": "rank-00000.safetensors", "offset": [0, 0], "shape": [5, 4]}, ...]}}}

A chunk lies in its file under `entry_name(name, offset)`. The manifest is written last; a folder without one is no
checkpoint. What JSON has no word for is an object with one key that begins with "$".
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from accordion.checkpoint.boxes import Box
from accordion.errors import CheckpointError

SCHEMA = 1
MANIFEST = "manifest.json"
PLAIN_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*\.safetensors")  # neither a path nor hidden
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
Json: TypeAlias = Any  # what `json` reads and writes


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, and the file that holds it."""

    file: str
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor. `placements`: as it was saved, a word for each mesh axis; None for a plain tensor."""

    dtype: str
    shape: tuple[int, ...]
    placements: tuple[str, ...] | None
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint without the tensors' data. `aliases`: other names of tied tensors -> the name that has the data."""

    tensors: Mapping[str, Entry]
    aliases: Mapping[str, str]
    optimizer: Json
    extra: Json
    saved_by: Json

    def files(self) -> list[str]:
        """Names of the tensor files, each once."""
        return sorted({chunk.file for entry in self.tensors.values() for chunk in entry.chunks})


def file_name(rank: int) -> str:
    """The file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def entry_name(name: str, offset: Sequence[int]) -> str:
    """Under which name a chunk lies in its file."""
    return f"{name}[{','.join(map(str, offset))}]"


def code_of(name: str, dtype: torch.dtype) -> str:
    """How safetensors calls `dtype`. Raises `CheckpointError` for the few it does not know."""
    if dtype not in CODES:
        raise CheckpointError(f"{name} has dtype {dtype}, which safetensors cannot hold; cast it before saving.")
    return CODES[dtype]


def header(entries: Sequence[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The first bytes of a safetensors file whose data are `entries` (name, dtype, shape), one after the other."""
    words: dict[str, Json] = {}
    at = 0
    for name, code, shape in entries:
        end = at + math.prod(shape) * DTYPES[code].itemsize
        words[name] = {"dtype": code, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(words, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def dump(manifest: Manifest) -> str:
    """The text of `manifest.json`."""
    tensors = {name: _words(entry) for name, entry in manifest.tensors.items()}
    rest = {key: getattr(manifest, key) for key in ("saved_by", "aliases", "optimizer", "extra")}
    return json.dumps({"schema": SCHEMA, **rest, "tensors": tensors}, allow_nan=False, separators=(",", ":"))


def _words(entry: Entry) -> Json:
    chunks = [{"file": c.file, "offset": c.box.offset, "shape": c.box.shape} for c in entry.chunks]
    return {"dtype": entry.dtype, "shape": entry.shape, "placements": entry.placements, "chunks": chunks}


def parse(text: str | bytes) -> Manifest:
    """Read `manifest.json`, believing nothing: every name of a file and every box is checked.

    Raises `CheckpointError` saying what is wrong; the caller adds where.
    """
    try:
        words = json.loads(text)
        if words["schema"] != SCHEMA:
            raise CheckpointError(f"it has schema {words['schema']!r} and this version reads {SCHEMA}.")
        tensors = {name: _entry(name, value) for name, value in words["tensors"].items()}
        aliases = dict(words["aliases"])
        lost = [name for name, target in aliases.items() if target not in tensors]
        if lost:
            raise CheckpointError(f"these names stand for tensors that it does not list: {', '.join(lost)}.")
        rest = {key: words[key] for key in ("optimizer", "extra", "saved_by")}
        return Manifest(tensors=tensors, aliases=aliases, **rest)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"it is damaged: {type(error).__name__}: {error}.") from error


def _entry(name: str, words: Json) -> Entry:
    dtype, shape, placements = words["dtype"], _sizes(words["shape"]), words["placements"]
    if dtype not in DTYPES:
        raise CheckpointError(f"{name} has the unknown dtype {dtype!r}.")
    chunks = tuple(_chunk(name, shape, chunk) for chunk in words["chunks"])
    held, numel = sum(chunk.box.numel for chunk in chunks), math.prod(shape)
    if held != numel:
        raise CheckpointError(f"{name} has {numel} elements and its chunks have {held}.")
    return Entry(
        dtype=dtype, shape=shape, placements=None if placements is None else tuple(map(str, placements)), chunks=chunks
    )


def _chunk(name: str, shape: tuple[int, ...], words: Json) -> Chunk:
    file, box = words["file"], Box(_sizes(words["offset"]), _sizes(words["shape"]))
    if not _is_plain(file):
        raise CheckpointError(f"a chunk of {name} names {file!r}, which is not the plain name of a safetensors file.")
    if any(start + size > rows for start, size, rows in zip(box.offset, box.shape, shape, strict=True)):
        raise CheckpointError(f"a chunk of {name} at {box.offset} of size {box.shape} leaves its shape {shape}.")
    return Chunk(file, box)


@lru_cache(maxsize=4096)
def _is_plain(file: str) -> bool:
    """Whether it names a safetensors file in the folder itself."""
    return PLAIN_FILE.fullmatch(file) is not None and ".." not in file


def _sizes(words: Json) -> tuple[int, ...]:
    for size in words:
        if type(size) is not int or size < 0:
            raise CheckpointError(f"{words!r} is no list of sizes.")
    return tuple(words)


def encode(value: object, where: str, tensors: dict[str, Tensor] | None = None) -> Json:
    """`value` as JSON that `decode` turns back exactly; tensors in it are put into `tensors`, named by their place.

    Raises `CheckpointError` for other objects, and for a tensor where `tensors` is None.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, Tensor) and tensors is not None:
        tensors[where] = value
        return {"$tensor": where}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{where}/{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        pairs = [(key, encode(item, f"{where}/{key}", tensors)) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
            return dict(pairs)
        return {"$dict": [[encode(key, where), item] for key, item in pairs]}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which JSON cannot hold; use numbers, strings, lists, tuples and dicts."
    )


def decode(value: Json, tensor: Callable[[str], Tensor]) -> Any:
    """The inverse of `encode`; `tensor` gives the tensor of a name."""
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    word, inner = next(iter(value.items()), ("", None))
    if not word.startswith("$"):
        return {key: decode(item, tensor) for key, item in value.items()}
    meaning: dict[str, Callable[[Json], Any]] = {
        "$float": float,
        "$tensor": tensor,
        "$tuple": lambda items: tuple(decode(item, tensor) for item in items),
        "$dict": lambda pairs: {decode(key, tensor): decode(item, tensor) for key, item in pairs},
    }
    if word not in meaning:
        raise CheckpointError(f"{word!r} is a word of a manifest that this version does not know.")
    return meaning[word](inner)
