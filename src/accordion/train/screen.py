"""What a person sees: tables, a progress bar on a terminal, plain lines elsewhere, nothing on other ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from accordion.config import STRATEGIES, Place
from accordion.describe import Report, UnitReport
from accordion.output import lasting_stream
from accordion.train.metrics import StepMetrics

PLAIN_WIDTH = 110  # of tables where there is no terminal to ask
RECENT = 0.2  # what a step's time counts in the mean by which the time left is told
PLAIN_LINES = 100  # about so many lines of progress where there is no terminal


def human(num_bytes: float) -> str:
    """`num_bytes` in the largest binary unit that keeps it above one: 1536 -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def millions(count: int) -> str:
    """A number of parameters: 10059840 -> `10.06 M`."""
    return f"{count / 1e6:,.2f} M" if count < 1e9 else f"{count / 1e9:,.2f} B"


def lasting(seconds: float) -> str:
    """`45 s`, `3:05 min`, `2:07 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"


class Screen:
    """Owns the console and the progress bar of rank 0; on other ranks every call does nothing."""

    def __init__(self, *, speaks: bool = True) -> None:
        self._console = Console(file=lasting_stream(sys.stdout), quiet=not speaks, highlight=False, soft_wrap=True)
        self._live = self._console.is_terminal
        if not self._live:
            self._console.width = PLAIN_WIDTH
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._total = 0
        self._step_s = 0.0  # of the last steps, the newest counting most

    def note(self, text: str) -> None:
        """One line."""
        self._console.print(Text(text))

    def units(self, report: Report) -> None:
        """The start table: what lies on each rank, beside what unsharded data parallel would keep there."""
        self._console.print(units_table(report))

    def start(self, done: int, total: int) -> None:
        """Begin to show progress."""
        self._total = total
        if not self._live:
            return
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),  # takes what the others leave
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            expand=True,
        )
        self._task = self._progress.add_task("", total=total, completed=done, figures="")
        self._progress.start()

    def step(self, metrics: StepMetrics) -> None:
        """Show one step."""
        self._step_s = metrics.step_s if not self._step_s else self._step_s + RECENT * (metrics.step_s - self._step_s)
        figures = f"loss {metrics.loss:.3f}  lr {metrics.lr:.1e}  {metrics.speed}  {human(metrics.peak_bytes)}/rank"
        if self._progress is not None:
            self._progress.update(self._task, completed=metrics.step, figures=figures)
        elif metrics.step == self._total or metrics.step % max(1, self._total // PLAIN_LINES) == 0:
            left = (
                f"  {lasting(self._step_s * (self._total - metrics.step))} left" if metrics.step < self._total else ""
            )
            self.note(
                f"step {metrics.step}/{self._total}  {figures}  grad norm {metrics.grad_norm:.2f}  {metrics.step_s:.2f} s{left}"
            )

    def stop(self) -> None:
        """End the progress bar; may be called twice."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def examples(self, shown: Sequence[Sequence[tuple[str, bool]]]) -> None:
        """Examples in parts, each a text and whether it is learnt: what is not is dimmed, or outside of ⟦ ⟧ off a terminal."""
        legend = "dimmed: not learnt" if self._live else "learnt: ⟦ ⟧"
        for number, parts in enumerate(shown, 1):
            self._console.print(Text.assemble((f"example {number}", "bold"), f" ({legend})"))
            made = Text()
            for text, learnt in parts:
                if self._live:
                    made.append(text, "" if learnt else "dim")
                else:
                    made.append(f"⟦{text}⟧" if learnt else text)
            self._console.print(made)

    def sample(self, prompt: str, continuation: str) -> None:
        """Generated text, told apart from what it goes on from."""
        self._console.print(Text("sample:", style="bold"))
        self._console.print(Text.assemble((prompt, "dim"), ("▸" if self._live else "", "green"), continuation))

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def units_table(report: Report) -> Table:
    """A row for each run of equal units, their sum, and data parallelism without sharding."""
    strategy = STRATEGIES.get(report.strategy)
    resident = strategy is not None and strategy.params is Place.REPLICATE
    # Bytes on a rank: parameters, gradients, optimizer, copies kept all the time, and those of the gathered unit.
    rows = list[tuple[UnitReport, tuple[int, ...]]]()
    for unit in report.units:
        always = unit.inner_shard_bytes + unit.secondary_bytes + (unit.full_bytes if resident else 0)
        kept = (unit.parameter_bytes, unit.gradient_bytes, unit.optimizer_bytes, always)
        rows.append((unit, (*kept, 0 if resident else unit.full_bytes)))
    with_copies = any(row[3] for _, row in rows)
    title = f"{report.strategy} over {report.world} ranks: bytes on each rank"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("unit")
    for name in ("size", "weights", "gradients", "optimizer", *["copies"] * with_copies, "in all", "gathered"):
        table.add_column(name, justify="right", no_wrap=True)

    def add(name: str, num_params: int, several: Sequence[tuple[int, ...]], style: str | None = None) -> None:
        """Add a row. What is kept adds up; of what is gathered, the largest counts."""
        *kept, _ = map(sum, zip(*several, strict=True))
        gathered = max(row[-1] for row in several)
        cells = [*(human(n) for n in [*kept[: 3 + with_copies], sum(kept)]), human(gathered) if gathered else ""]
        table.add_row(name, millions(num_params), *cells, style=style)

    for _, run in groupby(rows, key=lambda pair: (pair[0].kind, pair[1])):
        alike = list(run)
        first, last = alike[0][0].name, alike[-1][0].name.rpartition(".")[2]
        name = first if len(alike) == 1 else f"{first}-{last}"
        add(name, sum(unit.num_params for unit, _ in alike), [row for _, row in alike])
    table.add_section()
    add("all units", report.total_params, [row for _, row in rows], style="bold")
    quarter = report.unsharded_bytes // 4  # parameters, gradients and two states of AdamW, alike in bytes
    add("without sharding", report.total_params, [(quarter, quarter, 2 * quarter, 0, 0)])
    return table
