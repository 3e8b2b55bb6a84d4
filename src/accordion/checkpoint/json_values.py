"""Python values as JSON that turns back exactly, with the tensors among them put aside by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from accordion.errors import CheckpointError

Json: TypeAlias = Any  # what `json` reads and writes
DEEPEST = 100  # values in JSON nest


def encode(value: object, where: str, tensors: dict[str, Tensor] | None = None, room: int = DEEPEST) -> Json:
    """`value` as JSON that `decode` turns back exactly; tensors in it are put into `tensors`, named by their place.

    Raises `CheckpointError` for other objects, for a tensor if `tensors` is None, and if the JSON would nest deeper than
    `DEEPEST` levels, which a list that holds itself does.
    """
    if room < 0:
        raise CheckpointError(f"{where[:40]}... nests more than {DEEPEST} deep as JSON, a tuple twice; flatten it.")
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, Tensor) and tensors is not None:
        while where in tensors:  # a key may hold a slash
            where += "'"
        tensors[where] = value
        return {"$tensor": where}
    if isinstance(value, list | tuple):
        room -= 1 if isinstance(value, list) else 2
        items = [encode(item, f"{where}/{i}", tensors, room) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        room -= 1 if plain else 3
        pairs = [(key, encode(item, f"{where}/{key}", tensors, room)) for key, item in value.items()]
        return dict(pairs) if plain else {"$dict": [[encode(key, where, None, room), item] for key, item in pairs]}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which JSON cannot hold; use numbers, strings, lists, tuples and dicts."
    )


def as_bytes(value: Json) -> Tensor:
    """Return the bytes of `value` as a tensor, (length,) of uint8."""
    return torch.frombuffer(bytearray(json.dumps(value, allow_nan=False).encode()), dtype=torch.uint8)


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
        raise CheckpointError(f"{word[:100]!r} is a word of a manifest that this version does not know.")
    return meaning[word](inner)
