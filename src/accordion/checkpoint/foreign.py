"""Checkpoints of other formats, to be converted: what they hold by our names, and their tensors file by file."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accordion.checkpoint.boxes import Box, box_of
from accordion.checkpoint.folders import Local
from accordion.checkpoint.format import DTYPES, MOST_DIMS, PLAIN_FILE
from accordion.checkpoint.gather import Stored, read_head, stored_in
from accordion.checkpoint.values import Json, encode
from accordion.checkpoint.writing import Part
from accordion.errors import CheckpointError, UsageError

HF_SINGLE, HF_INDEX = "model.safetensors", "model.safetensors.index.json"
DCP_METADATA = ".metadata"
MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")  # under which programs put a model's state dict
LARGEST_EXPANDED = 2**26  # bytes of a tensor that is larger than the memory it is made of
OPTIMIZER_KEYS = ("optimizer", "optim", "optimizer_state_dict")


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """`shapes`: our name -> dtype and shape. `files`: each gives the parts of one file to be written. `left`: what is lost."""

    kind: str
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    files: tuple[Callable[[], list[Part]], ...]
    optimizer: Json = None
    extra: Json = None
    left: tuple[str, ...] = ()


def open_foreign(path: str | os.PathLike[str]) -> Foreign:
    """Raises `UsageError` for what is none of the formats, `CheckpointError` for what is damaged or not safe to read."""
    at = Path(path)
    if (at / DCP_METADATA).is_file():
        return _dcp(at)
    if at.is_dir() and ((at / HF_SINGLE).is_file() or (at / HF_INDEX).is_file()):
        return _safetensors(at, _hf_files(at))
    if at.is_file() and at.suffix == ".safetensors":
        return _safetensors(at.parent, [at.name])
    if at.is_file():
        return _torch_file(at)
    raise UsageError(
        f"{at} is no folder of safetensors ({HF_SINGLE} or {HF_INDEX}), no torch DCP folder ({DCP_METADATA}) and no file."
    )


# -- safetensors


def _hf_files(folder: Path) -> list[str]:
    if (folder / HF_SINGLE).is_file():
        return [HF_SINGLE]
    try:
        names = sorted(set(json.loads((folder / HF_INDEX).read_text())["weight_map"].values()))
        bad = [name for name in names if not PLAIN_FILE.fullmatch(name) or ".." in name]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder / HF_INDEX} is no index: {type(error).__name__}: {error}.") from error
    if bad:
        raise CheckpointError(
            f"{folder / HF_INDEX} names {bad[0]!r}, which is not the plain name of a safetensors file."
        )
    return names


def _safetensors(folder: Path, names: list[str]) -> Foreign:
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name in names:
        for key, tensor in _mapped(folder, name):
            shapes["model/" + key] = tensor.dtype, tuple(tensor.shape)
    return Foreign(
        kind="safetensors", shapes=shapes, files=tuple(_later(lambda n=name: _mapped(folder, n)) for name in names)
    )


def _later(read: Callable[..., Iterator[tuple[str, Tensor]]]) -> Callable[[], list[Part]]:
    return lambda: [Part("model/" + key, box_of(t.shape, ()), t) for key, t in read() if t.numel()]


def _mapped(folder: Path, name: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a safetensors file; their memory is the file's."""
    try:
        with closing(Local(folder).open(name)) as reader:
            stored, num_bytes = list(stored_in(read_head(reader))), reader.num_bytes
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder / name} is no safetensors file: {type(error).__name__}: {error}.") from error
    data = (
        torch.from_numpy(np.memmap(folder / name, mode="c", dtype=np.uint8))
        if num_bytes
        else torch.empty(0, device="cpu")
    )
    for held in stored:
        if not _lies_in(held, num_bytes):
            raise CheckpointError(
                f"{held.name} of {folder / name} cannot be {held.dtype} of shape {held.shape} in bytes {held.at} to {held.end}."
            )
        dtype, part = DTYPES[held.dtype], data[held.at : held.end]
        part = part if held.at % dtype.itemsize == 0 else part.clone()
        yield held.name, part.view(dtype).view(held.shape)


def _lies_in(held: Stored, num_bytes: int) -> bool:
    """Whether a header's words mean a tensor in a file of so many bytes."""
    sizes = [held.at, held.end, *held.shape]
    if not isinstance(held.dtype, str) or held.dtype not in DTYPES or len(held.shape) > MOST_DIMS:
        return False
    if not all(type(size) is int and size >= 0 for size in sizes) or not held.at <= held.end <= num_bytes:
        return False
    return held.end - held.at == math.prod(held.shape) * DTYPES[held.dtype].itemsize


def _checked(name: str, tensor: Tensor) -> Tensor:
    """Raise `CheckpointError` for a tensor that a file can say in few bytes and nobody can hold."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise CheckpointError(f"{name} is no plain tensor: {tensor.layout}, {tensor.dtype} on {tensor.device}.")
    num_bytes, held = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
    if num_bytes > max(held, LARGEST_EXPANDED):
        raise CheckpointError(f"{name} of shape {tuple(tensor.shape)} is absurd: {num_bytes} bytes made of {held}.")
    return tensor


# -- a file of torch.save


def _torch_file(path: Path) -> Foreign:
    try:
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read as tensors alone (torch.load with weights_only): {str(error).splitlines()[0]}"
        ) from error
    if not isinstance(held, dict):
        raise CheckpointError(f"{path} holds a {type(held).__name__} and no state dict.")
    left = []
    inner = next((key for key in MODEL_KEYS if isinstance(held.get(key), dict)), None)
    if inner is not None:
        left = [str(key) for key in held if key != inner]
        held = held[inner]
    tensors = {str(key): _checked(str(key), value) for key, value in held.items() if isinstance(value, Tensor)}
    left += [str(key) for key, value in held.items() if not isinstance(value, Tensor)]
    return Foreign(
        kind="torch.save",
        shapes={"model/" + key: (t.dtype, tuple(t.shape)) for key, t in tensors.items()},
        files=(_later(lambda: iter(tensors.items())),),
        left=tuple(left),
    )


# -- torch.distributed.checkpoint


class _Record:
    """Stands for whatever object the metadata names: keeps what it was made of, and does nothing."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)
        else:
            self.args = state

    def __hash__(self) -> int:
        return id(self)


class _Index(_Record):
    """Where a chunk is looked for: `fqn` and `offset`."""

    fqn: str
    offset: tuple[int, ...] | None = None


class _Tensors(_Record):
    """What is said of a tensor."""

    properties: _Record
    size: tuple[int, ...]


def _joined_path(*parts: str) -> str:
    return "/".join(parts)


_OF_DCP = "torch.distributed.checkpoint"
ALLOWED: Mapping[tuple[str, str], Any] = {
    (f"{_OF_DCP}.metadata", "Metadata"): _Record,
    (f"{_OF_DCP}.metadata", "TensorStorageMetadata"): _Tensors,
    (f"{_OF_DCP}.metadata", "BytesStorageMetadata"): _Record,
    (f"{_OF_DCP}.metadata", "ChunkStorageMetadata"): _Record,
    (f"{_OF_DCP}.metadata", "TensorProperties"): _Record,
    (f"{_OF_DCP}.metadata", "_MEM_FORMAT_ENCODING"): _Record,
    (f"{_OF_DCP}.metadata", "MetadataIndex"): _Index,
    (f"{_OF_DCP}.metadata", "StorageMeta"): _Record,
    (f"{_OF_DCP}.filesystem", "_StorageInfo"): _Record,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _Record,
    ("pathlib", "PosixPath"): _joined_path,
    ("pathlib._local", "PosixPath"): _joined_path,
    ("collections", "OrderedDict"): dict,
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in DTYPES.values()},
}


class _AllowList(pickle.Unpickler):
    """Reads DCP's metadata, which is a pickle: the names above become records of ours, every other name is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise CheckpointError(f"its metadata, a pickle, names {module}.{name}, which is not allowed.")
        return ALLOWED[module, name]


def _dcp(folder: Path) -> Foreign:
    try:
        with open(folder / DCP_METADATA, "rb") as file:
            metadata = _AllowList(file).load()
        said, paths = metadata.state_dict_metadata, metadata.planner_data or {}
        where = [(index.fqn, index.offset, info) for index, info in metadata.storage_data.items()]
        tensors = {key: value for key, value in said.items() if isinstance(value, _Tensors)}
        shapes = {key: (value.properties.args[0], tuple(value.size)) for key, value in tensors.items()}
        wrong = [info.relative_path for *_, info in where if not _is_plain(info.relative_path)]
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    except Exception as error:  # whatever a broken pickle meets
        raise CheckpointError(f"{folder / DCP_METADATA} is damaged: {type(error).__name__}: {error}.") from error
    if wrong:
        raise CheckpointError(f"{folder / DCP_METADATA} names {wrong[0]!r}, which is not the plain name of a file.")
    names = _dcp_names(list(said), paths)
    optimizer, extra, left = _dcp_values(folder, where, names, said, paths)
    if optimizer is None:
        names = {key: name for key, name in names.items() if name.startswith("model/")}
    kept = {key: names[key] for key in tensors if key in names}
    files = sorted({info.relative_path for key, _, info in where if key in kept})
    return Foreign(
        kind="torch DCP",
        shapes={kept[key]: shapes[key] for key in kept},
        files=tuple(_dcp_file(folder, file, where, kept, shapes) for file in files),
        optimizer=optimizer,
        extra=extra,
        left=(*left, *(key for key in tensors if key not in names)),
    )


def _is_plain(name: object) -> bool:
    return isinstance(name, str) and "/" not in name and "\\" not in name and name not in ("", ".", "..")


def _dcp_names(keys: list[str], paths: Mapping[str, tuple[Any, ...]]) -> dict[str, str]:
    """Our names: `model/...` for a model's tensors, `optimizer/state/...` for an optimizer's."""
    found = {}
    for key in keys:
        path = paths.get(key, (key,))
        if len(path) == 2 and path[0] in MODEL_KEYS:
            found[key] = f"model/{path[1]}"
        elif len(path) == 4 and path[0] in OPTIMIZER_KEYS and path[1] == "state":
            found[key] = f"optimizer/state/{path[2]}/{path[3]}"
        elif len(path) == 1 and not any(p[0] in MODEL_KEYS for p in paths.values() if len(p) > 1):
            found[key] = f"model/{key}"  # a model's state dict alone
    return found


def _dcp_file(
    folder: Path,
    file: str,
    where: list[tuple[str, tuple[int, ...] | None, Any]],
    names: Mapping[str, str],
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
) -> Callable[[], list[Part]]:
    def read() -> list[Part]:
        parts = []
        for key, offset, info in where:
            if info.relative_path == file and key in names:
                tensor = _dcp_value(folder, info)
                if not isinstance(tensor, Tensor) or tensor.dtype != shapes[key][0]:
                    raise CheckpointError(
                        f"{key} in {folder / file} is not the {shapes[key][0]} that {DCP_METADATA} says."
                    )
                if tensor.numel():
                    at = tuple(offset) if offset is not None else (0,) * tensor.dim()
                    parts.append(Part(names[key], Box(at, tuple(tensor.shape)), tensor))
        return parts

    return read


def _dcp_value(folder: Path, info: Any) -> Any:
    try:
        with open(folder / info.relative_path, "rb") as file:
            file.seek(info.offset)
            room = os.fstat(file.fileno()).st_size - info.offset
            if not 0 <= info.length <= room:
                raise ValueError(f"{info.length} bytes from byte {info.offset} on are not there")
            value = torch.load(io.BytesIO(file.read(info.length)), map_location="cpu", weights_only=True)
            return _checked(str(info.relative_path), value) if isinstance(value, Tensor) else value
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder / info.relative_path} cannot be read as tensors alone: {str(error).splitlines()[0]}"
        ) from error


def _are_names(params: Any) -> bool:
    """Numbers, as an optimizer's own state dict has, say nothing to who does not know its parameters."""
    return isinstance(params, list) and all(isinstance(name, str) for name in params)


def _dcp_values(
    folder: Path,
    where: list[tuple[str, tuple[int, ...] | None, Any]],
    names: Mapping[str, str],
    said: Mapping[str, Any],
    paths: Mapping[str, tuple[Any, ...]],
) -> tuple[Json, Json, list[str]]:
    """The optimizer's words, the other values, and names of values that JSON cannot hold."""
    groups: dict[int, dict[str, Any]] = {}
    extra, left = {}, []
    for key, _, info in where:
        if isinstance(said[key], _Tensors):
            continue
        value, path = _dcp_value(folder, info), paths.get(key, (key,))
        try:
            encode(value, key)
        except CheckpointError:
            left.append(key)
            continue
        if len(path) == 4 and path[0] in OPTIMIZER_KEYS and path[1] == "param_groups":
            groups.setdefault(path[2], {})[path[3]] = value
        else:
            extra[key] = value
    if not groups or not all(_are_names(group.get("params")) for group in groups.values()):
        lost = [
            key for key, path in paths.items() if len(path) == 4 and path[0] in OPTIMIZER_KEYS and path[1] != "state"
        ]
        return None, encode(extra, "extra"), left + lost
    state: dict[str, dict[str, Json]] = {}
    for name in names.values():
        if name.startswith("optimizer/state/"):
            param, _, leaf = name.removeprefix("optimizer/state/").rpartition("/")
            state.setdefault(param, {})[leaf] = {"$tensor": name}
    words = [
        {
            "params": group["params"],
            "options": encode({k: v for k, v in group.items() if k != "params"}, f"optimizer/groups/{i}"),
        }
        for i, group in sorted(groups.items())
    ]
    return {"groups": words, "state": state}, encode(extra, "extra"), left
