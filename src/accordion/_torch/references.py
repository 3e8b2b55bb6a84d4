"""Functions that count references to tensors and to their memory, with private names of torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from accordion._torch.autograd import run_at_once
from accordion._torch.tensors import plain_attributes


def storages_of(tensors: Sequence[Tensor]) -> list[torch.UntypedStorage]:
    """Return the storage of each DTensor itself, which has no memory, not that of its local tensor.

    `p.data = x` gives `p` another storage and does not change the local tensor of `p`, so that comparing storages with `is`
    reveals it: while there is a reference to a storage, torch returns the same Python object for it.
    """
    with plain_attributes():
        return list(map(Tensor.untyped_storage, tensors))


def base_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor of which `tensor` is a view; None if it is no view, or autograd does not know it."""
    return tensor._base


def are_ours(grads: Sequence[Tensor | None]) -> list[bool]:
    """Return, for each gradient, True if nothing else refers to its memory, so that it may be overwritten. Call it first in the
    backward of an autograd Function, with its arguments: further references would count as others."""
    # autograd may pass one tensor to several nodes (`x + w`) or keep it for a later node, and hooks may have stored it. The
    # reference counts of the Python object, the tensor and the storage show that, as in autograd's own `AccumulateGrad`.
    return [_references(grads, i) in _alone() for i in range(len(grads))]


def _references(grads: Sequence[Tensor | None], i: int) -> tuple[int, ...]:
    grad = grads[i]
    if grad is None or grad.layout != torch.strided:
        return ()
    base = grad._base  # a view refers to its base: the gradient of nn.Linear is the transpose of a product
    of_base = () if base is None else (sys.getrefcount(base), base._use_count())  # type: ignore[attr-defined]
    storage = torch._C._storage_Use_Count(grad.untyped_storage()._cdata)
    return sys.getrefcount(grad), grad._use_count(), storage, *of_base  # type: ignore[attr-defined]


@cache
def _alone() -> list[tuple[int, ...]]:
    """Return `_references` of a gradient, and of a view, to which nothing else refers; measured by a small backward."""
    counts: list[tuple[int, ...]] = []

    @run_at_once  # as in the callers, since torch's code between autograd and `backward` has references too
    class Counts(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
            return tuple(x.detach() for x in inputs)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            counts.extend([_references(grads, i) for i in range(len(grads))])
            return grads

    with torch.enable_grad():
        both = [torch.ones(1, 1, requires_grad=True, device="cpu") for _ in range(2)]
        plain, viewed = Counts.apply(*both)  # type: ignore[no-untyped-call]
        (plain * 2 + viewed.t() * 2).backward()
    return counts


def holders_of_memory(tensor: Tensor) -> int:
    """Return the reference count of the tensor's storage; only a change of it between calls has a meaning."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies a storage among all live ones. No public name."""
    return int(storage._cdata)


def forget_references() -> None:
    """Make `are_ours` measure its reference counts anew. Call this when real tensors follow fake ones or fake ones real ones."""
    _alone.cache_clear()
