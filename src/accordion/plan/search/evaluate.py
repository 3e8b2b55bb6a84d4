"""Bytes and seconds of each choice of a search: traced, derived from other traces, or ruled out by a bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from accordion.config import FULL_SHARD, Offload
from accordion.plan.choice import NO_OFFLOAD, Choice, in_memory, moved_as
from accordion.plan.events import Log
from accordion.plan.extrapolate.offload import disk_bytes, host_bytes, offloaded
from accordion.plan.hardware import GIB, MARGIN, OUTSIDE_BYTES, REACHED, Cluster
from accordion.plan.replay.peak import peak_of
from accordion.plan.replay.predict import MemoryNeed, memory_of, step_of_choice
from accordion.plan.replay.timeline import Step
from accordion.plan.search.bounds import Floor, as_full_shard, floor_of, least_bytes, least_host_bytes, messages_s
from accordion.plan.search.space import Space
from accordion.plan.search.traces import Traces
from accordion.sharding import offload_words

AS_FAST = 0.02  # of choices that are as fast, the one that leaves most room is taken
BESIDE = 3  # of the fastest, with which other units are tried
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


class Evaluator:
    """Owns the traces of a search, and the bounds that were found so far. `known`: logs that were traced before."""

    def __init__(self, space: Space, say: Say, known: Mapping[Choice, Log] | None = None) -> None:
        self._space, self._cluster = space, space.cluster
        self.traces = Traces(space, say, known or {})
        self._floors: dict[Choice, Floor] = {}
        self._memory: dict[Choice, MemoryNeed] = {}  # of offload that was worked out, as `moved_as` has it
        self._last_moved: tuple[Log | None, dict[str | Offload, Log]] = None, {}
        self._rates: dict[int, float] = {}  # of the fastest that fits so many GPUs
        # Allocated bytes beyond which nothing fits.
        self._most = int((self._cluster.card_bytes - OUTSIDE_BYTES) / MARGIN)

    def candidates(self, chosen: Sequence[Choice]) -> list[Candidate]:
        return [c for choice in chosen for c in self._offloads(choice)]

    def _offloads(self, choice: Choice) -> Iterator[Candidate]:
        """The choice with each offload in turn, until it fits; if none of them can, the one that comes closest alone."""
        choices = [_with_states(choice, offload) for offload in self._space.offloads_of(choice)]
        first = self.candidate(choices[0])
        yield first
        if first.fits or first.bound or len(choices) == 1:
            return
        furthest = choices[-1]
        if first.memory is None and (bound := self._host_bound_of(choices[1:])):
            yield Candidate(choice=furthest, fits=False, least_bytes=least_bytes(furthest, self._space), bound=bound)
            return
        if peak_of(self._moved(self.traces.of(choice), in_memory(furthest.offload))).num_bytes > self._most:
            yield self.candidate(furthest)
            return
        for further in choices[1:]:
            candidate = self.candidate(further)
            yield candidate
            if candidate.fits:
                return

    def candidate(self, choice: Choice) -> Candidate:
        candidate = Candidate(choice=choice, fits=False, least_bytes=least_bytes(choice, self._space))
        if candidate.least_bytes > self._most:
            return candidate
        candidate.bound = self._bound_of(choice)
        if candidate.bound:
            return candidate
        alone = choice.gpus == 1 and choice.offload.is_any  # without offload its shards are the parameters
        return self._filled(candidate, self.traces.of(choice), self.traces.moved(choice) if alone else None)

    def _host_bound_of(self, choices: Sequence[Choice]) -> str:
        """Why a choice need not be traced for any of these offloads: what rests on the host is more than a machine has."""
        least = min(least_host_bytes(choice, self._space) for choice in choices) * HOST_MARGIN
        if least <= self._cluster.host_bytes:
            return ""
        return f"needs at least {least / GIB:,.0f} of {self._cluster.host_bytes / GIB:,.0f} GiB of a machine's memory"

    # -- next to what is fastest, or closest

    def _fastest_first(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those that fit all GPUs without offloaded states."""
        mine = [c for c in candidates if c.choice.gpus == self._cluster.num_gpus and not c.choice.offload.is_any]
        return sorted((c for c in mine if c.fits), key=lambda c: -c.tokens_per_s(self._space.tokens))

    def other_units(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Other units next to what is fastest, or if nothing fits, next to what comes closest."""
        mine = [c for c in candidates if c.choice.gpus == self._cluster.num_gpus and not c.choice.offload.is_any]
        near = self._fastest_first(candidates)[:BESIDE]
        near = near or sorted((c for c in mine if c.memory is not None), key=lambda c: c.needed_bytes)[:1]
        return [self.candidate(c.choice.but(units=units)) for c in near for units in self._space.units[1:]]

    def with_copies(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Copies kept in each node, next to what is fastest of that which gathers from other nodes."""
        if not self._space.search.copies:
            return []
        mine = [c.choice for c in self._fastest_first(candidates)]
        more = [kept for choice in mine if (kept := choice.keeping(self._cluster.node)) != choice]
        return [self.candidate(choice) for choice in more[:BESIDE]]

    def with_activations(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """If nothing fits: inputs of recomputed units elsewhere, next to what comes closest, until something does."""
        mine = [c for c in candidates if c.choice.gpus == self._cluster.num_gpus]
        if any(c.fits for c in mine):
            return []
        near = [c for c in mine if c.memory is not None and c.choice.checkpointing != "none"]
        near = sorted(near, key=lambda c: c.needed_bytes)[:BESIDE]
        tried: list[Candidate] = []
        for place in self._space.search.activations[1:]:
            offloads = [replace(c.choice.offload, activations=place) for c in near]
            tried += [self.candidate(c.choice.but(offload=offload)) for c, offload in zip(near, offloads, strict=True)]
            if any(c.fits for c in tried):
                break
        return tried

    # -- bounds

    def promising(self, chosen: Sequence[Choice]) -> list[Choice]:
        """Those first that could be fastest, so that what they reach rules out the others."""
        return sorted(chosen, key=lambda c: self._least_s(c) / (c.micro_batch * c.accumulate))

    def _floor(self, choice: Choice) -> Floor | None:
        """Return what no step of a choice falls below: FULL_SHARD's floor, or before its trace that without recomputation."""
        full = as_full_shard(choice, self._space.units[0])
        how = choice.sharding.checkpointing
        if full in self._floors or not how.every:
            return self._floors.get(full)
        plain = self._floors.get(full.but(checkpoint_activations="none", offload=NO_OFFLOAD))
        return None if plain is None else plain.recomputing(how)

    def _least_s(self, choice: Choice) -> float:
        """Seconds that no step of a choice falls below; 0 if nothing is known."""
        floor = self._floor(choice)
        return 0.0 if floor is None else max(floor.seconds, messages_s(choice, floor, self._space))

    def _bound_of(self, choice: Choice) -> str:
        """Return why a choice need not be traced: FULL_SHARD does not fit either, or it is slower even if nothing waits."""
        floor, units = self._floor(choice), self._space.units[0]
        if choice.offload.is_any or floor is None:
            return ""
        if floor.num_bytes > self._most and choice.units == units:  # smaller units take less
            needed = int(floor.num_bytes * MARGIN) + OUTSIDE_BYTES
            return f"takes more than full_shard, which needs at least {needed / GIB:,.1f} GiB"
        fastest, seconds = self._rates.get(choice.gpus, 0.0), self._least_s(choice)
        rate = choice.micro_batch * choice.accumulate * self._space.tokens / seconds
        if rate > fastest * (1 + AS_FAST):
            return ""
        said = f"{abs(gain := (rate / fastest - 1) * 100):.0f} % {'faster' if gain > 0 else 'slower'}"
        what = "if its messages alone took time" if seconds > floor.seconds else "if nothing waited"
        return f"even {what} {'only ' if gain > 0 else ''}{said}"

    def _bound(self, candidate: Candidate) -> None:
        """Keep what a candidate says of others."""
        choice = candidate.choice
        assert candidate.memory is not None
        assert candidate.steps is not None
        if choice == as_full_shard(choice, self._space.units[0]):
            peak, step = candidate.memory.peak.num_bytes, candidate.steps["middle"]
            self._floors[choice] = floor_of(self.traces.of(choice), peak, step, choice, self._cluster)
        if candidate.fits:
            rate = candidate.tokens_per_s(self._space.tokens)
            self._rates[choice.gpus] = max(rate, self._rates.get(choice.gpus, 0.0))

    # -- figures

    def _filled(self, candidate: Candidate, log: Log, traced: Log | None = None) -> Candidate:
        """`log`: without offload. `traced`: the engine's own with offload, which says what the device holds."""
        space, cluster, choice = self._space, self._cluster, candidate.choice
        candidate.is_traced = self.traces.is_own(log) and (traced is not None or not choice.offload.is_any)
        candidate.memory = self._memory_of(choice, log) if traced is None else memory_of(traced, self._most)
        candidate.steps = {"middle": self._step(log, choice, "middle")}
        candidate.host_bytes = host_bytes(log, choice, space.compute_bytes, cluster)
        candidate.disk_bytes = disk_bytes(log, choice, cluster)
        on_host = candidate.host_bytes * HOST_MARGIN <= cluster.host_bytes
        candidate.fits = candidate.memory.fits(cluster) and on_host
        self._bound(candidate)
        return candidate

    def _moved(self, log: Log, offload: Offload) -> Log:
        """`log` with offload; what was worked out of the last log is kept, of which memory, time and bounds are asked for."""
        known, words = self._last_moved, offload_words(offload)
        if known[0] is not log:
            known = self._last_moved = log, {}
        if words not in known[1]:
            known[1][words] = offloaded(log, offload, self._space.compute_bytes)
        return known[1][words]

    def _memory_of(self, choice: Choice, log: Log) -> MemoryNeed:
        """Of a log without the engine's own offload: the same for states on the host and on disk, and replayed once."""
        moved = partial(self._moved, log, in_memory(choice.offload))
        if not choice.offload.is_any:
            return memory_of(moved(), self._most)
        key = moved_as(choice)
        if key not in self._memory:
            self._memory[key] = memory_of(moved(), self._most)
        return self._memory[key]

    def _step(self, log: Log, choice: Choice, rate: str, *, drawn: bool = False) -> Step:
        moved = self._moved(log, choice.offload)
        return step_of_choice(moved, self._space.setup(choice), choice, self._cluster, rate, drawn=drawn)

    def at_all_rates(self, candidate: Candidate) -> None:
        if candidate.steps is None:
            return
        log, choice = self.traces.of(candidate.choice), candidate.choice
        candidate.steps = {rate: self._step(log, choice, rate, drawn=rate == "middle") for rate in REACHED}

    def verified(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """The fastest that fits by a trace of its own."""
        seen: list[Candidate] = []
        while (best := self.fastest(candidates)) is not None and all(c is not best for c in seen):
            if not best.is_traced:
                traced = self.traces.trace(best.choice, moved=True) if best.choice.offload.is_any else None
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


def _with_states(choice: Choice, offload: Offload) -> Choice:
    """The choice with states where `offload` has them, and inputs of recomputed units where they were."""
    return choice.but(offload=replace(offload, activations=choice.offload.activations))


# -- fewer GPUs


def frugal_space(space: Space) -> Space:
    """The choices that take least memory: one for every half of the GPUs asked for."""
    search, counts = space.search, [space.cluster.num_gpus]
    while counts[-1] % 2 == 0:
        counts.append(counts[-1] // 2)
    full = [FULL_SHARD] if FULL_SHARD in search.strategies else search.strategies[:1]
    frugal = replace(
        search,
        strategies=full,
        checkpointing=["full"] if "full" in search.checkpointing else search.checkpointing[-1:],
        micro_batches=[min(search.micro_batches)],
        offloads=search.offloads[:1],
        activations=search.activations[:1],
    )
    return replace(space, search=frugal, cluster=replace(space.cluster, gpus=counts))


def on_fewer(space: Space, known: Mapping[Choice, Log], say: Say) -> tuple[list[Candidate], Mapping[Choice, Log]]:
    """On ever more GPUs, the choice of the space that takes least memory, until it fits; and what was traced.

    `known`: logs that were traced before.
    """
    frugal = frugal_space(space)
    tried: list[Candidate] = []
    for choice in sorted(frugal.choices(), key=lambda c: c.gpus):
        if choice.gpus == space.cluster.num_gpus or (tried and tried[-1].fits):
            break
        # One number of GPUs at a time: mostly the first that is not too small is traced, and no other.
        evaluator = Evaluator(replace(frugal, cluster=replace(frugal.cluster, gpus=[choice.gpus])), say, known)
        tried.append(evaluator.candidate(_with_states(choice, frugal.search.offloads[0])))
        known = evaluator.traces.traced
    return tried, known
