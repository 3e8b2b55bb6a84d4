"""How many bytes of the device's memory an operator reads and writes, by its schema and arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from torch import Tensor

from accordion import _torch


def traffic_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Bytes read and written by one kernel over all, each tensor once; what is expanded is read once."""
    special = SPECIAL.get(str(func))
    if special is not None:
        return special(args, out)
    written_only, mutated, ignored = _roles(func)
    read = written = 0
    seen: set[int] = set()
    for name, value in _torch.named_arguments(func, args, kwargs):
        tensors = tensors_of(value)
        if name in mutated:
            written += sum(map(num_bytes, tensors))
            seen.update(id(t) for t in tensors)
        if name not in written_only and name not in ignored:
            read += sum(map(num_bytes, tensors))
    written += sum(num_bytes(t) for t in tensors_of(out) if id(t) not in seen)
    return read + written


@cache
def _roles(func: Any) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Names of the arguments that are written and not read, of those that are written, and of those not touched."""
    mutated = {
        name for name in _torch.mutated_arguments(func) if name != "grads"
    }  # fused optimizers unscale them at most
    kept = {name for name in mutated if name == "out" or str(func).startswith(OVERWRITES)}
    return frozenset(kept), frozenset(mutated), frozenset(UNREAD.get(str(func), ()))


OVERWRITES = ("aten.copy_", "aten.zero_", "aten.fill_", "aten._foreach_copy_", "aten._foreach_zero_")
UNREAD: Mapping[str, Iterable[str]] = {  # arguments of which a few elements are read at most
    "aten.nll_loss_backward.default": ("self", "target", "total_weight"),
    "aten.nll_loss_forward.default": ("self",),
}


def _rows(args: Any, out: Any) -> int:
    """Rows that are picked from a table."""
    return 2 * sum(map(num_bytes, tensors_of(out)))


def _softmax(args: Any, out: Any) -> int:
    """Twice over the input: a row's sum first, then the row."""
    return 2 * num_bytes(args[0]) + sum(map(num_bytes, tensors_of(out)))


def _copy_in(args: Any, out: Any) -> int:
    """FSDP2's shards into its own part of the message, whose other parts are only passed on."""
    return 2 * sum(map(num_bytes, tensors_of(args[0])))


SPECIAL: Mapping[str, Callable[[Any, Any], int]] = {
    "aten.embedding.default": _rows,
    "aten.index_select.default": _rows,
    "aten.gather.default": _rows,
    "aten._log_softmax.default": _softmax,
    "fsdp.all_gather_copy_in.default": _copy_in,
}


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
