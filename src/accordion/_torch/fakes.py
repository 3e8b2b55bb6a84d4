"""Functions around private names of fake tensors (shapes without data), on which the planner runs a training step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor as _fake


def asks_for_values(error: BaseException) -> bool:
    """Return True if `error` was raised because an operator needs the values of a fake tensor, which has none."""
    kinds = _fake.DataDependentOutputException, _fake.DynamicOutputShapeException
    return isinstance(error, kinds) or ".numpy() is not supported" in str(error)


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Context manager in which new tensors are fake; torch's log of failed operators is off in it. No public name."""
    log = logging.getLogger(_fake.__name__)
    before, log.disabled = log.disabled, True
    try:
        with _fake.FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        log.disabled = before


ASKS_DEVICE: Any = torch.ops.prim.device.default
"""The operator that reads the device of a fake tensor. Two of three operators that modes see on fake tensors are this one."""


def fake_device(tensor: Any) -> Any:
    """Return the device of a fake tensor, without an operator that dispatch modes see; None for other tensors."""
    return tensor.fake_device if isinstance(tensor, _fake.FakeTensor) else None


def fake_metadata(tensor: Any) -> Any:
    """Return (shape, strides, dtype, device) of a fake tensor; None if it is not fake, not strided, complex, or a constant."""
    if type(tensor) is not _fake.FakeTensor or tensor.constant is not None or tensor.layout is not torch.strided:
        return None
    if tensor.dtype.is_complex:  # may be marked as conjugated
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.fake_device


def fake_like(tensor: Any) -> Callable[[Any], Any] | None:
    """Return a function that ignores its argument and returns a new fake tensor with the metadata of `tensor`, faster than the
    fake mode. Return None if `tensor` does not fill its storage, or `fake_metadata(tensor)` is None."""
    metadata = fake_metadata(tensor)
    if metadata is None or tensor.storage_offset():
        return None
    (shape, strides, dtype, device), mode = metadata, tensor.fake_mode
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if tensor.numel() else -1
    if tensor.untyped_storage().nbytes() != (last + 1) * dtype.itemsize:
        return None

    def make(args: Any) -> Any:
        with _fake.in_kernel_invocation_manager(mode):
            empty = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        return _fake.FakeTensor(mode, empty, device)

    return make


def fake_view(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the result of the view operator `func`, a fake tensor or several, in a tenth of the time of the fake mode. Returns
    None if `fake_metadata` returns None for the first of `args`, the tensor that is viewed."""
    tensor: Any = args[0] if args else None
    if fake_metadata(tensor) is None:
        return None
    mode, device = tensor.fake_mode, tensor.fake_device
    with _fake.in_kernel_invocation_manager(mode):
        out = func(*args, **kwargs)
    if isinstance(out, Tensor):
        return _fake.FakeTensor(mode, out, device)
    return type(out)(_fake.FakeTensor(mode, each, device) for each in out)


@contextmanager
def around_propagation(inside: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Context manager that enters `inside()` whenever DTensor runs an operator on fake tensors to find the result's full shape.
    A memory tracker should not count these tensors. Replaces a method of torch meanwhile. No public name (2.11 to 2.15)."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    owner, name = ShardingPropagator, "_propagate_tensor_meta_non_cached"
    plain = getattr(owner, name)

    def propagate(self: Any, *args: Any, **kwargs: Any) -> Any:
        with inside():
            return plain(self, *args, **kwargs)

    setattr(owner, name, propagate)
    try:
        yield
    finally:
        setattr(owner, name, plain)


def fake_collectives() -> None:
    """Make torch's collectives accept fake tensors, in this process, by an import (all versions)."""
    import torch.distributed._tools.fake_collectives  # noqa: F401
