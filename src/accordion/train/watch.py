"""`accordion watch`: show runs as they go, from the files in their folders."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from accordion import options as flags
from accordion.checkpoint.prune import BEST
from accordion.describe import human
from accordion.errors import UsageError
from accordion.observe.findings import findings
from accordion.observe.trace import NOTHING, SHOWN, Trace
from accordion.train.failures import FILES
from accordion.train.metrics import METRICS, steps_in
from accordion.train.run_files import config_of_run
from accordion.train.screen import lasting

ABOUT = "Show runs as they go: accordion watch RUN_DIR ... (more than one: side by side). Ctrl-C ends the watch, not the run."
EVERY_S = 1.0
READ_BYTES = 2**20  # of the end of metrics.jsonl, about 5,000 steps
RECENT = 100  # steps in the histogram and the time left
BINS, WIDEST_BAR = 6, 60  # rows of the histogram; columns of its longest bar with labels
NARROWEST = 38  # columns of a run
QUIET_S, QUIET_STEPS = 60.0, 10  # a run without a step for longer than both makes no progress
CHARTS = {"loss": ("loss", ".4f"), "tokens/s": ("tokens_per_s", ",.0f"), "samples/s": ("samples_per_s", ",.0f")}
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Options of `accordion watch`."""

    once: bool = False
    """print one picture and end; so does a watch whose output is no terminal"""


def run(words: list[str]) -> int:
    """Run `accordion watch` with the arguments `words`, and return exit code 0. On a terminal, redraws until Ctrl-C unless
    `--once` is given; otherwise prints one picture. Raises `UsageError` if no folder is given, or one is not of a run."""
    options = flags.read(WatchOptions, [word for word in words if word.startswith("-")], "accordion watch", ABOUT)
    if options is None:
        return 0
    folders = [Path(word) for word in words if not word.startswith("-")]
    if not folders:
        raise UsageError("accordion watch takes folders of runs, as in `accordion watch runs/mine`.")
    console = Console(highlight=False)
    if options.once or not console.is_terminal:
        console.print(picture(folders, console.width))
        return 0
    with (
        suppress(KeyboardInterrupt),
        Live(picture(folders, console.width), console=console, auto_refresh=False) as live,
    ):
        while True:
            time.sleep(EVERY_S)
            with suppress(UsageError):  # a run that starts again is writing its configuration
                live.update(picture(folders, console.width), refresh=True)
    return 0


def picture(folders: Sequence[Path], width: int) -> Table:
    """Return a table of a panel for each run, as many in a row as fit `width` columns. Raises `UsageError` if one is no run."""
    num = max(1, min(len(folders), width // NARROWEST))
    grid = Table.grid(*(Column(ratio=1) for _ in range(num)), expand=True)
    panels = [_panel(folder, width // num - 4) for folder in folders]
    for first in range(0, len(panels), num):
        grid.add_row(*panels[first : first + num])
    return grid


def _panel(folder: Path, width: int) -> Panel:
    text = config_of_run(folder).get("train.steps", "")
    total = int(text) if text.isdecimal() else 0
    steps, changed_s = _steps_of(folder / METRICS)
    last, times_s = steps[-1]["step"] if steps else 0, _values(steps, "step_s")[-RECENT:]
    labels = Column(style="dim", no_wrap=True, justify="right")
    rows = Table.grid(labels, Column(overflow="fold"), padding=(0, 1))
    for name, (key, form) in CHARTS.items():
        if values := _values(steps, key):
            rows.add_row(name, f"{values[-1]:<9{form}}{_chart(values, width - 21)}")
    if values := _values(steps, "peak_bytes"):
        rows.add_row("memory", f"{human(values[-1])} a rank (peak)")
    rows.add_row("checkpoints", _checkpoints(folder))
    if times_s and last < total:
        rows.add_row("time left", lasting(median(times_s) * (total - last)))
    for name, bar in _histogram(times_s, min(width, WIDEST_BAR) - 18):
        rows.add_row(name, bar)
    head = Text.assemble((f"step {last:,} of {total:,}  ", "bold"), _state(folder, last, total, changed_s, times_s))
    advice = [Text(f"- {line}") for line in _advice(folder)]
    return Panel(Group(head, rows, *advice), title=Text(str(folder)), title_align="left")


def _steps_of(path: Path) -> tuple[list[dict[str, Any]], float]:
    """Return (metrics of the last steps in `path`, time of its last change by `time.time`); ([], 0.0) if it cannot be read."""
    # Nothing is kept between two calls, since a run that resumes cuts or replaces the file.
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            file.seek(max(0, status.st_size - READ_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return [], 0.0
    return [step for _, step in steps_in(text)], status.st_mtime


def _values(steps: Sequence[dict[str, Any]], key: str) -> list[float]:
    values = [step.get(key) for step in steps]
    return [value for value in values if isinstance(value, int | float) and math.isfinite(value)]


def _state(folder: Path, last: int, total: int, changed_s: float, times_s: Sequence[float]) -> tuple[str, str]:
    age_s = time.time() - changed_s
    if any(folder.glob(FILES)):
        return f"failed: accordion doctor {folder}", "red"
    if not last:
        return "no step yet", "yellow"
    if last >= total:
        return "finished", "green"
    if age_s > max(QUIET_S, QUIET_STEPS * max(times_s, default=0.0)):
        return f"no step for {lasting(age_s)}", "yellow"
    return "runs", "green"


def _checkpoints(folder: Path) -> str:
    place = config_of_run(folder).get("checkpoint.dir", "null")
    try:
        names = os.listdir(folder / "checkpoints" if place == "null" else place)
    except OSError:
        return "none"
    steps = sorted(filter(re.compile(r"step-\d+").fullmatch, names), key=lambda name: int(name.rpartition("-")[2]))
    return f"{len(steps)}{f', newest {steps[-1]}' if steps else ''}{f', {BEST}' if BEST in names else ''}"


def _advice(folder: Path) -> Sequence[str]:
    """Return lines with the findings of the newest trace in the run folder `folder`; none if there is no trace."""
    with suppress(OSError):  # removed meanwhile
        traces = [(path.stat().st_mtime, path) for path in folder.glob("trace-*.json")]
        return _advice_of(*max(traces)[::-1]) if traces else ()
    return ()


@lru_cache
def _advice_of(path: Path, changed_s: float) -> Sequence[str]:
    try:
        texts = [finding.text for finding in findings(Trace.open(path).recorded())]
    except UsageError as error:
        return [str(error)]
    return [f"{path.name}: {text}" for text in texts[:SHOWN] or [NOTHING]]


def _chart(values: Sequence[float], width: int) -> str:
    """Return a line of at most `width` bars, each the mean of a part of `values`; the lowest mean has the lowest bar."""
    num = min(width, len(values))
    means = [fmean(values[a:b]) for a, b in pairwise(len(values) * i // num for i in range(num + 1))]
    low, high = min(means), max(means)
    return "".join(BARS[round((mean - low) / (high - low or 1.0) * (len(BARS) - 1))] for mean in means)


def _histogram(times_s: Sequence[float], width: int) -> list[tuple[str, str]]:
    """Return (label, bar) of `BINS` bins up to the 95th percentile; the last has longer times too. [] for too few times."""
    if len(times_s) < BINS:
        return []
    low, *_, high = sorted(times_s)[: math.ceil(0.95 * len(times_s))]
    bin_s = (high - low) / BINS or 1.0
    counts = [0] * BINS
    for value in times_s:
        counts[min(BINS - 1, int((value - low) / bin_s))] += 1
    bars = [BARS[-1] * math.ceil(width * count / max(counts)) + (f" {count}" if count else "") for count in counts]
    return [(f"{'+' * (i == BINS - 1)}{low + i * bin_s:.3g} s", bar) for i, bar in enumerate(bars)]
