"""Logs of other micro-batches, extrapolated from two traced logs: sizes are linear in the micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from accordion.plan.events import Alloc, Collective, Event, Free, Log, Op


class UnlikeError(Exception):
    """Raised if logs of two micro-batches differ in their events, not only in sizes."""


class Family:
    """Extrapolates two logs of a step, each given as (size of the micro-batch, log), to other sizes. The constructor raises
    `UnlikeError` if the two logs differ in more than bytes and flops."""

    def __init__(self, base: tuple[int, Log], more: tuple[int, Log]) -> None:
        self._base, self._more = base, more
        if _shape(base[1]) != _shape(more[1]):
            raise UnlikeError

    def at(self, micro_batch: int) -> Log:
        """Return the log of a step with `micro_batch`. Its bytes and flops are on the line through those of the two logs."""
        (batch, log), (larger, more) = self._base, self._more
        along = (micro_batch - batch) / (larger - batch)
        # A deep model's log has the same kernel object many times: it is computed once, and is one object in this log too.
        known: dict[tuple[int, int], Event] = {}

        def between(a: Any, b: Any) -> Any:
            if type(a) is Alloc:
                return _between(a, b, along)
            if type(a) is not Op and type(a) is not Collective:
                return a
            key = id(a), id(b)
            if key not in known:
                known[key] = _between(a, b, along)
            return known[key]

        allocs = [(between(a, b), unit) for (a, unit), (b, _) in zip(log.held, more.held, strict=True)]
        events: list[Event] = list(map(between, log.events, more.events))
        host = log.host_bytes + along * (more.host_bytes - log.host_bytes)
        return replace(log, held=allocs, events=events, host_bytes=round(host))


def _between(a: Any, b: Any, along: float) -> Alloc | Op | Collective:
    num_bytes = max(1, round(a.num_bytes + along * (b.num_bytes - a.num_bytes)))
    if isinstance(a, Op):
        flops, unsure = a.flops + along * (b.flops - a.flops), round(a.unsure + along * (b.unsure - a.unsure))
        return Op(a.name, flops, num_bytes, a.dtype, a.stream, a.again, unsure)
    if isinstance(a, Alloc):
        return Alloc(a.number, num_bytes, a.category, a.stream, a.operator)
    return Collective(a.kind, num_bytes, a.axis, a.stream)


def _shape(log: Log) -> Sequence[object]:
    """Return descriptions of the events of `log` without their bytes and flops, to compare logs of two micro-batches."""
    # Allocations are numbered anew: the first trace of a process also counts memory that torch allocates once.
    numbers: dict[int, int] = {}
    shape: list[object] = [numbers.setdefault(alloc.number, len(numbers)) for alloc, _ in log.held]
    for event in log.events:
        if isinstance(event, Alloc):
            shape.append((numbers.setdefault(event.number, len(numbers)), event.stream))
        elif isinstance(event, Free):
            shape.append((Free, numbers.get(event.number)))
        elif isinstance(event, Op):
            shape.append(event.name)
        elif isinstance(event, Collective):
            shape.append((event.kind, event.axis))
        else:
            shape.append(event)
    return shape
