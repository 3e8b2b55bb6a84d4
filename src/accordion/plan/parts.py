"""Names for the parts of a step's time and of its peak memory, and the cost of a run of many steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from accordion.plan.events import (
    DISK_STREAM,
    FETCH,
    HOST,
    REPLICATE,
    STEPPER,
    STORE,
    Alloc,
    Category,
    Event,
    Free,
    Log,
    StepPhase,
)
from accordion.plan.replay.peak import MemoryPeak, name_of, peak_of
from accordion.plan.replay.timeline import KERNELS_OF, Step

MESSAGES = ("gather", "exchange", "scatter_sum", "sum")
WAITED_FOR = {  # stream -> what a wait for it is called
    "gather": "waiting for parameters (gather)",
    "copy in": "waiting for parameters (gather)",
    "reduce": "waiting for gradients (reduce)",
    "all-reduce": "waiting for gradients between nodes",
    REPLICATE: "waiting for gradients between nodes",
    FETCH: "waiting for the host",
    STORE: "waiting for the host",
    HOST: "waiting for the host",
}
OTHER_STREAMS = {  # kind of work -> its name
    "gather": "all-gather", "exchange": "all-to-all of gradients", "scatter_sum": "reduce-scatter", "sum": "all-reduce",
    FETCH: "copies from the host", STORE: "copies to the host", HOST: "the caller's work on the host",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePart:
    """Seconds of one kind of work or one unit. `waited`: waits among them. `hidden`: on another stream, not in the sum."""

    name: str
    seconds: float
    waited: float = 0.0
    hidden: bool = False


def by_kind(step: Step) -> list[TimePart]:
    """Return the compute stream's time by kind, longest first (the sum is the step), then the work on other streams."""
    waits: dict[str, float] = {}
    for stream, seconds in step.waits.items():
        name = WAITED_FOR.get(stream, "waiting for others")
        waits[name] = waits.get(name, 0.0) + seconds
    others = (*MESSAGES, FETCH, STORE, HOST, STEPPER, DISK_STREAM)
    compute = {name: s for name, s in step.by_kind.items() if name not in others and not name.endswith(KERNELS_OF)}
    parts = [TimePart(name=name, seconds=s) for name, s in compute.items() if s > 0]
    parts += [TimePart(name=name, seconds=s, waited=s) for name, s in waits.items() if s > 0]
    hidden = [
        TimePart(name=OTHER_STREAMS.get(name, name), seconds=s, hidden=True)
        for name, s in step.by_kind.items()
        if name not in compute and s > 0
    ]
    return [*sorted(parts, key=lambda p: -p.seconds), *sorted(hidden, key=lambda p: -p.seconds)]


def by_unit(step: Step, units: Sequence[str]) -> list[TimePart]:
    """Return the compute stream's time by phase and unit, in the order of a step; repeated blocks are one entry."""
    totals: dict[str, list[float]] = {}
    counts: dict[str, set[str]] = {}
    for place, (seconds, waited) in step.by_place.items():
        unit = name_of(place, units)
        stem = ".".join("*" if part.isdecimal() else part for part in unit.split("."))
        name = f"{place.phase.value} {stem or '(before the model)'}".strip()
        if place.phase is StepPhase.STEP:
            name = "optimizer's step, clipping"
        sums = totals.setdefault(name, [0.0, 0.0])
        sums[0] += seconds
        sums[1] += waited
        counts.setdefault(name, set()).add(unit)
    return [
        TimePart(
            name=f"{name}, {len(counts[name])} of them" if name.endswith(".*") else name, seconds=seconds, waited=waited
        )
        for name, (seconds, waited) in totals.items()
        if seconds > 0
    ]


# -- the peak


LOGITS = "the loss's float32 logits and tensors of their size"
WORDS = (  # (part of an operator's name, what the memory that it allocates is called)
    ("_log_softmax_backward", "the gradient of the loss in float32, for each token and each word of the vocabulary"),
    ("_log_softmax", "the loss's log-probabilities in float32, for each token and each word of the vocabulary"),
    ("_fused_", "the optimizer's states"),
    ("flash_attention", "attention's outputs"),
    ("efficient_attention", "attention's outputs"),
    ("native_dropout", "dropout's outputs and masks"),
    ("embedding", "embeddings"),
    ("resize_", "gathered parameters"),
)
OF_CATEGORY = {
    "parameters": "shards of the parameters", "gradients": "gradients", "optimizer": "the optimizer's states",
    "gathered": "gathered parameters", "activations": "what the forward keeps for the backward",
    "other": "temporaries of the backward",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakPart:
    """Bytes that are live at the peak, and their name. `advice`: a change that would save some of them."""

    name: str
    num_bytes: int
    advice: str = ""


def peak_parts(peak: MemoryPeak, logits_bytes: int) -> list[PeakPart]:
    """Return the parts of the peak, largest first. `logits_bytes`: of a micro-batch's float32 logits; 0: not known."""
    sizes: dict[str, int] = {}
    for live in peak.live:
        each = live.num_bytes // live.count
        name = next((words for part, words in WORDS if part in live.operator), OF_CATEGORY[live.category])
        if logits_bytes and each == logits_bytes and live.category in ("activations", "other"):
            name = LOGITS
        elif logits_bytes and 2 * each == logits_bytes and live.category in ("activations", "other"):
            name = "logits in 16 bits"
        sizes[name] = sizes.get(name, 0) + live.num_bytes
    rest = peak.num_bytes - sum(sizes.values())
    parts = [PeakPart(name=name, num_bytes=n) for name, n in sorted(sizes.items(), key=lambda item: -item[1])]
    return [*parts, PeakPart(name="the rest", num_bytes=rest)] if rest > 0 else parts


def logits_off(log: Log, logits_bytes: int) -> int:
    """Return by how many bytes the peak falls if whole logits, in float32 or 16 bits, are never allocated."""
    of_logits = {
        e.number
        for e in log.events
        if isinstance(e, Alloc)
        and e.category in (Category.ACTIVATIONS, Category.OTHER)
        and e.num_bytes in (logits_bytes, logits_bytes // 2)
    }
    others: list[Event] = [e for e in log.events if not (isinstance(e, (Alloc, Free)) and e.number in of_logits)]
    return peak_of(log).num_bytes - peak_of(replace(log, events=others)).num_bytes


# -- a whole run


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    """Time and price of a run over `tokens`, as (lowest, highest). `dollars`: None if no price was given."""

    tokens: float
    hours: tuple[float, float]
    gpu_hours: tuple[float, float]
    dollars: tuple[float, float] | None

    def as_dict(self) -> Mapping[str, object]:
        return {name: getattr(self, name) for name in self.__slots__}


def cost_of(tokens: float, rates: Sequence[float], gpus: int, price: float | None) -> RunCost:
    """Return the cost of a run. `rates`: useful tokens per second of one GPU. `price`: dollars per hour of one GPU."""
    seconds = sorted(tokens / (rate * gpus) for rate in rates)
    hours = (seconds[0] / 3600, seconds[-1] / 3600)
    gpu_hours = (hours[0] * gpus, hours[1] * gpus)
    return RunCost(
        tokens=tokens,
        hours=hours,
        gpu_hours=gpu_hours,
        dollars=None if price is None else (gpu_hours[0] * price, gpu_hours[1] * price),
    )
