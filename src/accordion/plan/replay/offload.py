"""Add offload to a log without it: the memory that stays on the device, the bytes on the host and on a disk, and the time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from accordion.config import DEVICE, HOST, Offload, folder_of
from accordion.offload.activations import NUM_STAGES, room_for
from accordion.offload.step.chunks import chunk_numel
from accordion.offload.step.pipelines import NUM_BUFFERS
from accordion.plan.choice import Choice
from accordion.plan.events import (
    START,
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
    Streams,
    Wait,
)
from accordion.plan.hardware import Cluster
from accordion.plan.replay.cost import Costs
from accordion.plan.replay.timeline import Step

COPIED = 2  # a copy reads and writes
ADDED = 3  # a sum of gradients on the host reads two and writes one
NORM, SCALE = "_foreach_norm", "_foreach_mul_"  # kernels of clipping; later kernels of a step are the optimizer's


# -- memory


def offloaded(log: Log, offload: Offload, compute_bytes: int) -> Log:
    """Return the log of a step with parameters and states offloaded as in `offload`. It is derived from `log`, in which both
    are on the device, and has only memory and work of the device. Return `log` itself if `offload` offloads neither. `log` must
    have the offload of activations already. For a single rank use only its work: its memory has to be traced.
    `compute_bytes`: bytes per element of the compute dtype."""
    return _without_states(log, offload.params == HOST, compute_bytes) if offload.is_any else log


@lru_cache(4)
def _without_states(log: Log, has_params_on_host: bool, compute_bytes: int) -> Log:
    allocs = []
    for alloc, unit in log.held:
        if alloc.category is Category.PARAMETERS and unit is not None:
            if has_params_on_host:
                continue
            alloc = replace(alloc, num_bytes=alloc.num_bytes * compute_bytes // log.master_bytes)
        elif alloc.category is Category.OPTIMIZER:
            continue
        allocs.append((alloc, unit))
    moved = {alloc.number for alloc, _ in log.held} - {alloc.number for alloc, _ in allocs}
    return replace(log, held=allocs, events=list(_device_events(log, moved)))


def _device_events(log: Log, moved: set[int]) -> Iterator[Event]:
    """Yield the events of `log` without operators of the optimizer's step, and without frees of allocations whose numbers are
    in `moved`. Sharded gradients are freed earlier than in `log`, when the engine has waited for their copy to the host: after
    the next reduce (on a single rank: the next unit's backward), or when the backward ends."""
    gradients = offloaded_gradients(log)
    launches = [event for event in log.events if isinstance(event, Launch)]
    last = Streams.REPLICATE if any(event.stream == Streams.REPLICATE for event in launches) else "reduce"
    reduces = {event.transfer for event in launches if event.stream == last}
    unreduced: list[int] = []
    reducing: dict[int, list[int]] = {}  # by transfer
    copied: list[int] = []  # gradients whose copy to the host has started
    place = START
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
            if place.phase is StepPhase.STEP or place == START:  # a backward has ended
                yield from map(Free, copied)
                copied = []
        elif isinstance(event, Launch) and event.transfer in reduces:
            reducing[event.transfer], unreduced = unreduced, []
        elif isinstance(event, Wait) and event.stream == Streams.COMPUTE and event.transfer in reducing:
            yield from map(Free, copied)
            copied = reducing.pop(event.transfer)
        elif isinstance(event, Alloc) and event.number in gradients:
            unreduced.append(event.number)
        yield event


@dataclass(slots=True)
class UnitState:
    """Memory of one unit on one rank between steps: elements of parameters, and bytes of optimizer states."""

    elements: int = 0
    state_bytes: int = 0


@lru_cache(4)
def state_by_unit(log: Log) -> Mapping[int, UnitState]:
    """Return index of the unit -> size of its parameters and optimizer states on the traced rank between steps."""
    states: dict[int, UnitState] = {}
    for alloc, unit in log.held:
        if unit is None:
            continue
        state = states.setdefault(unit, UnitState())
        if alloc.category is Category.PARAMETERS:
            state.elements += alloc.num_bytes // log.master_bytes
        elif alloc.category is Category.OPTIMIZER:
            state.state_bytes += alloc.num_bytes
    return states


@lru_cache(4)
def offloaded_gradients(log: Log) -> Mapping[int, int]:
    """Return allocation number -> bytes, for sharded gradients: all gradients that are live at the end of a backward, and those
    that other micro-batches allocate at an equal point of the forward or backward of an equal unit."""
    live: set[int] = set()
    live_at_end: set[int] = set()
    points: dict[int, tuple[StepPart, int]] = {}  # by number: (part of the step, gradients allocated in it before)
    sizes: dict[int, int] = {}
    place, count = START, 0
    for event in log.events:
        if isinstance(event, Alloc) and event.category is Category.GRADIENTS:
            live.add(event.number)
            sizes[event.number] = event.num_bytes
            points[event.number], count = (place, count), count + 1
        elif isinstance(event, Free):
            live.discard(event.number)
        elif isinstance(event, Enter):
            place, count = event.place, 0
            if place.phase is StepPhase.STEP or place == START:
                live_at_end |= live
    points_of_sharded = {points[number] for number in live_at_end}
    return {number: sizes[number] for number, point in points.items() if point in points_of_sharded}


def inputs_of(log: Log) -> list[int]:
    """Return the bytes, in whole pages, of each input of a recomputed unit that is offloaded, in the micro-batch that offloads
    the most bytes; [] if none offloads any."""
    batches: list[list[int]] = [[]]
    for event in log.events:
        if isinstance(event, Enter) and event.place == START:
            batches.append([])
        elif isinstance(event, Op) and event.stream == Streams.STORE:
            batches[-1].append(room_for(event.num_bytes // COPIED))
    return max(batches, key=sum)


def host_bytes(log: Log, choice: Choice, compute_bytes: int, cluster: Cluster) -> int:
    """Return the bytes of host memory that the offload of `choice` takes on one machine, for all its ranks: parameters as they
    are stored, shards in the compute dtype if that differs, gradients, a buffer for the gradients of one unit, optimizer states,
    and inputs of recomputed units. States or inputs on a disk take only staging buffers. `log`: log of the step without
    offloaded states. `compute_bytes`: bytes per element of the compute dtype."""
    ranks, offload = min(choice.gpus, cluster.node), choice.offload
    inputs = inputs_of(log) if offload.activations != DEVICE else []
    staged = NUM_STAGES * max(inputs, default=0)
    waiting = ranks * (staged if folder_of(offload.activations) else sum(inputs))
    if not offload.is_any:
        return waiting
    units = list(state_by_unit(log).values())
    elements, states = sum(u.elements for u in units), sum(u.state_bytes for u in units)
    largest = max((u.elements for u in units), default=0)
    # A gradient has the dtype of its parameter.
    each = 2 * log.master_bytes + (compute_bytes if compute_bytes != log.master_bytes else 0)
    if folder_of(offload.optimizer):
        state = states // max(elements, 1)  # bytes for each element
        states = NUM_BUFFERS * state * min(chunk_numel(compute_bytes, elements), largest)
    return (elements * each + log.master_bytes * largest + states) * ranks + waiting


def disk_bytes(log: Log, choice: Choice, cluster: Cluster) -> int:
    """Return the bytes on one machine's disk, for all its ranks: optimizer states and inputs of recomputed units, as far as
    `choice` offloads them to a disk. `log`: log of the step without offloaded states."""
    states = sum(s.state_bytes for s in state_by_unit(log).values()) if folder_of(choice.offload.optimizer) else 0
    inputs = sum(inputs_of(log)) if folder_of(choice.offload.activations) else 0
    return (states + inputs) * min(choice.gpus, cluster.node)


# -- time: copies to and from the device, and work of the host and its disk, by closed formulas


def host_work(log: Log, choice: Choice, compute_bytes: int) -> dict[str, float]:
    """Return stream -> bytes that offload reads and writes on one rank in a step of `choice`. Streams: FETCH and STORE (copies
    from and to the host), STEPPER (the optimizer), HOST (clipping, sums of gradients) and DISK; one without work has 0 or is
    left out. `log`: log without offloaded states. `compute_bytes`: bytes per element of the compute dtype."""
    offload, states, work = choice.offload, state_by_unit(log), dict[str, float]()
    if folder_of(offload.activations):  # the last inputs are still in the staging buffers
        inputs = inputs_of(log)
        work[Streams.DISK] = choice.accumulate * (sum(inputs) + sum(inputs[:-NUM_STAGES]))
    if not offload.is_any:
        return work
    clipped, stepped = _step_bytes(log)
    num_batches = sum(isinstance(event, Enter) and event.place == START for event in log.events)
    gradients = sum(offloaded_gradients(log).values()) / num_batches
    rows = {unit: state.elements * compute_bytes for unit, state in states.items()}
    # A backward that reduces marks the copies on the device as stale.
    times = choice.accumulate if offload.params == HOST or choice.each_reduces else 1
    gathered = _gathered_units(log) if offload.params == HOST else list(rows)
    work[Streams.FETCH] = COPIED * times * sum(rows.get(unit, 0) for unit in gathered)
    work[Streams.STORE] = COPIED * choice.accumulate * gradients
    work[Streams.HOST] = clipped + ADDED * (choice.accumulate - 1) * gradients
    written = 1 + compute_bytes / log.master_bytes if compute_bytes != log.master_bytes else 0.0
    work[Streams.STEPPER] = stepped + written * gradients
    if folder_of(offload.optimizer):
        work[Streams.DISK] = work.get(Streams.DISK, 0.0) + COPIED * sum(state.state_bytes for state in states.values())
    return work


def _step_bytes(log: Log) -> tuple[int, int]:
    """Return (bytes that clipping reads and writes, bytes that the optimizer reads and writes) in `log`."""
    place, is_clipped, clipped, stepped = START, False, 0, 0
    for event in log.events:
        if isinstance(event, Enter):
            place = event.place
        elif isinstance(event, Op) and place.phase is StepPhase.STEP:
            if is_clipped:
                stepped += event.num_bytes
            elif NORM in event.name or SCALE in event.name:
                clipped, is_clipped = clipped + event.num_bytes, SCALE in event.name
    return clipped, stepped


def _gathered_units(log: Log) -> list[int]:
    """Return the indices of the units that the last micro-batch gathers, in order. If the log has no gathers (one rank), return
    the unit of each forward and backward."""
    visits: list[list[int]] = []  # [unit, 1 if a gather ends in this part of the step]
    streams: dict[int, str] = {}
    for event in log.events:
        if isinstance(event, Enter):
            visits = [] if event.place == START else visits
            visits.append([event.place.unit, 0])
        elif isinstance(event, Launch):
            streams[event.transfer] = event.stream
        elif isinstance(event, Wait) and streams.get(event.transfer) == "gather":
            visits[-1][1] = 1
    return [unit for unit, gathered in visits if gathered or "gather" not in streams.values()]


def with_host_work(step: Step, work: Mapping[str, float], choice: Choice, num_units: int, costs: Costs) -> Step:
    """Return the time of a step with offload. `step`: the time of the device alone. `work`: stream -> bytes, from `host_work`;
    if it is 0 everywhere, return `step` itself. `num_units`: number of units with state.

    The optimizer steps during the next forward, unit by unit. The device always waits for the steps of the first two units, for
    the last two copies to the host, for the caller's own work on gradients, and if parameters are on the host, for their first
    copy in a backward. It waits for other work only if that takes longer than the device's own work at that time.
    """
    seconds = {stream: costs.of(Op("", 0.0, round(n), "", stream)) for stream, n in work.items() if n}
    if not seconds:
        return step
    forward_s = sum(s for place, (s, _) in step.by_place.items() if place.phase is StepPhase.FORWARD)
    first_s, lead = forward_s / choice.accumulate, min(1.0, 2 / max(1, num_units))
    fetch_s, store_s, disk_s = (seconds.get(stream, 0.0) for stream in (Streams.FETCH, Streams.STORE, Streams.DISK))
    stepped_s = max(seconds[Streams.STEPPER], disk_s) if Streams.STEPPER in seconds else 0.0
    begins_s = max(lead * stepped_s, stepped_s - (1 - lead) * first_s)
    always = choice.offload.params == HOST  # copied for each gather, not once in the first forward
    fetched_s = max(lead / 4 * fetch_s, fetch_s - step.seconds) if always else max(0.0, fetch_s - first_s)
    stored_s = max(lead * store_s, store_s - (step.seconds - forward_s))
    total_s = step.seconds + begins_s + fetched_s + stored_s + seconds.get(Streams.HOST, 0.0)
    total_s = max(total_s, disk_s)
    waited_s = total_s - step.seconds
    at_start = step.by_place.get(START, (0.0, 0.0))
    return replace(
        step,
        seconds=total_s,
        exposed_s=step.exposed_s + waited_s,
        by_kind={**step.by_kind, **{s: step.by_kind.get(s, 0.0) + took for s, took in seconds.items()}},
        waits={**step.waits, Streams.HOST: step.waits.get(Streams.HOST, 0.0) + waited_s},
        by_place={**step.by_place, START: (at_start[0] + waited_s, at_start[1] + waited_s)},
    )
