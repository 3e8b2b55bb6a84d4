"""Base class of dispatch modes that follow the storages of operators' inputs and outputs until they are freed."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor

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
        """Called for each operator in the mode: call `func`, and return its result. May `watch` storages before and after."""
        raise NotImplementedError

    def resized(self, key: int, storage: torch.UntypedStorage) -> None:
        """Called after a watched storage was resized from Python in the mode. `key`: the number `_torch.storage_key(storage)`."""
        raise NotImplementedError

    def died(self, key: int) -> None:
        """Called when a watched storage is freed, also after the mode has ended. Later storages may reuse its `key`."""
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
