"""Logs of many choices from few traces: sizes are linear in the micro-batch and in 1 / GPUs, equally in similar choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from accordion.plan.choice import Choice, moved_as, traced_as
from accordion.plan.events import Log
from accordion.plan.extrapolate.family import Family, UnlikeError
from accordion.plan.extrapolate.sizes import resized_like
from accordion.plan.replay.predict import log_of
from accordion.plan.search.space import Space


@dataclass(frozen=True, slots=True)
class _Lines:
    """The choices that span a family, and their logs: the base, one with a larger micro-batch, one on fewer GPUs."""

    choices: tuple[Choice, Choice | None, Choice | None]
    logs: tuple[Log, Log | None, Log | None]


class Traces:
    """Returns logs of choices, traced or derived from traces of others. `traced`: `traced_as` or `moved_as` choice -> log."""

    def __init__(self, space: Space, say: Callable[[str], None], known: Mapping[Choice, Log]) -> None:
        self._space, self._say = space, say
        self.traced = dict(known)
        self._families: dict[Choice, Family | None] = {}
        self._lines: list[_Lines] = []
        # The last derived log: a choice is asked for once for each of its offloads.
        self._last: tuple[Choice, Log] | None = None

    def of(self, choice: Choice) -> Log:
        return self._of(traced_as(choice))

    def moved(self, choice: Choice) -> Log:
        """Return the log of a step traced with the choice's offload, in which work on the host takes no time."""
        return self._of(moved_as(choice))

    def trace(self, choice: Choice, *, moved: bool = False) -> Log:
        return self._trace(moved_as(choice) if moved else traced_as(choice))

    def _of(self, choice: Choice) -> Log:
        if choice in self.traced:
            return self.traced[choice]
        if self._last is None or self._last[0] != choice:
            family = self._family(choice)
            if family is None:
                return self._trace(choice)
            self._last = choice, family.at(choice.micro_batch, choice.gpus)
        return self._last[1]

    def _trace(self, choice: Choice) -> Log:
        if choice not in self.traced:
            self._say(f"tracing {choice}")
            log, _ = log_of(self._space.subject_for(choice.micro_batch), self._space.setup(choice))
            # Work of offload is timed by `OffloadWalk`.
            unmodelled = {name: why for name, why in log.unmodelled.items() if name != "offload"}
            self.traced[choice] = replace(log, unmodelled=unmodelled)
        return self.traced[choice]

    def is_own(self, log: Log) -> bool:
        """Return True if `log` was traced, and not derived from others."""
        return any(log is other for other in self.traced.values())

    def _family(self, choice: Choice) -> Family | None:
        """Return the family from which the log of `choice` is derived; None if the choice has to be traced."""
        # It has all micro-batches, and all numbers of GPUs on one side of the node's size (for a hybrid, one number).
        gpus = self._gpus_like(choice)
        key = replace(
            choice, micro_batch=0, gpus=max(gpus), replicas=max(gpus) // choice.shards if choice.replicas > 1 else 1
        )
        if key not in self._families:
            self._families[key] = self._make_family(choice, gpus)
        return self._families[key]

    def _gpus_like(self, choice: Choice) -> list[int]:
        if choice.gpus == 1 or choice.replicas > 1:
            return [choice.gpus]
        node = self._space.cluster.node
        like = [n for n in self._space.divided_gpus if n > 1 and (n <= node) == (choice.gpus <= node)]
        return like or [choice.gpus]

    def _make_family(self, choice: Choice, gpus: list[int]) -> Family | None:
        batches = sorted(self._space.search.micro_batches)
        base = replace(choice, micro_batch=batches[0], gpus=max(gpus))
        more = replace(base, micro_batch=batches[1]) if len(batches) > 1 else None
        fewer = replace(base, gpus=min(gpus)) if len(gpus) > 1 else None
        if more is None and fewer is None:
            return None
        try:
            logs = (self._trace(base), self._other(base, more, 1), self._other(base, fewer, 2))
            family = Family(
                base=(base.micro_batch, base.gpus, logs[0]),
                more=None if more is None or logs[1] is None else (more.micro_batch, logs[1]),
                fewer=None if fewer is None or logs[2] is None else (fewer.gpus, logs[2]),
            )
        except UnlikeError:
            return None
        self._lines.append(_Lines((base, more, fewer), logs))
        return family

    def _other(self, base: Choice, wanted: Choice | None, which: int) -> Log | None:
        """Return the log of `wanted`, a variant of `base`: derived from a family with an equal change, otherwise traced."""
        if wanted is None or wanted in self.traced:
            return None if wanted is None else self.traced[wanted]
        for lines in self._similar(base, wanted, which):
            first, other = lines.logs[0], lines.logs[which]
            assert other is not None
            try:
                return resized_like(self._trace(base), first, other)
            except UnlikeError:
                continue
        return self._trace(wanted)

    def _similar(self, base: Choice, wanted: Choice, which: int) -> Iterator[_Lines]:
        """Yield families that change as from `base` to `wanted`, those with equal recomputation first. `which`: 1 for another
        micro-batch (under any strategy), 2 for another number of GPUs (under the same strategy)."""
        alike_first = sorted(self._lines, key=lambda lines: lines.choices[0].checkpointing != base.checkpointing)
        for lines in alike_first:
            first, other = lines.choices[0], lines.choices[which]
            if other is None or (first.accumulate, first.offload) != (base.accumulate, base.offload):
                continue
            if which == 1 and (first.micro_batch, other.micro_batch) == (base.micro_batch, wanted.micro_batch):
                yield lines
            if which == 2 and (first.strategy, first.micro_batch, first.gpus, other.gpus, first.units) == (
                base.strategy, base.micro_batch, base.gpus, wanted.gpus, base.units,
            ):  # fmt: skip
                yield lines
