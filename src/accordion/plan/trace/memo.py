"""Results of operators on fake tensors, known from an earlier call with equal inputs: most of a trace's time otherwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from accordion import _torch
from accordion.plan.trace.operators import tensors_of

_NEW = torch.ops.aten.new_empty_strided.default
Make = Callable[[torch.Tensor, Any], Any]
"""Makes what an operator gives, of a fake tensor of the same trace and the positional arguments."""


_KNOWN: dict[Any, Make | None] = {}
MOST_KNOWN = 20_000  # results: a search of a large model has some thousand


class Memo:
    """Results of operators by the metadata of their inputs.

    torch's mode of fake tensors has such a memory of its own, but takes 0.5 ms to look an operator up there, several times as
    long as this. Operators are remembered that make new tensors, or that write into their arguments and give the first one or
    nothing. Views are made by their own kernels. All others are left to the mode.

    Results outlive a trace, whose tensors do not mix with those of another one: what is remembered are shapes, of which
    an empty tensor of this trace makes new ones.
    """

    def __init__(self) -> None:
        self._anchor: torch.Tensor | None = None
        if len(_KNOWN) > MOST_KNOWN:
            _KNOWN.clear()

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call an operator, or make what it gave for inputs like these."""
        if func.namespace != "aten":
            return func(*args, **kwargs)
        if getattr(func, "is_view", False):
            out = _torch.fake_view(func, args, kwargs)
            return func(*args, **kwargs) if out is None else out
        try:
            key = (func, _described(args), _described(tuple(kwargs.items())))
            make = _KNOWN.get(key)
        except TypeError:  # a tensor of another kind, or a value that has no hash
            return func(*args, **kwargs)
        if make is not None:
            if self._anchor is None:
                self._anchor = torch.empty(0)
            return make(self._anchor, args)
        out = func(*args, **kwargs)
        if key not in _KNOWN:
            _KNOWN[key] = _maker(func, args, kwargs, out)
        return out


def _described(value: Any) -> Any:
    """A value with tensors by their metadata. Raises `TypeError` for tensors of which that says too little."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_described, value))
    if isinstance(value, torch.Tensor):
        metadata = _torch.fake_metadata(value)
        if metadata is None:
            raise TypeError
        return metadata
    return type(value), value


def _maker(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Make | None:
    """Return a function that makes the result again; None if there is none."""
    schema, given = func._schema, tensors_of((args, kwargs))
    writes = any(a.alias_info is not None for a in schema.arguments)
    if writes:
        in_place = torch.Tag.inplace_view not in func.tags and "out" not in kwargs
        if in_place and out is None:
            return lambda anchor, args: None
        return (lambda anchor, args: args[0]) if in_place and args and out is args[0] else None
    if any(r.alias_info is not None for r in schema.returns):
        return None
    storages = {_torch.storage_key(t.untyped_storage()) for t in given}
    makers: list[Make] = []
    for item in out if isinstance(out, (tuple, list)) else [out]:
        if isinstance(item, torch.Tensor):
            key = _torch.storage_key(item.untyped_storage())
            if _torch.fake_like(item) is None or item.device.type != "cpu" or key in storages:
                return None
            storages.add(key)
            makers.append(partial(_empty, tuple(item.shape), item.stride(), item.dtype))
        elif item is None or isinstance(item, (int, float, bool)):
            makers.append(lambda anchor, args, item=item: item)  # type: ignore[misc]
        else:
            return None
    if isinstance(out, (tuple, list)):
        kind = type(out)
        return lambda anchor, args: kind(make(anchor, args) for make in makers)
    return makers[0]


def _empty(shape: Any, strides: Any, dtype: torch.dtype, anchor: torch.Tensor, args: Any) -> torch.Tensor:
    """Return a new fake tensor: a kernel on the meta device, as for a view."""
    made: torch.Tensor = _torch.fake_view(_NEW, (anchor, shape, strides), {"dtype": dtype})
    return made
