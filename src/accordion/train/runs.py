"""`accordion runs`: the runs of a folder with their state, step, losses, checkpoints and time."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from accordion.checkpoint.prune import BEST, fault_of
from accordion.checkpoint.storage.folders import folder_at
from accordion.errors import UsageError
from accordion.options import place, read
from accordion.train.checkpoints import NAME
from accordion.train.metrics import METRICS, last_line
from accordion.train.owner import holder_of
from accordion.train.run_state import RUNNING, state_of
from accordion.train.screen import PLAIN_WIDTH, lasting

KILLED, UNKNOWN = "killed", "unknown"
DEPTH = 3  # folders below the one that is named in which runs are looked for
ABOUT = (
    "List the runs below a folder: running, finished, stopped, preempted, failed or killed, and what they have reached."
)


@dataclass(frozen=True, kw_only=True)
class RunsOptions:
    """What is listed.

    Args:
        folder: where runs are
        json: print an object for each run
    """

    folder: str = place(default="runs")
    json: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRun:
    """A run as its folder tells. `seconds`: how long its last start has run.

    `checkpoints`: names of those of steps, the oldest first; `best`: whether there is one of that name too. Complete ones alone.
    """

    folder: str
    state: str
    why: str
    step: int
    steps: int | None
    loss: float | None
    checkpoints: tuple[str, ...]
    best: bool
    since: float | None
    seconds: float | None


def run(words: Sequence[str]) -> int:
    """The subcommand. Returns the exit code."""
    options = read(RunsOptions, words, "accordion runs", ABOUT)
    if options is None:
        return 0
    folder = Path(options.folder)
    if not folder.is_dir():
        raise UsageError(
            f"{options.folder!r} is no folder; name the one that runs are in, `runs` unless run.dir said another."
        )
    found = runs_in(folder)
    if options.json:
        for one in found:
            print(json.dumps(asdict(one)))
        return 0
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    if not found:
        console.print(f"no run in {folder}", markup=False)
        return 0
    console.print(_table(found))
    for one in found:
        if one.why:
            console.print(f"{one.folder}: {one.state}: {one.why}", markup=False)
    return 0


def runs_in(folder: Path) -> list[FoundRun]:
    """Those in `folder` and below it, the one that began last at the end."""
    places = [folder] if _is_run(folder) else []
    level = [folder]
    for _ in range(DEPTH):
        level = [p for one in level if not _is_run(one) for p in _folders(one)]
        places += [p for p in level if _is_run(p)]
    return sorted((_found(p) for p in places), key=lambda one: (one.since or 0.0, one.folder))


def _is_run(folder: Path) -> bool:
    return state_of(folder) is not None or (folder / METRICS).is_file()


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError:  # one that is not ours to read has no runs of ours
        return []


def _found(folder: Path) -> FoundRun:
    said, last = state_of(folder), last_line(folder / METRICS)
    kept = folder / "checkpoints" if said is None else said.checkpoints_of(folder)
    state, why, until = UNKNOWN, "", None
    if said is not None:
        state, why, until = said.state, said.why, said.until
    if state == RUNNING:
        if holder_of(folder) is None:
            state, why = KILLED, "it ended without a word"
            until = _written_at(folder / METRICS)
        else:
            until = time.time()
    seconds = None if said is None or until is None else max(0.0, until - said.since)
    return FoundRun(
        folder=str(folder),
        state=state,
        why=why,
        step=last.get("step", 0) if isinstance(last.get("step"), int) else 0,
        steps=None if said is None else said.steps,
        loss=last.get("loss") if isinstance(last.get("loss"), float) else None,
        checkpoints=_checkpoints(kept),
        best=_is_complete(kept / BEST),
        since=None if said is None else said.since,
        seconds=seconds,
    )


def _checkpoints(folder: Path) -> tuple[str, ...]:
    """Those of steps, by number: names of more than six digits do not sort as text."""
    names = [p.name for p in _folders(folder) if NAME.fullmatch(p.name)]
    return tuple(name for name in sorted(names, key=_step_of) if _is_complete(folder / name))


def _step_of(name: str) -> int:
    return int(name.rpartition("-")[2])


def _is_complete(path: Path) -> bool:
    try:
        return path.is_dir() and fault_of(folder_at(path)) is None
    except OSError:
        return False


def _written_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _table(found: Sequence[FoundRun]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("run", overflow="fold")
    table.add_column("state", no_wrap=True)
    for name in ("step", "loss", "checkpoints", "began", "for"):
        table.add_column(name, justify="right")
    for one in found:
        kept = one.checkpoints
        newest = f"{len(kept)}, to {_step_of(kept[-1])}" if kept else "0"
        table.add_row(
            one.folder,
            one.state,
            f"{one.step}/{one.steps}" if one.steps is not None else str(one.step),
            "" if one.loss is None else f"{one.loss:.4f}",
            newest + (" + best" if one.best else ""),
            "" if one.since is None else time.strftime("%m-%d %H:%M", time.localtime(one.since)),
            "" if one.seconds is None else lasting(one.seconds),
        )
    return table
