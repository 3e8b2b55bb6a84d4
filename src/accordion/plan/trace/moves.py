"""Activations that move between ranks in a forward, and whose gradients move in the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Move = Callable[[Tensor], Tensor]


def moved(tensor: Tensor, there: Move, back: Move) -> Tensor:
    """`there` of a tensor, and `back` of the gradient of that."""
    found: Tensor = _Moved.apply(tensor, there, back)  # type: ignore[no-untyped-call]
    return found


def with_tensors(module: nn.Module, change: Move) -> Any:
    """A module's twin for one forward. `change`: of each parameter. A module of a unit refuses `copy.copy`."""
    twin: Any = object.__new__(type(module))
    own = {name: change(getattr(module, name)) for name, p in module._parameters.items() if p is not None}
    vars(twin).update({**vars(module), **own})
    return twin


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: Move, back: Move) -> Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.back(grads[0]), None, None
