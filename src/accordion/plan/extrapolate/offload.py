"""Apply offload to a log: move memory off the device, and count the bytes that it takes on the host and on a disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from accordion.config import DEVICE, HOST, Offload, folder_of
from accordion.offload.step.chunks import chunk_numel
from accordion.offload.step.pipelines import NUM_BUFFERS
from accordion.plan.choice import Choice
from accordion.plan.events import Alloc, Category, Enter, Free, Log, StepPart, StepPhase, begins
from accordion.plan.extrapolate.inputs import inputs_of
from accordion.plan.extrapolate.offload_events import OffloadedState, OffloadWalk
from accordion.plan.hardware import Cluster

MASTER_BYTES, GRADIENT_BYTES = 4, 4  # bytes of an element, float32


def offloaded(log: Log, offload: Offload, compute_bytes: int) -> Log:
    """Return the log of a step with `offload`, derived from `log`, the log of the step without it.

    Offload of activations is not added: `log` must have it already. Not for a single rank, whose offload has to be traced.
    `compute_bytes`: bytes per element of the compute dtype.
    """
    if not offload.is_any:
        return log
    allocs = []
    for alloc, unit in log.held:
        if alloc.category is Category.PARAMETERS and unit is not None:
            if offload.params == HOST:
                continue
            alloc = replace(alloc, num_bytes=alloc.num_bytes * compute_bytes // MASTER_BYTES)
        elif alloc.category is Category.OPTIMIZER:
            continue
        allocs.append((alloc, unit))
    states = state_by_unit(log)
    freed = {alloc.number for alloc, _ in log.held} - {alloc.number for alloc, _ in allocs}
    rows = {unit: s.elements * compute_bytes for unit, s in states.items()}
    wide = compute_bytes != MASTER_BYTES
    offloaded_state = OffloadedState(
        memory=freed,
        gradients=_offloaded_gradients(log),
        row_bytes=rows,
        state_bytes={unit: s.state_bytes for unit, s in states.items()},
        fetches_always=offload.params == HOST,
        on_disk=folder_of(offload.optimizer) is not None,
        written_for_gradient=(MASTER_BYTES + compute_bytes) / GRADIENT_BYTES if wide else 0.0,
    )
    return replace(log, held=allocs, events=list(OffloadWalk(log, offloaded_state).events()))


@dataclass(slots=True)
class UnitState:
    """The state of one unit on one rank between steps: number of its parameters' elements, and bytes of optimizer states."""

    elements: int = 0
    state_bytes: int = 0


@lru_cache(4)
def state_by_unit(log: Log) -> Mapping[int, UnitState]:
    """Return the state that the traced rank keeps of each unit, by unit index."""
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
def _offloaded_gradients(log: Log) -> set[int]:
    """Return the numbers of the allocations of sharded gradients: those that are live at the end of a backward, and those that
    other micro-batches allocate at equal points of the step.
    """
    live: set[int] = set()
    live_at_end: set[int] = set()
    points: dict[int, tuple[StepPart, int]] = {}  # by number: (part of the step, gradients allocated in it before)
    place, count = StepPart(StepPhase.FORWARD, -1), 0
    for event in log.events:
        if isinstance(event, Alloc) and event.category is Category.GRADIENTS:
            live.add(event.number)
            points[event.number], count = (place, count), count + 1
        elif isinstance(event, Free):
            live.discard(event.number)
        elif isinstance(event, Enter):
            place, count = event.place, 0
            if place.phase is StepPhase.STEP or begins(place):
                live_at_end |= live
    points_of_sharded = {points[number] for number in live_at_end}
    return {number for number, point in points.items() if point in points_of_sharded}


def host_bytes(log: Log, choice: Choice, compute_bytes: int, cluster: Cluster) -> int:
    """Return the bytes of host memory that offload takes on one machine, over all its ranks: masters, shards in the compute dtype
    if it differs, gradients, a landing buffer, states (buffers for those on disk), and inputs of recomputed units.
    """
    ranks, offload = min(choice.gpus, cluster.node), choice.offload
    waiting = ranks * sum(inputs_of(log)) if offload.activations != DEVICE else 0
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
    """Return the bytes of states that all ranks of one machine have on disk."""
    states = sum(s.state_bytes for s in state_by_unit(log).values()) if folder_of(choice.offload.optimizer) else 0
    return states * min(choice.gpus, cluster.node)
