"""Convert Python values to JSON and back without loss; tensors in them are collected by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from accordion.errors import CheckpointError

Json: TypeAlias = Any  # a value that `json` reads and writes


def encode(value: object, path: str, tensors: dict[str, Tensor] | None = None) -> Json:
    """Return `value` (None, a number, string, list, tuple, dict or tensor) as JSON from which `decode` makes an equal value.

    Each tensor is added to the dict `tensors` under a name that begins with `path`, and the JSON refers to it by that name.
    Raises `CheckpointError` for objects of other types, and for a tensor if `tensors` is None.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, Tensor) and tensors is not None:
        while path in tensors:  # keys with slashes can make two paths equal
            path += "'"
        tensors[path] = value
        return {"$tensor": path}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{path}/{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        pairs = [(key, encode(item, f"{path}/{key}", tensors)) for key, item in value.items()]
        return dict(pairs) if plain else {"$dict": [[encode(key, path, None), item] for key, item in pairs]}
    raise CheckpointError(
        f"{path} is a {type(value).__name__}, which JSON cannot hold; use numbers, strings, lists, tuples and dicts."
    )


def as_bytes(value: Json) -> Tensor:
    """Return the JSON text of `value`, encoded in UTF-8, as a tensor of uint8 of shape (length,)."""
    return torch.frombuffer(bytearray(json.dumps(value, allow_nan=False).encode()), dtype=torch.uint8)


def as_dict(extra: Json) -> dict[str, Any]:
    """Return the `extra` of a manifest as the dict that the user saved; {} if it was no dict. Raises `CheckpointError` if
    `extra` is damaged, or has an object of a kind that this version does not know."""
    try:
        value = decode(extra, dict[str, Tensor]().__getitem__)  # `extra` cannot hold tensors
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"extra in the manifest is damaged: {type(error).__name__}: {error}.") from None
    return value if isinstance(value, dict) else {}


def decode(value: Json, tensor: Callable[[str], Tensor]) -> Any:
    """Return the Python value that `encode` converted to the JSON `value`. `tensor`: function that returns a tensor by its
    name. Raises `CheckpointError` if `value` has an object of a kind that this version does not know."""
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
        raise CheckpointError(f"the manifest uses the key {word[:100]!r}, which this version does not know.")
    return meaning[word](inner)


def renamed(value: Json, names: Mapping[str, str]) -> Json:
    """Return the JSON `value`, a result of `encode`, with the tensors renamed that are in `names` (name -> new name)."""
    if isinstance(value, list):
        return [renamed(item, names) for item in value]
    if isinstance(value, dict) and "$tensor" in value:
        return {"$tensor": names.get(value["$tensor"], value["$tensor"])}
    return {key: renamed(item, names) for key, item in value.items()} if isinstance(value, dict) else value
