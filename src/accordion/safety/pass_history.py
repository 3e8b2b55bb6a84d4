"""What came in the passes before: whether the pass under way goes as the last one of its kind. Pure, no tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from accordion.engine.order import Phase

HISTORY = 32  # passes: what follows depends on them where gradients accumulate, or an evaluation comes now and then
MANY = 1024


class PassHistory:
    """Owns what came in the last pass of each kind (a forward, a backward), event by event, and which kind followed which.

    `begin`, `comes` and `end` say whether what comes was expected. After a surprise a pass is followed from where it fits.
    """

    def __init__(self) -> None:
        self._passes: dict[Hashable, list[Hashable]] = {}
        self._followed_by: dict[Hashable, Hashable] = {}  # by the last kind, and by the last `HISTORY` kinds
        self._last: deque[Hashable] = deque(maxlen=HISTORY)
        # of each pass under way: its kind, what came, the place in the last pass of that kind
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

    def comes(self, phase: Phase, event: Hashable) -> bool:
        """Whether `event` was expected; where it was, it is noted."""
        if phase not in self._open:
            return False
        kind, now, at = self._open[phase]
        then = self._passes.get(kind, ())
        if at[0] >= len(then) or then[at[0]] != event:
            return False
        now.append(event)
        at[0] += 1
        return True

    def note(self, phase: Phase, event: Hashable) -> None:
        """`event` comes, expected or not."""
        if self.comes(phase, event) or phase not in self._open:
            return
        kind, now, at = self._open[phase]
        now.append(event)
        then = self._passes.get(kind, [])
        if event in then[at[0] :]:
            at[0] = then.index(event, at[0]) + 1

    def following(self, phase: Phase) -> Hashable:
        """What is expected next; None at the end."""
        kind, _, at = self._open[phase]
        then = self._passes.get(kind, ())
        return then[at[0]] if at[0] < len(then) else None

    def num_done(self, phase: Phase) -> int | None:
        """Events of the pass under way; None where none is."""
        return len(self._open[phase][1]) if phase in self._open else None

    def num_left(self, phase: Phase) -> int:
        """Events that are still expected of the pass under way."""
        kind, _, at = self._open[phase]
        return len(self._passes.get(kind, ())) - at[0]

    def knows(self, kind: Hashable) -> bool:
        return kind in self._passes

    def end(self, phase: Phase) -> bool:
        if phase not in self._open:
            return False
        kind, now, at = self._open.pop(phase)
        known = at[0] == len(self._passes.get(kind, [])) and kind in self._passes
        self._passes[kind] = now
        return known
