"""Results of operators on fake tensors, known from an earlier call with equal inputs: most of a trace's time otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accordion import _torch
from accordion.plan.trace.operators import tensors_of

Make = Callable[[Any], Any]
"""Makes what an operator gives of its positional arguments."""


class Memo:
    """Results of operators by the metadata of their inputs; of one trace.

    torch's mode of fake tensors has such a memory of its own, but takes 0.5 ms to look an operator up there, several times as
    long as this. Operators are remembered that make new tensors, or that write into their arguments and give the first one or
    nothing. Views are made by their own kernels. All others are left to the mode.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Make | None] = {}

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call an operator, or make what it gave for inputs like these."""
        if func.namespace != "aten":
            return func(*args, **kwargs)
        if getattr(func, "is_view", False):
            out = _torch.fake_view(func, args, kwargs)
            return func(*args, **kwargs) if out is None else out
        try:
            key = (func, _described(args), _described(tuple(kwargs.items())))
            make = self._known.get(key)
        except TypeError:  # a tensor of another kind, or a value that has no hash
            return func(*args, **kwargs)
        if make is not None:
            return make(args)
        out = func(*args, **kwargs)
        if key not in self._known:
            self._known[key] = _maker(func, args, kwargs, out)
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
            return lambda args: None
        return (lambda args: args[0]) if in_place and args and out is args[0] else None
    if any(r.alias_info is not None for r in schema.returns):
        return None
    storages = {_torch.storage_key(t.untyped_storage()) for t in given}
    makers: list[Make] = []
    for item in out if isinstance(out, (tuple, list)) else [out]:
        if isinstance(item, torch.Tensor):
            again = _torch.fake_like(item)
            key = _torch.storage_key(item.untyped_storage())
            if again is None or key in storages:
                return None
            storages.add(key)
            makers.append(again)
        elif item is None or isinstance(item, (int, float, bool)):
            makers.append(lambda args, item=item: item)  # type: ignore[misc]
        else:
            return None
    if isinstance(out, (tuple, list)):
        kind = type(out)
        return lambda args: kind(make(args) for make in makers)
    return makers[0]
