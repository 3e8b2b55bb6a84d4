"""Follow storages, from what torch's dispatcher sees, and count the bytes of live ones."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from accordion import _torch

_Mode: Any = _torch.EagerMode


class StorageWatch(_Mode):  # type: ignore[misc]
    """A dispatch mode (context manager) that reports when a watched storage is resized or freed. A subclass implements the
    callbacks `runs`, `resized` and `died`, and chooses the storages with `watch`.

    Operators on DTensors are seen as operators on their local tensors. Memory that a kernel allocates inside is not seen. While
    the mode is active, `torch.UntypedStorage.resize_` is replaced for the whole process.
    """

    def __init__(self) -> None:
        super().__init__()
        self._deaths: dict[int, weakref.ref[Any]] = {}

    def runs(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Callback for each operator in the mode: call `func`, and return its result. May `watch` storages before and after."""
        raise NotImplementedError

    def resized(self, key: int, storage: torch.UntypedStorage) -> None:
        """Callback after a watched storage was resized from Python in the mode. `key`: `_torch.storage_key(storage)`."""
        raise NotImplementedError

    def died(self, key: int) -> None:
        """Callback when a watched storage is freed, also after the mode has ended. Later storages may reuse the `key`."""
        raise NotImplementedError

    def watch(self, storage: torch.UntypedStorage) -> bool:
        """Watch `storage` until it is freed. Returns True if it was not watched before."""
        key = _torch.storage_key(storage)
        if key in self._deaths:
            return False
        self._deaths[key] = weakref.ref(storage, lambda _: self._ends(key))
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor runs operators on local tensors, which this mode sees
        return self.runs(func, args, kwargs or {})

    def __enter__(self) -> Any:
        patched: Any = torch.UntypedStorage
        plain = self._resize = patched.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            key = _torch.storage_key(storage)
            is_watched = key in self._deaths
            result = plain(storage, size)
            if is_watched:
                self.resized(key, storage)
            return result

        patched.resize_ = resize
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        patched: Any = torch.UntypedStorage
        patched.resize_ = self._resize
        super().__exit__(*error)

    def _ends(self, key: int) -> None:
        self.died(key)
        self._deaths.pop(key, None)


class Allocations(StorageWatch):
    """Context manager that counts live bytes: the sizes of storages that operators create inside it, until they are freed. It may
    be entered again. Memory that a backend allocates for itself is not counted, such as gloo's copies. `live_bytes`: the bytes
    that are live at present."""

    # The profiler's memory events are no alternative, since they miss what gloo's threads free.

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self._history = [0]
        self._marks: dict[str, int] = {}
        self._sizes: dict[int, int] = {}  # storage's key -> bytes; -1 for storages that existed before
        self._starts: dict[int, int] = {}  # storage's key -> address of its memory

    def mark(self, name: str) -> None:
        """Name the present moment, for `live` and `peak`. Each name can be used once."""
        assert name not in self._marks, name
        self._marks[name] = len(self._history) - 1

    def live(self, mark: str) -> int:
        """Return the bytes that were live at the moment named `mark`."""
        return self._history[self._marks[mark]]

    def peak(self, start: str, end: str) -> int:
        """Return the most bytes that were live at once between the moments named `start` and `end`."""
        return max(self._history[self._marks[start] : self._marks[end] + 1])

    def count(self, sizes: range) -> int:
        """Return how many of the counted storages that are live at present have a size, in bytes, in `sizes`."""
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
    """Return the storage of each tensor in nested `tree`, repeated if tensors share it. Skips DTensors, meta and fake tensors."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor)]
    return [t.untyped_storage() for t in tensors if not t.is_meta and type(t).__name__ != "FakeTensor"]
