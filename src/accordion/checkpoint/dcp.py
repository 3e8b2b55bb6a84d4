"""Read folders of torch.distributed.checkpoint for conversion: metadata safely, tensors with torch's own reader."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from accordion.checkpoint.boxes import Box
from accordion.checkpoint.foreign import MODEL_KEYS, Foreign, Shape, check_unique, part_of
from accordion.checkpoint.format import CODES, make_up
from accordion.checkpoint.json_values import Json, encode
from accordion.checkpoint.reading import DCP_METADATA
from accordion.checkpoint.untrusted_files import check_names, named, opened, plain_names
from accordion.errors import CheckpointError

OPTIMIZER_KEYS = ("optimizer", "optim", "optimizer_state_dict")
CLASSES: Mapping[str, tuple[str, ...]] = {  # classes of plain data, whose creation runs no other code
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath", "WindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath"),
}


class _Properties:
    """Stand-in for DCP's `TensorProperties`, whose pickled state has another length in each version of torch."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = state[0]


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler for DCP's metadata that allows classes of plain data only; DCP's own reader runs whatever a pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "TensorProperties":
            return _Properties
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if not is_dtype and name not in CLASSES.get(module, ()):
            raise CheckpointError(f"its pickle names {module[:100]}.{name[:100]}, which is not allowed.")
        return super().find_class(module, name)


class _Planner(DefaultLoadPlanner):
    """DCP's load planner, except that pickled values may contain tensors and plain values only."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)


def open_dcp(folder: Path) -> Foreign:
    """Return the description of a DCP folder. May raise any exception if it is damaged or not safe to read."""
    with opened(folder / DCP_METADATA) as file:
        metadata: Metadata = _MetadataUnpickler(file).load()
    keys, paths = metadata.state_dict_metadata, metadata.planner_data or {}
    _check_files(folder, metadata.storage_data, keys)
    shapes = {
        key: _checked_shape(key, value, metadata.storage_data)
        for key, value in keys.items()
        if isinstance(value, TensorStorageMetadata)
    }
    names = _dcp_names(list(keys), paths)
    check_unique(names)
    check_names([key for key in keys if key not in names])
    values = {key: _dcp_value(folder, metadata, key) for key in keys if key not in shapes}
    optimizer, extra, left = _dcp_words(values, names, paths)
    if optimizer is None:
        names = {key: name for key, name in names.items() if name.startswith("model/")}
    parts = [
        part_of(names[key], *shape, partial(_dcp_value, folder, metadata, key, shape))
        for key, shape in shapes.items()
        if key in names
    ]
    left += [key for key in shapes if key not in names]
    return Foreign(kind="torch DCP", parts=parts, optimizer=optimizer, extra=extra, left=tuple(left))


def _check_files(folder: Path, storage_data: Mapping[MetadataIndex, Any], keys: Mapping[str, object]) -> None:
    """Raise `CheckpointError` unless each stored part has a key in `keys`, and is in a regular file of the folder."""
    for name in {info.relative_path for info in storage_data.values()}:
        if not isinstance(name, str) or "/" in name or "\\" in name or name in ("", ".", ".."):
            raise CheckpointError(f"it names {str(name)[:100]!r}, which is not the plain name of a file.")
        opened(folder / name).close()  # DCP's own reader would wait for the writer of a pipe
    if lost := {index.fqn for index in storage_data} - set(keys):
        raise CheckpointError(f"it does not describe {min(lost)[:100]}, of which it stores a part.")


def _checked_shape(key: str, value: TensorStorageMetadata, storage_data: Mapping[MetadataIndex, Any]) -> Shape:
    """Return (dtype, shape) of the tensor `key`. Raises `CheckpointError` unless each part of it is stored once."""
    dtype, shape = value.properties.dtype, tuple(value.size)
    if dtype not in CODES:
        raise CheckpointError(f"{key[:100]} has the dtype {str(dtype)[:20]}, which cannot be read.")
    boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in value.chunks]
    boxes = [box for box in boxes if box.numel]
    if not make_up(boxes, shape) or any(MetadataIndex(key, box.offset) not in storage_data for box in boxes):
        raise CheckpointError(f"it does not have each part of {key[:100]} of shape {str(shape)[:100]} once.")
    return dtype, shape


def _dcp_value(folder: Path, metadata: Metadata, key: str, shape: Shape | None = None) -> Any:
    """Return the value stored under `key`; for a tensor, pass its dtype and shape as `shape`."""
    with named(f"{key[:100]} in {folder} cannot be read as tensors alone"):
        into = None if shape is None else torch.empty(shape[1], dtype=shape[0], device="cpu")
        reader, planner = FileSystemReader(folder), _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        planner.set_up_planner({key: into}, metadata, is_coordinator=True)
        reader.read_data(planner.create_local_plan(), planner).wait()
        return planner.state_dict[key]


def _dcp_names(keys: list[str], paths: Mapping[str, tuple[Any, ...]]) -> dict[str, str]:
    """Return a dict from key to our name: `model/...` for a model's tensors, `optimizer/state/...` for an optimizer's."""
    states, models = {}, dict[str, str]()
    for key in keys:
        path = paths.get(key, (key,))
        if len(path) == 2 and path[0] in MODEL_KEYS:
            models[key] = str(path[1])
        elif len(path) == 4 and path[0] in OPTIMIZER_KEYS and path[1] == "state":
            states[key] = f"optimizer/state/{path[2]}/{path[3]}"
        elif len(path) == 1 and not any(p[0] in MODEL_KEYS for p in paths.values() if len(p) > 1):
            models[key] = key  # the folder holds nothing but a model's state dict
    plain = plain_names(models.values())
    return states | {key: f"model/{plain[name]}" for key, name in models.items()}


def _dcp_words(
    values: Mapping[str, Any], names: Mapping[str, str], paths: Mapping[str, tuple[Any, ...]]
) -> tuple[Json, Json, list[str]]:
    """Return (optimizer as JSON or None, the other values as JSON, keys that are left out)."""
    groups: dict[int, dict[str, Any]] = {}
    extra, left = {}, []
    for key, value in values.items():
        path = paths.get(key, (key,))
        try:
            encode(value, key)
        except CheckpointError:
            left.append(key)
            continue
        if len(path) == 4 and path[0] in OPTIMIZER_KEYS and path[1] == "param_groups":
            groups.setdefault(path[2], {})[path[3]] = value
        else:
            extra[key] = value
    # An optimizer's own state dict numbers its parameters, which does not tell their names.
    listed = [group.get("params") for group in groups.values()]
    if not groups or not all(isinstance(names, list) and all(isinstance(n, str) for n in names) for names in listed):
        left += [
            key for key, path in paths.items() if len(path) == 4 and path[0] in OPTIMIZER_KEYS and path[1] != "state"
        ]
        return None, encode(extra, "extra"), left
    plain = plain_names(param for group in groups.values() for param in group["params"])
    state: dict[str, dict[str, Json]] = {}
    for key, name in names.items():
        if name.startswith("optimizer/state/"):
            _, _, param, leaf = paths[key]
            state.setdefault(plain.get(param, str(param)), {})[str(leaf)] = {"$tensor": name}
    described = []
    for i, group in sorted(groups.items()):
        params = [plain[param] for param in group.pop("params")]
        described.append({"params": params, "options": encode(group, f"optimizer/groups/{i}")})
    return {"groups": described, "state": state}, encode(extra, "extra"), left
