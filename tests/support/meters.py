"""Meters of collectives and copies, from the operators that torch's dispatcher sees, and of bytes of storages."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accordion.bench.meters import ranks_of
from accordion.observe.allocations import Allocations

__all__ = ["Allocations", "Call", "Copy", "Wire"]


KINDS = {  # part of the operator's name -> (what it is, index of the argument whose bytes count)
    "gather": ("gather", 0),  # the full tensors received
    "reduce_scatter": ("reduce", 1),  # the full tensors sent
    "alltoall": ("reduce", 1),
    "allreduce": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
}
COPIES = ("copy", "clone", "cat", "split_with_sizes_copy", "stack", "index_put", "contiguous", "foreach_add", "lerp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One collective. `kind`: "gather", "reduce", "all_reduce", "broadcast", or the operator's name. `group`: number of its
    ranks, as text. `numels`: elements of each of its full tensors. `num_bytes`: bytes of these together. `dtype`: that of the
    first."""

    kind: str
    group: str
    numels: tuple[int, ...]
    num_bytes: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One operator that copies elements. `numel`: elements of its largest tensor. `cast`: True if its tensors differ in dtype.
    `strided`: True if one of them is not contiguous."""

    name: str
    numel: int
    cast: bool
    strided: bool


class Wire(TorchDispatchMode):
    """Context manager that records the operators called in it: `calls` are the collectives, `copies` the copies, and
    `seen` counts operators by name. `of(kind)` returns the collectives of one kind."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.copies: list[Copy] = []
        self.seen: Counter[str] = Counter()
        self._sent: dict[int, list[int]] = {}  # elements of each message between two ranks, by tag; of both directions

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local operators come back here
        name = func._schema.name
        self.seen[name] += 1
        if name.startswith(("c10d::", "_c10d_functional::")):
            self._collective(name, args)
        elif name.startswith("aten::") and any(part in name for part in COPIES):
            self._copy(name, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _collective(self, name: str, args: Any) -> None:
        """Record a collective. Sends and receives are not recorded: they count as large tensors of the next gather or reduce."""
        if name in ("c10d::send", "c10d::recv_"):
            pair = self._sent.setdefault(args[3], [0, 0, 0, 0])
            at = 0 if name == "c10d::send" else 2
            pair[at] += args[0][0].numel()
            pair[at + 1] += 1
            return
        kind, index = next((found for part, found in KINDS.items() if part in name), (name, 0))
        tensors = [leaf for leaf in tree_leaves(args[index]) if isinstance(leaf, Tensor)]
        groups = [leaf for leaf in tree_leaves(list(args)) if isinstance(leaf, torch.ScriptObject)]
        # This rank's part travels nowhere: as large as what it sends to each in a gather, receives from each in a reduce.
        parts = [(a + b // max(j, 1) if kind == "reduce" else b + a // max(i, 1)) for a, i, b, j in self._sent.values()]
        self._sent.clear()
        found = [str(ranks_of(group)) for group in groups if ranks_of(group) is not None]
        self.calls.append(
            Call(
                kind=kind,
                group=found[0] if found else "",
                numels=(*parts, *(t.numel() for t in tensors)),
                num_bytes=sum(t.nbytes for t in tensors) + sum(parts) * (tensors[0].itemsize if tensors else 0),
                dtype=tensors[0].dtype if tensors else torch.uint8,
            )
        )

    def _copy(self, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        tensors = [leaf for leaf in tree_leaves([list(args), kwargs]) if isinstance(leaf, Tensor)]
        dtypes = {t.dtype for t in tensors} | ({kwargs["dtype"]} if kwargs.get("dtype") else set())
        if tensors:
            largest = max(tensors, key=Tensor.numel)
            strided = any(not t.is_contiguous() for t in tensors)
            self.copies.append(Copy(name=name, numel=largest.numel(), cast=len(dtypes) > 1, strided=strided))

    def of(self, kind: str) -> list[Call]:
        return [call for call in self.calls if call.kind == kind]
