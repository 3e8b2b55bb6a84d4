"""Names for the parts of a step's time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accordion.plan.events import DISK_STREAM, FETCH, HOST, REPLICATE, STEPPER, STORE, StepPhase
from accordion.plan.replay.peak import name_of
from accordion.plan.replay.timeline import KERNELS_OF, Step

MESSAGES = ("gather", "exchange", "scatter_sum", "sum")
WAITED_FOR = {  # stream -> what a wait for it is called
    "gather": "waiting for parameters (gather)",
    "copy in": "waiting for parameters (gather)",
    "reduce": "waiting for gradients (reduce)",
    "all-reduce": "waiting for gradients between nodes",
    REPLICATE: "waiting for gradients between nodes",
    FETCH: "waiting for the host",
    STORE: "waiting for the host",
    HOST: "waiting for the host",
}
OTHER_STREAMS = {  # kind of work -> its name
    "gather": "all-gather", "exchange": "all-to-all of gradients", "scatter_sum": "reduce-scatter", "sum": "all-reduce",
    FETCH: "copies from the host", STORE: "copies to the host", HOST: "the caller's work on the host",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePart:
    """Seconds of one kind of work or one unit. `waited`: waits among them. `hidden`: on another stream, not in the sum."""

    name: str
    seconds: float
    waited: float = 0.0
    hidden: bool = False


def by_kind(step: Step) -> list[TimePart]:
    """Return the compute stream's time by kind, longest first (the sum is the step), then the work on other streams."""
    waits: dict[str, float] = {}
    for stream, seconds in step.waits.items():
        name = WAITED_FOR.get(stream, "waiting for others")
        waits[name] = waits.get(name, 0.0) + seconds
    others = (*MESSAGES, FETCH, STORE, HOST, STEPPER, DISK_STREAM)
    compute = {name: s for name, s in step.by_kind.items() if name not in others and not name.endswith(KERNELS_OF)}
    parts = [TimePart(name=name, seconds=s) for name, s in compute.items() if s > 0]
    parts += [TimePart(name=name, seconds=s, waited=s) for name, s in waits.items() if s > 0]
    hidden = [
        TimePart(name=OTHER_STREAMS.get(name, name), seconds=s, hidden=True)
        for name, s in step.by_kind.items()
        if name not in compute and s > 0
    ]
    return [*sorted(parts, key=lambda p: -p.seconds), *sorted(hidden, key=lambda p: -p.seconds)]


def by_unit(step: Step, units: Sequence[str]) -> list[TimePart]:
    """Return the compute stream's time by phase and unit, in the order of a step; repeated blocks are one entry."""
    totals: dict[str, list[float]] = {}
    counts: dict[str, set[str]] = {}
    for place, (seconds, waited) in step.by_place.items():
        unit = name_of(place, units)
        stem = ".".join("*" if part.isdecimal() else part for part in unit.split("."))
        name = f"{place.phase.value} {stem or '(before the model)'}".strip()
        if place.phase is StepPhase.STEP:
            name = "optimizer's step, clipping"
        sums = totals.setdefault(name, [0.0, 0.0])
        sums[0] += seconds
        sums[1] += waited
        counts.setdefault(name, set()).add(unit)
    return [
        TimePart(
            name=f"{name}, {len(counts[name])} of them" if name.endswith(".*") else name, seconds=seconds, waited=waited
        )
        for name, (seconds, waited) in totals.items()
        if seconds > 0
    ]
