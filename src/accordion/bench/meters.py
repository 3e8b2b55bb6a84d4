"""A meter of bytes sent, from the collectives that torch's dispatcher sees."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from accordion import _torch

# Part of an operator's name -> (index of the argument with the full tensors, how often (n - 1) / n of their bytes are sent).
FACTORS = {
    "gather": (0, 1),
    "reduce_scatter": (1, 1),
    "alltoall": (1, 1),
    "all_to_all": (1, 1),
    "allreduce": (0, 2),
    "broadcast": (0, 1),
}


class Wire(_torch.DispatchMode):
    """Context manager that counts bytes that this rank sends (`num_bytes`) and collectives that it launches (`launches`), both as
    kind of collective -> count.

    Bytes are those of the best algorithm: (n - 1) / n of the full tensors for an all-gather, a reduce-scatter, an all-to-all
    and a broadcast, twice that for an all-reduce, the whole message for a send. Receives, barriers and a store do not count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor's dispatch then calls this again with local tensors
        space, _, name = str(func.name()).partition("::")
        if space == "c10d":
            self._count(name.partition(".")[0], args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        if name == "send":
            self.num_bytes[name] += sum(t.nbytes for t in args[0])
            self.launches[name] += 1
            return
        factor = next((factor for part, factor in FACTORS.items() if part in name), None)
        if factor is None or name.startswith("recv"):
            return
        index, times = factor
        full = sum(leaf.nbytes for leaf in tree_leaves(args[index]) if isinstance(leaf, Tensor))
        num_ranks = max(filter(None, map(ranks_of, tree_leaves(list(args)))), default=1)
        self.num_bytes[name.strip("_")] += times * full * (num_ranks - 1) // num_ranks
        self.launches[name.strip("_")] += 1


def ranks_of(value: Any) -> int | None:
    """Return the number of ranks if `value` is a process group, boxed as in the arguments of an operator; otherwise None."""
    if not isinstance(value, torch.ScriptObject):
        return None
    try:
        return int(torch.distributed.ProcessGroup.unbox(value).size())
    except (RuntimeError, AttributeError):
        return None
