"""Names of plain tensors and parameters, and operators that take many tensors at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor as _fake

plain_attributes = torch._C.DisableTorchFunctionSubclass
"""Context manager for fast reads of DTensor attributes: without it, each read looks for a `__torch_function__` that does
nothing, which takes 1.6 thousand instructions. Documented by torch, though it has no public name."""

# Documented by torch as a beta interface. One call, and on an accelerator one kernel, for many tensors.
foreach_add_, foreach_copy_, foreach_mul_ = torch._foreach_add_, torch._foreach_copy_, torch._foreach_mul_
foreach_norm = torch._foreach_norm

find_non_finite_: Callable[[list[Tensor], Tensor, Tensor], None] = torch._amp_foreach_non_finite_check_and_unscale_
"""The function of `GradScaler`: (tensors, flag, scale) writes 1 into `flag` if any element is inf or NaN, and multiplies by
`scale`."""


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
    """Yield the plain tensors inside a tensor subclass that has `__tensor_flatten__`; yield a plain tensor itself."""
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
