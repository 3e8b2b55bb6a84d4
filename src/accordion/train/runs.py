"""The state of a run in its folder, written by the run itself, and `accordion runs`, which lists the runs of a folder."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import UnionType

from rich import box
from rich.console import Console
from rich.table import Table

from accordion.checkpoint.prune import BEST, fault_of
from accordion.checkpoint.storage.folders import folder_at
from accordion.errors import AccordionError, UsageError
from accordion.options import place, read
from accordion.safety.liveness.wording import is_echo
from accordion.train.checkpoints import NAME
from accordion.train.metrics import METRICS, last_line
from accordion.train.owner import holder_of
from accordion.train.screen import PLAIN_WIDTH, lasting
from accordion.train.tokens import write_whole

FILE = "state.json"
RUNNING, FINISHED, STOPPED, PREEMPTED, FAILED = "running", "finished", "stopped", "preempted", "failed"
KILLED, UNKNOWN = "killed", "unknown"  # of a run that cannot say so itself
LONGEST = 500  # characters of why
DEPTH = 3  # folders below the one that is named in which runs are looked for
ABOUT = (
    "List the runs below a folder: running, finished, stopped, preempted, failed or killed, and what they have reached."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """`since`: when this start of the run began, `until`: when it ended; both in seconds since 1970. `why`: in one line.

    `checkpoint_dir`: as seen from the run folder if it lies inside, so that a run may be moved; else its absolute path.
    """

    state: str
    why: str = ""
    steps: int
    checkpoint_dir: str
    since: float
    until: float | None = None

    def checkpoints_of(self, run_dir: Path) -> Path:
        """The folder of checkpoints of the run that lies in `run_dir` now."""
        return run_dir / ("checkpoints" if ".." in Path(self.checkpoint_dir).parts else self.checkpoint_dir)


class StateFile(AbstractContextManager["StateFile"]):
    """Owns `state.json` for one start of a run. A rank that fails writes why; the others' errors of the same end are echoes,
    which change nothing where a rank has said why already. What cannot be written is left out.
    """

    def __init__(self, run_dir: Path, steps: int, checkpoint_dir: str, *, leads: bool) -> None:
        """`leads`: this rank says that the run trains and how it ended."""
        self._path, self._leads = run_dir / FILE, leads
        at, home = Path(os.path.abspath(checkpoint_dir)), os.path.abspath(run_dir)
        self._now = RunState(
            state=RUNNING,
            steps=steps,
            checkpoint_dir=str(at.relative_to(home) if at.is_relative_to(home) else at),
            since=time.time(),
        )
        if leads:
            self._write(self._now)

    def ended(self, state: str, why: str = "") -> None:
        if self._leads:
            self._end(state, why)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        if isinstance(error, KeyboardInterrupt):
            self._end(STOPPED, "interrupted")
            return
        before = state_of(self._path.parent)
        is_later = is_echo(error) or (isinstance(error, RuntimeError) and not isinstance(error, AccordionError))
        if is_later and before is not None and before.state != RUNNING:
            return
        self._end(FAILED, " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST])

    def _end(self, state: str, why: str) -> None:
        now = {**asdict(self._now), "state": state, "why": why, "until": time.time()}
        self._write(RunState(**now))

    def _write(self, state: RunState) -> None:
        with suppress(OSError):  # the run is worth more than what it says of itself
            write_whole(self._path, json.dumps(asdict(state), indent=1) + "\n")


def state_of(run_dir: Path) -> RunState | None:
    """None where the folder has no such file, or one that is not read as such."""
    try:
        said = json.loads((run_dir / FILE).read_text(encoding="utf-8"))
        found = RunState(**said)
    except (OSError, ValueError, TypeError):
        return None
    kinds: dict[str, type | UnionType] = dict.fromkeys(("state", "why", "checkpoint_dir"), str)
    kinds |= {"steps": int, "since": int | float, "until": int | float | None}
    return found if all(isinstance(getattr(found, name), kind) for name, kind in kinds.items()) else None


# -- accordion runs


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
    state, why, until = (UNKNOWN, "", None) if said is None else (said.state, said.why, said.until)
    if state == RUNNING and holder_of(folder) is not None:
        until = time.time()
    elif state == RUNNING:
        state, why = KILLED, "it ended without a word"
        with suppress(OSError):
            until = (folder / METRICS).stat().st_mtime
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
