"""Read models in other formats for conversion, without executing anything in their files."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor, nn

from accordion.checkpoint.format import CODES
from accordion.checkpoint.untrusted_files import StoredTensor, check_names, named, opened, plain_names
from accordion.errors import CheckpointError

ARCHIVE = b"PK\3\4"  # first bytes of a file of torch.save since torch 1.6
CHECKED_BYTES = 2**20  # read at once when a record of such a file is checked
LARGEST_EXPANDED = 2**26  # bytes that a file's tensors may have beyond `MOST_COPIES` of the file's size
MOST_COPIES = 16  # tensors may have more bytes than their file, as some are tied or expanded
MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")  # keys for a model's state dict in other programs


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """The model in a file or folder of another format."""

    kind: str  # "safetensors" or "torch.save"
    tensors: Mapping[str, Tensor]  # memory-mapped, by their names in a checkpoint
    left: tuple[str, ...] = ()  # keys of the file that are left out


def check_unique(names: Mapping[Any, str]) -> None:
    """Raise `CheckpointError` if `names` (key of a tensor -> its new name) has a name twice, or one that is not valid Unicode."""
    first: dict[str, Any] = {}
    for key, name in names.items():
        if name in first:
            raise CheckpointError(
                f"its keys {ascii(first[name])[:100]} and {ascii(key)[:100]} both stand for {name[:100]}."
            )
        first[name] = key
    check_names(first)


# -- safetensors


def of_safetensors(tensors: Mapping[str, tuple[Path, StoredTensor]]) -> Foreign:
    """Return the model in safetensors files, memory-mapped. `tensors`: name -> (path of its file, tensor). Raises
    `CheckpointError` if two names are equal without the prefixes of wrappers, or a name is not valid Unicode."""
    plain = plain_names(tensors)
    check_unique(plain)
    ours: dict[str, Tensor] = {}
    for path in dict.fromkeys(path for path, _ in tensors.values()):
        with safe_open(path, framework="pt") as file:
            ours |= {f"model/{plain[key]}": file.get_tensor(key) for key, (at, _) in tensors.items() if at == path}
    return Foreign(kind="safetensors", tensors=ours)


# -- a file of torch.save


def of_torch_file(path: Path) -> Foreign:
    """Return the model in a file of `torch.save`, memory-mapped. The file holds a state dict, or a dict that has one under a key
    such as "model" or "state_dict". Raises `CheckpointError` if the file is damaged, older than torch 1.6, holds no dict or a
    tensor that is not plain, or names code to run."""
    with opened(path) as file:
        if file.read(4) != ARCHIVE:
            raise CheckpointError(
                f"{path} is not a torch.save archive of torch 1.6 or later; if it is an older file and you trust its origin, "
                "load it and save it again with a newer torch."
            )
        with named(f"{path} cannot be read as tensors alone"):
            _check_archive(file)
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            if not isinstance(saved, dict):
                raise CheckpointError(f"it holds a {type(saved).__name__} and no state dict.")
            own = next((key for key in MODEL_KEYS if isinstance(saved.get(key), dict)), None)
            state: dict[Any, Any] = saved if own is None else saved[own]
            left = [] if own is None else [str(key) for key in saved if key != own]
            tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            for key, tensor in tensors.items():
                plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
                if not plain or tensor.is_meta or tensor.is_nested or tensor.dtype not in CODES:
                    raise CheckpointError(f"{str(key)[:100]} is no plain tensor.")
            total = sum(tensor.nbytes for tensor in tensors.values())
            file_bytes = os.fstat(file.fileno()).st_size
            if total > LARGEST_EXPANDED + MOST_COPIES * file_bytes:
                raise CheckpointError(f"its tensors claim {total} bytes, and the file has {file_bytes}.")
            plain_of = plain_names(str(key) for key in tensors)
            check_unique({key: plain_of[str(key)] for key in tensors})
    ours = {f"model/{plain_of[str(key)]}": tensor.resolve_conj().resolve_neg() for key, tensor in tensors.items()}
    left += [str(key) for key in state if key not in tensors]
    return Foreign(kind="torch.save", tensors=ours, left=tuple(left))


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
