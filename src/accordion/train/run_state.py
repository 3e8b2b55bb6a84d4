"""What a run says of itself in its folder: whether it trains, and why it does not any more; read by `accordion runs`."""

from __future__ import annotations

import json
import os
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import UnionType

from accordion.errors import AccordionError
from accordion.safety.liveness.wording import is_echo
from accordion.train.tokens import write_whole

FILE = "state.json"
RUNNING, FINISHED, STOPPED, PREEMPTED, FAILED = "running", "finished", "stopped", "preempted", "failed"
LONGEST = 500  # characters of why


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
