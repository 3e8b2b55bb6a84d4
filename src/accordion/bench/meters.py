"""Meters of memory and of bytes sent, from the storages and collectives that torch's dispatcher sees."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from accordion import _torch
from accordion.plan.trace.storage_watch import StorageWatch

_Mode: Any = _torch.DispatchMode


class Allocations(StorageWatch):
    """Context manager that counts live bytes: storages that operators make inside it, at their size, until they are freed.

    Memory of the backend itself is not seen: gloo copies each message once more, NCCL does not. The profiler's memory events
    are no alternative, since they miss what gloo's threads free.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self._history = [0]
        self._marks: dict[str, int] = {}
        self._sizes: dict[int, int] = {}  # storage's key -> bytes; -1 for storages that existed before
        self._starts: dict[int, int] = {}  # storage's key -> address of its memory

    def mark(self, name: str) -> None:
        """Give the present moment a name, for `live` and `peak`."""
        assert name not in self._marks, name
        self._marks[name] = len(self._history) - 1

    def live(self, mark: str) -> int:
        """Return the bytes that were live when `mark` was given that name."""
        return self._history[self._marks[mark]]

    def peak(self, start: str, end: str) -> int:
        """Return the most bytes that were live at once between the marks `start` and `end`."""
        return max(self._history[self._marks[start] : self._marks[end] + 1])

    def count(self, sizes: range) -> int:
        """Return the number of storages live at present whose size, in bytes, is in `sizes`."""
        return sum(size in sizes for size in self._sizes.values())

    @property
    def marks(self) -> list[str]:
        return list(self._marks)

    def runs(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        inputs = storages_of((args, kwargs))
        for storage in inputs:
            if self.watch(storage):
                self._sizes[_torch.storage_key(storage)] = -1
        out = func(*args, **kwargs)
        for storage in [*inputs, *storages_of(out)]:
            if self.watch(storage):
                self._sizes[_torch.storage_key(storage)] = 0
            self.resized(_torch.storage_key(storage), storage)
        return out

    def resized(self, key: int, storage: torch.UntypedStorage) -> None:
        if self._sizes[key] >= 0 and self._sizes[key] != storage.nbytes():
            start = storage.data_ptr()
            others = list(self._starts.items())  # a copy, since any storage may be freed and removed during the loop
            # A storage inside the memory of another one is a slice, which takes no memory of its own.
            is_part = any(first <= start < first + self._sizes.get(o, 0) for o, first in others if o != key)
            size = 0 if is_part else storage.nbytes()
            self._change(size - self._sizes[key])
            self._sizes[key] = size
            self._starts[key] = start

    def died(self, key: int) -> None:
        self._change(-max(self._sizes.pop(key), 0))
        self._starts.pop(key, None)

    def _change(self, num_bytes: int) -> None:
        if num_bytes:
            self.live_bytes += num_bytes
            self._history.append(self.live_bytes)


def storages_of(tree: Any) -> list[torch.UntypedStorage]:
    """Return the storage of each tensor in `tree`, repeated if shared; skips DTensors, and meta and fake tensors."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor)]
    return [t.untyped_storage() for t in tensors if not t.is_meta and type(t).__name__ != "FakeTensor"]


# Part of an operator's name -> (index of the argument with the full tensors, how often (n - 1) / n of their bytes are sent).
FACTORS = {
    "gather": (0, 1),
    "reduce_scatter": (1, 1),
    "alltoall": (1, 1),
    "all_to_all": (1, 1),
    "allreduce": (0, 2),
    "broadcast": (0, 1),
}


class Wire(_Mode):  # type: ignore[misc]
    """Context manager that counts the bytes that this rank sends and the collectives that it launches, by kind of collective.

    Bytes are those of the best algorithm: (n - 1) / n of the full tensors for an all-gather, a reduce-scatter, an all-to-all
    and a broadcast, twice that for an all-reduce, the whole message for a send. Traffic of a store is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
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
    """Return the number of ranks of `value`, a process group as an operator gets it; None for any other value."""
    if not isinstance(value, torch.ScriptObject):
        return None
    try:
        return int(torch.distributed.ProcessGroup.unbox(value).size())
    except (RuntimeError, AttributeError):
        return None
