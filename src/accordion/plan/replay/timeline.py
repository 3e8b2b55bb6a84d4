"""Simulate the streams of one rank event by event, to compute the seconds of a step by kind of work, phase and unit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from accordion.plan.events import (
    START,
    Axes,
    Collective,
    Enter,
    Launch,
    Log,
    Mark,
    Op,
    StepPart,
    StepPhase,
    Streams,
    Wait,
)
from accordion.plan.replay.cost import Costs
from accordion.plan.replay.peak import name_of

COMPUTE = Streams.COMPUTE  # a global name, because it is looked up for each event
KERNELS_OF = " stream's kernels"
IN_LINE = "messages in line"  # kind of collectives on the compute stream itself, such as the sum of norms
OF_TOKENS = "all-to-all of tokens"
OF_HEADS = "all-to-all of attention heads"
ALL_TO_ALLS = {Axes.EXPERTS: OF_TOKENS, Axes.SEQUENCE: OF_HEADS}  # by axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The simulated time of one step."""

    seconds: float
    exposed_s: float  # how long the compute stream waited for other streams
    flops: float  # of products and attention, without recomputation
    by_kind: Mapping[str, float]  # kind of work -> seconds, on all streams
    waits: Mapping[str, float]  # stream -> the part of `exposed_s` in which it was waited for
    by_place: Mapping[StepPart, tuple[float, float]]  # (seconds, waits among them) of the compute stream


class StreamClock:
    """Simulates the step of a log: the method `run` returns its time, in total, by kind of work and by part of the step.

    Streams run in parallel. As in the engine, a transfer starts after the compute stream's work so far, and after earlier
    transfers on its own stream. The host takes `costs.rates.caller_s` for each kernel. `handlers`: type of event -> name of the
    method that handles it; events of other types take no time.
    """

    handlers: ClassVar[Mapping[type, str]] = {
        Op: "work", Collective: "work", Enter: "enter", Launch: "launch", Mark: "mark", Wait: "wait",
    }  # fmt: skip

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._busy: dict[str, float] = defaultdict(float)  # seconds until which each stream is busy
        self._ends: dict[int, float] = {}  # end of each transfer; so far, if it still runs
        self._streams: dict[int, str] = {}  # stream of each transfer
        self._running: dict[str, int] = {}  # last transfer of each stream
        # (kind, seconds) of each event so far, by id, because a deep model's log has the same event object many times.
        self._known: dict[int, tuple[str, float]] = {}
        self._by_kind: dict[str, float] = defaultdict(float)
        self._waits: dict[str, float] = defaultdict(float)
        self._places: dict[StepPart, list[float]] = {}  # [seconds, waits among them]
        self._flops = self._launched = 0.0  # `_launched`: time at which the caller launched the last kernel
        self._entered, self._place = 0.0, START
        self._in_place = self._places.setdefault(self._place, [0.0, 0.0])

    def run(self, log: Log) -> Step:
        """Simulate all events of `log`, then a wait for streams that are still busy; return the times. May be called once."""
        handlers = {kind: getattr(self, name) for kind, name in self.handlers.items()}
        for event in log.events:
            if (handler := handlers.get(type(event))) is not None:
                handler(event)
        busy = self._busy
        total = max(busy.values(), default=0.0)
        self._in_place[0] += total - self._entered
        if total > busy[COMPUTE]:
            self._wait(COMPUTE, total - busy[COMPUTE], max(busy, key=lambda name: busy[name]))
        return Step(
            seconds=total,
            exposed_s=sum(self._waits.values()),
            flops=self._flops,
            by_kind=dict(self._by_kind),
            waits=dict(self._waits),
            by_place={place: (seconds, waited) for place, (seconds, waited) in self._places.items()},
        )

    def _wait(self, stream: str, seconds: float, cause: str) -> None:
        self._busy[stream] += seconds
        if stream == COMPUTE and seconds:
            self._waits[cause] += seconds
            self._in_place[1] += seconds

    def work(self, event: Op | Collective) -> None:
        known = self._known.get(id(event))
        if known is None:
            known = self._known[id(event)] = kind_of(event), self._costs.of(event)
        (name, seconds), stream, busy = known, event.stream, self._busy
        if stream == COMPUTE:
            self._launched += self._costs.rates.caller_s
            idle = self._launched - busy[COMPUTE]
            if idle > 0:
                busy[COMPUTE] = self._launched
                self._by_kind["the caller"] += idle
        busy[stream] += seconds
        self._by_kind[name] += seconds
        if type(event) is Op and not event.again:
            self._flops += event.flops
        if stream in self._running:
            self._ends[self._running[stream]] = busy[stream]

    def enter(self, event: Enter) -> None:
        start = self._busy[COMPUTE]
        self._in_place[0] += start - self._entered
        self._place, self._entered = event.place, start
        self._in_place = self._places.setdefault(event.place, [0.0, 0.0])

    def launch(self, event: Launch) -> None:
        busy = self._busy
        busy[event.stream] = max(busy[event.stream], busy[COMPUTE])
        self._running[event.stream] = event.transfer
        self.mark(event)

    def mark(self, event: Launch | Mark) -> None:
        self._ends[event.transfer] = self._busy[event.stream]
        self._streams[event.transfer] = event.stream

    def wait(self, event: Wait) -> None:
        transfer, stream = event.transfer, event.stream
        waited = max(0.0, self._ends.get(transfer, 0.0) - self._busy[stream])
        self._wait(stream, waited, self._streams.get(transfer, ""))
        if stream in self._running:
            self._ends[self._running[stream]] = self._busy[stream]


def kind_of(event: Op | Collective) -> str:
    """Return the kind of work of `event`, by which seconds are summed: a kind of collective, such as "gather"; of kernel on the
    compute stream, such as "attention"; a stream of copies, such as "store"; on other streams "reduce stream's kernels"."""
    if isinstance(event, Collective):
        return ALL_TO_ALLS.get(event.axis, IN_LINE) if event.stream == COMPUTE else event.kind
    if event.stream in (Streams.FETCH, Streams.STORE):
        return event.stream
    if event.stream != COMPUTE:
        return f"{event.stream}{KERNELS_OF}"
    if event.flops:
        return "attention" if "attention" in event.name else "products"
    return "optimizer" if "adam" in event.name or "sgd" in event.name else "element-wise"


# -- named parts of a step's time

WAITED_FOR = {  # stream -> what a wait for it is called
    "gather": "waiting for parameters (gather)",
    "copy in": "waiting for parameters (gather)",
    "reduce": "waiting for gradients (reduce)",
    "all-reduce": "waiting for gradients between nodes",
    Streams.REPLICATE: "waiting for gradients between nodes",
    Streams.FETCH: "waiting for the host",
    Streams.STORE: "waiting for the host",
    Streams.HOST: "waiting for the host",
}
OTHER_STREAMS = {  # kind of work -> its name
    "gather": "all-gather", "exchange": "all-to-all of gradients", "scatter_sum": "reduce-scatter", "sum": "all-reduce",
    Streams.FETCH: "copies from the host", Streams.STORE: "copies to the host", Streams.HOST: "the caller's work on the host",
    Streams.STEPPER: Streams.STEPPER, Streams.DISK: Streams.DISK,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePart:
    """Seconds of one kind of work or one unit. `waited`: waits among them. `hidden`: work on a side stream, in parallel."""

    name: str
    seconds: float
    waited: float = 0.0
    hidden: bool = False


def by_kind(step: Step) -> list[TimePart]:
    """Return the times of the compute stream by kind of work and of wait, which add up to the step's time. After them, return
    the times of side streams by kind of work. Each of the two parts is sorted, longest first."""
    waits: dict[str, float] = defaultdict(float)
    for stream, seconds in step.waits.items():
        waits[WAITED_FOR.get(stream, "waiting for others")] += seconds
    compute = {
        name: s for name, s in step.by_kind.items() if name not in OTHER_STREAMS and not name.endswith(KERNELS_OF)
    }
    parts = [TimePart(name=name, seconds=s) for name, s in compute.items() if s > 0]
    parts += [TimePart(name=name, seconds=s, waited=s) for name, s in waits.items() if s > 0]
    hidden = [
        TimePart(name=OTHER_STREAMS.get(name, name), seconds=s, hidden=True)
        for name, s in step.by_kind.items()
        if name not in compute and s > 0
    ]
    return [*sorted(parts, key=lambda p: -p.seconds), *sorted(hidden, key=lambda p: -p.seconds)]


def by_unit(step: Step, units: Sequence[str]) -> list[TimePart]:
    """Return the times of the compute stream by phase and unit, in the order of a step. Units whose names differ only in
    numbers are one entry, as "forward layers.*, 32 of them"; so are the optimizer and clipping. `units`: names by index."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])  # by name: [seconds, waits among them]
    counts: dict[str, set[str]] = defaultdict(set)  # by name: its units
    for place, (seconds, waited) in step.by_place.items():
        unit = name_of(place, units)
        stem = ".".join("*" if part.isdecimal() else part for part in unit.split("."))
        name = f"{place.phase.value} {stem or '(before the model)'}".strip()
        if place.phase is StepPhase.STEP:
            name = "optimizer's step, clipping"
        totals[name][0] += seconds
        totals[name][1] += waited
        counts[name].add(unit)
    names = {name: f"{name}, {len(each)} of them" if name.endswith(".*") else name for name, each in counts.items()}
    return [
        TimePart(name=names[name], seconds=seconds, waited=waited)
        for name, (seconds, waited) in totals.items()
        if seconds > 0
    ]
