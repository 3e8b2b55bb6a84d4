"""Which configuration to take: all that are asked for are predicted, and each that is not chosen says why."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing import get_context

from accordion.config import strategy_named
from accordion.plan.accumulate import step_of_choice
from accordion.plan.events import Log
from accordion.plan.hardware import GIB, MARGIN, OUTSIDE_BYTES, REACHED, Cluster
from accordion.plan.memory import peak_of
from accordion.plan.offload import host_bytes, offloaded
from accordion.plan.predict import Memory, memory_of
from accordion.plan.rig import Subject
from accordion.plan.simulate import Step
from accordion.plan.space import NO_OFFLOAD, OFFLOADS, Choice, Space, choices
from accordion.plan.traces import Traces, traced_as

FIRST = "full_shard"  # is predicted first: it takes least memory, and others can only wait less
AS_FAST = 0.02  # of choices that are as fast, the one that leaves most room is taken
HOST_MARGIN = 1.1  # on what ranks keep on the host, for Python, torch and data
Say = Callable[[str], None]


@dataclass(slots=True, kw_only=True)
class Candidate:
    """A choice with what it takes. `memory`, `steps`: None where a bound, `least_bytes`, says that it does not fit. `host_bytes`:
    of one machine. `steps`: at middle rates, of the best one at low and high ones too. `bound`: why it was not worked out.
    `why`: it was not chosen.
    """

    choice: Choice
    fits: bool
    least_bytes: int
    host_bytes: int = 0
    memory: Memory | None = None
    steps: dict[str, Step] | None = None
    bound: str = ""
    why: str = ""

    @property
    def needed_bytes(self) -> int:
        return self.memory.needed_bytes if self.memory is not None else self.least_bytes

    def tokens_per_s(self, tokens: int, rate: str = "middle") -> float:
        """Of one GPU."""
        assert self.steps is not None
        return self.choice.micro_batch * tokens * self.choice.accumulate / self.steps[rate].seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """`best`: the fastest that fits on all GPUs asked for, or None. `fewest`: the fastest on the least GPUs on which any fits.

    `logs`: what was traced, and not worked out from other traces, without offload.
    """

    best: Candidate | None
    fewest: Candidate | None
    candidates: Sequence[Candidate]
    logs: Mapping[Choice, Log]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that a search is made of; a second process can be told of it where `subject_for` can be pickled."""

    subject_for: Callable[[int], Subject]
    space: Space
    cluster: Cluster
    num_params: int


def search(
    subject_for: Callable[[int], Subject],
    space: Space,
    cluster: Cluster,
    num_params: int,
    say: Say = lambda text: None,
    processes: int = 1,
    fewest: bool = False,
) -> Found:
    """Predict every choice of `space`. `subject_for`: training with that micro-batch. `processes`: 2 has a second one take half
    of the ways of checkpointing. `fewest`: smaller numbers of GPUs are looked at too, with what takes least memory.
    Raises `UsageError` where the space is empty.
    """
    job = Job(subject_for=subject_for, space=space, cluster=cluster, num_params=num_params)
    every = choices(space, cluster)
    first = [c for c in every if c.strategy == FIRST] or every
    theirs = _theirs(first) if processes > 1 else []
    part = _Part(job, say)
    with ExitStack() as stack:
        future = _second(job, theirs, stack) if theirs else None
        candidates = part.candidates([c for c in first if c not in theirs])
        if future is not None:
            candidates += _result(future, theirs, part, say)
    if len(first) < len(every):
        candidates += part.candidates([c for c in every if c.strategy != FIRST])
    best = part.verified([c for c in candidates if c.choice.gpus == max(space.gpus)])
    if fewest and len(space.gpus) == 1 and best is not None:
        candidates += _frugal(job, part.traces, say)
    least = min((c.choice.gpus for c in candidates if c.fits), default=0)
    on_fewest = part.fastest([c for c in candidates if c.choice.gpus == least])
    part.at_all_rates(best or closest(candidates, space))
    for candidate in candidates:
        candidate.why = "" if candidate is best else _why(candidate, best, space, cluster)
    return Found(best=best, fewest=on_fewest, candidates=candidates, logs=part.traces.traced)


def closest(candidates: Sequence[Candidate], space: Space) -> Candidate:
    """What comes closest to fitting all GPUs asked for."""
    return min((c for c in candidates if c.choice.gpus == max(space.gpus)), key=lambda c: c.needed_bytes)


def least_bytes(choice: Choice, space: Space, num_params: int) -> int:
    """What no trace can fall below: parameters and two states in the master's dtype, and full copies that stay."""
    strategy = strategy_named(choice.strategy)
    over = choice.gpus if strategy.optim_over_replicas else choice.shards
    if strategy.optim.value == "replicate":
        over = 1
    stays = strategy.params.value == "replicate" or strategy.keep_until_backward
    copies = space.compute_bytes if stays and choice.gpus > 1 else 0
    if choice.offload == NO_OFFLOAD:
        return int(num_params * (12 / over + copies))
    return int(num_params * (space.compute_bytes / over * (OFFLOADS[choice.offload][0] == "device") + copies))


@dataclass(frozen=True, slots=True)
class _Floor:
    """What FULL_SHARD takes, and no other strategy falls below: allocated bytes, and seconds without waiting for others."""

    num_bytes: int
    seconds: float


class _Part:
    """Owns the traces of a part of a search, and the bounds that were found so far."""

    def __init__(self, job: Job, say: Say) -> None:
        self._job, self._space, self._cluster = job, job.space, job.cluster
        self.traces = Traces(job.subject_for, job.space, job.cluster, say)
        self._floors: dict[Choice, _Floor] = {}
        self._rates: dict[int, float] = {}  # of the fastest that fits so many GPUs
        self._most = int((job.cluster.card_bytes - OUTSIDE_BYTES) / MARGIN)  # allocated bytes beyond which nothing fits

    def candidates(self, chosen: Sequence[Choice]) -> list[Candidate]:
        return [c for choice in chosen for c in self._tiers(choice)]

    def adopt(self, candidates: Sequence[Candidate], logs: Mapping[Choice, Log]) -> None:
        """Take over what another process found."""
        self.traces.traced.update(logs)
        for candidate in candidates:
            self._bound(candidate)
            choice = candidate.choice
            if choice.micro_batch == min(self._space.micro_batches) and traced_as(choice) in logs:
                self.traces.of(
                    replace(choice, micro_batch=max(self._space.micro_batches))
                )  # so that others can do alike

    def _tiers(self, choice: Choice) -> Iterator[Candidate]:
        """The choice with each offload in turn, until it fits; where none of them can, the one that comes closest alone."""
        tiers = self._space.tiers_of(choice)
        first = self.candidate(replace(choice, offload=tiers[0]))
        yield first
        if first.fits or first.bound or len(tiers) == 1:
            return
        furthest = replace(choice, offload=tiers[-1])
        if peak_of(offloaded(self.traces.of(choice), furthest, self._space.compute_bytes)).num_bytes > self._most:
            yield self.candidate(furthest)
            return
        for tier in tiers[1:]:
            candidate = self.candidate(replace(choice, offload=tier))
            yield candidate
            if candidate.fits:
                return

    def candidate(self, choice: Choice) -> Candidate:
        least = least_bytes(choice, self._space, self._job.num_params)
        if least > self._most:
            return Candidate(choice=choice, fits=False, least_bytes=least)
        bound = self._bound_of(choice)
        if bound:
            return Candidate(choice=choice, fits=False, least_bytes=least, bound=bound)
        return self._filled(Candidate(choice=choice, fits=False, least_bytes=least), self.traces.of(choice))

    def _bound_of(self, choice: Choice) -> str:
        """Why a choice need not be traced: FULL_SHARD does not fit either, or not even without waiting would it be faster."""
        floor = self._floors.get(_as_full_shard(choice))
        if choice.strategy == FIRST or choice.offload != NO_OFFLOAD or floor is None:
            return ""
        if floor.num_bytes > self._most:
            return f"takes more than full_shard, which needs at least {self._needed(floor.num_bytes) / GIB:,.1f} GiB"
        fastest = self._rates.get(choice.gpus, 0.0)
        rate = choice.micro_batch * choice.accumulate * self._space.tokens / floor.seconds
        if rate > fastest * (1 + AS_FAST):
            return ""
        gain = (rate / fastest - 1) * 100
        return f"even if nothing waited {'only ' if gain > 0 else ''}{abs(gain):.0f} % {'faster' if gain > 0 else 'slower'}"

    @staticmethod
    def _needed(num_bytes: int) -> int:
        return int(num_bytes * MARGIN) + OUTSIDE_BYTES

    def _bound(self, candidate: Candidate) -> None:
        """Keep what a candidate says of others."""
        choice = candidate.choice
        if candidate.memory is None or candidate.steps is None:
            return
        step = candidate.steps["middle"]
        if choice == _as_full_shard(choice):
            self._floors[choice] = _Floor(candidate.memory.peak.num_bytes, step.seconds - step.exposed_s)
        if candidate.fits:
            rate = candidate.tokens_per_s(self._space.tokens)
            self._rates[choice.gpus] = max(rate, self._rates.get(choice.gpus, 0.0))

    def _filled(self, candidate: Candidate, log: Log) -> Candidate:
        space, cluster, choice = self._space, self._cluster, candidate.choice
        moved = offloaded(log, choice, space.compute_bytes)
        candidate.memory = memory_of(moved, self._most)
        candidate.steps = {"middle": self._step(moved, log, choice, "middle")}
        candidate.host_bytes = host_bytes(log, choice, space.compute_bytes, space.optimizer, cluster)
        on_host = candidate.host_bytes * HOST_MARGIN <= cluster.host_bytes
        candidate.fits = candidate.memory.fits(cluster) and on_host
        self._bound(candidate)
        return candidate

    def _step(self, moved: Log, log: Log, choice: Choice, rate: str) -> Step:
        run = self._space.run_of(choice, self._cluster)
        return step_of_choice(moved, log, run, choice, self._cluster, rate)

    def at_all_rates(self, candidate: Candidate) -> None:
        if candidate.steps is None:
            return
        log = self.traces.of(candidate.choice)
        moved = offloaded(log, candidate.choice, self._space.compute_bytes)
        candidate.steps = {rate: self._step(moved, log, candidate.choice, rate) for rate in REACHED}

    def verified(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """The fastest that fits by a trace of its own."""
        seen: list[Candidate] = []
        while (best := self.fastest(candidates)) is not None and all(c is not best for c in seen):
            self._filled(best, self.traces.trace(best.choice))
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


def _as_full_shard(choice: Choice) -> Choice:
    return replace(choice, strategy=FIRST, replicas=1, offload=NO_OFFLOAD)


# -- the second process

Half = tuple[list[Candidate], dict[Choice, Log]]


def _theirs(first: Sequence[Choice]) -> list[Choice]:
    """What the second process takes of these: every other way of checkpointing."""
    ways = list(dict.fromkeys(c.checkpoint_activations for c in first))
    return [c for c in first if c.checkpoint_activations in ways[1::2]]


def _second(job: Job, theirs: Sequence[Choice], stack: ExitStack) -> Future[Half]:
    pool = stack.enter_context(ProcessPoolExecutor(1, mp_context=get_context("spawn")))
    return pool.submit(_search_half, job, theirs)


def _search_half(job: Job, theirs: Sequence[Choice]) -> Half:
    part = _Part(job, lambda text: None)
    return part.candidates(theirs), part.traces.traced


def _result(future: Future[Half], theirs: Sequence[Choice], part: _Part, say: Say) -> list[Candidate]:
    try:
        candidates, logs = future.result()
    except (
        BrokenProcessPool,
        pickle.PicklingError,
        AttributeError,
    ):  # killed, or told of a model that cannot be pickled
        say("the second process ended early; its part is searched here")
        return part.candidates(theirs)
    part.adopt(candidates, logs)
    return candidates


# -- beside the search


def _frugal(job: Job, traces: Traces, say: Say) -> list[Candidate]:
    """On ever fewer GPUs, the choice of the space that takes least memory, until it does not fit."""
    space, top = job.space, max(job.space.gpus)
    counts = [top]
    while counts[-1] % 2 == 0:
        counts.append(counts[-1] // 2)
    frugal = replace(
        space,
        strategies=[FIRST] if FIRST in space.strategies else space.strategies[:1],
        checkpointing=["full"] if "full" in space.checkpointing else space.checkpointing[-1:],
        micro_batches=[min(space.micro_batches)],
        offloads=space.offloads[:1],
        gpus=sorted(counts),
    )
    part = _Part(replace(job, space=frugal), say)
    part.traces.traced.update(traces.traced)
    found: list[Candidate] = []
    for choice in sorted(choices(frugal, job.cluster), key=lambda c: -c.gpus):
        if choice.gpus == top:
            continue
        candidate = part.candidate(replace(choice, offload=frugal.offloads[0]))
        found.append(candidate)
        if not candidate.fits:
            break
    traces.traced.update(part.traces.traced)
    return found


def _why(candidate: Candidate, best: Candidate | None, space: Space, cluster: Cluster) -> str:
    card = cluster.card_bytes / GIB
    if candidate.bound:
        return candidate.bound
    if candidate.memory is None:
        return f"takes {candidate.least_bytes / GIB:,.0f} GiB at least, of {card:.0f}"
    if not candidate.memory.fits(cluster):
        least = " at least" if "at_least" in candidate.memory.reserved_bytes else ""
        return f"needs{least} {candidate.needed_bytes / GIB:,.1f} of {card:.1f} GiB"
    if not candidate.fits:
        needed = candidate.host_bytes * HOST_MARGIN / GIB
        return f"needs {needed:,.0f} of {cluster.host_bytes / GIB:,.0f} GiB of a machine's memory"
    if best is None or best.steps is None:
        return ""
    if candidate.choice.gpus < best.choice.gpus:
        return "fits, on fewer GPUs than asked for"
    ratio = best.tokens_per_s(space.tokens) / candidate.tokens_per_s(space.tokens)
    if ratio < 1 + cluster.tellable:
        return f"too close to tell apart ({(ratio - 1) * 100:+.0f} %)"
    return f"{(ratio - 1) * 100:.0f} % slower"
