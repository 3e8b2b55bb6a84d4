"""Waits that poll: the loop, and a barrier in the job's store for ranks that have no hub yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
FIRST_S, LONGEST_S = 5e-5, 0.02


def poll(
    ready: Callable[[], T | None],
    timeout_s: float,
    while_waiting: Callable[[float], object] = lambda waited_s: None,
    pause: Callable[[float], object] = time.sleep,
    first_s: float = FIRST_S,
    longest_s: float = LONGEST_S,
) -> T | None:
    """Call `ready` until its result is true, and return that result; return None after `timeout_s`.

    Args:
        while_waiting: called between polls with the seconds since the first poll; it may raise to end the wait.
        pause: sleeps for its argument in seconds; it may return earlier if something has changed.
        first_s, longest_s: the first and the longest pause; each pause is twice as long as the one before.
    """
    begun, pause_s = time.monotonic(), first_s
    while not (answer := ready()):
        waited_s = time.monotonic() - begun
        if waited_s >= timeout_s:
            return None
        while_waiting(waited_s)
        pause(min(pause_s, timeout_s - waited_s))
        pause_s = min(2 * pause_s, longest_s)
    return answer


def once_after(seconds: float, call: Callable[[], object]) -> Callable[[float], None]:
    """Return a callback for `while_waiting` of `poll` that calls `call` once, when the wait has taken more than `seconds`."""
    calls = [call]

    def check(waited_s: float) -> None:
        if waited_s > seconds and calls:
            calls.pop()()

    return check


class Arrivals:
    """Reusable barrier of `ranks` in `store`, which counts how often each rank has arrived. `name`: prefix of the keys. `time`:
    number of times that this rank has arrived; `come` updates it."""

    def __init__(self, store: Any, name: str, ranks: Sequence[int], time: int = 0) -> None:
        self._store, self._name, self._ranks, self.time = store, name, ranks, time

    def come(self, rank: int) -> None:
        """Record that this rank, `rank`, has arrived once more. Does not wait; poll `all_came` for that."""
        self.time = self._count(rank, 1)
        self._store.add(f"{self._name}/met/{self.time}", 1)

    def _count(self, rank: int, more: int) -> int:
        """Add `more` to the number of times that `rank` has arrived, and return the new number."""
        return int(self._store.add(f"{self._name}/of/{rank}", more))

    def all_came(self) -> bool:
        """Return True if all ranks have arrived at least as often as this one."""
        return int(self._store.add(f"{self._name}/met/{self.time}", 0)) >= len(self._ranks)

    def missing(self) -> list[int]:
        """Return the ranks that have arrived less often than this one."""
        return [rank for rank in self._ranks if self._count(rank, 0) < self.time]

    def withdraw(self, rank: int) -> bool:
        """Undo the last arrival of this rank, `rank`, and return True. If all ranks have arrived, only return False."""
        if int(self._store.add(f"{self._name}/met/{self.time}", -1)) + 1 >= len(self._ranks):
            self._store.add(f"{self._name}/met/{self.time}", 1)
            return False
        self._count(rank, -1)
        return True
