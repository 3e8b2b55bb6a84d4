"""Checkpoints of other formats, to be converted: what they hold by our names, and their tensors file by file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from accordion.checkpoint.boxes import Box, box_of
from accordion.checkpoint.format import CODES, DTYPES
from accordion.checkpoint.json_values import Json, encode
from accordion.checkpoint.pickles import is_plain, load_saved, read_metadata
from accordion.checkpoint.untrusted_files import (
    HF_INDEX,
    HF_SINGLE,
    StoredTensor,
    check_names,
    check_quantised,
    mapped,
    named,
    opened,
    plain_names,
    read_files,
    read_folder,
    size_of,
)
from accordion.checkpoint.writing import WritePart
from accordion.errors import CheckpointError, UsageError
from accordion.files import read_text

ARCHIVE = b"PK\3\4"  # how a file of torch.save begins since torch 1.6
DCP_METADATA = ".metadata"
TENSOR = "TensorStorageMetadata"  # DCP's class of what it says of a tensor
MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")  # under which programs put a model's state dict
FREE_TENSORS = 2**14  # that any source may have; each takes 5 KB while it is converted
BYTES_PER_TENSOR = 2**10  # beyond it, on average
LARGEST_EXPANDED = 2**26  # bytes of a tensor that is larger than the memory it is made of
MOST_COPIES = 16  # of a file's bytes that its tensors may make: tied ones, and ones that are expanded
OPTIMIZER_KEYS = ("optimizer", "optim", "optimizer_state_dict")
Shapes: TypeAlias = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A checkpoint of another format.

    Attributes:
        shapes: dtype and shape of each tensor, by our names.
        files: the parts of each file to write, which are read when they are written.
        left: keys that are left out.
    """

    kind: str
    shapes: Shapes
    files: tuple[list[WritePart], ...]
    optimizer: Json = None
    extra: Json = None
    left: tuple[str, ...] = ()


def open_foreign(path: str | os.PathLike[str]) -> Foreign:
    """Raises `UsageError` for what is none of the formats, `CheckpointError` for what is damaged or not safe to read."""
    found = _opened(Path(path))
    if not found.shapes:
        raise CheckpointError(f"{path} holds no tensors of a model: nothing to convert.")
    words: Any = {}
    with suppress(OSError, ValueError):
        words = json.loads(read_text(Path(path, "config.json")))
    check_quantised(words if isinstance(words, dict) else {}, os.fspath(path), found.shapes)
    num_bytes = sum(math.prod(shape) * dtype.itemsize for dtype, shape in found.shapes.values())
    if len(found.shapes) > FREE_TENSORS + num_bytes // BYTES_PER_TENSOR:
        raise CheckpointError(f"{path} has {len(found.shapes)} tensors, which is absurd for {num_bytes} bytes of them.")
    return found


def _opened(at: Path) -> Foreign:
    if (at / DCP_METADATA).is_file():
        return _dcp(at)
    if (at / HF_SINGLE).is_file() or (at / HF_INDEX).is_file():
        return _safetensors(read_folder(at))
    if at.is_file() and at.suffix == ".safetensors":
        return _safetensors(read_files(at.parent, [at.name]))
    if at.is_file():
        return _torch_file(at)
    raise UsageError(
        f"{at} is no folder of safetensors ({HF_SINGLE} or {HF_INDEX}), no torch DCP folder ({DCP_METADATA}) and no file."
    )


def _check_unique(names: Mapping[Any, str]) -> None:
    """Raise `CheckpointError` where two keys of a source, 1 and "1" say, stand for one of our names, or a name is no text."""
    first: dict[str, Any] = {}
    for key, name in names.items():
        if name in first:
            raise CheckpointError(
                f"its keys {ascii(first[name])[:100]} and {ascii(key)[:100]} both stand for {name[:100]}."
            )
        first[name] = key
    check_names(first)


# -- safetensors


def _safetensors(tensors: Mapping[str, tuple[Path, StoredTensor]]) -> Foreign:
    plain = plain_names(tensors)
    _check_unique(plain)
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    files: dict[Path, list[WritePart]] = {}
    for key, (path, stored) in tensors.items():
        name, dtype = "model/" + plain[key], DTYPES[stored.dtype]
        shapes[name] = dtype, stored.shape
        part = _part(name, box_of(stored.shape, ()), dtype, partial(mapped, path, stored))
        files.setdefault(path, []).append(part)
    return Foreign(kind="safetensors", shapes=shapes, files=tuple(files.values()))


def _part(name: str, box: Box, dtype: torch.dtype, read: Callable[[], Tensor]) -> WritePart:
    return WritePart(name, box, torch.empty(box.shape, dtype=dtype, device="meta"), read)


# -- a file of torch.save


def _torch_file(path: Path) -> Foreign:
    with opened(path) as file:
        num_bytes, is_archive = size_of(file), file.read(4) == ARCHIVE
        if not is_archive:
            raise CheckpointError(
                f"{path} is no archive of torch.save, which its files are since torch 1.6; an older one must be saved again "
                "with a newer torch, where its origin is trusted."
            )
        try:
            return _torch_state(load_saved(file, path), num_bytes)
        except CheckpointError as error:
            raise CheckpointError(f"{path} cannot be read as tensors alone: {error}") from None


def _torch_state(held: Any, num_bytes: int) -> Foreign:
    if not isinstance(held, dict):
        raise CheckpointError(f"it holds a {type(held).__name__} and no state dict.")
    left: list[str] = []
    inner = next((key for key in MODEL_KEYS if isinstance(held.get(key), dict)), None)
    if inner is not None:
        left = [str(key) for key in held if key != inner]
        held = held[inner]
    tensors = {key: value for key, value in held.items() if isinstance(value, Tensor)}
    for key, tensor in tensors.items():
        if not is_plain(tensor):
            raise CheckpointError(f"{str(key)[:100]} is no plain tensor.")
        if tensor.nbytes > max(tensor.untyped_storage().nbytes(), LARGEST_EXPANDED):
            raise CheckpointError(f"{str(key)[:100]} of shape {str(tensor.shape)[:100]} is larger than its memory.")
    plain = plain_names(str(key) for key in tensors)
    _check_unique({key: plain[str(key)] for key in tensors})
    total = sum(tensor.nbytes for tensor in tensors.values())
    if total > LARGEST_EXPANDED + MOST_COPIES * num_bytes:
        raise CheckpointError(f"its tensors of {total} bytes are absurd, made of {num_bytes}.")
    left += [str(key) for key in held if key not in tensors]
    ours = {f"model/{plain[str(key)]}": tensor for key, tensor in tensors.items()}
    parts = [_part(name, box_of(t.shape, ()), t.dtype, partial(_resolved, t)) for name, t in ours.items()]
    shapes = {name: (t.dtype, tuple(t.shape)) for name, t in ours.items()}
    return Foreign(kind="torch.save", shapes=shapes, files=(parts,), left=tuple(left))


def _resolved(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg()


# -- torch.distributed.checkpoint


@dataclass(frozen=True, slots=True)
class _Place:
    """Bytes of a file in a DCP folder that hold a value, or the part `box` of a tensor."""

    key: str
    box: Box | None
    file: str
    at: int
    num_bytes: int


def _dcp(folder: Path) -> Foreign:
    with named(f"{folder / DCP_METADATA} cannot be used"):
        with opened(folder / DCP_METADATA) as file:
            metadata = _state(read_metadata(file), "Metadata")
        said, paths = metadata["state_dict_metadata"], metadata.get("planner_data") or {}
        about = {key: _state(value, TENSOR) for key, value in said.items() if type(value).__name__ == TENSOR}
        shapes = {
            key: (_dtype(key, value["properties"]), _checked_shape(value["size"])) for key, value in about.items()
        }
        boxes = {(key, box.offset): box for key, value in about.items() for box in map(_box, value["chunks"])}
        places = [_place(index, info, boxes) for index, info in metadata["storage_data"].items()]
        names = _dcp_names(list(said), paths)
        _check_unique(names)
        check_names([key for key in said if key not in names])
        _check_places(places, said, shapes)
    optimizer, extra, left = _dcp_values(folder, places, shapes, names, paths)
    if optimizer is None:
        names = {key: name for key, name in names.items() if name.startswith("model/")}
    kept = {key: names[key] for key in shapes if key in names}
    files: dict[str, list[WritePart]] = {}
    for place in sorted(places, key=lambda place: place.file):
        if place.key in kept and place.box is not None and place.box.numel:
            dtype = shapes[place.key][0]
            part = _part(kept[place.key], place.box, dtype, partial(_dcp_tensor, folder, place, dtype))
            files.setdefault(place.file, []).append(part)
    return Foreign(
        kind="torch DCP",
        shapes={kept[key]: shapes[key] for key in kept},
        files=tuple(files.values()),
        optimizer=optimizer,
        extra=extra,
        left=(*left, *(key for key in shapes if key not in names)),
    )


def _state(value: Any, kind: str) -> Any:
    """The attributes of an object of the metadata, which must be of this class."""
    if type(value).__name__ != kind:
        raise CheckpointError(f"it has a {type(value).__name__} where a {kind} is due.")
    return value.state


def _dtype(key: str, properties: Any) -> torch.dtype:
    dtype = _state(properties, "TensorProperties")[0]
    if dtype not in CODES:
        raise CheckpointError(f"{key[:100]} has the dtype {str(dtype)[:20]}, which cannot be read.")
    return dtype  # type: ignore[no-any-return]


def _box(chunk: Any) -> Box:
    state = _state(chunk, "ChunkStorageMetadata")
    return Box(_checked_shape(state["offsets"]), _checked_shape(state["sizes"]))


def _checked_shape(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, tuple) or not all(type(rows) is int and rows >= 0 for rows in shape):
        raise CheckpointError(f"{str(shape)[:100]} is no shape.")
    return shape


def _place(index: Any, info: Any, boxes: Mapping[tuple[str, tuple[int, ...]], Box]) -> _Place:
    index, info = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
    key = index["fqn"]
    file, at, num_bytes = (info[word] for word in ("relative_path", "offset", "length"))
    if not _is_plain(file):
        raise CheckpointError(f"it names {str(file)[:100]!r}, which is not the plain name of a file.")
    if type(at) is not int or type(num_bytes) is not int or at < 0 or num_bytes < 0 or not isinstance(key, str):
        raise CheckpointError(f"it puts {str(key)[:100]} nowhere in {file[:100]}.")
    return _Place(key, boxes.get((key, index.get("offset"))), file, at, num_bytes)


def _check_places(places: list[_Place], said: Mapping[str, Any], shapes: Shapes) -> None:
    """Raise `CheckpointError` unless each value is in one place, each part of a tensor in one, and no byte in two."""
    count = dict.fromkeys(said, 0)
    for place in places:
        dtype, _ = shapes.get(place.key, (None, ()))
        if place.key not in count or (
            dtype and (place.box is None or place.box.numel * dtype.itemsize > place.num_bytes)
        ):
            raise CheckpointError(f"it does not say which part of {place.key[:100]} lies in {place.file[:100]}.")
        count[place.key] += 1
    for key, num_places in count.items():
        if num_places != 1 and (key not in shapes or (num_places == 0 and all(shapes[key][1]))):
            raise CheckpointError(f"it has {key[:100]} in {num_places} places.")
    spans = sorted((place.file, place.at, place.at + place.num_bytes, place.key) for place in places)
    for one, other in pairwise(spans):
        if one[0] == other[0] and other[1] < one[2]:
            raise CheckpointError(f"it puts {one[3][:100]} and {other[3][:100]} into the same bytes of {one[0][:100]}.")


def _is_plain(name: object) -> bool:
    return isinstance(name, str) and "/" not in name and "\\" not in name and name not in ("", ".", "..")


def _dcp_names(keys: list[str], paths: Mapping[str, tuple[Any, ...]]) -> dict[str, str]:
    """Our names: `model/...` for a model's tensors, `optimizer/state/...` for an optimizer's."""
    found, models = {}, dict[str, str]()
    for key in keys:
        path = paths.get(key, (key,))
        if len(path) == 2 and path[0] in MODEL_KEYS:
            models[key] = str(path[1])
        elif len(path) == 4 and path[0] in OPTIMIZER_KEYS and path[1] == "state":
            found[key] = f"optimizer/state/{path[2]}/{path[3]}"
        elif len(path) == 1 and not any(p[0] in MODEL_KEYS for p in paths.values() if len(p) > 1):
            models[key] = key  # a model's state dict alone
    plain = plain_names(models.values())
    return found | {key: f"model/{plain[name]}" for key, name in models.items()}


def _dcp_tensor(folder: Path, place: _Place, dtype: torch.dtype) -> Tensor:
    tensor, shape = _dcp_value(folder, place), () if place.box is None else place.box.shape
    whole = is_plain(tensor) and tensor.untyped_storage().nbytes() <= place.num_bytes
    if not whole or (tensor.dtype, tensor.shape) != (dtype, shape):
        raise CheckpointError(
            f"{place.key} in {folder / place.file} is not the {dtype} of shape {shape} that {DCP_METADATA} says."
        )
    return tensor  # type: ignore[no-any-return]


def _dcp_value(folder: Path, place: _Place) -> Any:
    with opened(folder / place.file) as file:
        if place.at + place.num_bytes > size_of(file):
            raise CheckpointError(f"{folder / place.file}: {place.num_bytes} bytes of {place.key} are not there.")
        file.seek(place.at)
        data = BytesIO(file.read(place.num_bytes))
    try:
        return load_saved(data)
    except CheckpointError as error:
        raise CheckpointError(
            f"{place.key[:100]} in {folder / place.file} cannot be read as tensors alone: {error}"
        ) from None


def _are_names(params: Any) -> bool:
    """Numbers, as an optimizer's own state dict has, say nothing to who does not know its parameters."""
    return isinstance(params, list) and all(isinstance(name, str) for name in params)


def _dcp_values(
    folder: Path,
    places: list[_Place],
    shapes: Mapping[str, Any],
    names: Mapping[str, str],
    paths: Mapping[str, tuple[Any, ...]],
) -> tuple[Json, Json, list[str]]:
    """The optimizer's words, the other values, and names of values that JSON cannot hold."""
    groups: dict[int, dict[str, Any]] = {}
    extra, left = {}, []
    for place in places:
        key = place.key
        if key in shapes:
            continue
        value, path = _dcp_value(folder, place), paths.get(key, (key,))
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
    plain = plain_names(param for group in groups.values() for param in group["params"])
    state: dict[str, dict[str, Json]] = {}
    for key, name in names.items():
        if name.startswith("optimizer/state/"):
            _, _, param, leaf = paths[key]
            state.setdefault(plain.get(param, str(param)), {})[str(leaf)] = {"$tensor": name}
    words = [
        {
            "params": [plain[param] for param in group["params"]],
            "options": encode({k: v for k, v in group.items() if k != "params"}, f"optimizer/groups/{i}"),
        }
        for i, group in sorted(groups.items())
    ]
    return {"groups": words, "state": state}, encode(extra, "extra"), left
