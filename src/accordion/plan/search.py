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
from accordion.plan.traces import Traces

AS_FAST = 0.02  # of choices that are as fast, the one that leaves most room is taken
HOST_MARGIN = 1.1  # on what ranks keep on the host, for Python, torch and data
Say = Callable[[str], None]


@dataclass(slots=True, kw_only=True)
class Candidate:
    """A choice with what it takes. `memory`, `steps`: None where a bound, `least_bytes`, says that it does not fit. `host_bytes`:
    of one machine. `steps`: at middle rates, of the best one at low and high ones too. `why`: it was not chosen.
    """

    choice: Choice
    fits: bool
    least_bytes: int
    host_bytes: int = 0
    memory: Memory | None = None
    steps: dict[str, Step] | None = None
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
    choices(space, cluster)
    with ExitStack() as stack:
        helped = _second(job, stack) if processes > 1 else None
        part = _Part(replace(job, space=helped[0]) if helped else job, say)
        candidates = part.candidates()
        if helped:
            candidates += _result(helped[1], replace(job, space=helped[2]), part.traces, say)
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


class _Part:
    """Owns the traces of a part of a space, and what FULL_SHARD was found to take, which no other strategy falls below."""

    def __init__(self, job: Job, say: Say) -> None:
        self._job, self._space, self._cluster = job, job.space, job.cluster
        self.traces = Traces(job.subject_for, job.space, job.cluster, say)
        self._floor: dict[Choice, int] = {}
        self._most = int((job.cluster.card_bytes - OUTSIDE_BYTES) / MARGIN)  # allocated bytes beyond which nothing fits

    def candidates(self) -> list[Candidate]:
        return [c for choice in choices(self._space, self._cluster) for c in self._tiers(choice)]

    def _tiers(self, choice: Choice) -> Iterator[Candidate]:
        """The choice with each offload in turn, until it fits; where none of them can, the one that comes closest alone."""
        tiers = self._space.tiers_of(choice)
        first = self.candidate(replace(choice, offload=tiers[0]))
        yield first
        floor = self._floor.get(_as_full_shard(choice), 0)
        if (
            first.fits
            or len(tiers) == 1
            or (choice.strategy != "full_shard" and floor > self._most and first.memory is None)
        ):
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
        if choice.strategy != "full_shard" and choice.offload == NO_OFFLOAD:
            smallest = replace(_as_full_shard(choice), micro_batch=min(self._space.micro_batches))
            if self._floor.get(smallest, 0) > self._most:
                least = max(least, self._floor.get(_as_full_shard(choice), 0))
        if least > self._most:
            return Candidate(choice=choice, fits=False, least_bytes=least)
        return self._filled(Candidate(choice=choice, fits=False, least_bytes=least), self.traces.of(choice))

    def _filled(self, candidate: Candidate, log: Log) -> Candidate:
        space, cluster, choice = self._space, self._cluster, candidate.choice
        moved = offloaded(log, choice, space.compute_bytes)
        candidate.memory = memory_of(moved, self._most)
        candidate.steps = {"middle": self._step(moved, log, choice, "middle")}
        candidate.host_bytes = host_bytes(log, choice, space.compute_bytes, space.optimizer, cluster)
        on_host = candidate.host_bytes * HOST_MARGIN <= cluster.host_bytes
        candidate.fits = candidate.memory.fits(cluster) and on_host
        if choice == _as_full_shard(choice):
            self._floor[choice] = candidate.memory.peak.num_bytes
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
    return replace(choice, strategy="full_shard", replicas=1, offload=NO_OFFLOAD)


# -- the second process


def _second(
    job: Job, stack: ExitStack
) -> tuple[Space, Future[tuple[list[Candidate], dict[Choice, Log]]], Space] | None:
    """Every other way of checkpointing, searched through in another process: (ours, what it will find, its own)."""
    ours, theirs = job.space.checkpointing[0::2], job.space.checkpointing[1::2]
    if not theirs:
        return None
    spaces = replace(job.space, checkpointing=ours), replace(job.space, checkpointing=theirs)
    pool = stack.enter_context(ProcessPoolExecutor(1, mp_context=get_context("spawn")))
    return spaces[0], pool.submit(_search_part, replace(job, space=spaces[1])), spaces[1]


def _search_part(job: Job) -> tuple[list[Candidate], dict[Choice, Log]]:
    """In the second process: its candidates, and the log of the one that may be chosen."""
    part = _Part(job, lambda text: None)
    candidates = part.candidates()
    best = part.verified([c for c in candidates if c.choice.gpus == max(job.space.gpus)])
    chosen = None if best is None else replace(best.choice, offload=NO_OFFLOAD)
    return candidates, {choice: log for choice, log in part.traces.traced.items() if choice == chosen}


def _result(
    future: Future[tuple[list[Candidate], dict[Choice, Log]]], job: Job, traces: Traces, say: Say
) -> list[Candidate]:
    try:
        candidates, logs = future.result()
    except (BrokenProcessPool, pickle.PicklingError, AttributeError):
        say("the second process ended early; its part is searched here")
        return _Part(job, say).candidates()
    traces.traced.update(logs)
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
        strategies=["full_shard"] if "full_shard" in space.strategies else space.strategies[:1],
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
