"""Which configuration to take: all that are asked for are predicted, and each that is not chosen says why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from accordion.config import NO_SHARD, Precision, strategy_named
from accordion.errors import UsageError
from accordion.plan.events import Log
from accordion.plan.hardware import GIB, Cluster
from accordion.plan.predict import Memory, log_of, memory_of, steps_of
from accordion.plan.rig import Run, Subject
from accordion.plan.scale import Family, UnlikeError
from accordion.plan.simulate import Step

STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "shard_optim", "no_shard")
CHECKPOINTING = ("none", "selective", "every:2", "full")
MICRO_BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One configuration."""

    strategy: str
    checkpoint_activations: str
    micro_batch: int
    gpus: int

    def __str__(self) -> str:
        return f"{self.strategy}, checkpointing {self.checkpoint_activations}, micro-batch {self.micro_batch}, {self.gpus} GPUs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What is looked through: every combination. `tokens`: of one sample; `sharding`: more keyword arguments of `shard`."""

    strategies: Sequence[str] = STRATEGIES
    checkpointing: Sequence[str] = CHECKPOINTING
    micro_batches: Sequence[int] = MICRO_BATCHES
    gpus: Sequence[int] = (8,)
    accumulate: int = 1
    optimizer: str = "adamw"
    engine: str = "accordion"
    precision: Precision = field(default_factory=Precision)
    tokens: int = 1
    device: Literal["cuda", "cpu"] = "cuda"
    sharding: Mapping[str, Any] = field(default_factory=dict)

    def run_of(self, choice: Choice, cluster: Cluster) -> Run:
        """What is traced for a choice."""
        sharding = {
            **self.sharding,
            "precision": self.precision,
            "strategy": strategy_named(choice.strategy),
            "checkpoint_activations": choice.checkpoint_activations,
        }
        return Run(
            engine=self.engine,
            ranks=choice.gpus,
            node=cluster.node,
            accumulate=self.accumulate,
            optimizer=self.optimizer,
            sharding=sharding,
            device=self.device,
        )


@dataclass(slots=True, kw_only=True)
class Candidate:
    """A choice with what it takes. `memory`, `steps`: None where its states alone do not fit. `why`: it was not chosen."""

    choice: Choice
    fits: bool
    least_bytes: int
    memory: Memory | None = None
    steps: dict[str, Step] | None = None
    why: str = ""

    @property
    def needed_bytes(self) -> int:
        return self.memory.needed_bytes if self.memory is not None else self.least_bytes

    def tokens_per_s(self, tokens: int, accumulate: int, rate: str = "middle") -> float:
        """Of one GPU."""
        assert self.steps is not None
        return self.choice.micro_batch * tokens * accumulate / self.steps[rate].seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """`best`: the fastest that fits on all GPUs asked for, or None. `fewest`: the fastest on the least GPUs on which any fits.

    `logs`: what was traced, and not worked out from other traces.
    """

    best: Candidate | None
    fewest: Candidate | None
    candidates: Sequence[Candidate]
    logs: Mapping[Choice, Log]


def search(
    subject_for: Callable[[int], Subject],
    space: Space,
    cluster: Cluster,
    num_params: int,
    say: Callable[[str], None] = lambda text: None,
) -> Found:
    """Predict every choice of `space`. `subject_for`: training with that micro-batch. Raises `UsageError` where it is empty."""
    choices = list(_choices(space, cluster))
    if not choices:
        raise UsageError(
            f"no configuration is left to try: strategies {', '.join(space.strategies)} on {', '.join(map(str, space.gpus))} "
            "GPUs; hybrid strategies need more than one node, or take another --strategy."
        )
    logs = _Logs(subject_for, space, cluster, say)
    candidates = [_candidate(choice, space, cluster, num_params, logs) for choice in choices]
    best = _verified([c for c in candidates if c.choice.gpus == max(space.gpus)], space, cluster, logs)
    least = min((c.choice.gpus for c in candidates if c.fits), default=0)
    fewest = _fastest([c for c in candidates if c.choice.gpus == least], space)
    for candidate in candidates:
        candidate.why = "" if candidate is best else _why(candidate, best, space, cluster)
    return Found(best=best, fewest=fewest, candidates=candidates, logs=logs.traced)


def _choices(space: Space, cluster: Cluster) -> Iterator[Choice]:
    for gpus in space.gpus:
        for name in space.strategies:
            hybrid = strategy_named(name).hybrid
            if (hybrid and (gpus <= cluster.node or gpus % cluster.node)) or (
                gpus == 1 and name not in (NO_SHARD.name, space.strategies[0])
            ):
                continue
            for checkpointing in space.checkpointing:
                for micro_batch in space.micro_batches:
                    yield Choice(
                        strategy=name, checkpoint_activations=checkpointing, micro_batch=micro_batch, gpus=gpus
                    )


def least_bytes(choice: Choice, num_params: int, precision: Precision, cluster: Cluster) -> int:
    """What no trace can fall below: parameters and two states in the master's dtype, and full copies that stay."""
    strategy = strategy_named(choice.strategy)
    compute = precision.params.itemsize if precision.params is not None else 4
    over = min(choice.gpus, cluster.node) if strategy.hybrid and not strategy.optim_over_replicas else choice.gpus
    if strategy.optim.value == "replicate":
        over = 1
    stays = strategy.params.value == "replicate" or strategy.keep_until_backward
    return int(num_params * (12 / over + (compute if stays and choice.gpus > 1 else 0)))


def _candidate(choice: Choice, space: Space, cluster: Cluster, num_params: int, logs: _Logs) -> Candidate:
    least = least_bytes(choice, num_params, space.precision, cluster)
    if least > cluster.card_bytes:
        return Candidate(choice=choice, fits=False, least_bytes=least)
    log = logs.of(choice)
    memory = memory_of(log, cluster.card_bytes)
    steps = steps_of(log, space.run_of(choice, cluster), cluster)
    return Candidate(choice=choice, fits=memory.fits(cluster), least_bytes=least, memory=memory, steps=steps)


class _Logs:
    """Owns the traces: two micro-batches and two numbers of ranks give all others, where the step is the same but for sizes."""

    def __init__(
        self, subject_for: Callable[[int], Subject], space: Space, cluster: Cluster, say: Callable[[str], None]
    ) -> None:
        self._subject_for, self._space, self._cluster, self._say = subject_for, space, cluster, say
        self.traced: dict[Choice, Log] = {}
        self._families: dict[Choice, Family | None] = {}

    def of(self, choice: Choice) -> Log:
        if choice in self.traced:
            return self.traced[choice]
        family = self._family(choice)
        return self.trace(choice) if family is None else family.at(choice.micro_batch, choice.gpus)

    def trace(self, choice: Choice) -> Log:
        if choice not in self.traced:
            self._say(f"tracing {choice}")
            subject = self._subject_for(choice.micro_batch)
            self.traced[choice], _ = log_of(subject, self._space.run_of(choice, self._cluster))
        return self.traced[choice]

    def _family(self, choice: Choice) -> Family | None:
        """The log of all micro-batches, and of all numbers of ranks on one side of the node's size."""
        inside = choice.gpus <= self._cluster.node
        gpus = [n for n in self._space.gpus if n > 1 and (n <= self._cluster.node) == inside]
        if choice.gpus == 1:
            gpus = [1]
        key = replace(choice, micro_batch=0, gpus=max(gpus))
        if key not in self._families:
            self._families[key] = self._make_family(choice, gpus)
        return self._families[key]

    def _make_family(self, choice: Choice, gpus: list[int]) -> Family | None:
        batches = sorted(self._space.micro_batches)
        base = replace(choice, micro_batch=batches[0], gpus=max(gpus))
        more = replace(base, micro_batch=batches[1]) if len(batches) > 1 else None
        fewer = replace(base, gpus=min(gpus)) if len(gpus) > 1 else None
        if len(batches) <= 2 and len(gpus) <= 1:
            return None
        try:
            return Family(
                base=(base.micro_batch, base.gpus, self.trace(base)),
                more=None if more is None else (more.micro_batch, self.trace(more)),
                fewer=None if fewer is None else (fewer.gpus, self.trace(fewer)),
            )
        except UnlikeError:
            return None


def _verified(candidates: Sequence[Candidate], space: Space, cluster: Cluster, logs: _Logs) -> Candidate | None:
    """The fastest that fits by a trace of its own."""
    while (best := _fastest(candidates, space)) is not None and best.choice not in logs.traced:
        log = logs.trace(best.choice)
        best.memory, best.steps = memory_of(log), steps_of(log, space.run_of(best.choice, cluster), cluster)
        best.fits = best.memory.fits(cluster)
    return best


def _fastest(candidates: Sequence[Candidate], space: Space) -> Candidate | None:
    fitting = [c for c in candidates if c.fits]
    if not fitting:
        return None
    rates = {id(c): c.tokens_per_s(space.tokens, space.accumulate) for c in fitting}
    top = max(rates.values())
    close = [c for c in fitting if rates[id(c)] >= top * (1 - 0.02)]
    return min(close, key=lambda c: (c.needed_bytes, -rates[id(c)]))  # of what is as fast, what leaves most room


def _why(candidate: Candidate, best: Candidate | None, space: Space, cluster: Cluster) -> str:
    card = cluster.card_bytes / GIB
    if candidate.memory is None:
        return f"parameters and optimizer state alone take {candidate.least_bytes / GIB:,.0f} of {card:.0f} GiB"
    if not candidate.fits:
        least = " at least" if "at_least" in candidate.memory.reserved_bytes else ""
        return f"needs{least} {candidate.needed_bytes / GIB:,.1f} of {card:.1f} GiB"
    if best is None or best.steps is None:
        return ""
    if candidate.choice.gpus < best.choice.gpus:
        return "fits, on fewer GPUs than asked for"
    ratio = best.tokens_per_s(space.tokens, space.accumulate) / candidate.tokens_per_s(space.tokens, space.accumulate)
    if ratio < 1 + cluster.tellable:
        return f"too close to tell apart ({(ratio - 1) * 100:+.0f} %)"
    return f"{(1 - 1 / ratio) * 100:.0f} % slower"


def smallest_change(
    subject_for: Callable[[int], Subject], space: Space, cluster: Cluster, num_params: int, say: Callable[[str], None]
) -> str:
    """Where nothing fits: the first of ever larger changes that makes it fit."""
    tries: list[tuple[str, Space]] = []
    if min(space.micro_batches) > 1:
        tries.append(("--micro-batch 1", replace(space, micro_batches=[1])))
    if "full" not in space.checkpointing:
        tries.append(("--checkpoint-activations full", replace(space, micro_batches=[1], checkpointing=["full"])))
    if "full_shard" not in space.strategies:
        tries.append(
            (
                "--strategy full_shard",
                replace(space, micro_batches=[1], checkpointing=["full"], strategies=["full_shard"]),
            )
        )
    least = replace(space, micro_batches=[1], checkpointing=["full"], strategies=["full_shard"])
    gpus = max(space.gpus)
    for _ in range(7):
        gpus *= 2
        tries.append((f"--gpus {gpus}", replace(least, gpus=[gpus])))
    smallest: Candidate | None = None
    for flag, attempt in tries:
        found = search(subject_for, attempt, cluster, num_params, say)
        if found.best is not None:
            together = " with full_shard, full checkpointing and micro-batch 1" if flag.startswith("--gpus") else ""
            return f"{flag} would{together}: {found.best.needed_bytes / GIB:,.1f} of {cluster.card_bytes / GIB:.1f} GiB"
        smallest = min(found.candidates, key=lambda c: c.needed_bytes)
    assert smallest is not None
    lacks = smallest.needed_bytes / GIB
    return f"a card of {lacks:,.0f} GiB, or a shorter --seq: activations do not shrink with more of these GPUs"
