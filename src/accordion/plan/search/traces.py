"""Logs of many choices from few traces: two sizes of the micro-batch are traced, and all others are extrapolated from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from accordion.plan.choice import Choice, moved_as, traced_as
from accordion.plan.events import Alloc, Collective, Event, Free, Log, Op
from accordion.plan.replay.predict import log_of
from accordion.plan.search.space import Space


class Traces:
    """Makes logs of choices: traced, or extrapolated from traces of other micro-batches. Stores all traced logs in `traced`, by
    the choice that was traced. `say`: called with a line of text before each trace."""

    def __init__(self, space: Space, say: Callable[[str], None]) -> None:
        self._space, self._say = space, say
        self.traced: dict[Choice, Log] = {}
        self._families: dict[Choice, Family | None] = {}
        # The last derived log: a choice is asked for once for each of its offloads.
        self._last: tuple[Choice, Log] | None = None

    def of(self, choice: Choice) -> Log:
        """Return the log of a step of `choice` with parameters and states on the device, whatever its offload. The log is
        extrapolated from those of the two smallest micro-batches if possible. Logs that are missing for this are traced."""
        choice = traced_as(choice)
        if choice in self.traced:
            return self.traced[choice]
        if self._last is None or self._last[0] != choice:
            family = self._family(choice)
            if family is None:
                return self.trace(choice)
            self._last = choice, family.at(choice.micro_batch)
        return self._last[1]

    def trace(self, choice: Choice) -> Log:
        """Return the traced log of a step of `choice` with its offload, without the work on the host. If the step was not
        traced before, call `say`, trace it and store the log."""
        choice = moved_as(choice)
        if choice not in self.traced:
            self._say(f"tracing {choice}")
            log = log_of(self._space.subject_for(choice.micro_batch), self._space.setup(choice))
            # Work of offload is timed by `with_host_work`.
            unmodelled = {name: why for name, why in log.unmodelled.items() if name != "offload"}
            self.traced[choice] = replace(log, unmodelled=unmodelled)
        return self.traced[choice]

    def _family(self, choice: Choice) -> Family | None:
        """Return the `Family` from which the log of `choice` can be extrapolated. Traces the two smallest micro-batches of the
        search, unless that was done before. Return None if there is only one, or if the logs differ in more than sizes."""
        key, batches = replace(choice, micro_batch=0), sorted(self._space.search.micro_batches)
        if len(batches) < 2:
            return None
        if key not in self._families:
            logs = [(size, self.trace(replace(choice, micro_batch=size))) for size in batches[:2]]
            try:
                self._families[key] = Family(*logs)
            except UnequalEventsError:
                self._families[key] = None
        return self._families[key]


# -- other micro-batches: sizes are linear in the micro-batch


class UnequalEventsError(Exception):
    """Raised if logs of two micro-batches differ in their events, not only in sizes."""


class Family:
    """Extrapolates logs of a step with two sizes of the micro-batch, each given as (size, log), to other sizes. The constructor
    raises `UnequalEventsError` if the two logs differ in more than bytes and flops."""

    def __init__(self, base: tuple[int, Log], more: tuple[int, Log]) -> None:
        self._base, self._more = base, more
        if _shape(base[1]) != _shape(more[1]):
            raise UnequalEventsError

    def at(self, micro_batch: int) -> Log:
        """Return the log of a step with another micro-batch. Its bytes and flops are on the line through those of both logs."""
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
