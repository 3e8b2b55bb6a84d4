"""The loop for all waits that poll."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

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
    """Return a callback for `while_waiting` of `poll` that calls `call` once, after `seconds`."""
    calls = [call]

    def check(waited_s: float) -> None:
        if waited_s > seconds and calls:
            calls.pop()()

    return check
