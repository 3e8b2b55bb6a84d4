"""A cache of operator results on fake tensors; without it, most of a trace's time goes into computing them again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from accordion import _torch
from accordion.plan.trace.operators import tensors_of

_NEW = torch.ops.aten.new_empty_strided.default
Make = Callable[[torch.Tensor, Any], Any]
"""Creates an operator's result from a fake tensor of the current trace and the operator's positional arguments."""


_KNOWN: dict[Any, Make | None] = {}
MOST_KNOWN = 20_000  # results; a search of a large model needs some thousand


class Memo:
    """Runs operators, and caches their results by the metadata of the inputs.

    torch's fake tensor mode has such a cache too, but a look-up there takes 0.5 ms, several times as long as here. Cached are
    operators that create new tensors, or that write into their arguments and return the first one or nothing. Views are
    computed each time. All other operators are left to torch's mode.

    The cache outlives a trace. Fake tensors of two traces must not be mixed, so it stores shapes, strides and dtypes alone, and
    results are created from an empty tensor of the current trace.
    """

    def __init__(self) -> None:
        self._base: torch.Tensor | None = None
        if len(_KNOWN) > MOST_KNOWN:
            _KNOWN.clear()

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the result of `func(*args, **kwargs)`. If `func` ran on inputs of equal metadata before, create the result from
        the cache. Otherwise run `func`, and store the metadata of the result if `func` can be cached."""
        if func.namespace != "aten":
            return func(*args, **kwargs)
        if getattr(func, "is_view", False):
            out = _torch.fake_view(func, args, kwargs)
            return func(*args, **kwargs) if out is None else out
        try:
            key = (func, _described(args), _described(tuple(kwargs.items())))
            make = _KNOWN.get(key)
        except TypeError:  # a tensor whose metadata is not enough, or a value that has no hash
            return func(*args, **kwargs)
        if make is not None:
            if self._base is None:
                self._base = torch.empty(0)
            return make(self._base, args)
        out = func(*args, **kwargs)
        if key not in _KNOWN:
            _KNOWN[key] = _maker(func, args, kwargs, out)
        return out


def _described(value: Any) -> Any:
    """Return nested `value` as tuples, with metadata in place of tensors. Raises `TypeError` if `fake_metadata` returns None for
    a tensor. The result is not hashable if a value in it is not."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_described, value))
    if isinstance(value, torch.Tensor):
        if (metadata := _torch.fake_metadata(value)) is None:
            raise TypeError
        return metadata
    return type(value), value


def _maker(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Make | None:
    """Return a function that creates a result with the metadata of `out`, which `func` returned for `args` and `kwargs`. For an
    operator in place it returns the first argument, or None. Returns None if the result cannot be created without `func`."""
    schema, inputs = func._schema, tensors_of((args, kwargs))
    if any(a.alias_info is not None for a in schema.arguments):
        in_place = torch.Tag.inplace_view not in func.tags and "out" not in kwargs
        if in_place and out is None:
            return lambda base, args: None
        return (lambda base, args: args[0]) if in_place and args and out is args[0] else None
    if any(r.alias_info is not None for r in schema.returns):
        return None
    storages = {_torch.storage_key(t.untyped_storage()) for t in inputs}
    makers: list[Make] = []
    for item in out if isinstance(out, (tuple, list)) else [out]:
        if isinstance(item, torch.Tensor):
            key = _torch.storage_key(item.untyped_storage())
            if _torch.fake_like(item) is None or item.device.type != "cpu" or key in storages:
                return None
            storages.add(key)
            makers.append(partial(_empty, tuple(item.shape), item.stride(), item.dtype))
        elif item is None or isinstance(item, (int, float, bool)):
            makers.append(lambda base, args, item=item: item)  # type: ignore[misc]
        else:
            return None
    if isinstance(out, (tuple, list)):
        kind = type(out)
        return lambda base, args: kind(make(base, args) for make in makers)
    return makers[0]


def _empty(shape: Any, strides: Any, dtype: torch.dtype, base: torch.Tensor, args: Any) -> torch.Tensor:
    """Return a new fake CPU tensor of `shape`, `strides` and `dtype` in the mode of the fake tensor `base`. `args` is unused."""
    tensor: torch.Tensor = _torch.fake_view(_NEW, (base, shape, strides), {"dtype": dtype})
    return tensor
