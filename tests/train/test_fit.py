"""`accordion.fit` in a program that continues afterwards: everything the run uses is released, however it ends."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import accordion as acc

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Task:
    """Calls `at` in the loss of training or of validation whose number is `number`."""

    def __init__(self, number: int = 0, at: Any = None, *, trains: bool = True) -> None:
        self._left, self._at, self._trains = number, at, trains

    def model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def dataset(self, split: str) -> Any:
        return TensorDataset(torch.arange(64.0).reshape(16, 4) / 64)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if model.training is self._trains and dist.is_initialized():
            self._left -= 1
            if self._left == 0:
                self._at()
        return model(batch[0]).square().mean()


def fit(folder: Path, task: Task, **options: Any) -> Any:
    small = {"launch.device": "cpu", "train.micro_batch": 2, "log.tensorboard": False}
    return acc.fit(task, options={**small, "train.steps": 4, "run.dir": str(folder), **options})


def fails() -> None:
    raise ValueError("the task's own")


def test_a_program_resumes_a_run_that_raised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While the error is kept, which refers to objects of the run, and with a background save of the previous step."""
    with pytest.raises(ValueError, match="the task's own") as failed:
        fit(tmp_path, Task(3, fails), **{"checkpoint.every": 2})
    assert not dist.is_initialized()
    assert not (tmp_path / ".owner").exists()
    found = fit(tmp_path, Task())
    assert (found.state, found.step) == ("finished", 4)
    assert "2 of 4 steps are done" in capsys.readouterr().out
    del failed


def test_a_signal_after_the_run_is_sent_to_the_program(tmp_path: Path) -> None:
    """In the last validation no decision follows. In a step the signal ends the run by its exit code, and is not sent again."""
    taken: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: taken.append(number))
    try:
        send = partial(signal.raise_signal, signal.SIGTERM)
        found = fit(tmp_path / "late", Task(1, send, trains=False))
        assert (found.state, taken) == ("finished", [signal.SIGTERM])
        with pytest.raises(SystemExit) as ended:
            fit(tmp_path / "early", Task(2, send))
        assert (ended.value.code, taken) == (75, [signal.SIGTERM])
        send()
        assert len(taken) == 2
    finally:
        signal.signal(signal.SIGTERM, before)
