"""A record of forwards and backwards that tells if the current one repeats the last one of its kind. Pure, no tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from accordion.engine.order import Phase

# Number of last passes from which the next one is predicted: gradient accumulation or evaluations repeat after several.
HISTORY = 32
MANY = 1024


@dataclass(slots=True)
class _OpenPass:
    """A pass in progress: its `events` so far, those of the `last` pass of this `kind`, and the index `at` into `last` of the
    event expected next."""

    kind: Hashable
    last: list[Hashable]
    events: list[Hashable] = field(default_factory=list)
    at: int = 0


class PassHistory:
    """Record of past passes that predicts the next event in a pass, such as a call of a unit, and the kind of the next pass.

    A pass is one forward or backward. Its kind is any value that tells passes apart. Call `begin`, then `note` or `matches` for
    each event, then `end`; one pass of each phase may be in progress. `begin` and `end` return True if the pass began or ended
    as predicted. After an unexpected event, prediction resumes after an equal event that comes later in the last pass of that
    kind; if there is none, the prediction does not move.
    """

    def __init__(self) -> None:
        self._passes: dict[Hashable, list[Hashable]] = {}
        self._followed_by: dict[Hashable, Hashable] = {}  # by the last kind, and by the last `HISTORY` kinds
        self._last: deque[Hashable] = deque(maxlen=HISTORY)
        self._open: dict[Phase, _OpenPass] = {}

    def begin(self, phase: Phase, kind: Hashable) -> bool:
        """Begin a pass of `kind`, replacing a pass of this `phase` that has not ended. Return True if `kind` was predicted."""
        known = False
        if self._last:
            history, last = tuple(self._last), self._last[-1]
            known = self._followed_by.get(history, self._followed_by.get((last,))) == kind
            if len(self._followed_by) > MANY:  # an order that never repeats
                self._followed_by.clear()
            self._followed_by[history] = self._followed_by[last,] = kind
        self._last.append(kind)
        self._open[phase] = _OpenPass(kind, self._passes.get(kind, []))
        return known

    def matches(self, phase: Phase, event: Hashable) -> bool:
        """If `event` is expected next in the pass of this `phase`, record it and return True. Otherwise only return False."""
        run = self._open.get(phase)
        if run is None or run.at >= len(run.last) or run.last[run.at] != event:
            return False
        run.events.append(event)
        run.at += 1
        return True

    def note(self, phase: Phase, event: Hashable) -> bool:
        """Record `event` in the pass of this `phase`, if one is in progress. Return True if it was the event expected next."""
        expected = self.matches(phase, event)
        if not expected and phase in self._open:
            run = self._open[phase]
            run.events.append(event)
            if event in run.last[run.at :]:
                run.at = run.last.index(event, run.at) + 1
        return expected

    def following(self, phase: Phase) -> Hashable:
        """Return the event that is expected next in the pass of this `phase`, which must be in progress; None if no further
        event is expected, also if the pass is the first of its kind."""
        run = self._open[phase]
        return run.last[run.at] if run.at < len(run.last) else None

    def num_done(self, phase: Phase) -> int | None:
        """Return the number of events so far in the pass of this `phase`; None if none is in progress."""
        return len(self._open[phase].events) if phase in self._open else None

    def knows(self, kind: Hashable) -> bool:
        return kind in self._passes

    def end(self, phase: Phase) -> bool:
        """End the pass of this `phase`, and store it as the last one of its kind. Return True if no event was still
        expected; False if some were, if the pass was the first of its kind, or if no pass was in progress."""
        run = self._open.pop(phase, None)
        if run is None:
            return False
        known = run.kind in self._passes and run.at == len(run.last)
        self._passes[run.kind] = run.events
        return known
