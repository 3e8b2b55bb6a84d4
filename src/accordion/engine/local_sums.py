"""Gradients that add up on one rank under no_sync, in full, until a reduce takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from accordion import _torch
from accordion.engine.params import Param


@dataclass(slots=True)
class _Sum:
    """What one parameter's gradients add up to since somebody cleared them.

    `grad`: the parameter's `grad` then, and its `version`: they tell when it is cleared. `is_ours`: it was made of zeros for
    that, since the parameter had none.
    """

    total: Tensor
    grad: Tensor
    version: int
    is_ours: bool


class LocalSums:
    """Full gradients of one unit, summed on this rank under no_sync, each in the dtype of its sum over ranks.

    `pending`: indices of the parameters that a backward under no_sync trained and no reduce has taken since. It is the same
    on all ranks, also if a rank had no gradient for some of them.
    """

    def __init__(self, params: Sequence[Param], dtypes: Sequence[torch.dtype]) -> None:
        self._params, self._dtypes = params, dtypes
        self._sums: dict[int, _Sum] = {}  # by index of the parameter
        self.pending: set[int] = set()

    def add(self, indices: Sequence[int], grads: Sequence[Tensor | None]) -> None:
        """Add full gradients of the parameters `indices`. A parameter without a `grad` gets one of zeros."""
        self.pending.update(indices)
        for i, grad in zip(indices, grads, strict=True):
            if grad is None:
                continue
            held = self._held(i)
            if held is not None:
                # A new tensor, never in place: the first one may be shared by autograd.
                held.total = held.total + grad
                continue
            self._forget(i)
            param = self._params[i].sharded
            shown, is_ours = param.grad, param.grad is None
            if shown is None:
                like = self._params[i].grad_like
                zeros = torch.zeros_like(_torch.local_of(param), dtype=like.dtype)
                shown = param.grad = _torch.as_dtensor(zeros, like)
            self._sums[i] = _Sum(grad.to(self._dtypes[i]), shown, shown._version, is_ours)

    def take(self, indices: Sequence[int], grads: Sequence[Tensor | None] | None) -> list[Tensor | None]:
        """Return `grads` of the parameters `indices`, each added to the sum of its parameter, and forget these sums.

        A parameter that was frozen since the forward keeps its sum, because its gradient will be dropped. `grads`: None to take
        all sums alone.
        """
        result: list[Tensor | None] = []
        for i, grad in zip(indices, [None] * len(indices) if grads is None else grads, strict=True):
            local_sum = None
            if grads is None or self._params[i].sharded.requires_grad:
                local_sum = self._held(i)
                self._forget(i)
                self.pending.discard(i)
            if local_sum is not None:
                result.append(local_sum.total if grad is None else local_sum.total + grad)
            else:
                result.append(None if grad is None else grad.to(self._dtypes[i]))
        return result

    def any_held(self) -> bool:
        """Whether gradients have been added up that no reduce has taken, and nobody has cleared."""
        return any(self._held(i) is not None for i in self._sums)

    def drop(self) -> None:
        """Forget what has been added up, and the zeros that stand for it."""
        for i in list(self._sums):
            self._forget(i)
        self.pending.clear()

    def _forget(self, i: int) -> None:
        held = self._sums.pop(i, None)
        if held is not None and held.is_ours and self._params[i].sharded.grad is held.grad:
            self._params[i].sharded.grad = None

    def _held(self, i: int) -> _Sum | None:
        """What parameter `i` adds up to; None if its gradient was cleared since: the sum is of a step that was given up.

        Cleared is a gradient that is None, or was written and is zero everywhere: `zero_grad(set_to_none=False)`.
        """
        held = self._sums.get(i)
        if held is None:
            return None
        grad = self._params[i].sharded.grad
        if grad is None:
            return None
        if grad is held.grad and grad._version != held.version:
            local = _torch.local_of(grad) if isinstance(grad, DTensor) else grad
            if held.is_ours or not local.count_nonzero():
                return None
            held.version = grad._version
        return held
