"""Tensors inside the arguments and results of a module: containers are walked, anything else is left as it is."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def map_tensors(
    function: Callable[[Tensor], Tensor], tree: Any, in_mutable: Callable[[Tensor], Tensor] | None = None
) -> Any:
    """`tree` with every tensor replaced by `function` of it; containers in which nothing changed are the same objects.

    `in_mutable`: used in place of `function` for what stands in a list or a mapping, of which a caller may hold the original.
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, tuple):
        new = [map_tensors(function, item, in_mutable) for item in tree]
        if all(a is b for a, b in zip(new, tree, strict=True)):
            return tree
        return type(tree)(*new) if hasattr(tree, "_fields") else type(tree)(new)
    inside = in_mutable or function
    if isinstance(tree, list):
        new = [map_tensors(inside, item) for item in tree]
        return tree if all(a is b for a, b in zip(new, tree, strict=True)) else type(tree)(new)
    if isinstance(tree, Mapping):
        mapped = {key: map_tensors(inside, value) for key, value in tree.items()}
        if all(mapped[key] is value for key, value in tree.items()):
            return tree
        changed: Any = copy.copy(tree)
        for key, value in mapped.items():
            changed[key] = value
        return changed
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {f.name: map_tensors(function, getattr(tree, f.name)) for f in dataclasses.fields(tree) if f.init}
        if all(getattr(tree, name) is value for name, value in fields.items()):
            return tree
        return dataclasses.replace(tree, **fields)
    return tree


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors that `map_tensors` reaches."""
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        found.append(tree)
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            _collect(item, found)
    elif type(tree) is dict or isinstance(tree, Mapping):
        for item in tree.values():
            _collect(item, found)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for f in dataclasses.fields(tree):
            if f.init:
                _collect(getattr(tree, f.name), found)


def tensors_in(tree: Any, opaque_depth: int = 0) -> Iterator[Tensor]:
    """Tensors that `map_tensors` does not reach: in the attributes of other objects, `opaque_depth` of them deep."""
    if isinstance(tree, (list, tuple)):
        for item in tree:
            yield from tensors_in(item, opaque_depth)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from tensors_in(item, opaque_depth)
    elif opaque_depth and hasattr(tree, "__dict__") and not isinstance(tree, (Tensor, nn.Module, type)):
        for value in vars(tree).values():
            if isinstance(value, Tensor):
                yield value
            else:
                yield from tensors_in(value, opaque_depth - 1)


def written_into(inputs: Any) -> Iterator[Tensor]:
    """Tensors in the lists and mappings among a call's arguments: those that it came with, and those that it put there."""
    args, kwargs = inputs
    for given in (*args, *kwargs.values()):
        if isinstance(given, (list, dict)):
            yield from tensors_of(given)


def overlapping(outputs: Sequence[Tensor], others: Iterable[Tensor]) -> list[Tensor]:
    """The outputs whose memory another one, or one of `others`, has too."""
    count = Counter(t.untyped_storage()._cdata for t in outputs if t.layout is torch.strided)
    count.update({t.untyped_storage()._cdata for t in others if t.layout is torch.strided})
    return [t for t in outputs if t.layout is torch.strided and count[t.untyped_storage()._cdata] > 1]
