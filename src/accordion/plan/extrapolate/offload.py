"""Apply offload to a log: move memory off the device, and count the bytes that it takes on the host and on a disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from accordion.config import DEVICE, HOST, Offload, folder_of
from accordion.offload.activations.stores import NUM_STAGES, room_for
from accordion.offload.step.chunks import chunk_numel
from accordion.offload.step.pipelines import NUM_BUFFERS
from accordion.plan.choice import Choice
from accordion.plan.events import (
    COMPUTE,
    REPLICATE,
    STORE,
    Alloc,
    Category,
    Enter,
    Event,
    Free,
    Launch,
    Log,
    Op,
    StepPart,
    StepPhase,
    Wait,
    begins,
)
from accordion.plan.hardware import Cluster

MASTER_BYTES, GRADIENT_BYTES = 4, 4  # bytes of an element, float32
COPIED = 2  # a copy reads and writes


def offloaded(log: Log, offload: Offload, compute_bytes: int) -> Log:
    """Return the log of a step with parameters and states offloaded as in `offload`, derived from `log`, in which they are on the
    device. The result has the memory and work of the device only. Returns `log` itself if `offload` offloads neither parameters
    nor states. Offload of activations must be in `log` already. Not for a single rank, whose offload has to be traced.
    `compute_bytes`: bytes per element of the compute dtype."""
    return _without_states(log, offload.params == HOST, compute_bytes) if offload.is_any else log


@lru_cache(4)
def _without_states(log: Log, has_params_on_host: bool, compute_bytes: int) -> Log:
    allocs = []
    for alloc, unit in log.held:
        if alloc.category is Category.PARAMETERS and unit is not None:
            if has_params_on_host:
                continue
            alloc = replace(alloc, num_bytes=alloc.num_bytes * compute_bytes // MASTER_BYTES)
        elif alloc.category is Category.OPTIMIZER:
            continue
        allocs.append((alloc, unit))
    moved = {alloc.number for alloc, _ in log.held} - {alloc.number for alloc, _ in allocs}
    return replace(log, held=allocs, events=list(_device_events(log, moved)))


def _device_events(log: Log, moved: set[int]) -> Iterator[Event]:
    """Yield the events of `log` without operators of the optimizer's step, and without frees of the allocations numbered in
    `moved`. Sharded gradients are freed earlier than in `log`: when the next reduce ends or the backward ends, because the
    engine waits for their copy to the host then."""
    gradients = offloaded_gradients(log)
    launches = [event for event in log.events if isinstance(event, Launch)]
    last = REPLICATE if any(event.stream == REPLICATE for event in launches) else "reduce"
    reduces = {event.transfer for event in launches if event.stream == last}
    unreduced: list[int] = []
    reducing: dict[int, list[int]] = {}  # by transfer
    copied: list[int] = []  # gradients whose copy to the host has started
    place = StepPart(StepPhase.FORWARD, -1)
    for event in log.events:
        if isinstance(event, Free) and (event.number in moved or event.number in gradients):
            continue
        if isinstance(event, Op) and place.phase is StepPhase.STEP:
            continue
        if isinstance(event, Enter):
            place = event.place
            if not reduces and place.phase is not StepPhase.FORWARD:  # a single rank
                yield from map(Free, copied)
                copied, unreduced = unreduced, []
            if place.phase is StepPhase.STEP or begins(place):  # a backward has ended
                yield from map(Free, copied)
                copied = []
        elif isinstance(event, Launch) and event.transfer in reduces:
            reducing[event.transfer], unreduced = unreduced, []
        elif isinstance(event, Wait) and event.stream == COMPUTE and event.transfer in reducing:
            yield from map(Free, copied)
            copied = reducing.pop(event.transfer)
        elif isinstance(event, Alloc) and event.number in gradients:
            unreduced.append(event.number)
        yield event


@dataclass(slots=True)
class UnitState:
    """Memory of one unit on one rank between steps: number of parameter elements, and bytes of optimizer states."""

    elements: int = 0
    state_bytes: int = 0


@lru_cache(4)
def state_by_unit(log: Log) -> Mapping[int, UnitState]:
    """Return unit index -> memory that the traced rank keeps for the unit between steps."""
    states: dict[int, UnitState] = {}
    for alloc, unit in log.held:
        if unit is None:
            continue
        state = states.setdefault(unit, UnitState())
        if alloc.category is Category.PARAMETERS:
            state.elements += alloc.num_bytes // MASTER_BYTES
        elif alloc.category is Category.OPTIMIZER:
            state.state_bytes += alloc.num_bytes
    return states


@lru_cache(4)
def offloaded_gradients(log: Log) -> Mapping[int, int]:
    """Return allocation number -> bytes, for sharded gradients: the gradients that are live at the end of a backward, and those
    that other micro-batches allocate at the same point of their forward or backward."""
    live: set[int] = set()
    live_at_end: set[int] = set()
    points: dict[int, tuple[StepPart, int]] = {}  # by number: (part of the step, gradients allocated in it before)
    sizes: dict[int, int] = {}
    place, count = StepPart(StepPhase.FORWARD, -1), 0
    for event in log.events:
        if isinstance(event, Alloc) and event.category is Category.GRADIENTS:
            live.add(event.number)
            sizes[event.number] = event.num_bytes
            points[event.number], count = (place, count), count + 1
        elif isinstance(event, Free):
            live.discard(event.number)
        elif isinstance(event, Enter):
            place, count = event.place, 0
            if place.phase is StepPhase.STEP or begins(place):
                live_at_end |= live
    points_of_sharded = {points[number] for number in live_at_end}
    return {number: sizes[number] for number, point in points.items() if point in points_of_sharded}


def inputs_of(log: Log) -> list[int]:
    """Return the bytes, in whole pages, of each offloaded input of the micro-batch that offloads most bytes; [] if no micro-batch
    offloads inputs."""
    batches: list[list[int]] = [[]]
    for event in log.events:
        if isinstance(event, Enter) and begins(event.place):
            batches.append([])
        elif isinstance(event, Op) and event.stream == STORE:
            batches[-1].append(room_for(event.num_bytes // COPIED))
    return max(batches, key=sum)


def host_bytes(log: Log, choice: Choice, compute_bytes: int, cluster: Cluster) -> int:
    """Return the bytes of host memory that the offload of `choice` takes on one machine, for all its ranks: float32 masters,
    shards in the compute dtype if that is another, gradients, a buffer for the gradients of one unit, optimizer states, and
    inputs of recomputed units. States or inputs on a disk take only staging buffers. `log`: the log without offloaded states.
    `compute_bytes`: bytes per element of the compute dtype."""
    ranks, offload = min(choice.gpus, cluster.node), choice.offload
    inputs = inputs_of(log) if offload.activations != DEVICE else []
    staged = NUM_STAGES * max(inputs, default=0)
    waiting = ranks * (staged if folder_of(offload.activations) else sum(inputs))
    if not offload.is_any:
        return waiting
    units = list(state_by_unit(log).values())
    elements, states = sum(u.elements for u in units), sum(u.state_bytes for u in units)
    largest = max((u.elements for u in units), default=0)
    each = MASTER_BYTES + GRADIENT_BYTES + (compute_bytes if compute_bytes != MASTER_BYTES else 0)
    if folder_of(offload.optimizer):
        state = states // max(elements, 1)  # bytes for each element
        states = NUM_BUFFERS * state * min(chunk_numel(compute_bytes, elements), largest)
    return (elements * each + GRADIENT_BYTES * largest + states) * ranks + waiting


def disk_bytes(log: Log, choice: Choice, cluster: Cluster) -> int:
    """Return the bytes on one machine's disk, of all its ranks: optimizer states and inputs of recomputed units, if `choice`
    offloads them to a disk; else 0. `log`: the log of the step without offloaded states."""
    states = sum(s.state_bytes for s in state_by_unit(log).values()) if folder_of(choice.offload.optimizer) else 0
    inputs = sum(inputs_of(log)) if folder_of(choice.offload.activations) else 0
    return (states + inputs) * min(choice.gpus, cluster.node)
