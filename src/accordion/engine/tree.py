"""Find and replace tensors in the arguments and results of a module, inside tuples, lists, mappings and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def map_tensors(
    function: Callable[[Tensor], Tensor], tree: Any, in_mutable: Callable[[Tensor], Tensor] | None = None
) -> Any:
    """Return `tree`, nested tuples, lists, mappings and dataclasses, with each tensor replaced by `function(tensor)`.

    A container without changes stays the same object; a changed one is copied. Objects of other types, and fields of
    dataclasses with `init=False`, stay as they are. `in_mutable`: the function for tensors inside lists, mappings and
    dataclasses; by default `function`.
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
        fields = {f.name: map_tensors(inside, getattr(tree, f.name)) for f in dataclasses.fields(tree) if f.init}
        if all(getattr(tree, name) is value for name, value in fields.items()):
            return tree
        return dataclasses.replace(tree, **fields)
    return tree


def tensors_of(tree: Any) -> list[Tensor]:
    """Return all tensors inside the tuples, lists, mappings and dataclasses (fields with `init=True`) of `tree`, in order."""
    tensors: list[Tensor] = []
    _collect(tree, tensors)
    return tensors


def _collect(tree: Any, tensors: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        tensors.append(tree)
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            _collect(item, tensors)
    elif type(tree) is dict or isinstance(tree, Mapping):
        for item in tree.values():
            _collect(item, tensors)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for f in dataclasses.fields(tree):
            if f.init:
                _collect(getattr(tree, f.name), tensors)


def overlapping(outputs: Sequence[Tensor], others: Iterable[Tensor]) -> list[Tensor]:
    """Return the strided tensors of `outputs` that share their storage with another output or with one of `others`."""
    count = Counter(t.untyped_storage()._cdata for t in outputs if t.layout is torch.strided)
    count.update({t.untyped_storage()._cdata for t in others if t.layout is torch.strided})
    return [t for t in outputs if t.layout is torch.strided and count[t.untyped_storage()._cdata] > 1]
