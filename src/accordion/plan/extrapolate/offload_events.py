"""Add the events of offload to a log: copies to and from the host, the deferred optimizer step, and the waits between them."""

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
NORM, SCALE = "_foreach_norm", "_foreach_mul_"  # kernels of clipping; later kernels of a step are the optimizer's


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadedState:
    """The state that is off the device, and how it is moved."""

    memory: set[int]  # numbers of allocations that are not on the device between steps
    gradients: set[int]  # numbers of gradients that are copied to the host
    row_bytes: Mapping[int, int]  # by unit: bytes of its shards that are copied to the device
    state_bytes: Mapping[int, int]  # by unit: bytes of its optimizer states
    fetches_always: bool  # shards are copied for each gather, not once a step
    on_disk: bool  # states are on disk
    written_for_gradient: float  # bytes moved to write shards in the compute dtype, for each byte of gradients


class OffloadWalk:
    """Adds the events of offload to the log of a step without it.

    As in the engine (`offload/step/deferred_step.py`, `engine/autograd.py`): the optimizer step of the previous step runs on a
    thread during this step's forward, unit by unit in the forward's order, while states are read from disk and written back.
    Before a unit is gathered for the first time, the caller waits for its step; its shards are copied on the fetch stream.
    When a reduce ends, the caller waits for the previous copy of gradients and starts the next one on the store stream. The
    caller clips the gradients on the host.
    """

    def __init__(self, log: Log, state: OffloadedState) -> None:
        self._log, self._state = log, state
        self._place = StepPart(StepPhase.FORWARD, -1)
        self._clipped = False
        self._transfers = max((e.transfer for e in log.events if isinstance(e, (Launch, Mark))), default=0)
        self._gathers, self._shares = gathers_of(log)
        launches = [e for e in log.events if isinstance(e, Launch)]
        last = REPLICATE if any(e.stream == REPLICATE for e in launches) else "reduce"
        self._reduces = {e.transfer for e in launches if e.stream == last}
        self._step_ends: dict[int, int] = {}  # by unit: the end of its step, removed once it was waited for
        self._fetched: set[int] = set()  # units whose shards were copied to the device in this step
        self._unreduced: list[Alloc] = []  # gradients that no transfer reduces yet
        self._reducing: dict[int, list[Alloc]] = {}  # by transfer
        # The copy to the host that has not been waited for: (transfer, gradients, they are added to others on the host).
        self._storing: tuple[int, list[Alloc], bool] | None = None
        self._num_batches = 0  # micro-batches that have begun

    def events(self) -> Iterator[Event]:
        first, *rest = self._log.events
        yield from self._enter(first) if isinstance(first, Enter) else [first]
        yield from self._deferred_step()
        gradients, offloaded = self._state.gradients, self._state.gradients | self._state.memory
        for event in rest:  # the most frequent types first
            if isinstance(event, Op):
                if self._place.phase is StepPhase.STEP:
                    yield from self._step_kernel(event)
                else:
                    yield event
            elif isinstance(event, Alloc):
                yield event
                if event.number in gradients:
                    self._unreduced.append(event)
            elif isinstance(event, Free):
                if event.number not in offloaded:
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

    # -- the optimizer step of the previous step

    def _deferred_step(self) -> Iterator[Event]:
        """Yield the steps of the units, in the order in which the forward needs them."""
        total_bytes, gradient_bytes = self._stepped_bytes()
        states = sum(self._state.state_bytes.values())
        for unit in self._order():
            share = self._state.state_bytes[unit] / states
            label = f"step of {self._name(unit)}"
            read = self._next()
            if self._state.on_disk:
                yield Op(f"states of {self._name(unit)}", 0.0, 2 * self._state.state_bytes[unit], "", DISK_STREAM)
                yield Mark(read, DISK_STREAM)
            moved = total_bytes + gradient_bytes * self._state.written_for_gradient
            yield Op(label, 0.0, round(share * moved), "", STEPPER)
            if self._state.on_disk:
                yield Wait(read, STEPPER)
            self._step_ends[unit] = self._next()
            yield Mark(self._step_ends[unit], STEPPER)

    def _stepped_bytes(self) -> tuple[int, int]:
        """Return (bytes that the optimizer reads and writes, bytes of the gradients of one micro-batch)."""
        place, clips, moved = self._place, True, 0
        batches = gradients = 0
        for event in self._log.events:
            if isinstance(event, Enter):
                place = event.place
                batches += begins(place)
            elif isinstance(event, Op) and place.phase is StepPhase.STEP:
                moved += 0 if clips else event.num_bytes
                clips = clips and SCALE not in event.name
            elif isinstance(event, Alloc) and event.number in self._state.gradients and batches == 1:
                gradients += event.num_bytes
        return moved, gradients

    def _order(self) -> list[int]:
        entered = [
            e.place.unit for e in self._log.events if isinstance(e, Enter) and e.place.phase is StepPhase.FORWARD
        ]
        every = dict.fromkeys([*entered, *self._state.state_bytes])
        return [unit for unit in every if self._state.state_bytes.get(unit)]

    # -- gathers

    def _launch(self, event: Launch) -> Iterator[Event]:
        if event.transfer in self._reduces:
            self._reducing[event.transfer], self._unreduced = self._unreduced, []
        unit = self._gathers.get(event.transfer)
        fetched = None
        if unit is not None:
            yield from self._wait_for_step(unit)
            fetched = yield from self._fetch(unit, self._shares[event.transfer])
        yield event
        if fetched is not None:
            yield Wait(fetched, event.stream)

    def _wait_for_step(self, unit: int) -> Iterator[Event]:
        if unit in self._step_ends:
            yield Wait(self._step_ends.pop(unit), HOST)

    def _fetch(self, unit: int, num_shares: int) -> Generator[Event, None, int | None]:
        """Yield the events of a copy of `1 / num_shares` of a unit's shards to the device. Returns the number of the transfer;
        None if no copy is needed."""
        if not self._state.row_bytes.get(unit) or (unit in self._fetched and not self._state.fetches_always):
            return None
        self._fetched.add(unit)
        transfer = self._next()
        yield Launch(transfer, FETCH)
        yield Op("to the device", 0.0, COPIED * self._state.row_bytes[unit] // num_shares, "", FETCH)
        return transfer

    # -- gradients

    def _land(self, event: Land) -> Iterator[Event]:
        reduced = self._reducing.pop(event.transfer, None)
        if reduced is not None:
            yield from self._finish_store()
        yield event
        if reduced is not None:
            yield from self._store(reduced)

    def _store(self, gradients: list[Alloc]) -> Iterator[Event]:
        """Yield the events that start a copy of gradients to the host."""
        if gradients:
            self._storing = self._next(), gradients, self._num_batches > 1
            yield Launch(self._storing[0], STORE)
            yield Op("to the host", 0.0, COPIED * sum(alloc.num_bytes for alloc in gradients), "", STORE)

    def _finish_store(self) -> Iterator[Event]:
        """Yield the caller's wait for the last copy, the sum with gradients on the host, and the frees on the device."""
        if self._storing is None:
            return
        transfer, gradients, is_added = self._storing
        self._storing = None
        yield Wait(transfer, HOST)
        if is_added:
            yield Op("adds gradients", 0.0, ADDED * sum(alloc.num_bytes for alloc in gradients), "", HOST)
        for alloc in gradients:
            yield Free(alloc.number)

    def _enter(self, event: Enter) -> Iterator[Event]:
        self._place = place = event.place
        if begins(place):  # the optimizer may have stepped since the last micro-batch, so shards are fetched again
            self._fetched.clear()
            self._num_batches += 1
        if place.phase is not StepPhase.FORWARD and not self._reduces:  # a single rank, without reduces
            yield from self._finish_store()
            gradients, self._unreduced = self._unreduced, []
            yield from self._store(gradients)
        if place.phase is StepPhase.STEP or begins(place):  # a backward has ended
            yield from self._finish_store()
        yield event
        if place.unit >= 0 and place.unit not in self._gathers.values():  # a single rank, without gathers
            yield from self._wait_for_step(place.unit)
            fetched = yield from self._fetch(place.unit, 1)
            if fetched is not None:
                yield Land(fetched)

    # -- clipping

    def _step_kernel(self, event: Op) -> Iterator[Event]:
        """Yield a kernel of clipping, on the host if it works on gradients. Yields nothing for kernels of the optimizer."""
        if self._clipped:
            return
        if SCALE in event.name:  # the caller reads the norm first
            self._clipped, norm = True, self._next()
            yield Mark(norm, COMPUTE)
            yield Wait(norm, HOST)
        yield replace(event, stream=HOST) if NORM in event.name or SCALE in event.name else event


@lru_cache(4)
def gathers_of(log: Log) -> tuple[dict[int, int], dict[int, int]]:
    """Return (transfer of a gather -> gathered unit, transfer -> number of gathers that end during one visit of that unit)."""
    # The gathered unit is the one that was entered last when the gather ends.
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
    return units, {transfer: len(gathers) for gathers in visits for transfer in gathers}
