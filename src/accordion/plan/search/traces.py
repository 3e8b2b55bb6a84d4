"""Logs of many choices from few traces: two sizes of the micro-batch are traced, and all others are extrapolated from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from accordion.plan.choice import Choice, moved_as, traced_as
from accordion.plan.events import Log
from accordion.plan.extrapolate.family import Family, UnlikeError
from accordion.plan.replay.predict import log_of
from accordion.plan.search.space import Space


class Traces:
    """Makes and stores logs of choices: traced, or extrapolated from traces of other micro-batches. Attribute `traced`: all
    traced logs, by the choice that was traced. `say`: called with a line of text before each trace."""

    def __init__(self, space: Space, say: Callable[[str], None]) -> None:
        self._space, self._say = space, say
        self.traced: dict[Choice, Log] = {}
        self._families: dict[Choice, Family | None] = {}
        # The last derived log: a choice is asked for once for each of its offloads.
        self._last: tuple[Choice, Log] | None = None

    def of(self, choice: Choice) -> Log:
        """Return the log of a step of `choice` with parameters and states on the device. Traces the step unless the log is known
        or can be extrapolated from traces of other micro-batches."""
        choice = traced_as(choice)
        if choice in self.traced:
            return self.traced[choice]
        if self._last is None or self._last[0] != choice:
            family = self._family(choice)
            if family is None:
                return self.trace(choice)
            self._last = choice, family.at(choice.micro_batch)
        return self._last[1]

    def trace(self, choice: Choice) -> Log:
        """Return the log of a step of `choice` with its offload, without the work on the host. Calls `say` and traces the step,
        unless that was done before."""
        choice = moved_as(choice)
        if choice not in self.traced:
            self._say(f"tracing {choice}")
            log, _ = log_of(self._space.subject_for(choice.micro_batch), self._space.setup(choice))
            # Work of offload is timed by `with_host_work`.
            unmodelled = {name: why for name, why in log.unmodelled.items() if name != "offload"}
            self.traced[choice] = replace(log, unmodelled=unmodelled)
        return self.traced[choice]

    def _family(self, choice: Choice) -> Family | None:
        """Return the `Family` from which the log of `choice` can be extrapolated. Traces the two smallest micro-batches of the
        search, unless that was done before. Returns None if it has only one, or if the two differ in more than sizes."""
        key, batches = replace(choice, micro_batch=0), sorted(self._space.search.micro_batches)
        if len(batches) < 2:
            return None
        if key not in self._families:
            logs = [(size, self.trace(replace(choice, micro_batch=size))) for size in batches[:2]]
            try:
                self._families[key] = Family(*logs)
            except UnlikeError:
                self._families[key] = None
        return self._families[key]
