"""Offload in a plan: which memory of a log rests elsewhere, and how many bytes of the host and of a disk that takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from accordion.config import DEVICE, HOST, Offload, folder_of
from accordion.offload.step.chunks import chunk_numel
from accordion.offload.step.pipelines import NUM_BUFFERS
from accordion.plan.choice import Choice
from accordion.plan.events import Alloc, Category, Enter, Free, Log, StepPart, StepPhase, begins
from accordion.plan.extrapolate.inputs import inputs_of, inputs_on_disk, staged_bytes
from accordion.plan.extrapolate.offload_events import Away, OffloadWalk
from accordion.plan.hardware import Cluster

MASTER_BYTES, GRADIENT_BYTES = 4, 4  # of an element, float32


def offloaded(log: Log, offload: Offload, compute_bytes: int) -> Log:
    """Return `log` with shards, gradients and states where `offload` has them, with the copies, the work of the host and of the
    disk, and the waits of the engine. The log has inputs of recomputed units on the host if `offload` has them off the device;
    a disk is behind that. A step of one rank alone is traced instead: see `Evaluator`.
    """
    if folder_of(offload.activations):
        log = inputs_on_disk(log)
    if not offload.is_any:
        return log
    held = []
    for alloc, unit in log.held:
        if alloc.category is Category.PARAMETERS and unit is not None:
            if offload.params == HOST:
                continue
            alloc = replace(alloc, num_bytes=alloc.num_bytes * compute_bytes // MASTER_BYTES)
        elif alloc.category is Category.OPTIMIZER:
            continue
        held.append((alloc, unit))
    rests = rests_of(log)
    gone = {alloc.number for alloc, _ in log.held} - {alloc.number for alloc, _ in held}
    rows = {unit: r.elements * compute_bytes for unit, r in rests.items()}
    wide = compute_bytes != MASTER_BYTES
    away = Away(
        gone=gone,
        leaving=_leaving(log),
        row_bytes=rows,
        state_bytes={unit: r.state_bytes for unit, r in rests.items()},
        fetches_always=offload.params == HOST,
        on_disk=folder_of(offload.optimizer) is not None,
        written_for_gradient=(MASTER_BYTES + compute_bytes) / GRADIENT_BYTES if wide else 0.0,
    )
    return replace(log, held=held, events=list(OffloadWalk(log, away).events()))


@dataclass(slots=True)
class Rests:
    """What stays of one unit between steps: elements of its parameters, and bytes of the optimizer's states."""

    elements: int = 0
    state_bytes: int = 0


@lru_cache(4)
def rests_of(log: Log) -> Mapping[int, Rests]:
    """By unit, of one rank."""
    found: dict[int, Rests] = {}
    for alloc, unit in log.held:
        if unit is None:
            continue
        known = found.setdefault(unit, Rests())
        if alloc.category is Category.PARAMETERS:
            known.elements += alloc.num_bytes // MASTER_BYTES
        elif alloc.category is Category.OPTIMIZER:
            known.state_bytes += alloc.num_bytes
    return found


@lru_cache(4)
def _leaving(log: Log) -> set[int]:
    """Sharded gradients: those that are there at the end of a backward, and what other micro-batches add to them, which is made
    at the same points.
    """
    live: set[int] = set()
    kept: set[int] = set()
    points: dict[int, tuple[StepPart, int]] = {}  # of gradients: the place, and how many were made there before
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
                kept |= live
    leave = {points[number] for number in kept}
    return {number for number, point in points.items() if point in leave}


def host_bytes(log: Log, choice: Choice, compute_bytes: int, cluster: Cluster) -> int:
    """Of one machine for all its ranks: masters, rows that travel in another dtype, gradients, where those of a unit land, and
    states, or the buffers through which these pass where they are on disk; and inputs of recomputed units likewise.
    """
    ranks, offload = min(choice.gpus, cluster.node), choice.offload
    inputs = inputs_of(log) if offload.activations != DEVICE else []
    waiting = ranks * (staged_bytes(inputs) if folder_of(offload.activations) else sum(inputs))
    if not offload.is_any:
        return waiting
    rests = list(rests_of(log).values())
    elements, states = sum(r.elements for r in rests), sum(r.state_bytes for r in rests)
    largest = max((r.elements for r in rests), default=0)
    each = MASTER_BYTES + GRADIENT_BYTES + (compute_bytes if compute_bytes != MASTER_BYTES else 0)
    if folder_of(offload.optimizer):
        state = states // max(elements, 1)  # of an element
        states = NUM_BUFFERS * state * min(chunk_numel(compute_bytes, elements), largest)
    return (elements * each + GRADIENT_BYTES * largest + states) * ranks + waiting


def disk_bytes(log: Log, choice: Choice, cluster: Cluster) -> int:
    """States and inputs of recomputed units of all ranks of one machine, where they are on disk."""
    states = sum(r.state_bytes for r in rests_of(log).values()) if folder_of(choice.offload.optimizer) else 0
    inputs = sum(inputs_of(log)) if folder_of(choice.offload.activations) else 0
    return (states + inputs) * min(choice.gpus, cluster.node)
