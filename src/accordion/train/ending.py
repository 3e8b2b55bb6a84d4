"""Why a run ends before its last step: it is preempted, its time is over, or validations no longer improve."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

PREEMPTED = 75  # exit code: EX_TEMPFAIL of sysexits.h, "try again"; the same command goes on from what was saved
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # what schedulers announce the end of a job with
GOES_ON, TIME_IS_OVER, IS_PREEMPTED = 0, 1, 2  # what a rank wishes; of all ranks the largest counts
SLOW_DISK = 100e6  # bytes/s that a rank writes, until a save was measured


class Signals(AbstractContextManager["Signals"]):
    """Owns the handlers of SIGTERM and SIGUSR1 of a rank. A signal is only noted, and so is a second one: what is under way (a
    step, a save, a validation) comes to its end. Away from the main thread, where Python takes no handlers, nothing is noted.

    A process that ends with its run keeps them to its end. In another one `with` puts back those from before; a signal that came
    is sent to them then, unless the program ends by its code.
    """

    def __init__(self) -> None:
        self.came: set[int] = set()
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}

    def _note(self, number: int, frame: object) -> None:
        self.came.add(number)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: of other than Python's
        if isinstance(error, SystemExit):
            return
        if error is not None and self.came:  # the signal may end this process before it tells
            print(f"accordion: a signal came, and then {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        for came in sorted(self.came):
            signal.raise_signal(came)


class Ending:
    """Owns what this rank knows of the time it has, and what all ranks decided.

    `wish` goes to all ranks with the figures of a step, and `decide` takes the largest of all: so they end behind the same step.
    Times are in seconds; the longest of each kind so far counts.
    """

    def __init__(self, signals: Signals, *, hours: float, began_s: float, state_bytes: int) -> None:
        """`hours`: in which the run ends, counted from `began_s` (`time.time`); 0: no limit. `state_bytes`: what a save of this
        rank writes.
        """
        self._signals, self._limit_s, self._began_s = signals, 3600 * hours, began_s
        self._longest_s = {"step": 0.0, "validation": 0.0, "save": 0.0}
        self._first_save_s = state_bytes / SLOW_DISK
        self.decided = GOES_ON

    def took(self, what: Literal["step", "validation", "save"], seconds: float) -> None:
        self._longest_s[what] = max(self._longest_s[what], seconds)

    def wish(self) -> int:
        """In a step: whether the run should end behind it."""
        if self._signals.came:
            return IS_PREEMPTED
        if not self._limit_s:
            return GOES_ON
        # Two steps, since an accelerator's figures are read one step later, and a save that may be under way besides the last.
        longest_s = self._longest_s
        needed_s = 2 * longest_s["step"] + longest_s["validation"] + 2 * (longest_s["save"] or self._first_save_s)
        return TIME_IS_OVER if time.time() + needed_s > self._began_s + self._limit_s else GOES_ON

    def decide(self, most: int) -> None:
        """`most`: the largest of all ranks' wishes."""
        self.decided = max(self.decided, most)


class Best:
    """Owns which validation was the best, and how many have come since that were not better; what checkpoints keep of it.

    `is_owed`: the validation after the last step was not made yet. `last`: step after which there was one.
    """

    def __init__(self, patience: int, min_delta: float) -> None:
        """`patience`: validations in a row that may be no better, 0: any number. `min_delta`: by how much less loss is better."""
        self._patience, self._min_delta = patience, min_delta
        self.loss: float | None = None
        self.step, self.waited = 0, 0
        self.is_owed, self.last = False, -1
        self._mark = math.inf  # the loss that patience asks the next ones to be below

    def look(self, step: int, loss: float) -> bool:
        """Whether this validation is the best so far; NaN never is. The same on all ranks, since `loss` is."""
        is_lower = loss < self._mark - self._min_delta
        self._mark, self.waited = (loss, 0) if is_lower else (self._mark, self.waited + 1)
        if not loss < (math.inf if self.loss is None else self.loss):
            return False
        self.loss, self.step = loss, step
        return True

    @property
    def is_over(self) -> bool:
        return bool(self._patience) and self.waited >= self._patience

    def state(self) -> dict[str, Any]:
        mark = self._mark if math.isfinite(self._mark) else None
        return {"loss": self.loss, "step": self.step, "waited": self.waited, "mark": mark}

    def load(self, state: Mapping[str, Any]) -> None:
        self.loss, self.step, self.waited = state["loss"], state["step"], state["waited"]
        self._mark = math.inf if state["mark"] is None else state["mark"]
