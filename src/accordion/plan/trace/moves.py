"""Activations that move between ranks in a forward, and whose gradients move in the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Move = Callable[[Tensor], Tensor]


def moved(tensor: Tensor, there: Move, back: Move) -> Tensor:
    """`there` of a tensor, and `back` of the gradient of that."""
    found: Tensor = _Moved.apply(tensor, there, back)  # type: ignore[no-untyped-call]
    return found


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: Move, back: Move) -> Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.back(grads[0]), None, None
