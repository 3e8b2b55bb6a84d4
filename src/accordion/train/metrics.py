"""The record of a run: a line of JSON for each step in `metrics.jsonl`, and the same figures to its trackers."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from accordion.train.tokens import write_whole
from accordion.train.trackers import RunTracker

METRICS = "metrics.jsonl"  # in the run folder
TAIL_BYTES = 4096  # of it: its last line and more


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One step of all ranks. `loss`: their average; `peak_bytes`: the most that one of them held, see `peak_bytes`.

    `skipped`: loss or gradients were not finite, and the optimizer did not step.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    step_s: float = 0.0
    peak_bytes: int
    skipped: bool

    @property
    def speed(self) -> str:
        if self.tokens_per_s is not None:
            return f"{self.tokens_per_s:,.0f} tok/s"
        return f"{self.samples_per_s or 0.0:,.0f} samples/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """The figures of held-out data. `words`: what a person reads after the loss."""

    loss: float
    words: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)


def peak_bytes(device: torch.device) -> int:
    """The most memory this rank has held so far: allocated on the accelerator, or resident in the process on CPU."""
    if device.type != "cpu":
        return int(torch.accelerator.memory.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class MetricsLog:
    """Owns `metrics.jsonl` and the trackers of a run; closed by `with`.

    If the file cannot be written any more (a full disk, a folder that is gone), one line says so, and later steps are written
    when that works again: a run that trains and saves is worth more than its record.
    """

    def __init__(
        self,
        run_dir: Path,
        first_step: int,
        say: Callable[[str], None],
        trackers: Mapping[str, RunTracker] | None = None,
    ) -> None:
        """Go on after `first_step` steps: what an earlier run wrote beyond is dropped. Raises `OSError` if that fails."""
        self._trackers = dict(trackers or {})
        self.validations: list[tuple[int, float]] = []
        self._path, self._say, self._is_lost = run_dir / METRICS, say, False
        try:
            _keep_until(self._path, first_step)
            _append(self._path, b"")
        except OSError:
            self._close_trackers(failed=True)
            raise

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._close_trackers(failed=error is not None)

    def step(self, metrics: StepMetrics) -> None:
        """Record one step; what is not finite (a loss that diverged) is null in JSON and not given to trackers."""
        held = {key: value for key, value in asdict(metrics).items() if value is not None}
        values = {key: value if math.isfinite(value) else None for key, value in held.items()}
        try:
            _append(self._path, json.dumps(values).encode() + b"\n")
            self._is_lost = False
        except OSError as error:
            if not self._is_lost:
                why = error.strerror or error
                self._say(f"not recorded: {METRICS} in {self._path.parent} cannot be written ({why}); training goes on")
            self._is_lost = True
        self._track({key: value for key, value in values.items() if key != "step" and value is not None}, metrics.step)

    def validation(self, step: int, loss: float, metrics: Mapping[str, float] | None = None) -> None:
        """Record a validation; not in `metrics.jsonl`, of which a line is a step."""
        self.validations.append((step, loss))
        self._track({f"validation_{name}": value for name, value in {"loss": loss, **(metrics or {})}.items()}, step)

    def _track(self, values: Mapping[str, float], step: int) -> None:
        for name in list(self._trackers):
            self._to(name, lambda tracker: tracker.log(values, step))

    def _close_trackers(self, *, failed: bool) -> None:
        for name in list(self._trackers):
            self._to(name, lambda tracker: tracker.close(failed=failed))

    def _to(self, name: str, do: Callable[[RunTracker], None]) -> None:
        try:
            do(self._trackers[name])
        except Exception as error:  # whatever a service or its client raises
            del self._trackers[name]
            self._say(f"no longer recorded in {name}: {' '.join(str(error).split())}; training goes on")


def _append(path: Path, data: bytes) -> None:
    """Append all of `data` or nothing."""
    with path.open("ab", buffering=0) as file:
        size, written = file.tell(), 0
        try:
            while written < len(data):
                written += file.write(data[written:])
        except OSError:
            with suppress(OSError):
                os.ftruncate(file.fileno(), size)
            raise


def _keep_until(path: Path, step: int) -> None:
    """Drop the lines of later steps, and a last line that was cut off."""
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    kept = [line for line, said in lines_in(text) if said["step"] <= step]
    if (new := "".join(line + "\n" for line in kept)) != text:
        write_whole(path, new)


def lines_in(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the text and the content of each line of a step; one that was cut off, or is none of ours, is passed over."""
    for line in text.splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if isinstance(said, dict) and isinstance(said.get("step"), int):
            yield line, said


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the content of `metrics.jsonl`, whole lines alone."""
    return [said for _, said in lines_in((run_dir / METRICS).read_text(encoding="utf-8", errors="replace"))]


def last_line(path: Path) -> dict[str, Any]:
    """Return the last whole line of a run's metrics, empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            found = [said for _, said in lines_in(file.read().decode(errors="replace"))]
    except OSError:
        return {}
    return found[-1] if found else {}
