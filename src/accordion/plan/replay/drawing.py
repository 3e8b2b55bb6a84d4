"""Draw a planned step as `observe` draws a recorded one: spans of the streams, and memory by kind, at simulated times."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from accordion.observe.values import COMPUTE, WAIT, MemoryPoint, RankTrace, TraceSpan, UnitFacts
from accordion.plan.events import Alloc, Category, Collective, Free, Log, Op, StepPhase, Streams
from accordion.plan.replay.cost import Costs
from accordion.plan.replay.timeline import StreamClock

NUM_POINTS = 1500  # of the curve of memory
GAP_US = 1.0  # spans of one kind and unit that are closer are one
NO_UNIT = -1
LANES = {Streams.REPLICATE: "all-reduce"}  # names of streams that differ from the plan's
KINDS = {StepPhase.STEP: "optimizer"}


def drawn(log: Log, costs: Costs, strategy: str) -> RankTrace:
    """Simulate the step of `log`, and return it as the trace of one rank, for `observe`. In that trace, `full_bytes` of each
    unit is 0, since a log does not have it. `strategy`: name of the strategy."""
    clock = _DrawingClock(log, costs)
    end_us = clock.run(log).seconds * 1e6
    # Of the points in each of `NUM_POINTS` equal parts of the step, keep the one with most bytes.
    highest: dict[int, MemoryPoint] = {}
    for point in clock.points:
        part = int(point.time_us / max(end_us, 1.0) * NUM_POINTS)
        if part not in highest or point.total > highest[part].total:
            highest[part] = point
    between, shards = Counter[Category](), Counter[int | None]()
    for alloc, unit in log.held:
        between[alloc.category] += alloc.num_bytes
        shards[unit] += alloc.num_bytes if alloc.category is Category.PARAMETERS else 0
    return RankTrace(
        rank=0,
        device="planned",
        strategy=strategy,
        units=[UnitFacts(name=name or "root", full_bytes=0, shard_bytes=shards[i]) for i, name in enumerate(log.units)],
        steps=[(0.0, end_us)],
        spans=sorted((span for spans in clock.spans.values() for span in spans), key=lambda span: span.start_us),
        memory=list(highest.values()),
        memory_step=0,
        shard_bytes=between[Category.PARAMETERS],
        state_bytes=between[Category.OPTIMIZER],
    )


class _DrawingClock(StreamClock):
    """A clock of streams that also records `spans`, work and waits by lane, and `points`, live bytes after each change."""

    handlers: ClassVar[Mapping[type, str]] = {**StreamClock.handlers, Alloc: "allocate", Free: "free"}

    def __init__(self, log: Log, costs: Costs) -> None:
        super().__init__(costs)
        self.spans: dict[str, list[TraceSpan]] = defaultdict(list)
        self.points: list[MemoryPoint] = []
        self._live = {alloc.number: alloc for alloc, _ in log.held}
        self._bytes = Counter[Category]()
        for alloc in self._live.values():
            self._bytes[alloc.category] += alloc.num_bytes
        self._between = self._bytes[Category.PARAMETERS] + self._bytes[Category.OPTIMIZER]

    def allocate(self, event: Alloc) -> None:
        self._live[event.number] = event
        self._change(event.category, event.num_bytes)

    def free(self, event: Free) -> None:
        alloc = self._live.pop(event.number)
        self._change(alloc.category, -alloc.num_bytes)

    def _change(self, category: Category, num_bytes: int) -> None:
        self._bytes[category] += num_bytes
        full, gradients = self._bytes[Category.GATHERED], self._bytes[Category.GRADIENTS]
        activations = self._bytes[Category.ACTIVATIONS]
        point = MemoryPoint(
            time_us=self._busy[COMPUTE] * 1e6,
            full=full,
            gradients=gradients,
            activations=activations,
            other=sum(self._bytes.values()) - self._between - full - gradients - activations,
        )
        self.points.append(point)

    def work(self, event: Op | Collective) -> None:
        super().work(event)
        end_s, lane = self._busy[event.stream], LANES.get(event.stream, event.stream)
        kind = KINDS.get(self._place.phase, self._place.phase.value) if event.stream == COMPUTE else lane
        self._add(lane, kind, end_s - self._known[id(event)][1], end_s)

    def _wait(self, stream: str, seconds: float, cause: str) -> None:
        super()._wait(stream, seconds, cause)
        if stream == COMPUTE and seconds:
            self._add(WAIT, LANES.get(cause, cause), self._busy[COMPUTE] - seconds, self._busy[COMPUTE])

    def _add(self, lane: str, kind: str, start_s: float, end_s: float) -> None:
        """Add a span to `lane`. Its unit is the current unit on `COMPUTE` and `WAIT`, and none on other lanes. If the last span
        of the lane has equal kind and unit, and ends less than `GAP_US` before, extend that span instead."""
        spans = self.spans[lane]
        # A transfer starts during the unit before the one that it is for, which a log does not name.
        unit = self._place.unit if lane in (COMPUTE, WAIT) else NO_UNIT
        span = TraceSpan(lane=lane, kind=kind, unit=unit, start_us=start_s * 1e6, end_us=end_s * 1e6)
        last = spans[-1] if spans else None
        if last and (last.kind, last.unit) == (kind, unit) and span.start_us - last.end_us < GAP_US:
            span = replace(span, start_us=spans.pop().start_us)
        spans.append(span)
