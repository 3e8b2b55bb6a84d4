"""Functions around private names of torch's dispatch modes and operator schemas, and of `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

DispatchMode = TorchDispatchMode
"""Base class of context managers that intercept every operator inside them. No public name (all versions)."""


class EagerMode(TorchDispatchMode):
    """Base class of dispatch modes for eager code: torch does not disable Dynamo in them, which saves time. No public name."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def mutates(func: Any) -> bool:
    """Return True if the operator `func` writes into one of its arguments. No public name."""
    return bool(func._schema.is_mutable)


def argument_of(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the value (or default) of argument `name` in a call of the operator `func`; None if there is no such argument."""
    names = [argument.name for argument in func._schema.arguments]
    if name in kwargs or name not in names:
        return kwargs.get(name)
    at = names.index(name)
    return args[at] if at < len(args) else func._schema.arguments[at].default_value


WITHOUT_KERNEL = (
    *("aten.detach", "aten.empty", "aten.new_empty", "aten.as_strided", "aten.lift"),
    *("aten._unsafe_view", "aten.set_"),
)
"""Beginnings of the names of operators that run no kernel on a device."""


def named_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return (name, value) of each argument that was passed in a call of an operator."""
    positional = [(argument.name, value) for argument, value in zip(func._schema.arguments, args, strict=False)]
    return positional + list(kwargs.items())


def mutated_arguments(func: Any) -> list[str]:
    """Return the names of the arguments into which the operator `func` writes."""
    return [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


@contextmanager
def in_place_on_cpu(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Context manager that replaces composite aten operators on CPU tensors, for all threads. autograd records the operators
    that a replacement calls. `functions`: name in aten -> replacement, called with the operator's arguments. The method that
    removes them has no public name (2.11 to 2.15)."""
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, function in functions.items():
            library.impl(name, function, "AutogradCPU")
        yield
    finally:
        library._destroy()


def unseen_by_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of `function` that Dynamo skips, as by `torch.compiler.disable`, without its cost in eager mode."""
    from torch._C._dynamo.eval_frame import get_eval_frame_callback
    from torch._dynamo.eval_frame import skip_code

    disabled = torch.compiler.disable(function)

    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if get_eval_frame_callback() is None else disabled(*args, **kwargs)

    skip_code(called.__code__)
    vars(called).update(vars(disabled))  # the marks with which Dynamo skips a function
    return called


def is_compiled(model: nn.Module) -> bool:
    """Return True if `Module.compile` was called on `model` or on one of its submodules. No public name (all versions)."""
    return any(getattr(m, "_compiled_call_impl", None) is not None for m in model.modules())


def without_compile(model: nn.Module) -> nn.Module:
    """Return the module inside a `model` that `torch.compile` returned; `model` itself if it is another. No public name."""
    inner = vars(model).get("_modules", {}).get("_orig_mod")
    return inner if isinstance(inner, nn.Module) else model
