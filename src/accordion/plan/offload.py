"""Offload in a plan: a log without what rests on the host, with the copies; bytes of host and disk; time of the step there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from accordion.config import DISK, HOST
from accordion.memory.pieces import piece_numel
from accordion.memory.stream import NUM_BUFFERS
from accordion.plan.events import Alloc, Category, Collective, Enter, Event, Free, Log, Op, Phase, Place
from accordion.plan.hardware import GB, HOST_MEMORY_GBPS, Cluster
from accordion.plan.simulate import Step, kind_of
from accordion.plan.space import NO_OFFLOAD, OFFLOADS, Choice

MASTER_BYTES, GRADIENT_BYTES = 4, 4  # of an element, float32
MOVED_BY_STEP = 28  # bytes of host memory that Adam reads and writes for an element: 4 x (p, g, m, v) and 4 x (p, m, v)
STATE_BYTES = {"sgd": 4}  # of an element, where it is not Adam's 8
UNITS_LATER = 2  # after so many more units a gradient has left the device


def offloaded(log: Log, choice: Choice, compute_bytes: int) -> Log:
    """`log` of the same step with shards, gradients and states where `choice.offload` has them.

    The engine copies on lanes of their own: here copies to the device stand in the gather's stream and those from it in the
    reduce's, so that a plan is rather too slow.
    """
    if choice.offload == NO_OFFLOAD:
        return log
    params, _ = OFFLOADS[choice.offload]
    held = []
    for alloc, unit in log.held:
        if alloc.category is Category.PARAMETERS and unit is not None:
            if params == HOST:
                continue
            alloc = replace(alloc, num_bytes=alloc.num_bytes * compute_bytes // MASTER_BYTES)
        elif alloc.category is Category.OPTIMIZER:
            continue
        held.append((alloc, unit))
    kept = {alloc.number for alloc, _ in held}
    gone = {alloc.number for alloc, _ in log.held} - kept
    return replace(log, held=held, events=list(_events(log, choice, gone, params == HOST)))


def _events(log: Log, choice: Choice, gone: set[int], fetches: bool) -> Iterator[Event]:
    leaving = _leaving(log)
    due: dict[int, list[Alloc]] = defaultdict(list)  # by count of units entered
    entered, place = 0, Place(Phase.FORWARD, -1)
    first_pass = True
    for event in log.events:
        if isinstance(event, Enter):
            first_pass = first_pass and event.place.phase is Phase.FORWARD
            entered, place = entered + 1, event.place
            last = place.phase is Phase.STEP or place == Place(Phase.FORWARD, -1)
            for moment in [m for m in due if last or m <= entered]:
                for alloc in due.pop(moment):
                    yield Collective("store", alloc.num_bytes, HOST, "reduce")
                    yield Free(alloc.number)
        if isinstance(event, Free) and (event.number in gone or event.number in leaving):
            continue
        if isinstance(event, Op) and place.phase is Phase.STEP and kind_of(event) == "optimizer":
            continue
        if isinstance(event, Collective) and event.kind == "gather" and (fetches or first_pass):
            yield Collective("fetch", event.num_bytes // choice.shards, HOST, event.stream)
        yield event
        if isinstance(event, Alloc) and event.number in leaving:
            due[entered + UNITS_LATER].append(event)


def _leaving(log: Log) -> set[int]:
    """Sharded gradients: those that are there at the end of a backward."""
    live: dict[int, Alloc] = {}
    found: set[int] = set()
    for event in log.events:
        if isinstance(event, Alloc) and event.category is Category.GRADIENTS:
            live[event.number] = event
        elif isinstance(event, Free):
            live.pop(event.number, None)
        elif isinstance(event, Enter) and (event.place.phase is Phase.STEP or event.place == Place(Phase.FORWARD, -1)):
            found |= set(live)
    return found


def elements_of(log: Log) -> int:
    """Elements that one rank steps, from its masters in float32."""
    return sum(_elements_of_units(log).values())


def _elements_of_units(log: Log) -> dict[int, int]:
    found: dict[int, int] = defaultdict(int)
    for alloc, unit in log.held:
        if alloc.category is Category.PARAMETERS and unit is not None:
            found[unit] += alloc.num_bytes
    return {unit: num_bytes // MASTER_BYTES for unit, num_bytes in found.items()}


def host_bytes(log: Log, choice: Choice, compute_bytes: int, optimizer: str, cluster: Cluster) -> int:
    """Of one machine for all its ranks: masters, rows that travel in another dtype, gradients, where those of a unit land, and
    states, or the buffers through which these pass where they are on disk.
    """
    if choice.offload == NO_OFFLOAD:
        return 0
    elements, state = elements_of(log), STATE_BYTES.get(optimizer, 8)
    largest = max(_elements_of_units(log).values(), default=0)
    each = MASTER_BYTES + GRADIENT_BYTES + (compute_bytes if compute_bytes != MASTER_BYTES else 0)
    if OFFLOADS[choice.offload][1] == DISK:
        states = NUM_BUFFERS * state * min(piece_numel(compute_bytes, elements), largest)
    else:
        states = state * elements
    return (elements * each + GRADIENT_BYTES * largest + states) * min(choice.gpus, cluster.node)


def disk_bytes(log: Log, choice: Choice, optimizer: str, cluster: Cluster) -> int:
    """States of all ranks of one machine, where they are on disk."""
    if OFFLOADS[choice.offload][1] != DISK:
        return 0
    return STATE_BYTES.get(optimizer, 8) * elements_of(log) * min(choice.gpus, cluster.node)


def with_host_step(step: Step, log: Log, choice: Choice, optimizer: str, cluster: Cluster) -> Step:
    """`step` with the part of the host's step that the next forward does not hide: units are stepped in the order in which it
    needs them, so the first is waited for, and what takes longer than the forward.
    """
    if choice.offload == NO_OFFLOAD:
        return step
    elements = elements_of(log) * min(
        choice.gpus, cluster.node
    )  # of a machine, whose memory and disk all its ranks share
    seconds = elements * MOVED_BY_STEP / (HOST_MEMORY_GBPS * GB)
    if OFFLOADS[choice.offload][1] == DISK:
        seconds = max(seconds, elements * 2 * STATE_BYTES.get(optimizer, 8) / (cluster.disk_gbps * GB))
    units = max(1, len(log.units))
    forward = sum(s.seconds for s in step.lanes if s.stream == "compute" and s.label.startswith(Phase.FORWARD.value))
    exposed = max(seconds / units, seconds - forward * (units - 1) / units)
    return replace(step, seconds=step.seconds + exposed, exposed_s=step.exposed_s + exposed)
