"""Logs of other micro-batches and numbers of ranks from three that were traced: sizes are straight lines in both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from accordion.plan.events import Alloc, Collective, Event, Free, Land, Launch, Log, Mark, Op, Wait


class UnlikeError(Exception):
    """The logs differ in more than sizes."""


class Family:
    """Owns three logs that differ in sizes alone. `base`: (micro-batch, ranks, log); `more`: a larger micro-batch of the same
    ranks; `fewer`: fewer ranks with the same micro-batch. Raises `UnlikeError`.
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
        """The log of another micro-batch and another number of ranks."""
        batch, num, log = self.base
        along = 0.0 if self.more is None else (micro_batch - batch) / (self.more[0] - batch)
        across = 0.0 if self.fewer is None else (1 / ranks - 1 / num) / (1 / self.fewer[0] - 1 / num)
        more = log if self.more is None else self.more[1]
        fewer = log if self.fewer is None else self.fewer[1]
        held = [
            (_between(a, b, c, along, across), unit)
            for (a, unit), (b, _), (c, _) in zip(log.held, more.held, fewer.held, strict=True)
        ]
        events: list[Event] = [
            _between(a, b, c, along, across) for a, b, c in zip(log.events, more.events, fewer.events, strict=True)
        ]
        host = (
            log.host_bytes + along * (more.host_bytes - log.host_bytes) + across * (fewer.host_bytes - log.host_bytes)
        )
        return replace(log, held=held, events=events, host_bytes=round(host))


def _renumbered(log: Log) -> Log:
    """The same log, numbers in the order in which they come up: what a process did before counts on."""
    numbers: dict[int, int] = {}
    transfers: dict[int, int] = {}

    def again(event: Any) -> Any:
        if isinstance(event, (Alloc, Free)):
            return replace(event, number=numbers.setdefault(event.number, len(numbers)))
        if isinstance(event, (Launch, Land, Mark, Wait)):
            return replace(event, transfer=transfers.setdefault(event.transfer, len(transfers)))
        return event

    held = [(again(alloc), unit) for alloc, unit in log.held]
    return replace(log, held=held, events=[again(event) for event in log.events])


def _between(a: Any, b: Any, c: Any, along: float, across: float) -> Any:
    if not isinstance(a, (Alloc, Op, Collective)):
        return a
    num_bytes = round(a.num_bytes + along * (b.num_bytes - a.num_bytes) + across * (c.num_bytes - a.num_bytes))
    num_bytes = max(1, num_bytes)
    if isinstance(a, Op):
        flops = a.flops + along * (b.flops - a.flops) + across * (c.flops - a.flops)
        unsure = round(a.unsure + along * (b.unsure - a.unsure) + across * (c.unsure - a.unsure))
        return Op(a.name, flops, num_bytes, a.dtype, a.stream, a.again, unsure)
    if isinstance(a, Alloc):
        return Alloc(a.number, num_bytes, a.category, a.stream, a.operator)
    return replace(a, num_bytes=num_bytes)


def _shape(log: Log) -> Sequence[object]:
    """All but the sizes."""
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
