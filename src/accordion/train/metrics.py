"""The record of a run: a line of JSON and TensorBoard scalars for each step."""

from __future__ import annotations

import io
import json
import math
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import torch
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import scalar

from accordion.train.metrics_file import METRICS, lines_in
from accordion.train.tokens import write_whole
from accordion.train.trackers import FigureSink


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


def peak_bytes(device: torch.device) -> int:
    """The most memory this rank has held so far: allocated on the accelerator, or resident in the process on CPU."""
    if device.type != "cpu":
        return int(torch.accelerator.memory.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class MetricsLog:
    """Owns `metrics.jsonl` and the TensorBoard file of a run; closed by `with`.

    Where one of them cannot be written any more (a full disk, a folder that is gone) this is told in one line, and what comes
    later is written where that works again: a run that trains and saves is worth more than its record.
    """

    def __init__(
        self,
        run_dir: Path,
        first_step: int,
        say: Callable[[str], None],
        trackers: Mapping[str, FigureSink] | None = None,
        *,
        tensorboard: bool = True,
    ) -> None:
        """Go on after `first_step` steps: what an earlier run wrote beyond is dropped. Raises `OSError` where that fails."""
        self._trackers = dict(trackers or {})
        self.validations: list[tuple[int, float]] = []
        self._run_dir, self._say, self._lost = run_dir, say, set[str]()
        lines = run_dir / METRICS
        events = (
            run_dir / f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{first_step}"
        )
        try:
            _keep_until(lines, first_step)
            self._lines = _Growing(lines, b"")
            self._events = _Growing(events, _first_events(first_step)) if tensorboard else None
        except OSError:
            self._close_trackers(failed=True)
            raise

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._lines.close()
        if self._events is not None:
            self._events.close()
        self._close_trackers(failed=error is not None)

    def step(self, metrics: StepMetrics) -> None:
        """Record one step; what is not finite (a loss that diverged) is null in JSON and absent from TensorBoard."""
        held = {key: value for key, value in asdict(metrics).items() if value is not None}
        values = {key: value if math.isfinite(value) else None for key, value in held.items()}
        shown = {key: value for key, value in values.items() if key != "step" and value is not None}
        parts = {self._lines: json.dumps(values).encode() + b"\n"}
        self._write(parts | self._shown(shown, metrics.step))

    def validation(self, step: int, loss: float, metrics: Mapping[str, float] | None = None) -> None:
        """Record a validation; not in `metrics.jsonl`, of which a line is a step."""
        self.validations.append((step, loss))
        found = {f"validation_{name}": value for name, value in {"loss": loss, **(metrics or {})}.items()}
        self._write(self._shown(found, step))

    def _shown(self, values: Mapping[str, float], step: int) -> dict[_Growing, bytes]:
        """Give `values` to the trackers; what TensorBoard's file gets of them."""
        for name in list(self._trackers):
            self._to(name, lambda tracker: tracker.log(values, step))
        return {} if self._events is None else {self._events: _scalars(values, step)}

    def _close_trackers(self, *, failed: bool) -> None:
        for name in list(self._trackers):
            self._to(name, lambda tracker: tracker.close(failed=failed))

    def _to(self, name: str, do: Callable[[FigureSink], None]) -> None:
        try:
            do(self._trackers[name])
        except Exception as error:  # whatever a service or its client says
            del self._trackers[name]
            self._say(f"no longer recorded in {name}: {' '.join(str(error).split())}; training goes on")

    def _write(self, parts: dict[_Growing, bytes]) -> None:
        failed = {file: why for file, data in parts.items() if (why := file.add(data))}
        new = {file.path.name: why for file, why in failed.items() if file.path.name not in self._lost}
        self._lost -= {file.path.name for file in parts if file not in failed}
        if new:
            self._lost |= set(new)
            names = " and ".join(new)
            self._say(
                f"not recorded: {names} in {self._run_dir} cannot be written ({'; '.join({*new.values()})}); training goes on"
            )


class _Growing:
    """Owns a file that grows by whole parts. One that was removed is made anew, with `head` at its beginning."""

    def __init__(self, path: Path, head: bytes) -> None:
        self.path, self._head = path, head
        self._file = self._opened()

    def add(self, data: bytes) -> str:
        """Append all of `data` or nothing; why not, where it is nothing."""
        try:
            if self._file.closed or os.fstat(self._file.fileno()).st_nlink == 0:
                self._file.close()
                self._file = self._opened()
            _append(self._file, data)
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def close(self) -> None:
        with suppress(OSError):  # what a file system tells late; all that could be kept is
            self._file.close()

    def _opened(self) -> IO[bytes]:
        file = self.path.open("ab", buffering=0)
        try:
            if self._head and file.tell() == 0:
                _append(file, self._head)
        except OSError:
            file.close()
            raise
        return file


def _append(file: IO[bytes], data: bytes) -> None:
    size, written = os.fstat(file.fileno()).st_size, 0
    try:
        while written < len(data):
            written += file.write(data[written:])
    except OSError:
        with suppress(OSError):
            os.ftruncate(file.fileno(), size)
        raise


def _first_events(first_step: int) -> bytes:
    """What TensorBoard's file begins with: its version, and where a run goes on, that steps from here on come anew."""
    events = [Event(wall_time=time.time(), file_version="brain.Event:2")]
    if first_step:
        start = SessionLog(status=SessionLog.START)
        events.append(Event(wall_time=time.time(), step=first_step + 1, session_log=start))
    return _records(events)


def _scalars(values: Mapping[str, float], step: int) -> bytes:
    now = time.time()
    return _records([Event(wall_time=now, step=step, summary=scalar(key, value)) for key, value in values.items()])


def _records(events: list[Event]) -> bytes:
    """In the framing of TensorBoard's files, by its own writer; its other writer is a thread that a full disk ends loudly."""
    into = io.BytesIO()
    writer = RecordWriter(into)
    for event in events:
        writer.write(event.SerializeToString())
    return into.getvalue()


def _keep_until(path: Path, step: int) -> None:
    """Drop the lines of later steps, and a last line that was cut off."""
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    kept = [line for line, said in lines_in(text) if said["step"] <= step]
    if (new := "".join(line + "\n" for line in kept)) != text:
        write_whole(path, new)
