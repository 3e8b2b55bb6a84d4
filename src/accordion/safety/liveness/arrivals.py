"""How often each of some ranks has come to one place, counted in the job's store: for waits before ranks have a hub."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Arrivals:
    """Counters of the ranks that come to `name`. `time`: how often this rank has come."""

    def __init__(self, store: Any, name: str, ranks: Sequence[int], time: int = 0) -> None:
        self._store, self._name, self._ranks, self.time = store, name, ranks, time

    def come(self, rank: int) -> None:
        """Count this rank, once more than before."""
        self.time = self.count(rank, 1)
        self._store.add(f"{self._name}/met/{self.time}", 1)

    def count(self, rank: int, more: int = 0) -> int:
        """Return how often a rank has come, with `more` added."""
        return int(self._store.add(f"{self._name}/of/{rank}", more))

    def all_came(self) -> bool:
        """Return True if all ranks have come as often as this one."""
        return int(self._store.add(f"{self._name}/met/{self.time}", 0)) >= len(self._ranks)

    def missing(self) -> list[int]:
        """Return the ranks that have come less often than this one."""
        return [rank for rank in self._ranks if self.count(rank) < self.time]

    def withdraw(self, rank: int) -> bool:
        """Have this time not count for this rank; return False if the last rank has just come after all."""
        if int(self._store.add(f"{self._name}/met/{self.time}", -1)) + 1 >= len(self._ranks):
            self._store.add(f"{self._name}/met/{self.time}", 1)
            return False
        self.count(rank, -1)
        return True

    def forget_last(self) -> None:
        """Delete the counter of the time before, which all ranks have left."""
        if self.time > 1:
            self._store.delete_key(f"{self._name}/met/{self.time - 1}")
