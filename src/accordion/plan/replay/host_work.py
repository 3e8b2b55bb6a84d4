"""The time of offload: copies to and from the device, and work of the host and its disk, by closed formulas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from accordion.config import HOST, folder_of
from accordion.offload.activations.stores import NUM_STAGES
from accordion.plan.choice import Choice
from accordion.plan.events import (
    DISK_STREAM,
    FETCH,
    STEPPER,
    STORE,
    Enter,
    Launch,
    Log,
    Op,
    StepPart,
    StepPhase,
    Wait,
    begins,
)
from accordion.plan.extrapolate.offload import (
    COPIED,
    GRADIENT_BYTES,
    MASTER_BYTES,
    inputs_of,
    offloaded_gradients,
    state_by_unit,
)
from accordion.plan.replay.cost import Costs
from accordion.plan.replay.timeline import Step

ADDED = 3  # a sum of gradients on the host reads two and writes one
NORM, SCALE = "_foreach_norm", "_foreach_mul_"  # kernels of clipping; later kernels of a step are the optimizer's


def host_work(log: Log, choice: Choice, compute_bytes: int) -> dict[str, float]:
    """Return stream -> bytes that one rank reads and writes in a step of `choice`. Streams are `FETCH` and `STORE` (copies from
    and to the host), `STEPPER` (the optimizer), `HOST` (clipping, sums of gradients) and `DISK_STREAM`; one without work has 0
    or is left out. `log`: the log without offloaded states. `compute_bytes`: bytes per element of the compute dtype."""
    offload, states, work = choice.offload, state_by_unit(log), dict[str, float]()
    if folder_of(offload.activations):  # the last inputs are still in the staging buffers
        inputs = inputs_of(log)
        work[DISK_STREAM] = choice.accumulate * (sum(inputs) + sum(inputs[:-NUM_STAGES]))
    if not offload.is_any:
        return work
    clipped, stepped = _step_bytes(log)
    num_batches = sum(isinstance(event, Enter) and begins(event.place) for event in log.events)
    gradients = sum(offloaded_gradients(log).values()) / num_batches
    rows = {unit: state.elements * compute_bytes for unit, state in states.items()}
    # A backward that reduces marks the copies on the device as stale.
    times = choice.accumulate if offload.params == HOST or choice.each_reduces else 1
    gathered = _gathered_units(log) if offload.params == HOST else list(rows)
    work[FETCH] = COPIED * times * sum(rows.get(unit, 0) for unit in gathered)
    work[STORE] = COPIED * choice.accumulate * gradients
    work[HOST] = clipped + ADDED * (choice.accumulate - 1) * gradients
    written = (MASTER_BYTES + compute_bytes) / GRADIENT_BYTES if compute_bytes != MASTER_BYTES else 0.0
    work[STEPPER] = stepped + written * gradients
    if folder_of(offload.optimizer):
        work[DISK_STREAM] = work.get(DISK_STREAM, 0.0) + COPIED * sum(state.state_bytes for state in states.values())
    return work


def _step_bytes(log: Log) -> tuple[int, int]:
    """Return (bytes that clipping reads and writes, bytes that the optimizer reads and writes) in the step of `log`."""
    place, is_clipped, clipped, stepped = StepPart(StepPhase.FORWARD, -1), False, 0, 0
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
            visits = [] if begins(event.place) else visits
            visits.append([event.place.unit, 0])
        elif isinstance(event, Launch):
            streams[event.transfer] = event.stream
        elif isinstance(event, Wait) and streams.get(event.transfer) == "gather":
            visits[-1][1] = 1
    return [unit for unit, gathered in visits if gathered or "gather" not in streams.values()]


def with_host_work(step: Step, work: Mapping[str, float], choice: Choice, num_units: int, costs: Costs) -> Step:
    """Return `step`, the time of the device alone, with the waits for offload's `work` (stream -> bytes) added, if there are any.

    The previous step's optimizer runs during the forward, unit by unit. Nothing hides the steps of the first two units, the
    first copy to the device in a backward, the last two copies to the host, and the caller's own work on gradients. All other
    work is hidden by the device's, as long as it takes no longer.
    """
    seconds = {stream: costs.of(Op("", 0.0, round(n), "", stream)) for stream, n in work.items() if n}
    if not seconds:
        return step
    forward_s = sum(s for place, (s, _) in step.by_place.items() if place.phase is StepPhase.FORWARD)
    first_s, lead = forward_s / choice.accumulate, min(1.0, 2 / max(1, num_units))
    fetch_s, store_s, disk_s = (seconds.get(stream, 0.0) for stream in (FETCH, STORE, DISK_STREAM))
    stepped_s = max(seconds[STEPPER], disk_s) if STEPPER in seconds else 0.0
    begins_s = max(lead * stepped_s, stepped_s - (1 - lead) * first_s)
    always = choice.offload.params == HOST  # copied for each gather, not once in the first forward
    fetched_s = max(lead / 4 * fetch_s, fetch_s - step.seconds) if always else max(0.0, fetch_s - first_s)
    stored_s = max(lead * store_s, store_s - (step.seconds - forward_s))
    total_s = step.seconds + begins_s + fetched_s + stored_s + seconds.get(HOST, 0.0)
    total_s = max(total_s, disk_s)
    waited_s = total_s - step.seconds
    start = StepPart(StepPhase.FORWARD, -1)
    at_start = step.by_place.get(start, (0.0, 0.0))
    return replace(
        step,
        seconds=total_s,
        exposed_s=step.exposed_s + waited_s,
        by_kind={**step.by_kind, **{s: step.by_kind.get(s, 0.0) + took for s, took in seconds.items()}},
        waits={**step.waits, HOST: step.waits.get(HOST, 0.0) + waited_s},
        by_place={**step.by_place, start: (at_start[0] + waited_s, at_start[1] + waited_s)},
    )
