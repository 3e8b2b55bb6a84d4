"""Functions around private names of tensors, parameters and DTensors: operators on many tensors at once, local tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor as _fake
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

plain_attributes = torch._C.DisableTorchFunctionSubclass
"""Context manager class in which attributes of DTensors are read fast, without a search for `__torch_function__`."""

untracked_views = torch._C._AutoDispatchBelowADInplaceOrView
"""Context manager class in which autograd does not record views as such, so that they take 3 instead of 5.5 us: a write into a
view does not raise the version of its base. No public name (all versions)."""

# Documented by torch as a beta interface. One call, and on an accelerator one kernel, for many tensors.
foreach_add_, foreach_copy_, foreach_mul_ = torch._foreach_add_, torch._foreach_copy_, torch._foreach_mul_
foreach_norm = torch._foreach_norm


def chunk_cat(tensors: Sequence[Tensor], num_chunks: int, out: Tensor) -> None:
    """Fill row r of `out` (num_chunks, n) with chunk r on dim 0 of each tensor, padded with zeros, in the dtype of `out`."""
    torch._chunk_cat(list(tensors), 0, num_chunks, out=out)


def marks_of(param: Tensor) -> dict[str, Any]:
    """Return name -> value of the Python attributes that users and libraries have set on `param`."""
    return {name: value for name, value in vars(param).items() if name != "_is_param"}


def is_plain(tensor: Tensor) -> bool:
    """Return True if `tensor.data` is a `torch.Tensor` or a fake tensor, and not of another subclass."""
    return type(tensor.data) is Tensor or isinstance(tensor.data, _fake.FakeTensor)


def inner_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield `tensor` itself, detached, if it is plain; for a subclass, the plain tensors inside that its `__tensor_flatten__`
    names, to any depth. Yield nothing for a subclass without that method."""
    if is_plain(tensor):
        yield tensor.detach()
    elif hasattr(tensor.data, "__tensor_flatten__"):
        for name in tensor.data.__tensor_flatten__()[0]:
            yield from inner_tensors(getattr(tensor.data, name))


ASSERT_BYTES = 250
"""Longest text of `assert_on_device`; CUDA's kernel refuses 255 bytes (all versions)."""


def assert_on_device(condition: Tensor, text: str) -> None:
    """Make the device fail with `text`, cut to `ASSERT_BYTES` bytes, if `condition` is false; the host does not wait."""
    torch._assert_async(condition, text.encode()[:ASSERT_BYTES].decode(errors="ignore"))


def asked_grad_dtype(param: Tensor) -> tuple[bool, torch.dtype | None]:
    """Return (True if the user has set `param.grad_dtype`, value of `param.grad_dtype`). The value None allows gradients of any
    dtype. Before torch 2.15 a value that equals the parameter's dtype counts as not set."""
    dtype = param.grad_dtype
    was_set = getattr(param, "_has_grad_dtype_override", dtype != param.dtype)
    return bool(was_set), dtype


def keep_grad_dtype(old: Tensor, new: Tensor) -> None:
    """Copy the attribute `grad_dtype` from leaf `old` to leaf `new`, if the user has set it on `old`."""
    was_set, dtype = asked_grad_dtype(old)
    if was_set:
        new.grad_dtype = dtype


# The fast path in C++, if this version has one.
_new_dtensor: Any = getattr(torch.Tensor, "_dtensor__new__", DTensor.__new__)

StridedShard = _StridedShard
"""DTensor placement of rows that are sharded by a later mesh dim first, as with `hybrid_shard_optim` (all versions)."""


def local_of(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, without autograd, unlike `to_local`, and faster."""
    return tensor._local_tensor  # type: ignore[attr-defined, no-any-return]


def local_or_same(value: Any) -> Any:
    """Return the local tensor of a DTensor, and any other value as it is."""
    return local_of(value) if isinstance(value, DTensor) else value


_version, _local = attrgetter("_version"), attrgetter("_local_tensor")


def versions_of(tensors: Sequence[Tensor]) -> int:
    """Return the sum of the version counters of DTensors and of their local tensors; any write to one of them raises it."""
    with plain_attributes():
        return int(sum(map(_version, tensors)) + sum(map(_version, map(_local, tensors))))


def own_versions_of(tensors: Sequence[Tensor]) -> int:
    """Return the sum of the DTensors' own version counters, which writes to their local tensors do not raise."""
    with plain_attributes():
        return int(sum(map(_version, tensors)))


def set_local(tensor: Tensor, local: Tensor) -> None:
    """Make `local` the local tensor of the DTensor `tensor`, which stays the same object for optimizers. No public name."""
    tensor._local_tensor = local  # type: ignore[attr-defined]


def as_dtensor(local: Tensor, like: Tensor) -> DTensor:
    """Return a DTensor of `local` with mesh, placements, full shape and dtype of `like`, without checks; it is fast."""
    return _new_dtensor(DTensor, local, like._spec, requires_grad=False)  # type: ignore[attr-defined, no-any-return]


def rows_dtensor(local: Tensor, like: Tensor, shape: Sequence[int]) -> DTensor:
    """Return a DTensor of `shape`, divided on dim 0 over the ranks that divide `like`. `local`: its rows on this rank.
    `from_local` would move a tensor on the host to the mesh's device."""
    spec = like._spec  # type: ignore[attr-defined]
    full = torch.empty(tuple(shape), device="meta")
    meta = spec.tensor_meta._replace(shape=full.shape, stride=full.stride(), dtype=local.dtype)
    rows = type(spec)(spec.mesh, tuple(map(_on_dim_0, spec.placements)), tensor_meta=meta)
    return _new_dtensor(DTensor, local, rows, requires_grad=False)  # type: ignore[no-any-return]


def _on_dim_0(placement: Any) -> Any:
    if isinstance(placement, StridedShard):
        return StridedShard(0, split_factor=placement.split_factor)
    return placement if placement.is_replicate() else Shard(0)


def as_dtensors(rows: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[DTensor | None]:
    """Return a DTensor of each local tensor in `rows`, with mesh, placements, shape of its entry in `like`; None for None."""
    new, kind = _new_dtensor, DTensor
    pairs = zip(rows, like, strict=True)
    return [None if x is None else new(kind, x, p._spec, requires_grad=False) for x, p in pairs]  # type: ignore[attr-defined]


def has_rule(operator: Any) -> bool:
    """Return True if DTensor has a sharding rule for the aten operator `operator`. No public name."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    rules = (propagator.op_strategy_funcs, propagator.op_single_dim_strategy_funcs, propagator.op_to_rules)
    return any(operator in table for table in rules)


def answer_operator(operator: Any, answer: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> bool:
    """Make DTensor, in this process, call `answer(operator, args, kwargs)` for an aten operator, and return True. If there is
    another handler, change nothing and return False. No public name."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    return handlers.setdefault(operator, answer) is answer


def unanswered(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operator on DTensors without the handler that `answer_operator` has registered. The handler is
    removed during the call, for all threads."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(operator, None)
    try:
        return operator(*args, **kwargs)
    finally:
        if handler is not None:
            handlers[operator] = handler


def like_in(like: Tensor, dtype: torch.dtype) -> DTensor:
    """Return a DTensor on the meta device, like `like` but of `dtype`, to pass to `as_dtensor` as its `like`."""
    spec = copy.copy(like._spec)  # type: ignore[attr-defined]
    spec.tensor_meta = spec.tensor_meta._replace(dtype=dtype)
    local = torch.empty(local_of(like).shape, dtype=dtype, device="meta")
    return _new_dtensor(DTensor, local, spec, requires_grad=False)  # type: ignore[no-any-return]
