"""What is known of operators: one table of what each computes, moves, and takes inside itself on CUDA.

An operator without a row computes what torch's own counter says, reads and writes each tensor of its schema once, and
takes nothing inside itself that matters. A row says what is otherwise.
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
    """How one operator, or a family of them, differs from what its schema says.

    `flops(args)`: two for each product of two numbers. `moved(args, out)`: bytes read and written. `unread`: arguments of
    which it reads a few elements at most. `overwrites`: it does not read what it writes into. `workspace(args)`: bytes that
    it takes for itself on CUDA and gives back. `bound(args, kwargs, out)`: where those are not known, the most that they may
    be, and `why` they are not known.
    """

    flops: Callable[[Any], float] | None = None
    moved: Callable[[Any, Any], int] | None = None
    unread: Sequence[str] = ()
    overwrites: bool = False
    workspace: Callable[[Any], int] | None = None
    bound: Callable[[Any, Any, Any], float] | None = None
    why: str = ""


# -- what is asked of an operator, as a dispatch mode sees it


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Two for each product of two numbers; 0 for what has none."""
    known = known_of(func).flops
    if known is not None:
        return known(args)
    count = flop_registry.get(getattr(func, "_overloadpacket", None))
    if count is not None and _name(func).startswith("_scaled_dot_product"):
        args = _with_all_heads(func, args)
    flops = float(count(*args, **kwargs, out_val=out)) if count is not None else 0.0
    if flops and "attention" in _name(func) and _torch.argument_of(func, "is_causal", args, kwargs):
        flops /= 2  # torch counts it whole
    return flops


def _with_all_heads(func: Any, args: Any) -> Any:
    """Keys and values with as many heads as queries: a kernel computes as much, and torch 2.11 counts nothing else."""
    at = {argument.name: i for i, argument in enumerate(func._schema.arguments[: len(args)])}
    heads, args = args[at["query"]].shape[1], list(args)  # (batch, head, token, number of a head)
    for name in ("key", "value"):
        own = args[at[name]].shape[1]
        if own != heads and heads % own == 0:  # else no kernel takes them, and torch says so
            args[at[name]] = args[at[name]][:, :1].expand(-1, heads, -1, -1)
    return args


def bytes_moved_by(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Bytes read and written by one kernel over all, each tensor once; what is expanded is read once."""
    known = known_of(func)
    if known.moved is not None:
        return known.moved(args, out)
    mutated = _mutated(func)
    read = written = 0
    seen: set[int] = set()
    for name, value in _torch.named_arguments(func, args, kwargs):
        tensors = tensors_of(value)
        written_only = name in mutated and (known.overwrites or name == "out")
        if name in mutated:
            written += sum(map(num_bytes, tensors))
            seen.update(id(t) for t in tensors)
        if not written_only and name not in known.unread:
            read += sum(map(num_bytes, tensors))
    written += sum(num_bytes(t) for t in tensors_of(out) if id(t) not in seen)
    return read + written


def workspace_of(func: Any, args: Any) -> int:
    """Bytes that it takes for itself on CUDA and gives back, where they are known; what no trace sees."""
    known = known_of(func).workspace
    return 0 if known is None else known(args)


def unknown_workspace_of(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[int, str]:
    """(the most bytes that it may take for itself on CUDA, why that is not known); 0 where it is known."""
    known = known_of(func)
    return (0, "") if known.bound is None else (int(known.bound(args, kwargs, out)), known.why)


@cache
def known_of(func: Any) -> Operator:
    """Its row, or that of its family."""
    if func._schema.name in OPERATORS:
        return OPERATORS[func._schema.name]
    if func.namespace not in NAMESPACES:
        return CUSTOM
    return next((row for belongs, row in FAMILIES if belongs(_name(func))), PLAIN)


@cache
def _mutated(func: Any) -> frozenset[str]:
    """Arguments that are written; fused optimizers unscale their gradients at most."""
    return frozenset(_torch.mutated_arguments(func)) - {"grads"}


def _name(func: Any) -> str:
    """Without its namespace."""
    return str(func._schema.name.partition("::")[2])


def tensors_of(tree: Any) -> list[Tensor]:
    """Tensors in the tuples, lists and mappings that operators take and give; twice as fast as torch's own trees."""
    if isinstance(tree, Tensor):
        return [tree]
    found: list[Tensor] = []
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return found
    for item in tree:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (tuple, list, dict)):
            found += tensors_of(item)
    return found


def num_bytes(tensor: Tensor) -> int:
    """Of the memory behind a tensor: what is expanded counts once."""
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())


# -- arithmetic


def _grouped(args: Any) -> float:
    """Of experts: where one side is 2-D its rows, or columns, are dealt out to the groups of the other, and so each is used once.

    (rows, k) x (groups, k, n), (groups, m, k) x (k, columns), (m, rows) x (rows, n), (groups, m, k) x (groups, k, n).
    """
    left, right = args[:2]
    if left.dim() == 3 and right.dim() == 2:
        return float(2 * right.numel() * left.shape[-2])
    return float(2 * left.numel() * right.shape[-1])


def _grouped_backward(args: Any) -> float:
    """As many for each of the two gradients."""
    return 2 * _grouped(args)


def _added(args: Any) -> float:
    """Of a product that is added to something in its place: (target, left, right)."""
    return float(2 * args[1].numel() * args[2].shape[-1])


# -- bytes moved


def _rows(args: Any, out: Any) -> int:
    """Rows that are picked from a table."""
    return 2 * sum(map(num_bytes, tensors_of(out)))


def _softmax(args: Any, out: Any) -> int:
    """Twice over the input: a row's sum first, then the row."""
    return 2 * num_bytes(args[0]) + sum(map(num_bytes, tensors_of(out)))


def _copy_in(args: Any, out: Any) -> int:
    """FSDP2's shards into its own part of the message, whose other parts are only passed on."""
    return 2 * sum(map(num_bytes, tensors_of(args[0])))


# -- workspaces on CUDA


def _flash_backward(args: Any) -> int:
    """FlashAttention-2 adds the query's gradient up in float32; with fewer key heads it makes theirs for each query head."""
    query, key = args[1], args[2]
    rounded = -(-query.shape[2] // 128) * 128
    sums = query.shape[0] * query.shape[1] * rounded * (query.shape[3] + 1) * 4
    expanded = 0
    if key.shape[1] != query.shape[1]:
        expanded = 2 * key.shape[0] * query.shape[1] * prod(key.shape[2:]) * key.itemsize
    return int(sums + expanded)


def _times(times: int, args: Any, kwargs: Any, out: Any) -> int:
    """So many times what it is given and makes."""
    return times * (sum(map(num_bytes, tensors_of((args, kwargs)))) + sum(map(num_bytes, tensors_of(out))))


_twice, _four_times = partial(_times, 2), partial(_times, 4)


def _convolution(args: Any, kwargs: Any, out: Any) -> int:
    """The input unfolded, as a product of matrices takes it, and copies of all in another layout."""
    x, weight = args[0], args[1]
    made = tensors_of(out)[0]
    unfolded = x.shape[0] * prod(weight.shape[1:]) * prod(made.shape[2:]) * x.itemsize
    return int(unfolded + sum(map(num_bytes, (x, weight, made))))


def _convolution_backward(args: Any, kwargs: Any, out: Any) -> int:
    grad, x, weight = args[:3]
    unfolded = x.shape[0] * prod(weight.shape[1:]) * prod(grad.shape[2:]) * x.itemsize
    return int(unfolded + sum(map(num_bytes, (grad, x, weight))) + sum(map(num_bytes, tensors_of(out))))


def _embedding_backward(args: Any, kwargs: Any, out: Any) -> float:
    """Sorted and original indices, and partial sums of the rows in float32: one for each index and one for every ten."""
    grad, indices = args[0], args[1]
    return float(indices.numel() * (4 * 8 + 1.1 * grad.shape[-1] * 4))


def _attention_backward(args: Any, kwargs: Any, out: Any) -> int:
    """Sums of the gradients of query, key and value in float32."""
    return sum(4 * t.numel() for t in args[1:4])


# -- the table

PLAIN = Operator()
CUSTOM = Operator(
    bound=_twice,
    why="a custom operator; its inside is not traced: twice what it is given and makes, and no arithmetic",
)
CUDNN = "cuDNN chooses an algorithm by its size; the input unfolded, and copies in another layout"

OPERATORS: Mapping[str, Operator] = {
    "aten::addmm_": Operator(flops=_added),
    "aten::baddbmm_": Operator(flops=_added),
    "aten::_grouped_mm": Operator(flops=_grouped),
    "aten::_scaled_grouped_mm": Operator(flops=_grouped),
    "transformers::grouped_mm_fallback": replace(CUSTOM, flops=_grouped),
    "transformers::grouped_mm_fallback_backward": replace(CUSTOM, flops=_grouped_backward),
    "aten::_scaled_dot_product_flash_attention_backward": Operator(workspace=_flash_backward),
    "aten::_scaled_dot_product_efficient_attention_backward": Operator(
        bound=_attention_backward, why="may sum gradients in float32"
    ),
    "aten::convolution": Operator(bound=_convolution, why=CUDNN),
    "aten::convolution_backward": Operator(bound=_convolution_backward, why=CUDNN),
    "aten::embedding": Operator(moved=_rows),
    "aten::embedding_dense_backward": Operator(bound=_embedding_backward, why="sorts indices and sums rows in pieces"),
    "aten::index_select": Operator(moved=_rows),
    "aten::gather": Operator(moved=_rows),
    "aten::_log_softmax": Operator(moved=_softmax),
    "aten::nll_loss_forward": Operator(unread=("self",)),
    "aten::nll_loss_backward": Operator(unread=("self", "target", "total_weight")),
    "aten::copy_": Operator(overwrites=True),
    "aten::zero_": Operator(overwrites=True),
    "aten::fill_": Operator(overwrites=True),
    "aten::_foreach_copy_": Operator(overwrites=True),
    "aten::_foreach_zero_": Operator(overwrites=True),
    "fsdp::all_gather_copy_in": Operator(moved=_copy_in),
}
"""By the name in the schema. Workspaces: read in torch 2.13's sources where they say; the rest is the most that is usual."""

NAMESPACES = ("aten", "prim", "prims", "c10d", "_c10d_functional", "fsdp", "profiler", "inductor")
"""Of torch; operators of all others are custom ones."""

SORTS = ("sort", "topk", "unique", "argsort", "kthvalue", "median", "mode", "index_put", "scatter", "cumsum", "cumprod")
SOLVES = ("linalg_", "_linalg_", "cholesky", "lu_", "triangular_solve", "ormqr", "geqrf")

FAMILIES: Sequence[tuple[Callable[[str], bool], Operator]] = [
    (
        lambda name: name.startswith(SORTS),
        Operator(bound=_four_times, why="sorts or scans; buffers of four times what it is given and makes"),
    ),
    (
        lambda name: "mkldnn" in name or name.endswith("_for_cpu"),
        Operator(bound=_twice, why="the CPU's own; CUDA runs another: twice what it is given and makes"),
    ),
    (
        lambda name: name.startswith(SOLVES) and "norm" not in name,
        Operator(bound=_four_times, why="a solver; four times what it is given and makes"),
    ),
]
"""Operators of torch that have no row, by their names without a namespace; the first that fits counts."""
