"""Record the order in which units run, and choose the units to prefetch. Plain integers, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum


class Phase(IntEnum):
    FORWARD = 0
    BACKWARD = 1


FORWARD, BACKWARD = Phase  # for code that each unit runs: through the class it takes 0.1 us in Python 3.11
START, END = -1, -2


class UnitOrder:
    """The order in which units ran: for each unit (by index) and phase, the unit that followed it the last time. Choices depend
    on this record alone, never on time or memory, so that all ranks gather the same units in one order. In each phase call
    `begin`, `visit` before each unit, and `end`.

    `budget_bytes`: the most bytes of full parameters to prefetch; None: one unit of any size. `num_bytes`: list of the bytes
    of each unit's full parameters, empty at first; the code that adds a unit to the model appends them.
    """

    # A surprise costs one wrong guess and not the whole trace, which DeepSpeed drops at the first mismatch.

    def __init__(self, budget_bytes: int | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.num_bytes: list[int] = []
        self._next: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self._last = [START, START]

    def begin(self, phase: Phase) -> None:
        """Begin a pass of `phase`: the unit of the next `visit` is its first one."""
        self._last[phase] = START

    def visit(self, phase: Phase, unit: int) -> None:
        """Record that `unit` is about to run, unless the last visit was to `unit` too. A first backward is expected to run in
        the reverse order of the forward."""
        last = self._last[phase]
        if last == unit:
            return
        self._next[phase][last] = unit
        if phase is FORWARD and last != START:
            self._next[BACKWARD].setdefault(unit, last)
        self._last[phase] = unit

    def end(self, phase: Phase) -> None:
        """Record that `phase` ended after the unit of the last `visit`. Do nothing if no unit was visited."""
        last = self._last[phase]
        if last != START:
            self._next[phase][last] = END
        self._last[phase] = START

    def after(self, phase: Phase, unit: int) -> int | None:
        """Return the unit expected after `unit` in `phase`; None at the end of the phase, or if none was recorded."""
        following = self._next[phase].get(unit, END)
        return None if following == END else following

    def sequence(self) -> list[int]:
        """Return the indices of the units in the recorded order of forwards, up to the first unit that comes again."""
        sequence: list[int] = []
        following = self.after(FORWARD, START)
        while following is not None and following not in sequence:
            sequence.append(following)
            following = self.after(FORWARD, following)
        return sequence

    def ends_with(self, phase: Phase, unit: int) -> bool:
        """Return True if `phase` ended after `unit` the last time that `unit` ran."""
        return self._next[phase].get(unit) == END

    def ahead(self, phase: Phase, unit: int) -> Sequence[int]:
        """Return the units (indices) to prefetch while `unit` runs: the expected ones that fit into the budget together;
        without a budget, at most one. Units that are gathered already are included."""
        following, left_bytes = self.after(phase, unit), self.budget_bytes
        if left_bytes is None:
            return () if following is None or following == unit else (following,)
        chosen: list[int] = []
        while following is not None and following != unit and following not in chosen:
            left_bytes -= self.num_bytes[following]
            if left_bytes < 0:
                break
            chosen.append(following)
            following = self.after(phase, following)
        return chosen
