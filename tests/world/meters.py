"""Meters that trust nothing: bytes by storage, collectives and copies as the dispatcher sees them."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Owns the count of live bytes: every storage that an operator makes, until it dies or is resized.

    The inside of operators is not seen, nor what the backend takes for itself: gloo copies each message once more,
    NCCL does not. The profiler's memory events will not do: they miss what gloo's threads free.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self._history = [0]
        self._marks: dict[str, int] = {}
        self._sizes: dict[int, int] = {}  # by address of the storage; -1 for those that were there before
        self._starts: dict[int, int] = {}  # addresses of their memory
        self._deaths: dict[int, weakref.ref[Any]] = {}

    def mark(self, name: str) -> None:
        """Give this moment a name."""
        assert name not in self._marks, name
        self._marks[name] = len(self._history) - 1

    def live(self, mark: str) -> int:
        """Bytes that were live at a mark."""
        return self._history[self._marks[mark]]

    def peak(self, start: str, end: str) -> int:
        """The most bytes that were live at any time between two marks."""
        return max(self._history[self._marks[start] : self._marks[end] + 1])

    def count(self, sizes: range) -> int:
        """Storages that are live now and have a size among `sizes`."""
        return sum(size in sizes for size in self._sizes.values())

    @property
    def marks(self) -> list[str]:
        return list(self._marks)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local operators come back here
        given = storages_of((args, kwargs))
        for storage in given:
            if storage._cdata not in self._sizes:
                self._meet(storage, counted=False)
        out = func(*args, **(kwargs or {}))
        for storage in [*given, *storages_of(out)]:
            self._update(storage)
        return out

    def __enter__(self) -> Allocations:
        plain = self._resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            known = storage._cdata in self._sizes
            result = plain(storage, size)
            if known:
                self._update(storage)
            return result

        torch.UntypedStorage.resize_ = resize
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def _meet(self, storage: torch.UntypedStorage, counted: bool) -> None:
        key = storage._cdata
        self._sizes[key] = 0 if counted else -1
        self._deaths[key] = weakref.ref(storage, lambda _: self._forget(key))

    def _update(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._meet(storage, counted=True)
        if self._sizes[key] >= 0 and self._sizes[key] != storage.nbytes():
            size = 0 if self._is_part(key, storage) else storage.nbytes()
            self._change(size - self._sizes[key])
            self._sizes[key] = size
            self._starts[key] = storage.data_ptr()

    def _is_part(self, key: int, storage: torch.UntypedStorage) -> bool:
        """Whether it lies in the memory of another one, as a slice of a storage does."""
        start = storage.data_ptr()
        others = list(self._starts.items())  # a copy: a storage may die, and be forgotten, at any point
        return any(first <= start < first + self._sizes.get(other, 0) for other, first in others if other != key)

    def _forget(self, key: int) -> None:
        self._change(-max(self._sizes.pop(key), 0))
        self._starts.pop(key, None)
        del self._deaths[key]

    def _change(self, num_bytes: int) -> None:
        if num_bytes:
            self.live_bytes += num_bytes
            self._history.append(self.live_bytes)


def storages_of(tree: Any) -> list[torch.UntypedStorage]:
    """Storages of the tensors in a tree that have memory."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor)]
    return [t.untyped_storage() for t in tensors if not t.is_meta and type(t).__name__ != "FakeTensor"]


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
    """One collective. `numels`, `num_bytes`: of its full tensors, over all tensors of one launch."""

    kind: str
    group: str
    numels: tuple[int, ...]
    num_bytes: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One operator that only moves numbers. `cast`: between dtypes; `strided`: from a tensor that is not contiguous."""

    name: str
    numel: int
    cast: bool
    strided: bool


class Wire(TorchDispatchMode):
    """Owns the lists of all collectives and of all copies made while it is active, by any thread's own calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.copies: list[Copy] = []
        self.seen: Counter[str] = Counter()

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
        kind, index = next((found for part, found in KINDS.items() if part in name), (name, 0))
        tensors = [leaf for leaf in tree_leaves(args[index]) if isinstance(leaf, Tensor)]
        groups = [leaf for leaf in tree_leaves(list(args)) if isinstance(leaf, torch.ScriptObject)]
        found = [str(_size_of(group)) for group in groups if _size_of(group) is not None]
        self.calls.append(
            Call(
                kind=kind,
                group=found[0] if found else "",
                numels=tuple(t.numel() for t in tensors),
                num_bytes=sum(t.nbytes for t in tensors),
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


def _size_of(group: Any) -> int | None:
    """Ranks of a boxed process group; None for another boxed object."""
    try:
        return torch.distributed.ProcessGroup.unbox(group).size()
    except (RuntimeError, AttributeError):
        return None
