"""Find the peak of allocated memory in a log, and its breakdown by category."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from accordion.plan.events import START, Alloc, Category, Enter, Free, Log, Op, StepPart, StepPhase


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveAllocations:
    """The `count` allocations of one operator and one category that are live at the peak."""

    operator: str
    category: str
    num_bytes: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPeak:
    """The peak of allocated memory during a step: its bytes, and what they are for."""

    num_bytes: int  # the most bytes that are live at once
    breakdown: dict[str, int]  # bytes at the peak by category
    phase: str  # phase of the step at the peak
    unit: str  # name of the unit at the peak, as in `name_of`
    operator: str  # operator that allocates the last bytes of the peak; "" before the first event
    live: tuple[LiveAllocations, ...]  # the 12 largest, at the peak
    held_bytes: int  # bytes between steps
    highest: dict[str, int]  # by category, the most bytes at any time
    unsure_bytes: int = 0  # how much higher the peak may be, because of the workspace of `unsure_operator`
    unsure_operator: str = ""


@lru_cache(4)
def peak_of(log: Log) -> MemoryPeak:
    """Return the peak of allocated memory in the step of `log`."""
    total = held_bytes = sum(a.num_bytes for a, _ in log.held)
    live = {a.number: a for a, _ in log.held}
    current = {c: sum(a.num_bytes for a in live.values() if a.category is c) for c in Category}
    highest = dict(current)
    best, best_at = total, -1
    most, most_by = 0, ""
    events: list[Any] = log.events
    for i, event in enumerate(events):
        kind = type(event)
        if kind is Alloc:
            live[event.number] = event
            total += event.num_bytes
            num_bytes = current[event.category] = current[event.category] + event.num_bytes
            if num_bytes > highest[event.category]:
                highest[event.category] = num_bytes
            if total > best:
                best, best_at = total, i
        elif kind is Free:
            freed = live.pop(event.number)
            total -= freed.num_bytes
            current[freed.category] -= freed.num_bytes
        elif kind is Op and event.unsure and total + event.unsure > most:
            most, most_by = total + event.unsure, event.name
    allocs, place = _state_at(log, best_at)
    last = events[best_at] if best_at >= 0 else None
    return MemoryPeak(
        num_bytes=best,
        breakdown={c.value: sum(a.num_bytes for a in allocs if a.category is c) for c in Category},
        phase=place.phase.value,
        unit=name_of(place, log.units),
        operator=last.operator if isinstance(last, Alloc) else "",
        live=_largest(allocs),
        held_bytes=held_bytes,
        highest={c.value: n for c, n in highest.items()},
        unsure_bytes=max(0, most - best),
        unsure_operator=most_by if most > best else "",
    )


def _state_at(log: Log, at: int) -> tuple[Sequence[Alloc], StepPart]:
    """Return (live allocations, part of the step) after event number `at` of `log`; -1: before the first event."""
    live = {a.number: a for a, _ in log.held}
    place = START
    for event in log.events[: at + 1]:
        if isinstance(event, Alloc):
            live[event.number] = event
        elif isinstance(event, Free):
            del live[event.number]
        elif isinstance(event, Enter):
            place = event.place
    return list(live.values()), place


def _largest(allocs: Sequence[Alloc]) -> tuple[LiveAllocations, ...]:
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for a in allocs:
        groups[a.operator, a.category.value].append(a.num_bytes)
    holdings = [LiveAllocations(operator=o, category=c, num_bytes=sum(n), count=len(n)) for (o, c), n in groups.items()]
    return tuple(sorted(holdings, key=lambda h: -h.num_bytes)[:12])


def name_of(place: StepPart, units: Sequence[str]) -> str:
    """Return the name of the unit of `place`, "(root)" for the root. Outside of units: "(loss)" in the backward, else ""."""
    if place.unit < 0:
        return "(loss)" if place.phase is StepPhase.BACKWARD else ""
    return units[place.unit] or "(root)"
