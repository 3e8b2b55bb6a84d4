"""The streams of a rank, event by event: what computes, what communicates, and what waits for what."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from accordion.plan.events import (
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """What a stream does from `start_s` for `seconds`, for the picture."""

    stream: str
    label: str
    start_s: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """`exposed_s`: how long the compute stream waited for others. `flops`: of products and attention, recomputation left out."""

    seconds: float
    exposed_s: float
    flops: float
    by_kind: dict[str, float]
    stretches: tuple[Stretch, ...]


def simulate(log: Log, costs: Costs) -> Step:
    """Run a log on streams that work side by side. A transfer starts behind the compute stream's work so far, ends in order on
    its stream, and the compute stream waits where it lands, as the engine has it. What the caller waits for holds up all that
    it begins later. Other than that it takes time for kernels alone, where the rates say so.
    """
    now: dict[str, float] = defaultdict(float)  # until when each stream is busy
    ends: dict[int, float] = {}  # of transfers; of the one that runs on a stream, so far
    running: dict[str, int] = {}
    exposed = flops = asked = 0.0  # `asked`: when the caller asked for the last kernel
    by_kind: dict[str, float] = defaultdict(float)
    stretches, place = _Stretches(), StepPart(StepPhase.FORWARD, -1)
    for event in log.events:
        if type(event) is Alloc or type(event) is Free:  # most are
            continue
        if isinstance(event, Enter):
            place = event.place
        elif isinstance(event, Launch):
            now[event.stream] = max(now[event.stream], now[COMPUTE])
            running[event.stream], ends[event.transfer] = event.transfer, now[event.stream]
        elif isinstance(event, Land):
            waited = max(0.0, ends.get(event.transfer, 0.0) - now[COMPUTE])
            exposed += waited
            now[COMPUTE] += waited
        elif isinstance(event, Mark):
            ends[event.transfer] = now[event.stream]
        elif isinstance(event, Wait):
            waited = max(0.0, ends.get(event.transfer, 0.0) - now[event.stream])
            exposed += waited if event.stream == COMPUTE else 0.0
            now[event.stream] += waited
            if event.stream in running:
                ends[running[event.stream]] = now[event.stream]
        elif isinstance(event, (Op, Collective)):
            kind = event.kind if isinstance(event, Collective) else kind_of(event)
            seconds = costs.of_collective(event) if isinstance(event, Collective) else costs.of(event)
            held_up = max(0.0, now[HOST] - now[event.stream])
            exposed += held_up if event.stream == COMPUTE else 0.0
            now[event.stream] += held_up
            if event.stream == COMPUTE:
                asked = max(asked, now[HOST]) + costs.caller_s
                now[COMPUTE] = max(now[COMPUTE], asked)
            stretches.add(event.stream, label_of(event, place, log), now[event.stream], seconds)
            now[event.stream] += seconds
            by_kind[kind] += seconds
            flops += 0.0 if isinstance(event, Collective) or event.again else event.flops
            if event.stream in running:
                ends[running[event.stream]] = now[event.stream]
    total = max(now.values(), default=0.0)
    exposed += total - now[COMPUTE]
    return Step(seconds=total, exposed_s=exposed, flops=flops, by_kind=dict(by_kind), stretches=tuple(stretches.found))


def label_of(event: Op | Collective, place: StepPart, log: Log) -> str:
    if event.stream in (STEPPER, DISK_STREAM) and isinstance(event, Op):  # of the step before this one
        return event.name
    return f"{place.phase.value} {name_of(place, log.units)}".strip()


def kind_of(op: Op) -> str:
    if op.stream in (FETCH, STORE, HOST, STEPPER, DISK_STREAM):
        return op.stream
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
