"""Which methods of a module may be entry points."""

from __future__ import annotations

import inspect

from torch import nn

from accordion.errors import UsageError


def check_entry_point(module: nn.Module, name: str) -> None:
    """Raise `UsageError` unless the method `name` of `module` has done all when it returns."""
    method = getattr(type(module), name, None)
    if not callable(method):
        raise UsageError(f"{type(module).__name__} has no method {name!r}; name one that its class defines.")
    checks = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    if any(check(method) for check in checks):
        raise UsageError(
            f"{type(module).__name__}.{name} computes after the call that makes its generator or coroutine, when full parameters "
            "are let go again; make entry points of the methods that it calls and that return, and loop over these outside."
        )
