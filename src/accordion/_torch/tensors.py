"""Names of tensors, parameters and DTensors: operators on many at once, local tensors, handlers of operators."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor as _fake
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

plain_attributes = torch._C.DisableTorchFunctionSubclass
"""Context manager for fast reads of DTensor attributes: without it, each read looks for a `__torch_function__` that does
nothing, which takes 1.6 thousand instructions. Documented by torch, though it has no public name."""

untracked_views = torch._C._AutoDispatchBelowADInplaceOrView
"""Context manager in which a view costs 3 instead of 5.5 us, because autograd does not see that it is one: a write into it does
not raise the version of its base. No public name (all versions)."""

# Documented by torch as a beta interface. One call, and on an accelerator one kernel, for many tensors.
foreach_add_, foreach_copy_, foreach_mul_ = torch._foreach_add_, torch._foreach_copy_, torch._foreach_mul_
foreach_norm = torch._foreach_norm


def chunk_cat(tensors: Sequence[Tensor], num_chunks: int, out: Tensor) -> None:
    """Write the r-th chunk along dim 0 of each tensor, padded and cast, one after the other into row r of `out`."""
    torch._chunk_cat(list(tensors), 0, num_chunks, out=out)  # out: (num_chunks, n)


def marks_of(param: Tensor) -> dict[str, Any]:
    """Return the attributes that users and libraries set on `param`; `_is_param` is torch's mark of a DTensor parameter."""
    return {name: value for name, value in vars(param).items() if name != "_is_param"}


def is_plain(tensor: Tensor) -> bool:
    """Return True if a tensor, or a parameter's data, is a plain `Tensor` or a fake tensor, not another subclass."""
    return type(tensor.data) is Tensor or isinstance(tensor.data, _fake.FakeTensor)


def inner_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield `tensor` if it is plain, else the plain tensors that its `__tensor_flatten__` lists, if any; all are detached."""
    if is_plain(tensor):
        yield tensor.detach()
    elif hasattr(tensor.data, "__tensor_flatten__"):
        for name in tensor.data.__tensor_flatten__()[0]:
            yield from inner_tensors(getattr(tensor.data, name))


ASSERT_BYTES = 250
"""CUDA's kernel gets the text by value and refuses 255 bytes (all versions)."""


def assert_on_device(condition: Tensor, text: str) -> None:
    """Stop the device if `condition` is false, with the first `ASSERT_BYTES` of `text`; the host continues. No public name."""
    torch._assert_async(condition, text.encode()[:ASSERT_BYTES].decode(errors="ignore"))


def asked_grad_dtype(param: Tensor) -> tuple[bool, torch.dtype | None]:
    """Return (True if `grad_dtype` was set on a parameter, its value); the value None allows gradients of any dtype.

    Before torch 2.15, which records if it was set, the parameter's own dtype counts as not set.
    """
    dtype = param.grad_dtype
    was_set = getattr(param, "_has_grad_dtype_override", dtype != param.dtype)
    return bool(was_set), dtype


def keep_grad_dtype(old: Tensor, new: Tensor) -> None:
    """Copy `grad_dtype` from leaf `old` to leaf `new`, if it was set."""
    was_set, dtype = asked_grad_dtype(old)
    if was_set:
        new.grad_dtype = dtype


# The fast path in C++, if this version has one.
_new_dtensor: Any = getattr(torch.Tensor, "_dtensor__new__", DTensor.__new__)

StridedShard = _StridedShard
"""Placement of rows sharded by a later mesh axis first; used if an optimizer is sharded over replicas too (all versions)."""


def local_of(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor without the autograd function of `to_local` (0.05 instead of 96 us for nine)."""
    return tensor._local_tensor  # type: ignore[attr-defined, no-any-return]


_version, _local = attrgetter("_version"), attrgetter("_local_tensor")


def versions_of(tensors: Sequence[Tensor]) -> int:
    """Return the sum of the version counters of DTensors and of their local tensors, which autograd counts separately."""
    with plain_attributes():
        return int(sum(map(_version, tensors)) + sum(map(_version, map(_local, tensors))))


def own_versions_of(tensors: Sequence[Tensor]) -> int:
    """Return the sum of the DTensors' own version counters; writes to local tensors, as by offloaded steps, do not count."""
    with plain_attributes():
        return int(sum(map(_version, tensors)))


def set_local(tensor: Tensor, local: Tensor) -> None:
    """Set the local tensor of a DTensor, which stays the same object for optimizers, as in torch's FSDP2. No public name."""
    tensor._local_tensor = local  # type: ignore[attr-defined]


def as_dtensor(local: Tensor, like: Tensor) -> DTensor:
    """Return a DTensor of `local` with the placement of `like`, without checks: 1.3 us; `DTensor.from_local` takes 55."""
    return _new_dtensor(DTensor, local, like._spec, requires_grad=False)  # type: ignore[attr-defined, no-any-return]


def as_dtensors(rows: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[DTensor | None]:
    """Return `as_dtensor(row, like)` for each pair of a local tensor and a `like`; None for a row that is None."""
    new, kind = _new_dtensor, DTensor
    pairs = zip(rows, like, strict=True)
    return [None if x is None else new(kind, x, p._spec, requires_grad=False) for x, p in pairs]  # type: ignore[attr-defined]


def has_rule(operator: Any) -> bool:
    """Return True if DTensor has a sharding rule for `operator`. No public name."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    rules = (propagator.op_strategy_funcs, propagator.op_single_dim_strategy_funcs, propagator.op_to_rules)
    return any(operator in table for table in rules)


def answer_operator(operator: Any, answer: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> bool:
    """Register `answer(operator, args, kwargs)` as the handler of an operator on DTensors.

    Returns False, and changes nothing, if there is another handler. No public name.
    """
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    return handlers.setdefault(operator, answer) is answer


def unanswered(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator on DTensors without its handler. No public name."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(operator, None)
    try:
        return operator(*args, **kwargs)
    finally:
        if handler is not None:
            handlers[operator] = handler


def like_in(like: Tensor, dtype: torch.dtype) -> DTensor:
    """Return a DTensor without memory, like `like` but of `dtype`, to pass to `as_dtensor` as its `like`. No public name."""
    spec = copy.copy(like._spec)  # type: ignore[attr-defined]
    spec.tensor_meta = spec.tensor_meta._replace(dtype=dtype)
    local = torch.empty(local_of(like).shape, dtype=dtype, device="meta")
    return _new_dtensor(DTensor, local, spec, requires_grad=False)  # type: ignore[no-any-return]
