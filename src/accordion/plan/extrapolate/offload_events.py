"""A step whose states rest on the host: the engine's copies, its deferred step, and what waits for what, as events of a log."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from accordion.plan.events import (
    COMPUTE,
    DISK_STREAM,
    FETCH,
    HOST,
    REPLICATE,
    STEPPER,
    STORE,
    Alloc,
    Enter,
    Event,
    Free,
    Land,
    Launch,
    Log,
    Mark,
    Op,
    StepPart,
    StepPhase,
    Wait,
    begins,
)

COPIED = 2  # a copy reads and writes
ADDED = 3  # a sum of gradients on the host reads two and writes one
NORM, SCALE = "_foreach_norm", "_foreach_mul_"  # kernels of clipping; what follows in a step is the optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Away:
    """What is not on the device. `gone`, `leaving`: memory that rests elsewhere, and gradients that go there, by number.

    `row_bytes`, `state_bytes`: of a unit, those that travel to the device and those of the optimizer. `fetches_always`: for each
    gather, else once a step. `written_for_gradient`: bytes that a step reads and writes to make rows in the dtype of the
    computation, for a byte of gradients.
    """

    gone: set[int]
    leaving: set[int]
    row_bytes: Mapping[int, int]
    state_bytes: Mapping[int, int]
    fetches_always: bool
    on_disk: bool
    written_for_gradient: float


class OffloadWalk:
    """Owns the walk over a log of the same step without offload.

    What the engine does (`offload/step/deferred_step.py`, `engine/autograd.py`): before a unit is gathered for the first time,
    the caller waits until the thread that steps has stepped it; shards come on a stream of their own. Where a reduce lands,
    the caller waits for the gradients that left before, and these leave on another stream. Clipping is done by the caller;
    the step of the step before runs behind this one's forward, unit by unit as the forward needs them, with states that come
    from disk and go back meanwhile.
    """

    def __init__(self, log: Log, away: Away) -> None:
        self._log, self._away = log, away
        self._place = StepPart(StepPhase.FORWARD, -1)
        self._clipped = False
        self._transfers = max((e.transfer for e in log.events if isinstance(e, (Launch, Mark))), default=0)
        self._gathers, self._shares = gathers_of(log)
        launches = [e for e in log.events if isinstance(e, Launch)]
        last = REPLICATE if any(e.stream == REPLICATE for e in launches) else "reduce"
        self._reduces = {e.transfer for e in launches if e.stream == last}
        self._stepped: dict[int, int] = {}  # by unit, the end of its step, until somebody waited for it
        self._fresh: set[int] = set()  # units whose rows came to the device in this step
        self._waiting: list[Alloc] = []  # gradients that no transfer reduces yet
        self._reducing: dict[int, list[Alloc]] = {}  # by transfer
        self._arriving: tuple[int, list[Alloc], bool] | None = (
            None  # (transfer, gradients, added there) on their way to the host
        )
        self._begun = 0  # micro-batches

    def events(self) -> Iterator[Event]:
        first, *rest = self._log.events
        yield from self._enter(first) if isinstance(first, Enter) else [first]
        yield from self._deferred_step()
        leaving, freed_elsewhere = self._away.leaving, self._away.leaving | self._away.gone
        for event in rest:  # what there is most of comes first
            if isinstance(event, Op):
                if self._place.phase is StepPhase.STEP:
                    yield from self._of_step(event)
                else:
                    yield event
            elif isinstance(event, Alloc):
                yield event
                if event.number in leaving:
                    self._waiting.append(event)
            elif isinstance(event, Free):
                if event.number not in freed_elsewhere:
                    yield event
            elif isinstance(event, Enter):
                yield from self._enter(event)
            elif isinstance(event, Launch):
                yield from self._launch(event)
            elif isinstance(event, Land):
                yield from self._land(event)
            else:
                yield event

    def _next(self) -> int:
        self._transfers += 1
        return self._transfers

    def _name(self, unit: int) -> str:
        return self._log.units[unit] or "(root)"

    # -- the step of the step before

    def _deferred_step(self) -> Iterator[Event]:
        """Unit by unit, in the order in which the forward comes to them."""
        total_bytes, gradient_bytes = self._stepped_bytes()
        states = sum(self._away.state_bytes.values())
        for unit in self._order():
            share = self._away.state_bytes[unit] / states
            what = f"step of {self._name(unit)}"
            read = self._next()
            if self._away.on_disk:
                yield Op(f"states of {self._name(unit)}", 0.0, 2 * self._away.state_bytes[unit], "", DISK_STREAM)
                yield Mark(read, DISK_STREAM)
            moved = total_bytes + gradient_bytes * self._away.written_for_gradient
            yield Op(what, 0.0, round(share * moved), "", STEPPER)
            if self._away.on_disk:
                yield Wait(read, STEPPER)
            self._stepped[unit] = self._next()
            yield Mark(self._stepped[unit], STEPPER)

    def _stepped_bytes(self) -> tuple[int, int]:
        """(bytes that the optimizer reads and writes, bytes of the gradients of one micro-batch)."""
        place, clips, found = self._place, True, 0
        batches = gradients = 0
        for event in self._log.events:
            if isinstance(event, Enter):
                place = event.place
                batches += begins(place)
            elif isinstance(event, Op) and place.phase is StepPhase.STEP:
                found += 0 if clips else event.num_bytes
                clips = clips and SCALE not in event.name
            elif isinstance(event, Alloc) and event.number in self._away.leaving and batches == 1:
                gradients += event.num_bytes
        return found, gradients

    def _order(self) -> list[int]:
        entered = [
            e.place.unit for e in self._log.events if isinstance(e, Enter) and e.place.phase is StepPhase.FORWARD
        ]
        every = dict.fromkeys([*entered, *self._away.state_bytes])
        return [unit for unit in every if self._away.state_bytes.get(unit)]

    # -- gathers

    def _launch(self, event: Launch) -> Iterator[Event]:
        if event.transfer in self._reduces:
            self._reducing[event.transfer], self._waiting = self._waiting, []
        unit = self._gathers.get(event.transfer)
        fetched = None
        if unit is not None:
            yield from self._ready(unit)
            fetched = yield from self._fetch(unit, self._shares[event.transfer])
        yield event
        if fetched is not None:
            yield Wait(fetched, event.stream)

    def _ready(self, unit: int) -> Iterator[Event]:
        """The caller waits for the step of a unit."""
        if unit in self._stepped:
            yield Wait(self._stepped.pop(unit), HOST)

    def _fetch(self, unit: int, share: int) -> Generator[Event, None, int | None]:
        """One of so many equal parts of a unit's rows; gives the transfer."""
        if not self._away.row_bytes.get(unit) or (unit in self._fresh and not self._away.fetches_always):
            return None
        self._fresh.add(unit)
        transfer = self._next()
        yield Launch(transfer, FETCH)
        yield Op("to the device", 0.0, COPIED * self._away.row_bytes[unit] // share, "", FETCH)
        return transfer

    # -- gradients

    def _land(self, event: Land) -> Iterator[Event]:
        reduced = self._reducing.pop(event.transfer, None)
        if reduced is not None:
            yield from self._arrived()
        yield event
        if reduced is not None:
            yield from self._store(reduced)

    def _store(self, mine: list[Alloc]) -> Iterator[Event]:
        """Begin to copy them to the host."""
        if mine:
            self._arriving = self._next(), mine, self._begun > 1
            yield Launch(self._arriving[0], STORE)
            yield Op("to the host", 0.0, COPIED * sum(alloc.num_bytes for alloc in mine), "", STORE)

    def _arrived(self) -> Iterator[Event]:
        """The caller waits for what is under way, which lets go of the device's memory, and adds it to what was there."""
        if self._arriving is None:
            return
        transfer, mine, is_added = self._arriving
        self._arriving = None
        yield Wait(transfer, HOST)
        if is_added:
            yield Op("adds gradients", 0.0, ADDED * sum(alloc.num_bytes for alloc in mine), "", HOST)
        for alloc in mine:
            yield Free(alloc.number)

    def _enter(self, event: Enter) -> Iterator[Event]:
        self._place = place = event.place
        if begins(place):  # gradients came meanwhile, after which a step may have followed
            self._fresh.clear()
            self._begun += 1
        if place.phase is not StepPhase.FORWARD and not self._reduces:  # one rank, which reduces nothing
            yield from self._arrived()
            mine, self._waiting = self._waiting, []
            yield from self._store(mine)
        if place.phase is StepPhase.STEP or begins(place):  # a backward has ended
            yield from self._arrived()
        yield event
        if place.unit >= 0 and place.unit not in self._gathers.values():  # one rank, whose shards are the parameters
            yield from self._ready(place.unit)
            fetched = yield from self._fetch(place.unit, 1)
            if fetched is not None:
                yield Land(fetched)

    # -- clipping

    def _of_step(self, event: Op) -> Iterator[Event]:
        """Kernels on gradients are the host's; those on the norm, a few numbers, stay. The optimizer's ran before."""
        if self._clipped:
            return
        if SCALE in event.name:  # the norm is read
            self._clipped, known = True, self._next()
            yield Mark(known, COMPUTE)
            yield Wait(known, HOST)
        yield replace(event, stream=HOST) if NORM in event.name or SCALE in event.name else event


@lru_cache(4)
def gathers_of(log: Log) -> tuple[dict[int, int], dict[int, int]]:
    """By transfer: the unit that is gathered, which is entered where it lands; and how many of its gathers land there."""
    place, streams = StepPart(StepPhase.FORWARD, -1), dict[int, str]()
    visits: list[list[int]] = []
    units: dict[int, int] = {}
    for event in log.events:
        if isinstance(event, Enter):
            place = event.place
            visits.append([])
        elif isinstance(event, Launch):
            streams[event.transfer] = event.stream
        elif isinstance(event, Land) and streams.get(event.transfer) == "gather":
            units[event.transfer] = place.unit
            visits[-1].append(event.transfer)
    return units, {transfer: len(landed) for landed in visits for transfer in landed}
