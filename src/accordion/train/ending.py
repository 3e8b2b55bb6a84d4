"""Reasons for a run to end before its last step: preemption, the time limit, NaN or inf, or no better validations."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

from accordion.errors import NonFiniteError

PREEMPTED = 75  # exit code: EX_TEMPFAIL of sysexits.h, "try again"; the same command resumes from what was saved
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # with which schedulers announce the end of a job
GOES_ON, SAVES, TIME_IS_OVER, IS_PREEMPTED = range(4)  # wishes of a rank; the largest of all ranks decides
SLOW_DISK = 100e6  # bytes/s; assumed speed of a rank's writes until a save was measured


class Signals(AbstractContextManager["Signals"]):
    """Context manager that records SIGTERM and SIGUSR1 in `came` instead of ending the process, so that the current step or
    save can finish. The constructor sets the handlers; leaving the context restores the previous ones, and then raises the
    recorded signals again unless the body ended with `SystemExit`. Outside of the main thread, nothing is recorded."""

    def __init__(self) -> None:
        self.came: set[int] = set()
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, lambda came, _: self.came.add(came)) for number in SIGNALS}

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set by Python
        if isinstance(error, SystemExit):
            return
        if error is not None and self.came:  # the signal may end this process before Python reports the error
            print(f"accordion: a signal arrived, then {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        for came in sorted(self.came):
            signal.raise_signal(came)


class Ending:
    """Decides, after the same step on all ranks, if the run ends early because of a signal or the time limit (from durations
    given to `took`), and if it saves because `ask` was called. In each step the ranks reduce `wish()` to the largest of all,
    and each passes that to `decide`. `decided`: `GOES_ON`, or the wish that ends the run. `saves`: a save was asked for; set it
    to False after a save."""

    def __init__(self, signals: Signals, *, hours: float, began_s: float, state_bytes: int) -> None:
        """`hours`: time limit, counted from `began_s` (`time.time`); 0: no limit. `state_bytes`: bytes that this rank writes into
        a checkpoint, from which the time of the first save is estimated."""
        self._signals, self._limit_s, self._began_s = signals, 3600 * hours, began_s
        self._longest_s = {"step": 0.0, "validation": 0.0, "save": 0.0}
        self._first_save_s = state_bytes / SLOW_DISK
        self.decided, self.saves = GOES_ON, False
        self._asks = self._asked = False

    def took(self, what: Literal["step", "validation", "save"], seconds: float) -> None:
        self._longest_s[what] = max(self._longest_s[what], seconds)

    def wish(self) -> int:
        """Return this rank's wish: `IS_PREEMPTED` after a signal, `TIME_IS_OVER` if another step may pass the time limit,
        `SAVES` if the last call of `ask` asked for a save, else `GOES_ON`."""
        if self._signals.came:
            return IS_PREEMPTED
        goes_on = SAVES if self._asks else GOES_ON
        if not self._limit_s:
            return goes_on
        # Two steps, because an accelerator's figures are read one step later; two saves, because one may be under way.
        longest_s = self._longest_s
        needed_s = 2 * longest_s["step"] + longest_s["validation"] + 2 * (longest_s["save"] or self._first_save_s)
        return TIME_IS_OVER if time.time() + needed_s > self._began_s + self._limit_s else goes_on

    def ask(self, save: bool) -> None:
        """Make the next `wish` ask for a save if `save` is True and was False at the last call. Call this once a step."""
        self._asks, self._asked = save and not self._asked, save

    def decide(self, most: int) -> None:
        """Record `most`, the largest wish of all ranks: `SAVES` sets `saves`, another one becomes `decided` if it is larger."""
        if most == SAVES:
            self.saves = True
        else:
            self.decided = max(self.decided, most)


class Best:
    """Keeps the lowest validation loss that `observe` got, `loss` at step `step` (None before the first), and counts in
    `waited` the validations since the loss last fell by more than `min_delta`. `is_over`: `waited` has reached the patience.
    `last`: step of the last validation, set by the caller. Checkpoints store `state()`."""

    def __init__(self, patience: int, min_delta: float) -> None:
        """`patience`: validations in a row without a loss lower by more than `min_delta`, after which `is_over`; 0: never."""
        self._patience, self._min_delta = patience, min_delta
        self.loss: float | None = None
        self.step, self.waited = 0, 0
        self.last = -1
        self._mark = math.inf  # the loss to improve on, for patience

    def observe(self, step: int, loss: float) -> bool:
        """Record the validation `loss` at `step`, equal on all ranks. Return True if it is lower than all losses before."""
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


class Skips:
    """Counts skipped steps: all in `total`, and those with NaN or inf since the last finite step in `in_row`. Call `nonfinite`
    for each of these, and set `in_row` to 0 after a finite step. If the gradient scaler skips a step, add 1 to `total` only."""

    def __init__(self, most: int) -> None:
        """`most`: largest number of steps in a row that may be skipped; 0: the first nonfinite step ends the run."""
        self._most = most
        self.total, self.in_row = 0, 0

    def nonfinite(self, step: int, where: str) -> str:
        """Count a nonfinite step, and return a line to report. `where`: text that names the source of NaN or inf, for the line.
        Raises `NonFiniteError` if this is one step in a row more than may be skipped."""
        self.in_row += 1
        self.total += 1
        if not self._most:
            raise NonFiniteError(f"step {step}: {where} To skip such steps, set train.on_nonfinite skip.")
        if self.in_row > self._most:
            raise NonFiniteError(
                f"step {step} is not finite, nor are the {self._most} before it, the most that train.on_nonfinite allows: {where}"
            )
        return f"step {step} is skipped ({self.in_row} in a row, at most {self._most}): {where}"
