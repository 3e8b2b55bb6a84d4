"""What happens on one rank in a training step, in the order of the host's calls: the event log, plain data without tensors."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

COMPUTE = "compute"  # the stream of forward and backward
FETCH, STORE = "fetch", "store"  # those of copies to the device and from it, where anything rests elsewhere
REPLICATE = "replicate"  # that of a hybrid's reduces between its groups of ranks
NEAR = "near"  # the axis of neighbours that keep one copy from a forward to its backward
EXPERTS = "experts"  # the axis of neighbours that share the experts of a mixture
EXPERT_DATA = "expert data"  # that of ranks that have the same ones
ALL_TO_ALL = "all_to_all"  # of tokens to their experts, on the compute stream
HOST = "host"  # memory that is none of the card's; and, as a stream, the caller, who begins all work on all others
STEPPER, DISK_STREAM = "host step", "disk"  # the thread that steps what rests on the host, and the files of its states


class Category(Enum):
    """What bytes are held for, as the plan breaks them down."""

    PARAMETERS = "parameters"  # shards and masters, and the model's buffers
    GRADIENTS = "gradients"  # full ones until they are reduced, messages of a reduce, sharded ones
    OPTIMIZER = "optimizer"
    GATHERED = "gathered"  # full parameters, and messages of a gather
    ACTIVATIONS = "activations"  # all that a forward makes, recomputation too: saved tensors, logits, loss
    OTHER = "other"  # gradients of activations, temporaries of the backward
    __hash__ = object.__hash__  # that of an enum is a function of Python's, and walks over logs look many up


class StepPhase(Enum):
    """Which part of a step; `STEP` is clipping, the optimizer's step and clearing of gradients."""

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
    """Whether a micro-batch begins there."""
    return place == StepPart(StepPhase.FORWARD, -1)


@dataclass(slots=True)
class Alloc:
    """Memory is taken. `number`: names it. `stream`: in whose pool the allocator keeps it."""

    number: int
    num_bytes: int
    category: Category
    stream: str
    operator: str


@dataclass(slots=True)
class Free:
    number: int


@dataclass(slots=True)
class Op:
    """A kernel, or what makes several. `num_bytes`: read and written. `dtype`: of the first floating tensor.

    `again`: it belongs to a recomputation. `unsure`: bytes of workspace that it may take at most and no trace sees.
    """

    name: str
    flops: float
    num_bytes: int
    dtype: str
    stream: str
    again: bool = False
    unsure: int = 0


@dataclass(slots=True)
class Collective:
    """One launch. `num_bytes`: of the full tensors, or of an all-to-all what one rank sends and keeps. `axis`: of the mesh."""

    kind: str  # gather, exchange, scatter_sum, sum, ALL_TO_ALL
    num_bytes: int
    axis: str  # shard, replicate, NEAR, EXPERTS or EXPERT_DATA
    stream: str


@dataclass(slots=True)
class Launch:
    """A transfer starts on its stream, behind all that is on the compute stream now."""

    transfer: int
    stream: str


@dataclass(slots=True)
class Land:
    """The compute stream waits for the end of a transfer."""

    transfer: int


@dataclass(slots=True)
class Mark:
    """An event is recorded on a stream: it ends with all that is on the stream so far. Numbered as transfers are."""

    transfer: int
    stream: str


@dataclass(slots=True)
class Wait:
    """What comes later on a stream runs after a mark."""

    transfer: int
    stream: str


@dataclass(slots=True)
class Enter:
    """What follows belongs to `place`."""

    place: StepPart


Event = Alloc | Free | Op | Collective | Launch | Land | Mark | Wait | Enter


@dataclass(slots=True, kw_only=True, eq=False)
class Log:
    """A step in its steady state. Nothing writes to it, so what is worked out of it may be kept.

    `held`: what is there before it, each with its unit (None: of no unit). `units`: names.
    `host_bytes`: the most that rests in the host's memory, which is in none of the rest.

    `substituted`, `unmodelled`: operators that stood for those of the device, and those whose memory or time is not known.
    """

    held: list[tuple[Alloc, int | None]]
    events: list[Event]
    units: list[str]
    substituted: dict[str, str] = field(default_factory=dict)
    unmodelled: dict[str, str] = field(default_factory=dict)
    host_bytes: int = 0


def without_host(log: Log) -> Log:
    """The same log with what happens in the host's memory as one figure."""
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
    held = [(alloc, unit) for alloc, unit in log.held if alloc.stream != HOST]
    return replace(log, held=held, events=events, unmodelled=unmodelled, host_bytes=best)
