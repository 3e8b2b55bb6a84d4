"""The record of a run: a line of JSON and TensorBoard scalars for each step."""

from __future__ import annotations

import json
import math
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import torch
from torch.utils.tensorboard import SummaryWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One step of all ranks. `loss`: their average; `peak_bytes`: the most that one of them held, see `peak_bytes`.

    `skipped`: loss or gradients were not finite, and the optimizer did not step.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    step_s: float
    peak_bytes: int
    skipped: bool


def peak_bytes(device: torch.device) -> int:
    """The most memory this rank has held so far: allocated on the accelerator, or resident in the process on CPU."""
    if device.type != "cpu":
        return int(torch.accelerator.memory.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class MetricsLog:
    """Owns `metrics.jsonl` and the TensorBoard files of a run; closed by `with`."""

    def __init__(self, run_dir: Path, first_step: int) -> None:
        """Go on after `first_step` steps: what an earlier run wrote beyond is dropped."""
        path = run_dir / "metrics.jsonl"
        _keep_until(path, first_step)
        self._file: IO[str] = path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(run_dir), purge_step=first_step + 1 if first_step else None)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        self._board.close()

    def step(self, metrics: StepMetrics) -> None:
        """Record one step; what is not finite (a loss that diverged) is null in JSON and absent from TensorBoard."""
        values = {key: value if math.isfinite(value) else None for key, value in asdict(metrics).items()}
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()
        for key, value in values.items():
            if key != "step" and value is not None:
                self._board.add_scalar(key, value, metrics.step)

    def validation(self, step: int, loss: float) -> None:
        """Record a validation; TensorBoard only, since a line of `metrics.jsonl` is a step."""
        self._board.add_scalar("validation_loss", loss, step)


def _keep_until(path: Path, step: int) -> None:
    """Drop the lines of later steps, and a last line that was cut off."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
