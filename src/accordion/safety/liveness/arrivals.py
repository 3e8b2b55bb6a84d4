"""Barriers in the job's store, for waits before ranks have a hub: the store counts how often each rank has arrived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Arrivals:
    """Reusable barrier of `ranks` in `store`. `name`: prefix of its keys. `time`: how many times this rank has arrived."""

    def __init__(self, store: Any, name: str, ranks: Sequence[int], time: int = 0) -> None:
        self._store, self._name, self._ranks, self.time = store, name, ranks, time

    def come(self, rank: int) -> None:
        """Record that this rank, `rank`, has arrived once more. Does not wait; poll `all_came` for that."""
        self.time = self.count(rank, 1)
        self._store.add(f"{self._name}/met/{self.time}", 1)

    def count(self, rank: int, more: int = 0) -> int:
        """Add `more` to the number of times that `rank` has arrived, and return the new number."""
        return int(self._store.add(f"{self._name}/of/{rank}", more))

    def all_came(self) -> bool:
        """Return True if all ranks have arrived as often as this one."""
        return int(self._store.add(f"{self._name}/met/{self.time}", 0)) >= len(self._ranks)

    def missing(self) -> list[int]:
        """Return the ranks that have arrived less often than this one."""
        return [rank for rank in self._ranks if self.count(rank) < self.time]

    def withdraw(self, rank: int) -> bool:
        """Undo the last arrival of `rank` and return True; return False if all ranks have just arrived after all."""
        if int(self._store.add(f"{self._name}/met/{self.time}", -1)) + 1 >= len(self._ranks):
            self._store.add(f"{self._name}/met/{self.time}", 1)
            return False
        self.count(rank, -1)
        return True
