"""Checkpoints of other formats, to be converted: what they hold by our names, and their tensors file by file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accordion._torch import TENSOR_MAKERS
from accordion.checkpoint.boxes import Box, box_of
from accordion.checkpoint.format import DTYPES
from accordion.checkpoint.json_values import Json, encode
from accordion.checkpoint.manifest_of_files import StoredTensor
from accordion.checkpoint.pickles import Meaning, Name, Record, most_pickle, read_pickle
from accordion.checkpoint.torch_save_files import (
    DTYPE_NAMES,
    LARGEST_EXPANDED,
    SUBCLASS,
    Held,
    Saved,
    called_list,
    is_archive,
)
from accordion.checkpoint.untrusted_files import (
    BROKEN,
    HF_INDEX,
    HF_SINGLE,
    check_names,
    check_quantised,
    mapped,
    opened,
    plain_names,
    read_header,
    read_index,
    size_of,
)
from accordion.checkpoint.writing import WritePart
from accordion.errors import CheckpointError, UsageError

DCP_METADATA = ".metadata"
MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")  # under which programs put a model's state dict
FREE_TENSORS = 2**14  # that any source may have; each takes 5 KB while it is converted
BYTES_PER_TENSOR = 2**10  # beyond it, on average
MOST_COPIES = 16  # of a file's bytes that its tensors may make: tied ones, and ones that are expanded
SHOWN = 8  # tensors that a message names
OPTIMIZER_KEYS = ("optimizer", "optim", "optimizer_state_dict")


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """`shapes`: our name -> dtype and shape. `files`: each gives the parts of one file to be written. `left`: what is lost."""

    kind: str
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    files: tuple[Callable[[], list[WritePart]], ...]
    optimizer: Json = None
    extra: Json = None
    left: tuple[str, ...] = ()


def open_foreign(path: str | os.PathLike[str]) -> Foreign:
    """Raises `UsageError` for what is none of the formats, `CheckpointError` for what is damaged or not safe to read."""
    found = _opened(Path(path))
    if not found.shapes:
        raise CheckpointError(f"{path} holds no tensors of a model: nothing to convert.")
    config = Path(path, "config.json")
    words = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    check_quantised(words if isinstance(words, dict) else {}, os.fspath(path), found.shapes)
    num_bytes = sum(math.prod(shape) * dtype.itemsize for dtype, shape in found.shapes.values())
    if len(found.shapes) > FREE_TENSORS + num_bytes // BYTES_PER_TENSOR:
        raise CheckpointError(f"{path} has {len(found.shapes)} tensors, which is absurd for {num_bytes} bytes of them.")
    return found


def _opened(at: Path) -> Foreign:
    if (at / DCP_METADATA).is_file():
        return _dcp(at)
    if (at / HF_SINGLE).is_file():
        return _safetensors(at, None, [HF_SINGLE])
    if (at / HF_INDEX).is_file():
        places = read_index(at)
        return _safetensors(at, places, sorted(set(places.values())))
    if at.is_file() and at.suffix == ".safetensors":
        return _safetensors(at.parent, None, [at.name])
    if at.is_file():
        return _torch_file(at)
    raise UsageError(
        f"{at} is no folder of safetensors ({HF_SINGLE} or {HF_INDEX}), no torch DCP folder ({DCP_METADATA}) and no file."
    )


def _found(names: Mapping[Any, str]) -> None:
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


def _safetensors(folder: Path, promised: Mapping[str, str] | None, names: Iterable[str]) -> Foreign:
    """`promised`: the file of each tensor as an index says."""
    held = {name: read_header(folder / name) for name in names}
    where: dict[str, str] = {}
    for name, tensors in held.items():
        for tensor in tensors:
            if tensor.name in where:
                raise CheckpointError(f"{tensor.name} lies in {where[tensor.name]} and in {name} of {folder}.")
            where[tensor.name] = name
    lost = [f"{key} in {name}" for key, name in (promised or {}).items() if where.get(key) != name]
    if lost:
        more = f" and {len(lost) - SHOWN} more" if len(lost) > SHOWN else ""
        raise CheckpointError(f"{folder / HF_INDEX} names tensors that are not there: {', '.join(lost[:SHOWN])}{more}.")
    plain = plain_names(where)
    _found(plain)
    shapes = {"model/" + plain[t.name]: (DTYPES[t.dtype], t.shape) for tensors in held.values() for t in tensors}
    files = tuple(_later(lambda n=name: _mapped(folder / n, held[n]), plain) for name in held)
    return Foreign(kind="safetensors", shapes=shapes, files=files)


def _later(
    read: Callable[..., Iterator[tuple[str, Tensor]]], plain: Mapping[str, str]
) -> Callable[[], list[WritePart]]:
    return lambda: [WritePart("model/" + plain[key], box_of(t.shape, ()), t) for key, t in read() if t.numel()]


def _mapped(path: Path, stored: Iterable[StoredTensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a safetensors file; their memory is the file's."""
    with opened(path) as file:
        data = mapped(file)
    for held in stored:
        dtype, part = DTYPES[held.dtype], data[held.at : held.end]
        part = part if held.at % dtype.itemsize == 0 else part.clone()
        yield held.name, part.view(dtype).view(held.shape)


# -- a file of torch.save


def _torch_file(path: Path) -> Foreign:
    with opened(path) as file:
        data = mapped(file)
    if not is_archive(data):
        raise CheckpointError(
            f"{path} is no archive of torch.save, which its files are since torch 1.6; an older one must be saved again with a "
            "newer torch, where its origin is trusted."
        )
    try:
        saved = Saved(data)
        held, left = saved.value, []
        if not isinstance(held, dict):
            raise CheckpointError(f"it holds a {type(held).__name__} and no state dict.")
        inner = next((key for key in MODEL_KEYS if isinstance(held.get(key), dict)), None)
        if inner is not None:
            left = [str(key) for key in held if key != inner]
            held = held[inner]
        tensors = {key: value for key, value in held.items() if isinstance(value, Held)}
        strange = [str(key) for key, value in held.items() if _is_strange(value)]
        if strange:
            raise CheckpointError(f"{strange[0][:100]} is no plain tensor.")
        plain = plain_names(str(key) for key in tensors)
        _found({key: plain[str(key)] for key in tensors})
        num_bytes = sum(tensor.num_bytes for tensor in tensors.values())
        if num_bytes > LARGEST_EXPANDED + MOST_COPIES * data.numel():
            raise CheckpointError(f"its tensors of {num_bytes} bytes are absurd, made of {data.numel()}.")
    except CheckpointError as error:
        raise CheckpointError(f"{path} cannot be read as tensors alone: {error}") from None
    left += [str(key) for key, value in held.items() if not isinstance(value, Held)]
    return Foreign(
        kind="torch.save",
        shapes={f"model/{plain[str(key)]}": (t.dtype, t.shape) for key, t in tensors.items()},
        files=(_later(lambda: ((str(key), saved.tensor(t)) for key, t in tensors.items()), plain),),
        left=tuple(left),
    )


def _is_strange(value: object) -> bool:
    """Whether it stands for a tensor of a kind that a checkpoint cannot hold: sparse, on meta, a subclass."""
    what = value.what if isinstance(value, Record) else None
    return isinstance(what, Name) and (what.module == TENSOR_MAKERS or what == SUBCLASS)


# -- torch.distributed.checkpoint


_OF_DCP = "torch.distributed.checkpoint"
_TENSORS, _INDEX, _INFO, _METADATA = (
    Name(f"{_OF_DCP}.{module}", name)
    for module, name in (
        ("metadata", "TensorStorageMetadata"),
        ("metadata", "MetadataIndex"),
        ("filesystem", "_StorageInfo"),
        ("metadata", "Metadata"),
    )
)
ALLOWED = {
    *(_TENSORS, _INDEX, _INFO, _METADATA),
    *(
        Name(f"{_OF_DCP}.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "_MEM_FORMAT_ENCODING",
            "StorageMeta",
        )
    ),
    Name("torch", "Size"),
    Name("torch.serialization", "_get_layout"),
    Name("pathlib", "PosixPath"),
    Name("pathlib._local", "PosixPath"),
    Name("collections", "OrderedDict"),
    *DTYPE_NAMES,
}
DCP = Meaning(allowed=ALLOWED.__contains__, called=called_list)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one value of a DCP folder lies, or a part of a tensor: bytes of a file, and the part's first element."""

    key: str
    offset: tuple[int, ...] | None
    file: str
    at: int
    num_bytes: int


def _dcp(folder: Path) -> Foreign:
    data_bytes = sum(entry.stat().st_size for entry in os.scandir(folder) if entry.is_file())
    with opened(folder / DCP_METADATA) as file:
        num_bytes = size_of(file)
        if num_bytes > most_pickle(data_bytes - num_bytes):
            raise CheckpointError(
                f"{folder / DCP_METADATA} has {num_bytes} bytes, which is absurd beside the other files."
            )
        text = file.read(num_bytes)
    try:
        metadata = _of(read_pickle(text, DCP), _METADATA)
        said, paths = metadata.get("state_dict_metadata"), metadata.get("planner_data") or {}
        shapes = {
            key: (DTYPE_NAMES[value.get("properties").state[0]], _checked_shape(value.get("size")))
            for key, value in said.items()
            if _is(value, _TENSORS)
        }
        places = [_place(_of(index, _INDEX), _of(info, _INFO)) for index, info in metadata.get("storage_data").items()]
        names = _dcp_names(list(said), paths)
        _found(names)
        check_names([key for key in said if key not in names])
        _check_places(places, said, shapes)
    except CheckpointError as error:
        raise CheckpointError(f"{folder / DCP_METADATA} cannot be used: {error}") from None
    except BROKEN as error:
        raise CheckpointError(
            f"{folder / DCP_METADATA} is damaged: {type(error).__name__}: {str(error)[:300]}."
        ) from error
    optimizer, extra, left = _dcp_values(folder, places, shapes, names, paths)
    if optimizer is None:
        names = {key: name for key, name in names.items() if name.startswith("model/")}
    kept = {key: names[key] for key in shapes if key in names}
    files = sorted({place.file for place in places if place.key in kept})
    return Foreign(
        kind="torch DCP",
        shapes={kept[key]: shapes[key] for key in kept},
        files=tuple(_dcp_file(folder, file, places, kept, shapes) for file in files),
        optimizer=optimizer,
        extra=extra,
        left=(*left, *(key for key in shapes if key not in names)),
    )


def _is(value: object, what: Name) -> bool:
    return isinstance(value, Record) and value.what == what


def _of(value: Any, what: Name) -> Record:
    if not _is(value, what):
        raise CheckpointError(f"it has a {type(value).__name__} where a {what.name} is due.")
    return value  # type: ignore[no-any-return]


def _checked_shape(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, tuple) or not all(type(rows) is int and rows >= 0 for rows in shape):
        raise CheckpointError(f"{str(shape)[:100]} is no shape.")
    return shape


def _place(index: Record, info: Record) -> _Place:
    key, offset = index.get("fqn"), index.state.get("offset")
    file, at, num_bytes = (info.get(word) for word in ("relative_path", "offset", "length"))
    if not _is_plain(file):
        raise CheckpointError(f"it names {str(file)[:100]!r}, which is not the plain name of a file.")
    if type(at) is not int or type(num_bytes) is not int or at < 0 or num_bytes < 0 or not isinstance(key, str):
        raise CheckpointError(f"it puts {str(key)[:100]} nowhere in {file[:100]}.")
    return _Place(key, None if offset is None else _checked_shape(offset), file, at, num_bytes)


def _check_places(places: list[_Place], said: Mapping[str, Any], shapes: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` unless everything said has its places, each byte used once, a value that is no tensor one."""
    count = dict.fromkeys(said, 0)
    for place in places:
        if place.key not in count:
            raise CheckpointError(f"it says where {place.key[:100]} lies and not what it is.")
        count[place.key] += 1
    for key, found in count.items():
        if found == 0 and (key not in shapes or all(shapes[key][1])):
            raise CheckpointError(f"it does not say where {key[:100]} lies.")
        if found > 1 and key not in shapes:
            raise CheckpointError(f"it has {key[:100]} twice.")
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


def _dcp_file(
    folder: Path,
    file: str,
    places: list[_Place],
    names: Mapping[str, str],
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
) -> Callable[[], list[WritePart]]:
    def read() -> list[WritePart]:
        parts = []
        with opened(folder / file) as opened_file:
            data = mapped(opened_file)
        for place in places:
            if place.file == file and place.key in names:
                saved = _dcp_saved(data, folder, place)
                held, (dtype, shape) = saved.value, shapes[place.key]
                if not isinstance(held, Held) or held.dtype != dtype or len(held.shape) != len(shape):
                    raise CheckpointError(
                        f"{place.key} in {folder / file} is not the {dtype} of shape {shape} that {DCP_METADATA} says."
                    )
                at = place.offset if place.offset is not None else (0,) * len(shape)
                tensor = saved.tensor(held)
                if tensor.numel():
                    parts.append(WritePart(names[place.key], Box(at, tuple(tensor.shape)), tensor))
        return parts

    return read


def _dcp_saved(data: Tensor, folder: Path, place: _Place) -> Saved:
    """What lies at a place of a file, whose bytes are `data`."""
    try:
        part = data[place.at : place.at + place.num_bytes]
        if part.numel() != place.num_bytes:
            raise CheckpointError(f"{place.num_bytes} bytes from byte {place.at} on are not there.")
        return Saved(part)
    except CheckpointError as error:
        raise CheckpointError(
            f"{folder / place.file}: {place.key[:100]} cannot be read as tensors alone: {error}"
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
        with opened(folder / place.file) as file:
            value, path = _dcp_saved(mapped(file), folder, place).value, paths.get(key, (key,))
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
