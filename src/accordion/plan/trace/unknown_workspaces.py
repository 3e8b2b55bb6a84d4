"""Operators whose workspaces on CUDA are not known: how much each may take at most, by its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from accordion.plan.trace.bytes_moved import num_bytes, tensors_of

KNOWN = ("aten", "prim", "prims", "c10d", "_c10d_functional", "fsdp", "profiler", "inductor")
SORTS = ("sort", "topk", "unique", "argsort", "kthvalue", "median", "mode", "index_put", "scatter", "cumsum", "cumprod")
SOLVES = ("linalg_", "_linalg_", "cholesky", "lu_", "triangular_solve", "ormqr", "geqrf")


def unsure_bytes(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[int, str]:
    """(the most bytes that the inside of an operator may take beside what was traced, why that is not known); 0 where it is."""
    name = func._schema.name.partition("::")[2]
    if func.namespace not in KNOWN:
        return 2 * _all(
            args, kwargs, out
        ), "a custom operator; its inside is not traced: twice what it is given and makes, and no arithmetic"
    if name in BOUNDS:
        bound, why = BOUNDS[name]
        return bound(args, out), why
    if name.startswith(SORTS):
        return 4 * _all(args, kwargs, out), "sorts or scans; buffers of four times what it is given and makes"
    if "mkldnn" in name or name.endswith("_for_cpu"):
        return 2 * _all(args, kwargs, out), "the CPU's own; CUDA runs another: twice what it is given and makes"
    if name.startswith(SOLVES) and "norm" not in name:
        return 4 * _all(args, kwargs, out), "a solver; four times what it is given and makes"
    return 0, ""


def _all(args: Any, kwargs: Any, out: Any) -> int:
    return sum(map(num_bytes, tensors_of((args, kwargs)))) + sum(map(num_bytes, tensors_of(out)))


def _convolution(args: Any, out: Any) -> int:
    """The input unfolded, as a product of matrices takes it, and copies of all in another layout."""
    x, weight = args[0], args[1]
    made = tensors_of(out)[0]
    unfolded = x.shape[0] * prod(weight.shape[1:]) * prod(made.shape[2:]) * x.itemsize
    return int(unfolded + sum(map(num_bytes, (x, weight, made))))


def _convolution_backward(args: Any, out: Any) -> int:
    grad, x, weight = args[:3]
    unfolded = x.shape[0] * prod(weight.shape[1:]) * prod(grad.shape[2:]) * x.itemsize
    return int(unfolded + sum(map(num_bytes, (grad, x, weight))) + sum(map(num_bytes, tensors_of(out))))


def _embedding(args: Any, out: Any) -> int:
    """Sorted and original indices, and partial sums of the rows in float32: one for each index and one for every ten."""
    grad, indices = args[0], args[1]
    return int(indices.numel() * (4 * 8 + 1.1 * grad.shape[-1] * 4))


def _attention_backward(args: Any, out: Any) -> int:
    """Sums of the gradients of query, key and value in float32."""
    return sum(4 * t.numel() for t in args[1:4])


BOUNDS: Mapping[str, tuple[Callable[[Any, Any], int], str]] = {
    "convolution": (
        _convolution,
        "cuDNN chooses an algorithm by its size; the input unfolded, and copies in another layout",
    ),
    "convolution_backward": (
        _convolution_backward,
        "cuDNN chooses an algorithm by its size; the input unfolded, and copies in another layout",
    ),
    "embedding_dense_backward": (_embedding, "sorts indices and sums rows in pieces"),
    "_scaled_dot_product_efficient_attention_backward": (
        _attention_backward,
        "may sum gradients in float32",
    ),
}
"""By the operator's name in aten. Read in torch 2.13's sources where the sources say; the rest is the most that is usual."""
