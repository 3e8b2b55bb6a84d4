"""Read files of unknown origin: only regular files are opened, and their headers are checked before they are used."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from accordion.checkpoint.contents import without_wrappers
from accordion.checkpoint.format import CODES, DTYPES, MOST_DIMS, MOST_ELEMENTS, is_plain, without_twins
from accordion.errors import CheckpointError, UsageError, some_of
from accordion.files import NOT_REGULAR, open_regular

SHOWN = 8  # tensors that a message names
FORBIDDEN = re.compile(r"GLOBAL (\S+) (?:was not|whose module)")  # how torch.load names a class that it refuses
LENGTH_BYTES = 8  # of the header's length, at the beginning of a safetensors file
HF_SINGLE, HF_INDEX = "model.safetensors", "model.safetensors.index.json"
QUANTISED = re.compile(r"(_scale_inv|_blocks|\.(weight_scale|qweight|qzeros|absmax|SCB|quant_map|quant_state\..*))$")
ARCHIVE = b"PK\3\4"  # first bytes of a file of torch.save since torch 1.6
CHECKED_BYTES = 2**20  # read at once when a record of such a file is checked
LARGEST_EXPANDED = 2**26  # bytes that a file's tensors may have beyond `MOST_COPIES` of the file's size
MOST_COPIES = 16  # tensors may have more bytes than their file, as some are tied or expanded
MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")  # keys for a model's state dict in other programs


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file: `dtype` as its header names it, and the range [at, end) of its bytes in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    at: int
    end: int


def opened(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises `CheckpointError` if it is a pipe, device or folder, or cannot be opened."""
    try:
        return open_regular(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{path} {'is' if why == NOT_REGULAR else 'cannot be opened:'} {why}.") from error


@contextmanager
def named(what: str) -> Iterator[None]:
    """Context manager that turns any exception of its body into a `CheckpointError` whose message begins with `what`."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{what}: {error}") from None
    except Exception as error:  # torch may raise anything for broken bytes
        text = str(error).partition("\n")[0].partition("  (")[0]  # without torch's advice and stack
        why = f"it is damaged: {type(error).__name__}: {text[:300]}"
        if isinstance(error, pickle.UnpicklingError):  # torch's text advises to load the file unsafely
            why = "its pickle is damaged, or holds more than tensors and plain values"
        if forbidden := FORBIDDEN.search(str(error)):
            why = f"its pickle names {forbidden[1][:200]}, which is not allowed"
        raise CheckpointError(f"{what}: {why}.") from None


def check_quantised(config: Mapping[str, Any], source: str, names: Iterable[str] = ()) -> None:
    """Raise `UsageError`, naming `source`, if `config` or the tensors' `names` are of quantised weights. `config`: the parsed
    config.json of `source`; {} without one."""
    settings = next((config[key] for key in ("quantization_config", "compression_config") if config.get(key)), None)
    scale = next((name for name in names if QUANTISED.search(name)), None)
    if settings is None and scale is None:
        return
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    raise UsageError(
        f"{source} is quantised ({method or scale or 'according to its config.json'}), and Accordion does not read the scales of "
        "weights; load it with transformers, call dequantize() on the model, save_pretrained() it, and use that folder."
    )


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Return {name: name without prefixes of torch.compile, activation checkpointing and, if all have it, DDP's "module."}."""
    plain_of = {name: without_wrappers(name) for name in names}
    while plain_of and all(plain.startswith("module.") for plain in plain_of.values()):
        plain_of = {name: plain.removeprefix("module.") for name, plain in plain_of.items()}
    return plain_of


# -- safetensors


def read_header(path: Path) -> list[StoredTensor]:
    """Read the header of a safetensors file; return its tensors, in the order of their bytes. Raises `CheckpointError` for any
    other file, an unknown dtype, a key twice, and tensors that overlap or leave a gap."""
    with opened(path) as file, named(f"{path} is no safetensors file"):
        try:
            with safe_open(path, framework="np"):
                pass
        except SafetensorError as error:
            raise CheckpointError(f"{error}.") from None
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        return stored_in(file.read(length), LENGTH_BYTES + length)


def stored_in(head: bytes, start: int) -> list[StoredTensor]:
    """Return the tensors that `head`, a safetensors header without its length, describes, in the order of their bytes. `start`:
    byte of the file at which the data begin. Raises `CheckpointError` for an unknown dtype and for an impossible size; errors
    of other classes if the JSON is damaged."""
    words = json.loads(head.decode(), object_pairs_hook=without_twins)
    words.pop("__metadata__", None)
    tensors = []
    for name, about in words.items():
        dtype, shape, (at, end) = about["dtype"], tuple(about["shape"]), about["data_offsets"]
        if dtype not in DTYPES:
            raise CheckpointError(f"{name[:100]} has the dtype {dtype!r}, which cannot be read.")
        if len(shape) > MOST_DIMS or math.prod(max(1, rows) for rows in shape) > MOST_ELEMENTS:
            raise CheckpointError(f"{name[:100]} cannot be {dtype} of shape {str(shape)[:100]}.")
        tensors.append(StoredTensor(name, dtype, shape, start + at, start + end))
    return sorted(tensors, key=lambda tensor: (tensor.at, tensor.end))


def read_folder(folder: Path) -> dict[str, tuple[Path, StoredTensor]]:
    """Return {name: (path of its file, tensor)} for a folder of safetensors as transformers writes it; read headers alone.

    Reads `model.safetensors` if there is one, else the files that the index names. Raises `CheckpointError` if there is
    neither, if the index or a header is damaged, if a tensor in the index is not in its file, or if a tensor that the index
    lacks is in two files.
    """
    if (folder / HF_SINGLE).exists() and not (folder / HF_SINGLE).is_dir():
        return read_files(folder, [HF_SINGLE], {})
    if not (folder / HF_INDEX).exists():
        raise CheckpointError(f"{folder} has neither {HF_SINGLE} nor {HF_INDEX}; other formats are not read.")
    path = folder / HF_INDEX
    with opened(path) as file, named(f"{path} is no index of safetensors"):
        promised = json.loads(file.read().decode(), object_pairs_hook=without_twins)["weight_map"]
        bad = [name for name in promised.values() if not is_plain(name)]
        check_names(promised)
    if bad:
        raise CheckpointError(f"{path} names {bad[0][:100]!r}, which is not the plain name of a safetensors file.")
    tensors = read_files(folder, sorted(set(promised.values())), promised)
    lost = [f"{key} in {name}" for key, name in promised.items() if key not in tensors]
    if lost:
        raise CheckpointError(f"{path} names {len(lost)} tensors that are not there: {some_of(lost, SHOWN)}.")
    return tensors


def read_files(folder: Path, names: Iterable[str], promised: Mapping[str, str]) -> dict[str, tuple[Path, StoredTensor]]:
    """Return {name: (path of its file, tensor)} for the safetensors files `names` in `folder`; read headers alone.

    `promised`: tensor -> file name, from an index, {} without one; a copy of a tensor in a file other than the promised one is
    left out. Raises `CheckpointError` if a header is damaged or a tensor without a promise is in two files.
    """
    tensors: dict[str, tuple[Path, StoredTensor]] = {}
    for name in names:
        for stored in read_header(folder / name):
            if promised.get(stored.name, name) != name:  # a copy of the one that the index names
                continue
            if stored.name in tensors:
                raise CheckpointError(f"{stored.name} is in {tensors[stored.name][0].name} and in {name} of {folder}.")
            tensors[stored.name] = folder / name, stored
    return tensors


def check_names(names: Iterable[str]) -> None:
    """Raise `CheckpointError` if a name cannot be encoded in UTF-8, for example if it has half of a surrogate pair."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise CheckpointError(f"the name {ascii(name)[:100]} is not valid Unicode.") from None


# -- models in other formats, for conversion


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignModel:
    """The model in a file or folder of another format. `kind`: "safetensors" or "torch.save"; `tensors`: memory-mapped, by
    their names in a checkpoint ("model/w"); `left`: keys of the file that are left out."""

    kind: str
    tensors: Mapping[str, Tensor]
    left: tuple[str, ...] = ()


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


def of_safetensors(tensors: Mapping[str, tuple[Path, StoredTensor]]) -> ForeignModel:
    """Return the model in safetensors files, memory-mapped. `tensors`: name -> (path of its file, tensor). Raises
    `CheckpointError` if two names are equal without the prefixes of wrappers, or a name is not valid Unicode."""
    plain = plain_names(tensors)
    check_unique(plain)
    ours: dict[str, Tensor] = {}
    for path in dict.fromkeys(path for path, _ in tensors.values()):
        with safe_open(path, framework="pt") as file:
            ours |= {f"model/{plain[key]}": file.get_tensor(key) for key, (at, _) in tensors.items() if at == path}
    return ForeignModel(kind="safetensors", tensors=ours)


def of_torch_file(path: Path) -> ForeignModel:
    """Return the model in a file of `torch.save`, memory-mapped. The file holds a state dict, or a dict that has one under a key
    such as "model" or "state_dict". Raises `CheckpointError` if the file is damaged, older than torch 1.6, holds no dict, names
    code to run, or has tensors that are not plain, get one name, or claim far more bytes than the file."""
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
    return ForeignModel(kind="torch.save", tensors=ours, left=tuple(left))


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
