"""The streams of a rank, event by event: what computes, what communicates, and what waits for what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from accordion.plan.events import (
    ALL_TO_ALL,
    COMPUTE,
    DISK_STREAM,
    FETCH,
    HOST,
    STEPPER,
    STORE,
    Collective,
    Enter,
    Land,
    Launch,
    Log,
    Mark,
    Op,
    StepPart,
    StepPhase,
    Wait,
)
from accordion.plan.hardware import LAUNCH_S
from accordion.plan.replay.cost import Costs
from accordion.plan.replay.peak import name_of

KERNELS_OF = " stream's kernels"
IN_LINE = "messages in line"  # of the compute stream itself, such as the sum of norms
OF_TOKENS = "all-to-all of tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """What a stream does from `start_s` for `seconds`, for the picture."""

    stream: str
    label: str
    start_s: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """`exposed_s`: how long the compute stream waited for others. `flops`: of products and attention, recomputation left out.

    `by_kind`: seconds of all streams, by what they do. `waits`: what `exposed_s` is made of, by the stream that was waited for.
    `by_place`: seconds of the compute stream, and what of them is waiting, by phase and unit.
    """

    seconds: float
    exposed_s: float
    flops: float
    by_kind: Mapping[str, float]
    waits: Mapping[str, float]
    by_place: Mapping[StepPart, tuple[float, float]]
    stretches: tuple[Stretch, ...] = ()


def simulate(log: Log, costs: Costs, *, drawn: bool = True) -> Step:
    """Run a log on streams that work at the same time. `drawn`: with its stretches.

    A transfer starts after the compute stream's work so far, ends in order on its stream, and the compute stream waits where
    it lands, as the engine has it. What the caller waits for holds up all that it begins later. Other than that it takes time
    for kernels alone, where the rates say so.
    """
    clock = _Clock(log, costs, drawn)
    for event in log.events:
        if (run := _HANDLERS.get(type(event))) is not None:
            run(clock, event)
    return clock.step()


class _Clock:
    """How far each stream is, and what its time went to.

    Args:
        busy: seconds until which each stream is busy.
        ends: of transfers; of the one that runs on a stream, so far.
        streams: of transfers.
        running: the last transfer of each stream.
        taken: name and seconds of an event, by its id: a deep model's log has the same one many times.
    """

    def __init__(self, log: Log, costs: Costs, drawn: bool) -> None:
        self._log, self._costs, self._drawn = log, costs, drawn
        self._busy: dict[str, float] = defaultdict(float)
        self._ends: dict[int, float] = {}
        self._streams: dict[int, str] = {}
        self._running: dict[str, int] = {}
        self._taken: dict[int, tuple[str, float]] = {}
        self._by_kind: dict[str, float] = defaultdict(float)
        self._waits: dict[str, float] = defaultdict(float)
        self._places: dict[StepPart, list[float]] = {}  # [seconds, of them waiting]
        self._stretches = _Stretches()
        self._flops = self._asked = 0.0  # when the caller asked for the last kernel
        self._entered, self._place = 0.0, StepPart(StepPhase.FORWARD, -1)
        self._in_place = self._places.setdefault(self._place, [0.0, 0.0])

    def _wait(self, stream: str, seconds: float, cause: str) -> None:
        self._busy[stream] += seconds
        if stream == COMPUTE and seconds:
            self._waits[cause] += seconds
            self._in_place[1] += seconds

    def work(self, event: Op | Collective) -> None:
        known = self._taken.get(id(event))
        if known is None:
            known = self._taken[id(event)] = kind_of(event), self._costs.seconds_of(event)
        (name, seconds), stream, busy = known, event.stream, self._busy
        held_up = busy[HOST] - busy[stream]
        if held_up > 0:
            self._wait(stream, held_up, HOST)
        if stream == COMPUTE:
            self._asked = max(self._asked, busy[HOST]) + self._costs.caller_s
            late = self._asked - busy[COMPUTE]
            if late > 0:
                busy[COMPUTE] = self._asked
                self._by_kind["the caller"] += late
        if self._drawn:
            self._stretches.add(stream, label_of(event, self._place, self._log), busy[stream], seconds)
        busy[stream] += seconds
        self._by_kind[name] += seconds
        if type(event) is Op and not event.again:
            self._flops += event.flops
        if stream in self._running:
            self._ends[self._running[stream]] = busy[stream]

    def enter(self, event: Enter) -> None:
        now = self._busy[COMPUTE]
        self._in_place[0] += now - self._entered
        self._place, self._entered = event.place, now
        self._in_place = self._places.setdefault(event.place, [0.0, 0.0])

    def launch(self, event: Launch) -> None:
        busy = self._busy
        busy[event.stream] = max(busy[event.stream], busy[COMPUTE])
        self._running[event.stream] = event.transfer
        self.mark(event)

    def mark(self, event: Launch | Mark) -> None:
        self._ends[event.transfer] = self._busy[event.stream]
        self._streams[event.transfer] = event.stream

    def land(self, event: Land) -> None:
        self._wait_for(event.transfer, COMPUTE)

    def wait(self, event: Wait) -> None:
        self._wait_for(event.transfer, event.stream)
        if event.stream in self._running:
            self._ends[self._running[event.stream]] = self._busy[event.stream]

    def _wait_for(self, transfer: int, stream: str) -> None:
        waited = max(0.0, self._ends.get(transfer, 0.0) - self._busy[stream])
        self._wait(stream, waited, self._streams.get(transfer, ""))

    def step(self) -> Step:
        """Return the seconds of the whole log: until the last stream is done."""
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
            stretches=tuple(self._stretches.found),
        )


_HANDLERS: Mapping[type, Callable[[_Clock, Any], None]] = {
    Op: _Clock.work,
    Collective: _Clock.work,
    Enter: _Clock.enter,
    Launch: _Clock.launch,
    Mark: _Clock.mark,
    Land: _Clock.land,
    Wait: _Clock.wait,
}
"""By type of event; memory takes no time."""


def label_of(event: Op | Collective, place: StepPart, log: Log) -> str:
    if event.stream in (STEPPER, DISK_STREAM) and isinstance(event, Op):  # of the step before this one
        return event.name
    return f"{place.phase.value} {name_of(place, log.units)}".strip()


def kind_of(event: Op | Collective) -> str:
    """Return the kind of a kernel of the compute stream or of a message; for other kernels, the stream that they run on."""
    if isinstance(event, Collective):
        if event.stream != COMPUTE:
            return event.kind
        return OF_TOKENS if event.kind == ALL_TO_ALL else IN_LINE
    if event.stream in (FETCH, STORE, HOST, STEPPER, DISK_STREAM):
        return event.stream
    if event.stream != COMPUTE:
        return f"{event.stream}{KERNELS_OF}"
    if event.flops:
        return "attention" if "attention" in event.name else "products"
    return "optimizer" if "adam" in event.name or "sgd" in event.name else "element-wise"


class _Stretches:
    """Owns the stretches; work of one place on one stream that follows on itself at once is one."""

    def __init__(self) -> None:
        self.found: list[Stretch] = []
        self._last: dict[str, int] = {}
        self._ends: dict[str, float] = {}

    def add(self, stream: str, label: str, start_s: float, seconds: float) -> None:
        last = self._last.get(stream)
        if last is not None and self.found[last].label == label and start_s <= self._ends[stream] + LAUNCH_S:
            begun = self.found[last].start_s
            self._ends[stream] = start_s + seconds
            self.found[last] = Stretch(stream=stream, label=label, start_s=begun, seconds=start_s + seconds - begun)
            return
        self._last[stream], self._ends[stream] = len(self.found), start_s + seconds
        self.found.append(Stretch(stream=stream, label=label, start_s=start_s, seconds=seconds))
