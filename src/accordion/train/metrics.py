"""Metrics of a run: written as a line of JSON for each step into `metrics.jsonl`, and sent to trackers."""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from accordion.files import write_whole
from accordion.train.trackers import RunTracker

METRICS = "metrics.jsonl"  # in the run folder


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Metrics of one step over all ranks. `loss`: mean over ranks. `peak_bytes`: largest peak memory of a rank. `skipped`: loss
    or gradients were not finite, so the optimizer did not step. One of `tokens_per_s` and `samples_per_s` is None."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    step_s: float = 0.0
    peak_bytes: int
    skipped: bool

    def values(self) -> dict[str, float]:
        """Return name -> value of the metrics that are not None."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Results of a validation. `words`: text that is shown after the loss. `metrics`: name -> mean, without the loss."""

    loss: float
    words: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory of this rank in bytes: allocated on the accelerator; on CPU, resident in the process."""
    if device.type != "cpu":
        return int(torch.accelerator.memory.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """Context manager that writes `metrics.jsonl` and passes metrics to trackers. If the file or a tracker cannot be written (a
    full disk, a removed folder), reports that, and writes no later step there; training continues."""

    def __init__(
        self, run_dir: Path, first_step: int, say: Callable[[str], None], trackers: Mapping[str, RunTracker]
    ) -> None:
        """Open the file, create it if it is missing, and remove its lines on steps after `first_step`. Raises `OSError` if this
        fails. `say`: shows a line. `trackers`: name -> open tracker; leaving the context closes them."""
        self._trackers, self._say = dict(trackers), say
        path = run_dir / METRICS
        self._path: Path | None = path
        before = text_of(path)
        text = "".join(f"{line}\n" for line, content in steps_in(before) if content["step"] <= first_step)
        if text != before:
            write_whole(path, text)
        path.touch()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._each(lambda tracker: tracker.close(failed=error is not None))

    def step(self, metrics: StepMetrics) -> None:
        """Record one step. Values that are not finite are null in the file, and not passed to trackers."""
        values = {k: v if math.isfinite(v) else None for k, v in metrics.values().items()}
        try:
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps(values) + "\n")
        except OSError as error:
            self._say(f"no longer recorded in {self._path}: {error.strerror or error}; training goes on")
            self._path = None
        figures = {key: value for key, value in values.items() if key != "step" and value is not None}
        self._each(lambda tracker: tracker.log(figures, metrics.step))

    def validation(self, step: int, result: Validation) -> None:
        """Pass the results of a validation to trackers, with the prefix `validation_`, but not to `metrics.jsonl`."""
        figures = {f"validation_{name}": value for name, value in {"loss": result.loss, **result.metrics}.items()}
        self._each(lambda tracker: tracker.log(figures, step))

    def _each(self, do: Callable[[RunTracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                do(tracker)
            except Exception as error:  # clients of services raise errors of any kind
                del self._trackers[name]
                self._say(f"no longer recorded in {name}: {' '.join(str(error).split())}; training goes on")


def text_of(path: Path) -> str:
    """Return the text of the file `path`, with U+FFFD in place of bytes that are no UTF-8; "" if there is no file."""
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def steps_in(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (line, its content) for each line of `text` that is a JSON object with a number "step"."""
    for line in text.splitlines():
        try:
            content = json.loads(line)
        except ValueError:
            continue
        if isinstance(content, dict) and isinstance(content.get("step"), int):
            yield line, content
