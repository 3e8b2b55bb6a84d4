"""Evaluate the choices of a search: compute memory and time from traces, or rule a choice out by a bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from accordion.plan.choice import NO_OFFLOAD, Choice, traced_as
from accordion.plan.events import Log
from accordion.plan.hardware import GIB, MARGIN, OUTSIDE_BYTES, REACHED, Cluster
from accordion.plan.replay.offload import disk_bytes, host_bytes, host_work, offloaded, state_by_unit, with_host_work
from accordion.plan.replay.peak import peak_of
from accordion.plan.replay.predict import MemoryNeed, costs_for, memory_of, step_of_choice
from accordion.plan.replay.timeline import Step
from accordion.plan.search.bounds import Floor, as_full_shard, floor_of, least_bytes, least_host_bytes, messages_s
from accordion.plan.search.space import Space
from accordion.plan.search.traces import Traces

# Choices within this share of the fastest count as equally fast; the one that needs least memory is taken.
AS_FAST = 0.02
NUM_VARIED = 3  # number of choices that `with_copies` and `with_activations` try
HOST_MARGIN = 1.1  # factor on the bytes that ranks keep on the host, for Python, torch and data
Say = Callable[[str], None]


@dataclass(slots=True, kw_only=True)
class Candidate:
    """A choice and its predicted memory and time.

    Args:
        fits: True if it fits into the memory of the GPU and of the host; False also if it was ruled out and this is not known.
        least_bytes: lower bound of its GPU memory.
        host_bytes, disk_bytes: bytes that its offload takes on one machine.
        memory: GPU memory of a step; None if the choice was ruled out by `least_bytes` or by `bound`.
        steps: times by name of the assumed rates: "middle", and for the best choice (if none fits, the closest) also "low" and
            "high". None if `memory` is None.
        is_traced: True if memory and time are from the choice's own trace, not from other traces.
        bound: reason why the choice was ruled out before it was traced (too large or too slow), or "".
        why: reason why the choice was not chosen, or "".
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
        """Return True if the choice may or may not fit into the GPU, depending on the unknown workspace of an operator."""
        return self.memory is not None and self.memory.is_open(cluster)

    @property
    def needed_bytes(self) -> int:
        return self.memory.needed_bytes if self.memory is not None else self.least_bytes

    def tokens_per_s(self, tokens: int, rate: str = "middle") -> float:
        """Return tokens per second and GPU; `steps` must not be None. `tokens`: tokens per sample. `rate`: a key of `steps`."""
        assert self.steps is not None
        return self.choice.samples * tokens / self.steps[rate].seconds


class Evaluator:
    """Evaluates the choices of one search, and stores their traces in `traces`. Call `candidates` for FULL_SHARD first, whose
    bounds may rule out other choices; at the end, `verified` chooses. `say`: called with a line of text before each trace."""

    def __init__(self, space: Space, say: Say) -> None:
        self._space, self._cluster = space, space.cluster
        self.traces = Traces(space, say)
        self._floors: dict[Choice, Floor] = {}
        self._rates: dict[int, float] = {}  # number of GPUs -> tokens/s of the fastest choice that fits
        # The most allocated bytes that can fit.
        self._most = int((self._cluster.card_bytes - OUTSIDE_BYTES) / MARGIN)

    def candidates(self, chosen: Sequence[Choice]) -> list[Candidate]:
        """Evaluate `chosen` in order, each with one or more offloads of states. Return one candidate for each offload tried."""
        return [c for choice in chosen for c in self._offloads(choice)]

    def _offloads(self, choice: Choice) -> Iterator[Candidate]:
        """Yield candidates of `choice` with one offload of states after the other until one fits. Yield only the first if
        `_bound_of` rules it out. The last offload needs least GPU memory. Yield only the first and the last if the last cannot
        fit into the GPU, or if lower bounds of the first exceed the GPU and those of all others the host's memory."""
        inputs = choice.offload.activations
        choices = [choice.but(offload=replace(o, activations=inputs)) for o in self._space.offloads_of(choice)]
        first = self.candidate(choices[0])
        yield first
        if first.fits or first.bound or len(choices) == 1:
            return
        furthest, host = choices[-1], self._cluster.host_bytes
        least = min(least_host_bytes(choice, self._space) for choice in choices[1:]) * HOST_MARGIN
        if first.memory is None and least > host:
            bound = f"needs at least {least / GIB:,.0f} of {host / GIB:,.0f} GiB of a machine's memory"
            yield Candidate(choice=furthest, fits=False, least_bytes=least_bytes(furthest, self._space), bound=bound)
            return
        if peak_of(self._offloaded(furthest, self.traces.of(choice))).num_bytes > self._most:
            yield self.candidate(furthest)
            return
        for further in choices[1:]:
            candidate = self.candidate(further)
            yield candidate
            if candidate.fits:
                return

    def candidate(self, choice: Choice) -> Candidate:
        """Return the candidate of `choice` with memory and time, or without them if a bound rules it out. Traces the choice
        unless its log can be derived from other traces, and stores bounds for later choices."""
        candidate = Candidate(choice=choice, fits=False, least_bytes=least_bytes(choice, self._space))
        if candidate.least_bytes > self._most:
            return candidate
        if bound := self._bound_of(choice):
            candidate.bound = bound
            return candidate
        # On one GPU without offload the shards are the parameters themselves: offload cannot be derived and is traced.
        alone = choice.gpus == 1 and choice.offload.is_any
        return self._filled(candidate, self.traces.of(choice), self.traces.trace(choice) if alone else None)

    # -- variants of the fastest choices, or of the closest ones

    def with_copies(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Evaluate and return new candidates: up to `NUM_VARIED` of the fastest of `candidates` that fit on all GPUs without
        offloaded states, changed so that each node keeps a copy of a unit from its forward to its backward. Leaves out those
        that `Choice.keeping` does not change. Return [] if the search tries no copies."""
        if not self._space.search.copies:
            return []
        on_all = [c for c in candidates if c.choice.gpus == self._cluster.num_gpus and not c.choice.offload.is_any]
        fastest = sorted((c for c in on_all if c.fits), key=lambda c: -c.tokens_per_s(self._space.tokens))
        more = [other for c in fastest if (other := c.choice.keeping(self._cluster.node)) != c.choice]
        return [self.candidate(choice) for choice in more[:NUM_VARIED]]

    def with_activations(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Evaluate and return candidates if none of `candidates` fits on all GPUs; else return []. New ones are up to
        `NUM_VARIED` of those that need least memory, with inputs of recomputed units in each place until one fits."""
        on_all = [c for c in candidates if c.choice.gpus == self._cluster.num_gpus]
        if any(c.fits for c in on_all):
            return []
        near = [c for c in on_all if c.memory is not None and c.choice.checkpointing != "none"]
        near = sorted(near, key=lambda c: c.needed_bytes)[:NUM_VARIED]
        tried: list[Candidate] = []
        for place in self._space.search.activations[1:]:
            moved = [c.choice.but(offload=replace(c.choice.offload, activations=place)) for c in near]
            tried += map(self.candidate, moved)
            if any(c.fits for c in tried):
                break
        return tried

    # -- bounds

    def promising(self, chosen: Sequence[Choice]) -> list[Choice]:
        """Return `chosen` sorted by the speed that bounds allow: fastest first, since they may rule out slower ones."""
        return sorted(chosen, key=lambda c: self._least_s(c) / c.samples)

    def _floor(self, choice: Choice) -> Floor | None:
        """Return lower bounds of a choice's memory and time: the floor of the FULL_SHARD choice that bounds it. If that choice
        was not evaluated, derive the floor from the same choice without recomputation. None if neither was evaluated."""
        full = as_full_shard(choice)
        how = choice.sharding.checkpointing
        if full in self._floors or not how.every:
            return self._floors.get(full)
        plain = self._floors.get(full.but(checkpoint_activations="none", offload=NO_OFFLOAD))
        return None if plain is None else plain.recomputing(how)

    def _least_s(self, choice: Choice) -> float:
        """Return a lower bound of the seconds of a choice's step; 0 if none is known."""
        floor = self._floor(choice)
        return 0.0 if floor is None else max(floor.seconds, messages_s(choice, floor, self._space))

    def _bound_of(self, choice: Choice) -> str:
        """Return a text that says why `choice` is too large or too slow to be the best; "" if it may be the best, if no bound
        is known, or if it offloads states."""
        floor = self._floor(choice)
        if choice.offload.is_any or floor is None:
            return ""
        if floor.num_bytes > self._most:
            needed = int(floor.num_bytes * MARGIN) + OUTSIDE_BYTES
            return f"takes more than full_shard, which needs at least {needed / GIB:,.1f} GiB"
        fastest, seconds = self._rates.get(choice.gpus, 0.0), self._least_s(choice)
        rate = choice.samples * self._space.tokens / seconds
        if rate > fastest * (1 + AS_FAST):
            return ""
        percent = round((rate / fastest - 1) * 100)
        gain = f"only {percent} % faster" if percent > 0 else f"{-percent} % slower" if percent else "no faster"
        case = "if only its messages took time" if seconds > floor.seconds else "if nothing waited"
        return f"even {case}, {gain}"

    # -- figures

    def _filled(self, candidate: Candidate, log: Log, traced: Log | None = None) -> Candidate:
        """Set the figures of `candidate`, and return it. Stores its floor and speed, which may rule out later choices. `log`:
        log of its step without offloaded states. `traced`: log with offload, for the memory; None: derive it from `log`."""
        space, cluster, choice = self._space, self._cluster, candidate.choice
        is_own = any(log is own for own in self.traces.traced.values())  # not extrapolated
        candidate.is_traced = is_own and (traced is not None or not choice.offload.is_any)
        candidate.memory = memory_of(traced or self._offloaded(choice, log), self._most)
        step = self._step(log, choice, "middle")
        candidate.steps = {"middle": step}
        candidate.host_bytes = host_bytes(log, choice, space.compute_bytes, cluster)
        candidate.disk_bytes = disk_bytes(log, choice, cluster)
        on_host = candidate.host_bytes * HOST_MARGIN <= cluster.host_bytes
        candidate.fits = candidate.memory.fits(cluster) and on_host
        if choice == as_full_shard(choice):
            peak = candidate.memory.peak.num_bytes
            self._floors[choice] = floor_of(self.traces.of(choice), peak, step, choice, cluster)
        if candidate.fits:
            rate = candidate.tokens_per_s(space.tokens)
            self._rates[choice.gpus] = max(rate, self._rates.get(choice.gpus, 0.0))
        return candidate

    def _offloaded(self, choice: Choice, log: Log) -> Log:
        """Return the log of the step of `choice` with its offload, derived from `log`, which has no offloaded states."""
        return offloaded(log, choice.offload, self._space.compute_bytes)

    def _step(self, log: Log, choice: Choice, rate: str) -> Step:
        moved, run = self._offloaded(choice, log), self._space.setup(choice)
        step = step_of_choice(moved, run, choice, self._cluster, rate)
        work, num_units = host_work(log, choice, self._space.compute_bytes), len(state_by_unit(log))
        return with_host_work(step, work, choice, num_units, costs_for(run, self._cluster, rate))

    def at_all_rates(self, candidate: Candidate) -> None:
        """Set `candidate.steps` to the times at low, middle and high rates; do nothing if the candidate was ruled out."""
        if candidate.steps is None:
            return
        log, choice = self.traces.of(candidate.choice), candidate.choice
        candidate.steps = {rate: self._step(log, choice, rate) for rate in REACHED}

    def verified(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return the candidate that `fastest` chooses, with figures from its own trace; None if none fits. While the figures of
        the chosen candidate are from other traces, trace it, update its figures in place, and choose again."""
        seen: list[Candidate] = []
        while (best := self.fastest(candidates)) is not None and all(c is not best for c in seen):
            if not best.is_traced:
                traced = self.traces.trace(best.choice) if best.choice.offload.is_any else None
                self._filled(best, self.traces.trace(traced_as(best.choice)), traced)
            seen.append(best)
        return best

    def fastest(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return the candidate that needs least memory, of those that fit and are slower than the fastest that fits by a share
        of `AS_FAST` at most; None if none fits."""
        fitting = [c for c in candidates if c.fits]
        if not fitting:
            return None
        rates = {id(c): c.tokens_per_s(self._space.tokens) for c in fitting}
        top = max(rates.values())
        close = [c for c in fitting if rates[id(c)] >= top * (1 - AS_FAST)]
        return min(close, key=lambda c: (c.needed_bytes, -rates[id(c)]))
