"""The event log of one rank's training step, in the order in which the host issues the work: plain data without tensors."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

ALL_TO_ALL = "all_to_all"  # kind of the collective of experts and of sequence parallelism, on the compute stream


class Streams:
    """Names of streams. Transfers of the engine and of FSDP2 have more, such as "gather" and "reduce"."""

    COMPUTE = "compute"  # forward and backward
    FETCH, STORE = "fetch", "store"  # copies to the device and to the host, with offload
    REPLICATE = "replicate"  # a hybrid strategy's reduces over replicas
    HOST = "host"  # the caller's thread, which starts the work on all other streams; also of host memory
    STEPPER, DISK = "host step", "disk"  # the thread that steps offloaded parameters, and transfers of its files


class Axes:
    """Names of mesh axes, in addition to "shard" and "replicate"."""

    NEAR = "near"  # neighbouring ranks that keep one copy of a unit for its backward
    EXPERTS = "experts"  # neighbouring ranks that share a model's experts
    SEQUENCE = "sequence"  # neighbouring ranks that share each sequence
    EXPERT_DATA = "expert data"  # ranks that have the same experts


class Category(Enum):
    """The purpose of an allocation; a plan shows the bytes of each."""

    PARAMETERS = "parameters"  # shards, float32 masters, and the model's buffers
    GRADIENTS = "gradients"  # full gradients until they are reduced, buffers of a reduce, sharded gradients
    OPTIMIZER = "optimizer"
    GATHERED = "gathered"  # full parameters, and buffers of a gather
    ACTIVATIONS = "activations"  # all that a forward or a recomputation allocates: saved tensors, logits, loss
    OTHER = "other"  # gradients of activations, temporaries of the backward
    __hash__ = object.__hash__  # faster than `Enum.__hash__`, which is written in Python; walks over logs hash many


class StepPhase(Enum):
    """A phase of a trace. `BUILD`: sharding of the model. `STEP`: clipping, the optimizer's step, and `zero_grad`."""

    BUILD = "build"
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"
    __hash__ = object.__hash__


class StepPart(NamedTuple):
    """One phase of one unit, such as its forward. `unit`: index of the unit; -1: outside of all units."""

    phase: StepPhase
    unit: int


START = StepPart(StepPhase.FORWARD, -1)  # the start of a micro-batch: its forward before the first unit


@dataclass(slots=True)
class Alloc:
    """Memory is allocated."""

    number: int  # identifies the allocation; the `Free` that ends it has an equal number
    num_bytes: int
    category: Category
    stream: str  # the stream whose pool the allocator takes it from
    operator: str  # the operator that allocates it


@dataclass(slots=True)
class Free:
    """The memory of an `Alloc` is freed."""

    number: int  # the number of the `Alloc`


@dataclass(slots=True)
class Op:
    """An operator runs: one kernel or several."""

    name: str
    flops: float
    num_bytes: int  # read and written
    dtype: str  # of its first floating point tensor
    stream: str
    again: bool = False  # True in the recomputation of a forward
    unsure: int = 0  # upper bound of the bytes that its kernel allocates inside, if they are not known


@dataclass(slots=True)
class Collective:
    """A collective runs on `stream`."""

    kind: str  # gather, exchange, scatter_sum, sum, ALL_TO_ALL
    num_bytes: int  # of the full tensors; of an all-to-all: what one rank sends and keeps
    axis: str  # of the mesh: shard, replicate, or one of `Axes`
    stream: str


@dataclass(slots=True)
class Launch:
    """A transfer, such as the gather of a unit, starts on `stream`, after all work that is on the compute stream so far. Its
    operators and collectives are later events on `stream`. `transfer`: number that identifies the transfer."""

    transfer: int
    stream: str


@dataclass(slots=True)
class Mark:
    """A device event is recorded on `stream`, after the work there so far. `transfer`: number that identifies the event."""

    transfer: int
    stream: str


@dataclass(slots=True)
class Wait:
    """Later work on `stream` waits for the end of the transfer, or for the device event, with number `transfer`."""

    transfer: int
    stream: str


@dataclass(slots=True)
class Enter:
    """The events up to the next `Enter` belong to `place`."""

    place: StepPart


Event = Alloc | Free | Op | Collective | Launch | Mark | Wait | Enter


@dataclass(slots=True, kw_only=True, eq=False)
class Log:
    """The log of one training step; the optimizer's states exist before it. Do not change a log: results from it are cached."""

    held: list[tuple[Alloc, int | None]]  # live before the step, with the index of the unit (None: of no unit)
    events: list[Event]
    units: list[str]  # names of units, by index
    substituted: dict[str, str] = field(default_factory=dict)  # CPU operator -> the CUDA operator in its place
    unmodelled: dict[str, str] = field(default_factory=dict)  # operator -> why its memory or time is not known
    host_bytes: int = 0  # the most live host memory; its allocations are not in `held` and `events`
    master_bytes: int = 4  # bytes of an element of the stored parameters: 2 if these are bf16, without float32 masters


def without_host(log: Log) -> Log:
    """Return a copy of `log` without allocations and operators on the host. In the copy, `host_bytes` is the most host memory
    that is live at once, and `unmodelled` has a note that work on the host takes no time. If no host memory is live before the
    step, return `log` itself."""
    live = {alloc.number: alloc.num_bytes for alloc, _ in log.held if alloc.stream == Streams.HOST}
    if not live:
        return log
    events: list[Event] = []
    total = best = sum(live.values())
    for event in log.events:
        if isinstance(event, Alloc) and event.stream == Streams.HOST:
            live[event.number] = event.num_bytes
            total += event.num_bytes
            best = max(best, total)
        elif isinstance(event, Free) and event.number in live:
            total -= live.pop(event.number)
        elif not (isinstance(event, Op) and event.stream == Streams.HOST):
            events.append(event)
    unmodelled = {**log.unmodelled, "offload": "in this log the step on the host takes no time"}
    allocs = [(alloc, unit) for alloc, unit in log.held if alloc.stream != Streams.HOST]
    return replace(log, held=allocs, events=events, unmodelled=unmodelled, host_bytes=best)
