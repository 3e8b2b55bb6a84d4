"""Logs of other micro-batches and numbers of ranks, extrapolated from three traced logs: sizes are linear in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from accordion.plan.events import Alloc, Collective, Event, Free, Land, Launch, Log, Mark, Op, Wait


class UnlikeError(Exception):
    """Raised if logs that should differ in sizes alone differ in their events."""


class Family:
    """Extrapolates logs that differ in sizes alone to other micro-batches and numbers of ranks.

    `base`: (micro-batch, ranks, log). `more`: (larger micro-batch, log) on as many ranks. `fewer`: (fewer ranks, log) with the
    micro-batch of `base`. Raises `UnlikeError`.
    """

    def __init__(self, base: tuple[int, int, Log], more: tuple[int, Log] | None, fewer: tuple[int, Log] | None) -> None:
        self.base = (*base[:2], _renumbered(base[2]))
        self.more = None if more is None else (more[0], _renumbered(more[1]))
        self.fewer = None if fewer is None else (fewer[0], _renumbered(fewer[1]))
        shape = _shape(self.base[2])
        for other in (self.more, self.fewer):
            if other is not None and _shape(other[1]) != shape:
                raise UnlikeError

    def at(self, micro_batch: int, ranks: int) -> Log:
        """Return the log for `micro_batch` and `ranks`, whose sizes are linear in `micro_batch` and in `1 / ranks`."""
        batch, num, log = self.base
        along = 0.0 if self.more is None else (micro_batch - batch) / (self.more[0] - batch)
        across = 0.0 if self.fewer is None else (1 / ranks - 1 / num) / (1 / self.fewer[0] - 1 / num)
        more = log if self.more is None else self.more[1]
        fewer = log if self.fewer is None else self.fewer[1]
        # A deep model's log has the same kernel object many times: it is computed once, and is one object in this log too.
        known: dict[tuple[int, int, int], Event] = {}

        def between(a: Any, b: Any, c: Any) -> Any:
            if type(a) is Alloc:
                return _between(a, b, c, along, across)
            if type(a) is not Op and type(a) is not Collective:
                return a
            key = id(a), id(b), id(c)
            if key not in known:
                known[key] = _between(a, b, c, along, across)
            return known[key]

        pairs = zip(log.held, more.held, fewer.held, strict=True)
        allocs = [(between(a, b, c), unit) for (a, unit), (b, _), (c, _) in pairs]
        events: list[Event] = list(map(between, log.events, more.events, fewer.events))
        host = (
            log.host_bytes + along * (more.host_bytes - log.host_bytes) + across * (fewer.host_bytes - log.host_bytes)
        )
        return replace(log, held=allocs, events=events, host_bytes=round(host))


def _renumbered(log: Log) -> Log:
    """Return the log with allocations and transfers numbered from 0, so that logs of several traces can be compared."""
    numbers: dict[int, int] = {}
    transfers: dict[int, int] = {}

    def renumbered(event: Any) -> Any:
        kind = type(event)
        if kind is Free:
            return Free(numbers.setdefault(event.number, len(numbers)))
        if kind is Alloc:
            number = numbers.setdefault(event.number, len(numbers))
            return Alloc(number, event.num_bytes, event.category, event.stream, event.operator)
        if kind in (Launch, Land, Mark, Wait):
            return replace(event, transfer=transfers.setdefault(event.transfer, len(transfers)))
        return event

    allocs = [(renumbered(alloc), unit) for alloc, unit in log.held]
    return replace(log, held=allocs, events=[renumbered(event) for event in log.events])


def _between(a: Any, b: Any, c: Any, along: float, across: float) -> Alloc | Op | Collective:
    num_bytes = a.num_bytes
    if not num_bytes == b.num_bytes == c.num_bytes:
        num_bytes = round(num_bytes + along * (b.num_bytes - num_bytes) + across * (c.num_bytes - num_bytes))
    num_bytes = max(1, num_bytes)
    if isinstance(a, Op):
        flops = a.flops + along * (b.flops - a.flops) + across * (c.flops - a.flops)
        unsure = round(a.unsure + along * (b.unsure - a.unsure) + across * (c.unsure - a.unsure))
        return Op(a.name, flops, num_bytes, a.dtype, a.stream, a.again, unsure)
    if isinstance(a, Alloc):
        return Alloc(a.number, num_bytes, a.category, a.stream, a.operator)
    return Collective(a.kind, num_bytes, a.axis, a.stream)


def _shape(log: Log) -> Sequence[object]:
    """Return the events of a log without their sizes; equal for all logs of one family."""
    shape: list[object] = [alloc.number for alloc, _ in log.held]
    for event in log.events:
        if isinstance(event, Alloc):
            shape.append((event.number, event.stream))
        elif isinstance(event, Op):
            shape.append(event.name)
        elif isinstance(event, Collective):
            shape.append((event.kind, event.axis))
        else:
            shape.append(event)
    return shape
