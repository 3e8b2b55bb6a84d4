"""A part of a search: what each choice takes, traced, worked out from other traces, or ruled out by a bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from accordion.plan.events import Log
from accordion.plan.extrapolate.accumulate import step_of_choice
from accordion.plan.extrapolate.offload import disk_bytes, host_bytes, offloaded
from accordion.plan.hardware import GIB, MARGIN, OUTSIDE_BYTES, REACHED, Cluster
from accordion.plan.replay.peak import peak_of
from accordion.plan.replay.predict import MemoryNeed, memory_of
from accordion.plan.replay.timeline import Step
from accordion.plan.search.bounds import Floor, as_full_shard, floor_of, least_bytes, least_host_bytes, messages_s
from accordion.plan.search.space import NO_OFFLOAD, Choice, Space, choices, with_secondary
from accordion.plan.search.traces import Traces, moved_as
from accordion.plan.trace.setup import Subject
from accordion.units import AUTO

FIRST = "full_shard"  # is predicted first: it takes least memory, and others can only wait less
AS_FAST = 0.02  # of choices that are as fast, the one that leaves most room is taken
BESIDE = 3  # of the fastest, with which other units are tried
SAME_MEMORY = ("all", "disk")  # of the device: what is on disk passes through the host
HOST_MARGIN = 1.1  # on what ranks keep on the host, for Python, torch and data
Say = Callable[[str], None]


@dataclass(slots=True, kw_only=True)
class Candidate:
    """A choice with what it takes. `memory`, `steps`: None where a bound, `least_bytes`, says that it does not fit.

    `host_bytes`, `disk_bytes`: of one machine. `steps`: at middle rates, of the best one at low and high ones too.
    `is_traced`: they come from a trace of its own. `bound`: why it was not worked out. `why`: it was not chosen.
    """

    choice: Choice
    fits: bool
    least_bytes: int
    host_bytes: int = 0
    disk_bytes: int = 0
    memory: MemoryNeed | None = None
    steps: dict[str, Step] | None = None
    is_traced: bool = False
    bound: str = ""
    why: str = ""

    def is_open(self, cluster: Cluster) -> bool:
        """There is no verdict: see `MemoryNeed.is_open`."""
        return self.memory is not None and self.memory.is_open(cluster)

    @property
    def needed_bytes(self) -> int:
        return self.memory.needed_bytes if self.memory is not None else self.least_bytes

    def tokens_per_s(self, tokens: int, rate: str = "middle") -> float:
        """Of one GPU."""
        assert self.steps is not None
        each = self.choice.micro_batch * tokens * self.choice.accumulate
        return each / self.steps[rate].seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTask:
    """All that a search is made of; a second process can be told of it where `subject_for` can be pickled."""

    subject_for: Callable[[int], Subject]
    space: Space
    cluster: Cluster
    num_params: int


Outcome = tuple[list[Candidate], dict[Choice, Log]]
"""Candidates, and the logs that were traced for them."""


class Evaluator:
    """Owns the traces of a part of a search, and the bounds that were found so far."""

    def __init__(self, task: SearchTask, say: Say) -> None:
        self._task, self._space, self._cluster = task, task.space, task.cluster
        self.traces = Traces(task.subject_for, task.space, task.cluster, say)
        self._floors: dict[Choice, Floor] = {}
        self._memory: dict[Choice, MemoryNeed] = {}  # of offload that was worked out, as `moved_as` has it
        self._rates: dict[int, float] = {}  # of the fastest that fits so many GPUs
        self._most = int(
            (task.cluster.card_bytes - OUTSIDE_BYTES) / MARGIN
        )  # allocated bytes beyond which nothing fits

    def candidates(self, chosen: Sequence[Choice]) -> list[Candidate]:
        return [c for choice in chosen for c in self._tiers(choice)]

    def adopt(self, candidates: Sequence[Candidate], logs: Mapping[Choice, Log]) -> None:
        """Take over what another process found."""
        self.traces.traced.update(logs)
        for candidate in candidates:
            self._bound(candidate)

    def _tiers(self, choice: Choice) -> Iterator[Candidate]:
        """The choice with each offload in turn, until it fits; where none of them can, the one that comes closest alone."""
        tiers = self._space.tiers_of(choice)
        first = self.candidate(replace(choice, offload=tiers[0]))
        yield first
        if first.fits or first.bound or len(tiers) == 1:
            return
        furthest = replace(choice, offload=tiers[-1])
        if first.memory is None and (bound := self._host_bound_of(choice, tiers[1:])):
            yield Candidate(choice=furthest, fits=False, least_bytes=self._least_bytes(furthest), bound=bound)
            return
        if peak_of(offloaded(self.traces.of(choice), furthest, self._space.compute_bytes)).num_bytes > self._most:
            yield self.candidate(furthest)
            return
        for tier in tiers[1:]:
            candidate = self.candidate(replace(choice, offload=tier))
            yield candidate
            if candidate.fits:
                return

    def candidate(self, choice: Choice) -> Candidate:
        least = self._least_bytes(choice)
        if least > self._most:
            return Candidate(choice=choice, fits=False, least_bytes=least)
        bound = self._bound_of(choice)
        if bound:
            return Candidate(choice=choice, fits=False, least_bytes=least, bound=bound)
        candidate = Candidate(choice=choice, fits=False, least_bytes=least)
        alone = choice.gpus == 1 and choice.offload != NO_OFFLOAD  # without offload its shards are the parameters
        return self._filled(candidate, self.traces.of(choice), self.traces.moved(choice) if alone else None)

    def _least_bytes(self, choice: Choice) -> int:
        return least_bytes(choice, self._space, self._task.num_params)

    def _host_bound_of(self, choice: Choice, tiers: Sequence[str]) -> str:
        """Why a choice need not be traced for any of these offloads: what rests on the host is more than a machine has."""
        rests = (replace(choice, offload=tier) for tier in tiers)
        least = min(least_host_bytes(c, self._space, self._task.num_params, self._cluster) for c in rests) * HOST_MARGIN
        if least <= self._cluster.host_bytes:
            return ""
        return f"needs at least {least / GIB:,.0f} of {self._cluster.host_bytes / GIB:,.0f} GiB of a machine's memory"

    def other_units(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Other units beside what is fastest, or where nothing fits, beside what comes closest."""
        mine = [c for c in candidates if c.choice.gpus == max(self._space.gpus) and c.choice.offload == NO_OFFLOAD]
        known = [c for c in mine if c.memory is not None and c.steps is not None]
        near = sorted((c for c in known if c.fits), key=lambda c: -c.tokens_per_s(self._space.tokens))[:BESIDE]
        near = near or sorted(known, key=lambda c: c.needed_bytes)[:1]
        return [self.candidate(replace(c.choice, units=units)) for c in near for units in self._space.units[1:]]

    def with_secondary(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Secondary shards in each node, beside what is fastest of that which gathers from other nodes."""
        if self._space.secondary is not None or self._space.engine != "accordion":
            return []
        node, gpus = self._cluster.node, max(self._space.gpus)
        mine = [c for c in candidates if c.fits and (c.choice.gpus, c.choice.offload) == (gpus, NO_OFFLOAD)]
        mine.sort(key=lambda c: -c.tokens_per_s(self._space.tokens))
        more = [choice for c in mine if (choice := with_secondary(c.choice, node)) is not None]
        return [self.candidate(choice) for choice in more[:BESIDE]]

    def with_activations(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Where nothing fits: inputs of recomputed units elsewhere, beside what comes closest, until something does."""
        mine = [c for c in candidates if c.choice.gpus == max(self._space.gpus)]
        if len(self._space.activations) == 1 or any(c.fits for c in mine):
            return []
        near = [c for c in mine if c.memory is not None and c.choice.checkpoint_activations != "none"]
        near = sorted(near, key=lambda c: c.needed_bytes)[:BESIDE]
        found: list[Candidate] = []
        for place in self._space.activations[1:]:
            found += [self.candidate(replace(c.choice, activations=place)) for c in near]
            if any(c.fits for c in found):
                break
        return found

    def promising(self, chosen: Sequence[Choice]) -> list[Choice]:
        """Those first that could be fastest, so that what they reach rules out the others."""
        return sorted(chosen, key=lambda c: self._least_s(c) / (c.micro_batch * c.accumulate))

    def _least_s(self, choice: Choice) -> float:
        """Seconds that no step of a choice falls below; 0 where nothing is known."""
        floor = self._floors.get(as_full_shard(choice))
        return 0.0 if floor is None else max(floor.seconds, messages_s(choice, floor, self._space, self._cluster))

    def _bound_of(self, choice: Choice) -> str:
        """Why a choice need not be traced: FULL_SHARD does not fit either, or even if it waited for nothing it would not win."""
        floor = self._floors.get(as_full_shard(choice))
        if choice == as_full_shard(choice) or choice.offload != NO_OFFLOAD or floor is None:
            return ""
        if floor.num_bytes > self._most and choice.units == AUTO:  # smaller units take less
            return f"takes more than full_shard, which needs at least {self._needed(floor.num_bytes) / GIB:,.1f} GiB"
        fastest, seconds = self._rates.get(choice.gpus, 0.0), self._least_s(choice)
        rate = choice.micro_batch * choice.accumulate * self._space.tokens / seconds
        if rate > fastest * (1 + AS_FAST):
            return ""
        said = f"{abs(gain := (rate / fastest - 1) * 100):.0f} % {'faster' if gain > 0 else 'slower'}"
        what = "if its messages alone took time" if seconds > floor.seconds else "if nothing waited"
        return f"even {what} {'only ' if gain > 0 else ''}{said}"

    @staticmethod
    def _needed(num_bytes: int) -> int:
        return int(num_bytes * MARGIN) + OUTSIDE_BYTES

    def _bound(self, candidate: Candidate) -> None:
        """Keep what a candidate says of others."""
        choice = candidate.choice
        if candidate.memory is None or candidate.steps is None:
            return
        if choice == as_full_shard(choice):
            peak, step = candidate.memory.peak.num_bytes, candidate.steps["middle"]
            self._floors[choice] = floor_of(self.traces.of(choice), peak, step, choice, self._cluster)
        if candidate.fits:
            rate = candidate.tokens_per_s(self._space.tokens)
            self._rates[choice.gpus] = max(rate, self._rates.get(choice.gpus, 0.0))

    def _filled(self, candidate: Candidate, log: Log, traced: Log | None = None) -> Candidate:
        """`log`: without offload. `traced`: the engine's own with offload, which says what the device holds."""
        space, cluster, choice = self._space, self._cluster, candidate.choice
        moved = offloaded(log, choice, space.compute_bytes)
        candidate.is_traced = self.traces.is_own(log) and (traced is not None or choice.offload == NO_OFFLOAD)
        candidate.memory = self._memory_of(choice, moved) if traced is None else memory_of(traced, self._most)
        candidate.steps = {"middle": self._step(moved, choice, "middle")}
        candidate.host_bytes = host_bytes(log, choice, space.compute_bytes, cluster)
        candidate.disk_bytes = disk_bytes(log, choice, cluster)
        on_host = candidate.host_bytes * HOST_MARGIN <= cluster.host_bytes
        candidate.fits = candidate.memory.fits(cluster) and on_host
        self._bound(candidate)
        return candidate

    def _memory_of(self, choice: Choice, moved: Log) -> MemoryNeed:
        """Of a log without the engine's own offload: the same for states on the host and on disk, and replayed once."""
        if choice.offload not in SAME_MEMORY:
            return memory_of(moved, self._most)
        key = moved_as(choice)
        if key not in self._memory:
            self._memory[key] = memory_of(moved, self._most)
        return self._memory[key]

    def _step(self, moved: Log, choice: Choice, rate: str, *, drawn: bool = False) -> Step:
        run = self._space.run_of(choice, self._cluster)
        return step_of_choice(moved, run, choice, self._cluster, rate, drawn=drawn)

    def at_all_rates(self, candidate: Candidate) -> None:
        if candidate.steps is None:
            return
        log = self.traces.of(candidate.choice)
        moved = offloaded(log, candidate.choice, self._space.compute_bytes)
        candidate.steps = {rate: self._step(moved, candidate.choice, rate, drawn=rate == "middle") for rate in REACHED}

    def verified(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """The fastest that fits by a trace of its own."""
        seen: list[Candidate] = []
        while (best := self.fastest(candidates)) is not None and all(c is not best for c in seen):
            if not best.is_traced:
                traced = None if best.choice.offload == NO_OFFLOAD else self.traces.trace_moved(best.choice)
                self._filled(best, self.traces.trace(best.choice), traced)
            seen.append(best)
        return best

    def fastest(self, candidates: Sequence[Candidate]) -> Candidate | None:
        fitting = [c for c in candidates if c.fits]
        if not fitting:
            return None
        rates = {id(c): c.tokens_per_s(self._space.tokens) for c in fitting}
        top = max(rates.values())
        close = [c for c in fitting if rates[id(c)] >= top * (1 - AS_FAST)]
        return min(close, key=lambda c: (c.needed_bytes, -rates[id(c)]))


# -- fewer GPUs


def frugal_space(space: Space) -> Space:
    """The choices that take least memory: one for every half of the GPUs asked for."""
    counts = [max(space.gpus)]
    while counts[-1] % 2 == 0:
        counts.append(counts[-1] // 2)
    return replace(
        space,
        strategies=[FIRST] if FIRST in space.strategies else space.strategies[:1],
        checkpointing=["full"] if "full" in space.checkpointing else space.checkpointing[-1:],
        micro_batches=[min(space.micro_batches)],
        offloads=space.offloads[:1],
        activations=space.activations[:1],
        gpus=sorted(counts),
    )


def on_fewer(task: SearchTask, logs: Mapping[Choice, Log], say: Say) -> Outcome:
    """On ever fewer GPUs, the choice of the space that takes least memory, until it does not fit. `logs`: traced before."""
    frugal, top = frugal_space(task.space), max(task.space.gpus)
    evaluator = Evaluator(replace(task, space=frugal), say)
    evaluator.traces.traced.update(logs)
    found: list[Candidate] = []
    for choice in sorted(choices(frugal, task.cluster), key=lambda c: -c.gpus):
        if choice.gpus == top:
            continue
        candidate = evaluator.candidate(replace(choice, offload=frugal.offloads[0]))
        found.append(candidate)
        if not candidate.fits:
            break
    return found, evaluator.traces.traced
