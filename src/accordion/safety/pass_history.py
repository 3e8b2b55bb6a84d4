"""A record of past passes that tells whether the current pass repeats the last one of its kind. Pure, no tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from accordion.engine.order import Phase

# Number of last passes from which the next one is predicted: gradient accumulation or evaluations repeat after several.
HISTORY = 32
MANY = 1024


class PassHistory:
    """The events of the last pass of each kind (a forward, a backward), and which kind of pass followed which.

    `begin`, `matches` and `end` return True if the pass or event was expected. After an unexpected event the next ones are
    compared from the first later place in the last pass that matches.
    """

    def __init__(self) -> None:
        self._passes: dict[Hashable, list[Hashable]] = {}
        self._followed_by: dict[Hashable, Hashable] = {}  # by the last kind, and by the last `HISTORY` kinds
        self._last: deque[Hashable] = deque(maxlen=HISTORY)
        # For each pass in progress: its kind, its events, the position in the last pass of that kind.
        self._open: dict[Phase, tuple[Hashable, list[Hashable], list[int]]] = {}

    def begin(self, phase: Phase, kind: Hashable) -> bool:
        known = False
        if self._last:
            history, last = tuple(self._last), self._last[-1]
            known = self._followed_by.get(history, self._followed_by.get((last,))) == kind
            if len(self._followed_by) > MANY:  # an order that never repeats
                self._followed_by.clear()
            self._followed_by[history] = self._followed_by[last,] = kind
        self._last.append(kind)
        self._open[phase] = (kind, [], [0])
        return known

    def matches(self, phase: Phase, event: Hashable) -> bool:
        """Return True and record `event` if it is the one expected next; otherwise return False and record nothing."""
        if phase not in self._open:
            return False
        kind, events, at = self._open[phase]
        last = self._passes.get(kind, ())
        if at[0] >= len(last) or last[at[0]] != event:
            return False
        events.append(event)
        at[0] += 1
        return True

    def note(self, phase: Phase, event: Hashable) -> None:
        """Record `event`, expected or not."""
        if self.matches(phase, event) or phase not in self._open:
            return
        kind, events, at = self._open[phase]
        events.append(event)
        last = self._passes.get(kind, [])
        if event in last[at[0] :]:
            at[0] = last.index(event, at[0]) + 1

    def following(self, phase: Phase) -> Hashable:
        """Return the event that is expected next; None at the end."""
        kind, _, at = self._open[phase]
        last = self._passes.get(kind, ())
        return last[at[0]] if at[0] < len(last) else None

    def num_done(self, phase: Phase) -> int | None:
        """Return the number of events so far of the `phase` in progress; None if there is none."""
        return len(self._open[phase][1]) if phase in self._open else None

    def num_left(self, phase: Phase) -> int:
        """Return the number of events that are still expected in the `phase` in progress."""
        kind, _, at = self._open[phase]
        return len(self._passes.get(kind, ())) - at[0]

    def knows(self, kind: Hashable) -> bool:
        return kind in self._passes

    def end(self, phase: Phase) -> bool:
        if phase not in self._open:
            return False
        kind, events, at = self._open.pop(phase)
        known = at[0] == len(self._passes.get(kind, [])) and kind in self._passes
        self._passes[kind] = events
        return known
