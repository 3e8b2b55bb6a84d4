"""Predict the memory and the seconds of one configuration on one cluster: trace it, replay the log, and time it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from torch import nn

from accordion.plan.choice import Choice
from accordion.plan.events import START, Enter, Log, StepPhase
from accordion.plan.hardware import MARGIN, OUTSIDE_BYTES, TIGHT_BYTES, Cluster
from accordion.plan.replay.allocator import reserved_bytes
from accordion.plan.replay.cost import Costs
from accordion.plan.replay.peak import MemoryPeak, peak_of
from accordion.plan.replay.timeline import Step, StreamClock
from accordion.plan.trace.depth import Extension, IrregularError, longest_run, num_traced
from accordion.plan.trace.setup import Subject, TrainingSetup
from accordion.plan.trace.trace import trace


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """The GPU memory that one rank needs for a step."""

    peak: MemoryPeak
    reserved_bytes: dict[str, int]  # by allocator setting, expandable_segments and classic; or a lower bound, at_least

    @property
    def largest_reserved(self) -> int:
        return max(self.reserved_bytes.values())

    @property
    def needed_bytes(self) -> int:
        """Bytes of the GPU: the largest reserved bytes with a margin, plus memory outside of torch."""
        return int(self.largest_reserved * MARGIN) + OUTSIDE_BYTES

    @property
    def possible_bytes(self) -> int:
        """`needed_bytes` if the operators whose workspace is unknown allocate the most that they may."""
        return int((self.largest_reserved + self.peak.unsure_bytes) * MARGIN) + OUTSIDE_BYTES

    def fits(self, cluster: Cluster) -> bool:
        return self.possible_bytes < cluster.card_bytes

    def is_tight(self, cluster: Cluster) -> bool:
        return cluster.card_bytes - self.needed_bytes < TIGHT_BYTES

    def is_open(self, cluster: Cluster) -> bool:
        """Return True if the step may or may not fit, depending on the unknown workspace of an operator."""
        return self.needed_bytes < cluster.card_bytes <= self.possible_bytes


def log_of(subject: Subject, run: TrainingSetup) -> Log:
    """Return the log of a step of `subject` with the setup `run`. Traces some of the model's equal blocks and repeats their
    events. Traces all if few or none are equal, if their events do not repeat, or if the optimizer is adamw_foreach."""
    model = subject.make()
    blocks = longest_run(model, run.sharding.units)
    if blocks is None or run.optimizer == "adamw_foreach":
        return trace(subject, run)
    period = max(1, run.sharding.checkpointing.every)
    # In the backward, a reduce over a hybrid's replicas ends two blocks later than a plain one, a copy to the host one later.
    later = 2 * run.strategy.hybrid + run.sharding.offload.asks
    count = num_traced(blocks.count, period, later)
    if count == blocks.count:
        return trace(subject, run)
    num_trained = _num_trained(model)
    holder: Any = model.get_submodule(blocks.container)
    del holder[count:]  # from here on, `model` is the shortened model
    scale = num_trained / _num_trained(model)
    try:
        log = trace(replace(subject, make=lambda: model), run)
        return Extension(log, blocks, traced=count, period=period, later=later, scale=scale).log()
    except (IrregularError, IndexError, KeyError):
        return trace(subject, run)


def _num_trained(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


@lru_cache(4)
def memory_of(log: Log, enough_bytes: int | None = None) -> MemoryNeed:
    """Return the memory that the step in `log` needs. If its allocated peak exceeds `enough_bytes` (None: no limit), the
    allocator is not replayed, and `reserved_bytes` has only the peak, a lower bound, as "at_least"."""
    peak = peak_of(log)
    if enough_bytes is not None and peak.num_bytes > enough_bytes:
        return MemoryNeed(peak=peak, reserved_bytes={"at_least": peak.num_bytes})
    settings = {"expandable_segments": True, "classic": False}
    reserved = {name: reserved_bytes(log, expandable=expandable) for name, expandable in settings.items()}
    return MemoryNeed(peak=peak, reserved_bytes=reserved)


def step_of(log: Log, run: TrainingSetup, cluster: Cluster, rate: str = "middle") -> Step:
    """Return the time of the step in `log`. `run`: the setup of its trace. `rate`: assumed rates, "low", "middle" or "high"."""
    return StreamClock(costs_for(run, cluster, rate)).run(log)


def costs_for(run: TrainingSetup, cluster: Cluster, rate: str) -> Costs:
    shards = run.shards if run.strategy.hybrid else None
    near, experts = run.sharding.kept_over, run.expert_parallel
    return Costs(cluster, rate, run.ranks, shards=shards, near=near, experts=experts, sequence=run.sequence)


# -- accumulation: the traced micro-batches, and more of them like the second one


def step_of_choice(log: Log, run: TrainingSetup, choice: Choice, cluster: Cluster, rate: str) -> Step:
    """Return the time of a step of `choice`, which has `choice.accumulate` micro-batches. `log`, the trace of a step of `run`,
    may have fewer, `run.accumulate`. Each missing one is assumed to take as long as the second in `log`. `rate`: assumed rates,
    "low", "middle" or "high"."""
    step = step_of(log, run, cluster, rate)
    between = choice.accumulate - run.accumulate
    if between <= 0:
        return step
    marks = [i for i, e in enumerate(log.events) if isinstance(e, Enter) and e.place == START]
    marks.append(next(i for i, e in enumerate(log.events) if isinstance(e, Enter) and e.place.phase is StepPhase.STEP))
    first, second = (step_of(replace(log, events=log.events[:end]), run, cluster, rate) for end in marks[1:3])

    def more(values: Callable[[Step], Mapping[Any, float]]) -> dict[Any, float]:
        """Return key -> seconds in the step with all micro-batches, extrapolated from the simulated steps. `values`: function
        that returns key -> seconds of a simulated step."""
        total, one, two = map(values, (step, first, second))
        added = {key: between * (two.get(key, 0.0) - one.get(key, 0.0)) for key in {**total, **two}}
        return {key: max(0.0, total.get(key, 0.0) + seconds) for key, seconds in added.items()}

    places = more(lambda timed: {(place, i): pair[i] for place, pair in timed.by_place.items() for i in (0, 1)})
    return replace(
        step,
        seconds=step.seconds + between * (second.seconds - first.seconds),
        exposed_s=max(0.0, step.exposed_s + between * (second.exposed_s - first.exposed_s)),
        flops=step.flops + between * (second.flops - first.flops),
        by_kind=more(lambda timed: timed.by_kind),
        waits=more(lambda timed: timed.waits),
        by_place={place: (places[place, 0], places[place, 1]) for place, _ in places},
    )
