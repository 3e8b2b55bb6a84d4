"""Full gradients that are summed on one rank under no_sync, until a later backward reduces them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from accordion import _torch
from accordion.engine.params import Param


@dataclass(slots=True)
class _Sum:
    """The sum `total` of one parameter's full gradients since the user last cleared `.grad`.

    `grad`, `version`: `.grad` at the first term and its version when last checked, to detect when the user clears it.
    `is_ours`: True if `grad` is zeros that `LocalSums.add` put in place of None.
    """

    total: Tensor
    grad: Tensor
    version: int
    is_ours: bool


class LocalSums:
    """Full gradients of one unit, summed on this rank under no_sync, each in its reduce dtype. `pending`: indices of parameters
    for which `add` was called since the last `take`, equal on all ranks."""

    def __init__(self, params: Sequence[Param], dtypes: Sequence[torch.dtype]) -> None:
        self._params, self._dtypes = params, dtypes
        self._sums: dict[int, _Sum] = {}  # by index of the parameter
        self.pending: set[int] = set()

    def add(self, indices: Sequence[int], grads: Sequence[Tensor | None]) -> None:
        """Add the gradients `grads` to the sums of the parameters `indices`; None adds nothing. If a sum begins and the
        parameter's `.grad` is None, set `.grad` to sharded zeros."""
        self.pending.update(indices)
        for i, grad in zip(indices, grads, strict=True):
            if grad is None:
                continue
            earlier = self._sum_of(i)
            if earlier is not None:
                # Not in place, because autograd may share the first gradient.
                earlier.total = earlier.total + grad
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
        """Return for each parameter in `indices` its sum plus its gradient in `grads`, None if it has neither; forget the sums.

        `grads`: None to take the sums alone. With gradients, a parameter that was frozen since the forward keeps its sum, and
        only its gradient is returned.
        """
        result: list[Tensor | None] = []
        for i, grad in zip(indices, [None] * len(indices) if grads is None else grads, strict=True):
            local_sum = None
            if grads is None or self._params[i].sharded.requires_grad:
                local_sum = self._sum_of(i)
                self._forget(i)
                self.pending.discard(i)
            if local_sum is not None:
                result.append(local_sum.total if grad is None else local_sum.total + grad)
            else:
                result.append(None if grad is None else grad.to(self._dtypes[i]))
        return result

    def any_held(self) -> bool:
        """Return True if there is a sum that was neither taken nor cleared by the user through `.grad`."""
        return any(self._sum_of(i) is not None for i in self._sums)

    def drop(self) -> None:
        """Forget all sums, and set each `.grad` that `add` filled with zeros to None again."""
        for i in list(self._sums):
            self._forget(i)
        self.pending.clear()

    def _forget(self, i: int) -> None:
        entry = self._sums.pop(i, None)
        if entry is not None and entry.is_ours and self._params[i].sharded.grad is entry.grad:
            self._params[i].sharded.grad = None

    def _sum_of(self, i: int) -> _Sum | None:
        """Return the sum of parameter `i`; None if there is none, or if the user has set `.grad` to None or to zeros since. A
        write into the zeros that `add` put into `.grad` counts as clearing too. The host may wait for the device."""
        entry = self._sums.get(i)
        grad = None if entry is None else self._params[i].sharded.grad
        if entry is None or grad is None:
            return None
        if grad is entry.grad and grad._version != entry.version:
            local = _torch.local_or_same(grad)
            if entry.is_ours or not local.count_nonzero():
                return None
            entry.version = grad._version
        return entry
