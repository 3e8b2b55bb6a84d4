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
"""Function of (any fake tensor of the current trace, positional arguments of an operator) that creates the operator's result."""


_KNOWN: dict[Any, Make | None] = {}
MOST_KNOWN = 20_000  # results; a search of a large model needs some thousand


class Memo:
    """Runs operators on fake tensors, and caches their results by the metadata of the inputs.

    torch's fake tensor mode has such a cache too, but a look-up there takes 0.5 ms, several times as long as here. Cached are
    aten operators that create new tensors, or that write into their arguments and return the first one or nothing. Views are
    computed each time. All other operators are left to torch's mode.

    All instances share one cache; the constructor clears it if it has more than `MOST_KNOWN` results. Fake tensors of two
    traces must not be mixed. So the cache has no tensors, and results are created from an empty tensor of the current trace.
    """

    def __init__(self) -> None:
        self._base: torch.Tensor | None = None
        if len(_KNOWN) > MOST_KNOWN:
            _KNOWN.clear()

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the result of the operator call `func(*args, **kwargs)`. If a call with equal metadata is in the cache, create
        the result from that. Otherwise run `func`, and store the metadata of the result if the call can be cached."""
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
    """Return nested `value` as nested tuples: tensors are replaced by their metadata, and other values by (type, value). Raises
    `TypeError` if `fake_metadata` returns None for a tensor. The result has no hash if one of the values has none."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_described, value))
    if isinstance(value, torch.Tensor):
        if (metadata := _torch.fake_metadata(value)) is None:
            raise TypeError
        return metadata
    return type(value), value


def _maker(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Make | None:
    """Return a `Make` that creates results with the metadata of `out`, the result of `func` for `args` and `kwargs`. If `func`
    changes an argument, it returns the first argument or None, as `func` does. Return None if `func` cannot be cached."""
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
    """Return a new fake CPU tensor of `shape`, `strides` and `dtype`, in the fake tensor mode of `base`. `args` is unused."""
    tensor: torch.Tensor = _torch.fake_view(_NEW, (base, shape, strides), {"dtype": dtype})
    return tensor
