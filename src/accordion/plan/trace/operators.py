"""A table of operators: the arithmetic, the bytes moved, and the workspace (memory that the CUDA kernel allocates and frees).

An operator without a row has the flops of torch's own counter, reads and writes each tensor of its schema once, and allocates
no workspace. A row overrides these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from accordion import _torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """A row of the table: properties of an operator, or of a family of operators, that its schema does not show."""

    flops: Callable[[Any], float] | None = None  # (args) -> floating point operations, two for each multiply-add
    moved: Callable[[Any, Any], int] | None = None  # (args, out) -> bytes read and written
    unread: Sequence[str] = ()  # arguments of which it reads a few elements at most
    overwrites: bool = False  # it does not read the tensors that it writes into
    workspace: Callable[[Any], int] = lambda args: 0  # (args) -> bytes that the CUDA kernel allocates and frees
    # (args, kwargs, out) -> most workspace bytes, if they are not known; 0 if they are.
    bound: Callable[[Any, Any, Any], float] = lambda args, kwargs, out: 0
    why: str = ""  # why the workspace is not known


# -- arithmetic and bytes of one call, as a dispatch mode sees it


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Return the floating point operations of one call of `func` with result `out`, two for each multiply-add; 0 for operators
    without products. Causal attention counts as half of full attention."""
    if (count_row := row_of(func).flops) is not None:
        return count_row(args)
    count = flop_registry.get(getattr(func, "_overloadpacket", None))
    if count is not None and _name(func).startswith("_scaled_dot_product"):
        args = _with_all_heads(func, args)
    flops = float(count(*args, **kwargs, out_val=out)) if count is not None else 0.0
    if flops and "attention" in _name(func) and _torch.argument_of(func, "is_causal", args, kwargs):
        flops /= 2  # torch counts the whole square
    return flops


def _with_all_heads(func: Any, args: Any) -> Any:
    """Return `args` of attention with key and value expanded to all heads of the query, as torch 2.11's counter needs them."""
    at = {argument.name: i for i, argument in enumerate(func._schema.arguments[: len(args)])}
    heads, args = args[at["query"]].shape[1], list(args)  # (batch, head, token, number of a head)
    for name in ("key", "value"):
        num = args[at[name]].shape[1]
        if num != heads and heads % num == 0:  # no kernel takes other numbers, and torch raises an error
            args[at[name]] = args[at[name]][:, :1].expand(-1, heads, -1, -1)
    return args


def bytes_moved_by(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the bytes that one call of `func` with result `out` reads and writes. By default it reads each input once, and
    writes each output and each changed argument once; the row of `func` may differ. Expanded tensors count as their storage."""
    row = row_of(func)
    if row.moved is not None:
        return row.moved(args, out)
    mutated = _mutated(func)
    read = written = 0
    seen: set[int] = set()
    for name, value in _torch.named_arguments(func, args, kwargs):
        tensors = tensors_of(value)
        size = sum(map(num_bytes, tensors))
        if name in mutated:
            written += size
            seen.update(map(id, tensors))
        if not (name in mutated and (row.overwrites or name == "out")) and name not in row.unread:
            read += size
    written += sum(num_bytes(t) for t in tensors_of(out) if id(t) not in seen)
    return read + written


@cache
def row_of(func: Any) -> Operator:
    """Return the row of the operator `func`: its row in `OPERATORS` if it has one; `CUSTOM` if it is not one of torch's own;
    else the first row of `FAMILIES` that applies, or `PLAIN`."""
    if func._schema.name in OPERATORS:
        return OPERATORS[func._schema.name]
    if func.namespace not in NAMESPACES:
        return CUSTOM
    return next((row for belongs, row in FAMILIES if belongs(_name(func))), PLAIN)


@cache
def _mutated(func: Any) -> frozenset[str]:
    # Without gradients, which the schemas of fused optimizers list as written because they may unscale them.
    return frozenset(_torch.mutated_arguments(func)) - {"grads"}


def _name(func: Any) -> str:
    return str(func._schema.name.partition("::")[2])  # without its namespace


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in a tree of nested tuples, lists and dicts, in order; twice as fast as torch's pytree."""
    if isinstance(tree, Tensor):
        return [tree]
    tensors: list[Tensor] = []
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return tensors
    for item in tree:
        if isinstance(item, Tensor):
            tensors.append(item)
        elif isinstance(item, (tuple, list, dict)):
            tensors += tensors_of(item)
    return tensors


def num_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements, but at most those of its storage, which an expanded tensor exceeds."""
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())


# -- arithmetic


def _grouped(args: Any) -> float:
    """Return the flops of a grouped matrix product of the two tensors `args[:2]`, with one group for each expert. Their shapes
    are (rows, k) x (groups, k, n), (groups, m, k) x (k, columns), (m, rows) x (rows, n) or (groups, m, k) x (groups, k, n).
    Each row or column of a 2-D tensor belongs to one group."""
    left, right = args[:2]
    if left.dim() == 3 and right.dim() == 2:
        return float(2 * right.numel() * left.shape[-2])
    return float(2 * left.numel() * right.shape[-1])


# -- workspaces on CUDA


def _flash_backward(args: Any) -> int:
    """Return the workspace bytes of FlashAttention's backward: the query's gradient and one sum per token and head in float32,
    with tokens rounded up to a multiple of 128, and if there are fewer key heads than query heads, also gradients of key and
    value for each query head. `args`: arguments of the backward operator; tensors are (batch, heads, tokens, head dim)."""
    query, key = args[1], args[2]
    rounded = -(-query.shape[2] // 128) * 128
    sums = query.shape[0] * query.shape[1] * rounded * (query.shape[3] + 1) * 4
    expanded = 0
    if key.shape[1] != query.shape[1]:
        expanded = 2 * key.shape[0] * query.shape[1] * prod(key.shape[2:]) * key.itemsize
    return int(sums + expanded)


def _times(times: int, args: Any, kwargs: Any, out: Any) -> int:
    """Return the bytes of all inputs and outputs, multiplied by `times`."""
    return times * sum(map(num_bytes, tensors_of((args, kwargs, out))))


_twice, _four_times = partial(_times, 2), partial(_times, 4)


def _convolution(result: Tensor, x: Tensor, weight: Tensor) -> int:
    """Return an upper bound of the workspace bytes of a convolution: the unfolded input `x` (im2col), and copies of the three
    tensors in another layout. `result`: the output, or its gradient."""
    unfolded = x.shape[0] * prod(weight.shape[1:]) * prod(result.shape[2:]) * x.itemsize
    return unfolded + sum(map(num_bytes, (result, x, weight)))


def _embedding_backward(args: Any, kwargs: Any, out: Any) -> float:
    """Return an upper bound of the workspace bytes of an embedding's backward: for each index, four int64 numbers for sorted
    and original indices, and 1.1 rows of partial sums in float32. `args`: (gradient of the output, indices, ...)."""
    grad, indices = args[:2]
    return float(indices.numel() * (4 * 8 + 1.1 * grad.shape[-1] * 4))


# -- the table

ADDS_PRODUCT = Operator(flops=lambda args: 2.0 * args[1].numel() * args[2].shape[-1])  # args: (target, left, right)
# An operator that picks rows from a table reads only as many bytes as it writes.
PICKS_ROWS = Operator(moved=lambda args, out: 2 * sum(map(num_bytes, tensors_of(out))))
PLAIN = Operator()
CUSTOM = Operator(
    bound=_twice,
    why="a custom operator, whose kernels are not traced: at most twice its inputs and outputs; no arithmetic is counted",
)
CUDNN = "cuDNN chooses an algorithm by its size: at most the unfolded input, and copies in another layout"

OPERATORS: Mapping[str, Operator] = {
    "aten::addmm_": ADDS_PRODUCT,
    "aten::baddbmm_": ADDS_PRODUCT,
    "aten::_grouped_mm": Operator(flops=_grouped),
    "aten::_scaled_grouped_mm": Operator(flops=_grouped),
    "transformers::grouped_mm_fallback": replace(CUSTOM, flops=_grouped),
    "transformers::grouped_mm_fallback_backward": replace(CUSTOM, flops=lambda args: 2 * _grouped(args)),
    "aten::_scaled_dot_product_flash_attention_backward": Operator(workspace=_flash_backward),
    "aten::_scaled_dot_product_efficient_attention_backward": Operator(  # gradients of query, key and value
        bound=lambda args, kwargs, out: sum(4 * t.numel() for t in args[1:4]), why="may sum gradients in float32"
    ),
    "aten::convolution": Operator(bound=lambda args, kwargs, out: _convolution(out, *args[:2]), why=CUDNN),
    "aten::convolution_backward": Operator(
        bound=lambda args, kwargs, out: _convolution(*args[:3]) + sum(map(num_bytes, tensors_of(out))), why=CUDNN
    ),
    "aten::embedding": PICKS_ROWS,
    "aten::embedding_dense_backward": Operator(bound=_embedding_backward, why="sorts indices and sums rows in chunks"),
    "aten::index_select": PICKS_ROWS,
    "aten::gather": PICKS_ROWS,
    "aten::_log_softmax": Operator(  # reads its input twice, first for the sum of each row
        moved=lambda args, out: 2 * num_bytes(args[0]) + num_bytes(out)
    ),
    "aten::nll_loss_forward": Operator(unread=("self",)),
    "aten::nll_loss_backward": Operator(unread=("self", "target", "total_weight")),
    "aten::copy_": Operator(overwrites=True),
    "aten::zero_": Operator(overwrites=True),
    "aten::fill_": Operator(overwrites=True),
    "aten::_foreach_copy_": Operator(overwrites=True),
    "aten::_foreach_zero_": Operator(overwrites=True),
    "fsdp::all_gather_copy_in": Operator(  # copies this rank's shards alone into the all-gather's buffer
        moved=lambda args, out: 2 * sum(map(num_bytes, tensors_of(args[0])))
    ),
}
"""Schema name -> row. Workspaces are from torch 2.13's sources if these state them; others are usual upper bounds."""

NAMESPACES = ("aten", "prim", "prims", "c10d", "_c10d_functional", "fsdp", "profiler", "inductor")
"""Namespaces of torch's own operators; operators of other namespaces are custom."""

SORTS = ("sort", "topk", "unique", "argsort", "kthvalue", "median", "mode", "index_put", "scatter", "cumsum", "cumprod")
SOLVES = ("linalg_", "_linalg_", "cholesky", "lu_", "triangular_solve", "ormqr", "geqrf")

FAMILIES: Sequence[tuple[Callable[[str], bool], Operator]] = [
    (
        lambda name: name.startswith(SORTS),
        Operator(bound=_four_times, why="sorts or scans: buffers of at most four times its inputs and outputs"),
    ),
    (
        lambda name: "mkldnn" in name or name.endswith("_for_cpu"),
        Operator(bound=_twice, why="a CPU operator; CUDA runs another one: at most twice its inputs and outputs"),
    ),
    (
        lambda name: name.startswith(SOLVES) and "norm" not in name,
        Operator(bound=_four_times, why="a solver: at most four times its inputs and outputs"),
    ),
]
"""(test of the name without namespace, row) of torch's operators that are not in OPERATORS; the first true test counts."""
