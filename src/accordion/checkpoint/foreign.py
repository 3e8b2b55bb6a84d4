"""Describe checkpoints of other formats for conversion: their tensors by our names, file by file."""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import torch
from torch import Tensor, nn

from accordion.checkpoint.boxes import box_of
from accordion.checkpoint.format import CODES, DTYPES
from accordion.checkpoint.json_values import Json
from accordion.checkpoint.untrusted_files import (
    StoredTensor,
    check_names,
    mapped,
    opened,
    plain_names,
    size_of,
)
from accordion.checkpoint.writing import WritePart
from accordion.errors import CheckpointError

ARCHIVE = b"PK\3\4"  # first bytes of a file of torch.save since torch 1.6
CHECKED_BYTES = 2**20  # read at once when a record of such a file is checked
FORBIDDEN = re.compile(r"GLOBAL (\S+) (?:was not|whose module)")  # how torch.load names a class that it refuses
LARGEST_EXPANDED = 2**26  # bytes that a file's tensors may have beyond `MOST_COPIES` of the file's size
MOST_COPIES = 16  # tensors may have more bytes than their file, as some are tied or expanded
DCP_METADATA = ".metadata"
MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")  # keys for a model's state dict in other programs
Shape: TypeAlias = tuple[torch.dtype, tuple[int, ...]]
Shapes: TypeAlias = Mapping[str, Shape]


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """The description of a checkpoint of another format.

    Attributes:
        shapes: dtype and shape of each tensor, by our names.
        files: the parts of each file to write, to be read when they are written.
        left: keys of the source that are left out.
    """

    kind: str
    shapes: Shapes
    files: tuple[list[WritePart], ...]
    optimizer: Json = None
    extra: Json = None
    left: tuple[str, ...] = ()


def check_unique(names: Mapping[Any, str]) -> None:
    """Raise `CheckpointError` if two keys in `names` (key of the source -> our name) share a name, or one is not Unicode."""
    first: dict[str, Any] = {}
    for key, name in names.items():
        if name in first:
            raise CheckpointError(
                f"its keys {ascii(first[name])[:100]} and {ascii(key)[:100]} both stand for {name[:100]}."
            )
        first[name] = key
    check_names(first)


def part_of(name: str, dtype: torch.dtype, shape: tuple[int, ...], read: Callable[[], Tensor]) -> WritePart:
    return WritePart(name, box_of(shape, ()), torch.empty(shape, dtype=dtype, device="meta"), read)


@contextmanager
def tensors_alone(what: str) -> Iterator[None]:
    """Context manager that turns errors of torch's reader into a `CheckpointError` that begins with `what`."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{what} cannot be used: {error}") from None
    except Exception as error:  # torch may raise anything for broken bytes
        forbidden = FORBIDDEN.search(str(error))
        text = str(error).partition("\n")[0].partition("  (")[0]  # without torch's advice and stack
        why = f"it is damaged: {type(error).__name__}: {text[:200]}"
        if isinstance(error, pickle.UnpicklingError):  # torch's text advises to load the file unsafely
            why = "its pickle is damaged, or holds more than tensors and plain values"
        if forbidden:
            why = f"its pickle names {forbidden[1][:200]}, which is not allowed"
        raise CheckpointError(f"{what} cannot be read as tensors alone: {why}.") from None


# -- safetensors


def of_safetensors(tensors: Mapping[str, tuple[Path, StoredTensor]]) -> Foreign:
    """Return the description of safetensors files, from what `read_files` or `read_folder` returned."""
    plain = plain_names(tensors)
    check_unique(plain)
    shapes: dict[str, Shape] = {}
    files: dict[Path, list[WritePart]] = {}
    for key, (path, stored) in tensors.items():
        name = "model/" + plain[key]
        shapes[name] = DTYPES[stored.dtype], stored.shape
        files.setdefault(path, []).append(part_of(name, *shapes[name], partial(mapped, path, stored)))
    return Foreign(kind="safetensors", shapes=shapes, files=tuple(files.values()))


# -- a file of torch.save


def of_torch_file(path: Path) -> Foreign:
    """Return the description of a file of `torch.save`. Raises `CheckpointError` if it is damaged or not safe to read."""
    with opened(path) as file:
        if file.read(4) != ARCHIVE:
            raise CheckpointError(
                f"{path} is not a torch.save archive of torch 1.6 or later; if it is an older file and you trust its origin, "
                "load it and save it again with a newer torch."
            )
        with tensors_alone(os.fspath(path)):
            _check_archive(file)
            state, left = _model_state(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
            tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            for key, tensor in tensors.items():
                plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
                if not plain or tensor.is_meta or tensor.is_nested or tensor.dtype not in CODES:
                    raise CheckpointError(f"{str(key)[:100]} is no plain tensor.")
            total = sum(tensor.nbytes for tensor in tensors.values())
            if total > LARGEST_EXPANDED + MOST_COPIES * size_of(file):
                raise CheckpointError(f"its tensors claim {total} bytes, and the file has {size_of(file)}.")
            plain_of = plain_names(str(key) for key in tensors)
            check_unique({key: plain_of[str(key)] for key in tensors})
    ours = {f"model/{plain_of[str(key)]}": tensor for key, tensor in tensors.items()}
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in ours.items()}
    parts = [part_of(name, *shapes[name], partial(_resolved, tensor)) for name, tensor in ours.items()]
    left += [str(key) for key in state if key not in tensors]
    return Foreign(kind="torch.save", shapes=shapes, files=(parts,), left=tuple(left))


def _check_archive(file: BinaryIO) -> None:
    """Raise `CheckpointError` or `BadZipFile` if a record of the archive is compressed or does not match its checksum."""
    with zipfile.ZipFile(file) as archive:
        for record in archive.infolist():
            if record.compress_type != zipfile.ZIP_STORED:
                raise CheckpointError(f"its record {record.filename[:100]!r} is compressed.")
            # After torch.serialization.set_crc32_options(False) the checksum is 0; reading to the end compares any other.
            with archive.open(record) as stream:
                while record.CRC and stream.read(CHECKED_BYTES):
                    pass


def _model_state(saved: Any) -> tuple[dict[Any, Any], list[str]]:
    """Return (the model's state dict in `saved`, the keys next to it)."""
    if not isinstance(saved, dict):
        raise CheckpointError(f"it holds a {type(saved).__name__} and no state dict.")
    for key in MODEL_KEYS:
        if isinstance(saved.get(key), dict):
            return saved[key], [str(other) for other in saved if other != key]
    return saved, []


def _resolved(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg()
