"""Output for people: tables, a progress bar on a terminal and plain lines elsewhere; nothing on ranks other than 0."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from accordion.describe import human
from accordion.output import lasting_stream
from accordion.train.metrics import StepMetrics

PLAIN_WIDTH = 110  # of tables without a terminal
RECENT = 0.2  # weight of a new step in the moving average of step times, for the time left
PLAIN_LINES = 100  # number of progress lines without a terminal


def lasting(seconds: float) -> str:
    """Return a duration as text: `45 s`, `3:05 min`, `2:07 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"


class Screen(AbstractContextManager["Screen"]):
    """Console and progress bar of rank 0; on other ranks (`speaks=False`) calls do nothing. Leaving the context ends the bar."""

    def __init__(self, *, speaks: bool = True) -> None:
        self._console = Console(file=lasting_stream(sys.stdout), quiet=not speaks, highlight=False, soft_wrap=True)
        self._live = self._console.is_terminal
        if not self._live:
            self._console.width = PLAIN_WIDTH
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._total = 0
        self._step_s = 0.0  # moving average

    def note(self, text: str) -> None:
        self._console.print(Text(text))

    def start(self, done: int, total: int) -> None:
        """Record, before the first `step`, the run's `total` steps. On a terminal, show the progress bar at `done` of them."""
        self._total = total
        if not self._live:
            return
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),  # takes the remaining width
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            expand=True,
        )
        self._task = self._progress.add_task("", total=total, completed=done, figures="")
        self._progress.start()

    def step(self, metrics: StepMetrics) -> None:
        """Show a step in the progress bar. Without a terminal, print a line instead, for about `PLAIN_LINES` steps of the run."""
        self._step_s = metrics.step_s if not self._step_s else self._step_s + RECENT * (metrics.step_s - self._step_s)
        speed = f"{metrics.samples_per_s or 0.0:,.0f} samples/s"
        if metrics.tokens_per_s is not None:
            speed = f"{metrics.tokens_per_s:,.0f} tok/s"
        figures = f"loss {metrics.loss:.3f}  lr {metrics.lr:.1e}  {speed}  {human(metrics.peak_bytes)}/rank"
        if self._progress is not None:
            self._progress.update(self._task, completed=metrics.step, figures=figures)
        elif metrics.step == self._total or metrics.step % max(1, self._total // PLAIN_LINES) == 0:
            num_left = self._total - metrics.step
            left = f"  {lasting(self._step_s * num_left)} left" if num_left > 0 else ""
            self.note(
                f"step {metrics.step}/{self._total}  {figures}  grad norm {metrics.grad_norm:.2f}  {metrics.step_s:.2f} s{left}"
            )

    def stop(self) -> None:
        """End the progress bar, if there is one."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def examples(self, shown: Sequence[Sequence[tuple[str, bool]]]) -> None:
        """Show examples, each a list of (text, True if it counts in the loss: bright; without a terminal, between ⟦ ⟧)."""
        legend = "dimmed: not learnt" if self._live else "learnt: ⟦ ⟧"
        for number, parts in enumerate(shown, 1):
            self._console.print(Text.assemble((f"example {number}", "bold"), f" ({legend})"))
            line = Text()
            for text, learnt in parts:
                if self._live:
                    line.append(text, "" if learnt else "dim")
                else:
                    line.append(f"⟦{text}⟧" if learnt else text)
            self._console.print(line)

    def sample(self, prompt: str, continuation: str) -> None:
        """Show generated text, `continuation`, after its `prompt`, which is dimmed on a terminal."""
        self._console.print(Text("sample:", style="bold"))
        self._console.print(Text.assemble((prompt, "dim"), ("▸" if self._live else "", "green"), continuation))

    def __exit__(self, *exception: object) -> None:
        self.stop()
