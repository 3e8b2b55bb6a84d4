"""The base of modes that watch memory: storages that operators are given or make, until they die."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from accordion import _torch

_Mode: Any = _torch.EagerMode


class StorageWatch(_Mode):  # type: ignore[misc]
    """Owns the list of watched storages, by key. A subclass says which storages it watches, and what their changes mean.

    Operators of a DTensor are seen as those of its local tensors. The inside of operators is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._deaths: dict[int, weakref.ref[Any]] = {}

    def runs(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operator on local tensors: run it, and return what it makes."""
        raise NotImplementedError

    def resized(self, key: int, storage: torch.UntypedStorage) -> None:
        """A watched storage was resized from Python."""
        raise NotImplementedError

    def died(self, key: int) -> None:
        """A watched storage is gone; another one may have its key from now on."""
        raise NotImplementedError

    def watch(self, storage: torch.UntypedStorage) -> bool:
        """Watch a storage until it dies. Whether it is a new one."""
        key = _torch.storage_key(storage)
        if key in self._deaths:
            return False
        self._deaths[key] = weakref.ref(storage, lambda _: self._ends(key))
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local operators come back here
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
