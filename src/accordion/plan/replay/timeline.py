"""The streams of a rank, event by event: what computes, what communicates, and what waits for what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from accordion.plan.events import (
    ALL_TO_ALL,
    COMPUTE,
    DISK_STREAM,
    FETCH,
    HOST,
    STEPPER,
    STORE,
    Alloc,
    Collective,
    Enter,
    Free,
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
    """Run a log on streams that work side by side. A transfer starts behind the compute stream's work so far, ends in order on
    its stream, and the compute stream waits where it lands, as the engine has it. What the caller waits for holds up all that
    it begins later. Other than that it takes time for kernels alone, where the rates say so. `drawn`: with its stretches.
    """
    now: dict[str, float] = defaultdict(float)  # until when each stream is busy
    ends: dict[int, float] = {}  # of transfers; of the one that runs on a stream, so far
    streams: dict[int, str] = {}  # of transfers
    running: dict[str, int] = {}
    flops = asked = entered = (
        0.0  # `asked`: when the caller asked for the last kernel; `entered`: the place, on the compute stream
    )
    by_kind: dict[str, float] = defaultdict(float)
    waits: dict[str, float] = defaultdict(float)
    places: dict[StepPart, list[float]] = {}
    stretches, place = _Stretches(), StepPart(StepPhase.FORWARD, -1)
    here = places.setdefault(place, [0.0, 0.0])
    taken: dict[int, tuple[str, float]] = {}  # by id of the event, which a deep model's log has many times
    for event in log.events:
        kind = type(event)
        if kind is Alloc or kind is Free:  # most are
            continue
        if isinstance(event, (Op, Collective)):
            known = taken.get(id(event))
            if known is None:
                if isinstance(event, Collective):
                    kind_said = (
                        event.kind if event.stream != COMPUTE else (OF_TOKENS if event.kind == ALL_TO_ALL else IN_LINE)
                    )
                    known = kind_said, costs.of_collective(event)
                else:
                    known = kind_of(event), costs.of(event)
                taken[id(event)] = known
            name, seconds = known
            stream = event.stream
            held_up = now[HOST] - now[stream]
            if held_up > 0:
                now[stream] += held_up
                if stream == COMPUTE:
                    waits[HOST] += held_up
                    here[1] += held_up
            if stream == COMPUTE:
                asked = max(asked, now[HOST]) + costs.caller_s
                late = asked - now[COMPUTE]
                if late > 0:
                    now[COMPUTE] = asked
                    by_kind["the caller"] += late
            if drawn:
                stretches.add(stream, label_of(event, place, log), now[stream], seconds)
            now[stream] += seconds
            by_kind[name] += seconds
            if isinstance(event, Op) and not event.again:
                flops += event.flops
            if stream in running:
                ends[running[stream]] = now[stream]
        elif isinstance(event, Enter):
            here[0] += now[COMPUTE] - entered
            place, entered = event.place, now[COMPUTE]
            here = places.setdefault(place, [0.0, 0.0])
        elif isinstance(event, Launch):
            now[event.stream] = max(now[event.stream], now[COMPUTE])
            running[event.stream], ends[event.transfer] = event.transfer, now[event.stream]
            streams[event.transfer] = event.stream
        elif isinstance(event, (Land, Wait)):
            stream = event.stream if isinstance(event, Wait) else COMPUTE
            waited = max(0.0, ends.get(event.transfer, 0.0) - now[stream])
            now[stream] += waited
            if stream == COMPUTE and waited:
                waits[streams.get(event.transfer, "")] += waited
                here[1] += waited
            if isinstance(event, Wait) and stream in running:
                ends[running[stream]] = now[stream]
        elif isinstance(event, Mark):
            ends[event.transfer] = now[event.stream]
            streams[event.transfer] = event.stream
    total = max(now.values(), default=0.0)
    here[0] += total - entered
    last = max(now, key=lambda name: now[name], default=COMPUTE)
    if total > now[COMPUTE]:
        waits[last] += total - now[COMPUTE]
        here[1] += total - now[COMPUTE]
    return Step(
        seconds=total,
        exposed_s=sum(waits.values()),
        flops=flops,
        by_kind=dict(by_kind),
        waits=dict(waits),
        by_place={place: (busy, waited) for place, (busy, waited) in places.items()},
        stretches=tuple(stretches.found),
    )


def label_of(event: Op | Collective, place: StepPart, log: Log) -> str:
    if event.stream in (STEPPER, DISK_STREAM) and isinstance(event, Op):  # of the step before this one
        return event.name
    return f"{place.phase.value} {name_of(place, log.units)}".strip()


def kind_of(op: Op) -> str:
    """What a kernel of the compute stream does; of others, the stream that they run on."""
    if op.stream in (FETCH, STORE, HOST, STEPPER, DISK_STREAM):
        return op.stream
    if op.stream != COMPUTE:
        return f"{op.stream}{KERNELS_OF}"
    if op.flops:
        return "attention" if "attention" in op.name else "products"
    return "optimizer" if "adam" in op.name or "sgd" in op.name else "element-wise"


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
