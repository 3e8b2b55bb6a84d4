"""Functions around private names of `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def unseen_by_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with Dynamo disabled, as `torch.compiler.disable` does, but without its cost in eager mode."""
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
    """Return the module that `torch.compile` wrapped, or `model` if it is no wrapper. No public name (all versions)."""
    inner = vars(model).get("_modules", {}).get("_orig_mod")
    return inner if isinstance(inner, nn.Module) else model
