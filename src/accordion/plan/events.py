"""The event log of one rank's training step, in the order of the host's calls: plain data without tensors."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

COMPUTE = "compute"  # the stream of forward and backward
FETCH, STORE = "fetch", "store"  # the streams of copies to the device and to the host, with offload
REPLICATE = "replicate"  # the stream of a hybrid strategy's reduces over replicas
NEAR = "near"  # the axis of ranks of a node over which shards are kept for the backward
EXPERTS = "experts"  # the axis of neighbours that share the experts of a mixture
EXPERT_DATA = "expert data"  # the axis of ranks that have the same experts
ALL_TO_ALL = "all_to_all"  # kind of the collective that sends tokens to their experts, on the compute stream
HOST = "host"  # host memory; as a stream: the caller's thread, which starts the work on all other streams
STEPPER, DISK_STREAM = "host step", "disk"  # the thread that steps offloaded parameters, and transfers of its files


class Category(Enum):
    """The purpose of memory, by which a plan breaks it down."""

    PARAMETERS = "parameters"  # shards and masters, and the model's buffers
    GRADIENTS = "gradients"  # full gradients until they are reduced, buffers of a reduce, sharded gradients
    OPTIMIZER = "optimizer"
    GATHERED = "gathered"  # full parameters, and buffers of a gather
    ACTIVATIONS = "activations"  # all that a forward or a recomputation allocates: saved tensors, logits, loss
    OTHER = "other"  # gradients of activations, temporaries of the backward
    __hash__ = object.__hash__  # faster than `Enum.__hash__`, which is written in Python; walks over logs hash many


class StepPhase(Enum):
    """A phase of a training step. `STEP`: clipping, the optimizer's step and clearing of gradients."""

    BUILD = "build"
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"
    __hash__ = object.__hash__


class StepPart(NamedTuple):
    """A part of a step that repeats from block to block: the forward or backward of one unit."""

    phase: StepPhase
    unit: int


def begins(place: StepPart) -> bool:
    """Return True if a micro-batch begins at `place`."""
    return place == StepPart(StepPhase.FORWARD, -1)


@dataclass(slots=True)
class Alloc:
    """Memory is allocated."""

    number: int  # identifies the allocation
    num_bytes: int
    category: Category
    stream: str  # the stream whose pool the allocator takes it from
    operator: str


@dataclass(slots=True)
class Free:
    number: int


@dataclass(slots=True)
class Op:
    """An operator runs: one kernel or several."""

    name: str
    flops: float
    num_bytes: int  # read and written
    dtype: str  # of the first floating point tensor
    stream: str
    again: bool = False  # it belongs to a recomputation
    unsure: int = 0  # upper bound of its workspace bytes, if they are not known


@dataclass(slots=True)
class Collective:
    """A collective runs."""

    kind: str  # gather, exchange, scatter_sum, sum, ALL_TO_ALL
    num_bytes: int  # of the full tensors; of an all-to-all: what one rank sends and keeps
    axis: str  # of the mesh: shard, replicate, NEAR, EXPERTS or EXPERT_DATA
    stream: str


@dataclass(slots=True)
class Launch:
    """A transfer starts on its stream, after all work that is on the compute stream so far."""

    transfer: int
    stream: str


@dataclass(slots=True)
class Land:
    """The compute stream waits for the end of a transfer."""

    transfer: int


@dataclass(slots=True)
class Mark:
    """A device event is recorded on a stream; it ends with the work on the stream so far. `transfer`: its number."""

    transfer: int
    stream: str


@dataclass(slots=True)
class Wait:
    """Later work on `stream` waits for the end of `transfer`, the number of a transfer or of a `Mark`."""

    transfer: int
    stream: str


@dataclass(slots=True)
class Enter:
    """The events that follow belong to `place`."""

    place: StepPart


Event = Alloc | Free | Op | Collective | Launch | Land | Mark | Wait | Enter


@dataclass(slots=True, kw_only=True, eq=False)
class Log:
    """The log of a step in steady state. It is never changed, so results computed from it may be cached."""

    held: list[tuple[Alloc, int | None]]  # memory before the step, each with the index of its unit (None: of no unit)
    events: list[Event]
    units: list[str]  # names
    substituted: dict[str, str] = field(default_factory=dict)  # operators replaced by those of the device, by name
    unmodelled: dict[str, str] = field(default_factory=dict)  # why memory or time of an operator is not known, by name
    host_bytes: int = 0  # the most host memory at once; it is not in `held` and `events`


def without_host(log: Log) -> Log:
    """Return the log with its events in host memory replaced by `host_bytes`."""
    live = {alloc.number: alloc.num_bytes for alloc, _ in log.held if alloc.stream == HOST}
    if not live:
        return log
    events: list[Event] = []
    total = best = sum(live.values())
    for event in log.events:
        if isinstance(event, Alloc) and event.stream == HOST:
            live[event.number] = event.num_bytes
            total += event.num_bytes
            best = max(best, total)
        elif isinstance(event, Free) and event.number in live:
            total -= live.pop(event.number)
        elif not (isinstance(event, Op) and event.stream == HOST):
            events.append(event)
    unmodelled = {
        **log.unmodelled,
        "offload": "in this log the step on the host takes no time",
    }
    allocs = [(alloc, unit) for alloc, unit in log.held if alloc.stream != HOST]
    return replace(log, held=allocs, events=events, unmodelled=unmodelled, host_bytes=best)
