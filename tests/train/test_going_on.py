"""Runs through `accordion.fit`: files that stay, resuming, ends, what is released afterwards; in a program's own group."""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import accordion as acc
from accordion import cli
from accordion.checkpoint import latest
from accordion.checkpoint.reading import opened, verify
from accordion.checkpoint.storage.folders import checkpoint_at
from accordion.errors import CheckpointError, UsageError
from accordion.export.command import ExportOptions, export
from accordion.observe.trace import Trace
from accordion.train import ending as ending_module
from accordion.train.checkpoints import with_batch_of
from accordion.train.config import JobConfig, TrainConfig
from accordion.train.ending import GOES_ON, IS_PREEMPTED, SIGNALS, TIME_IS_OVER, Best, Ending, Signals
from accordion.train.fitting import Fit
from tests import devices
from tests.support.own_tasks import Held
from tests.support.ranked import on_world

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
QUIET = {"launch.device": "cpu", "train.micro_batch": 2, "log.tensorboard": False}
PREEMPT = partial(signal.raise_signal, signal.SIGUSR1)
BEST = {"train_eval_every": 3, "train_keep_best": True}


class Curve:
    """A weight that counts the steps, and a table of validation losses by count, 5.0 for counts that are not in it.

    Calls `event` in the loss of number `event_at` of this start, of training or of validation.
    """

    def __init__(
        self,
        losses: Mapping[int, float] | None = None,
        *,
        event_at: int = -1,
        event: Callable[[], object] = PREEMPT,
        in_validation: bool = False,
    ) -> None:
        self.losses, self.left, self.event, self.in_validation = losses or {}, event_at, event, in_validation

    def model(self) -> nn.Module:
        return nn.Linear(1, 1, bias=False)

    def init(self, model: nn.Module) -> None:
        nn.init.zeros_(model.weight)

    def dataset(self, split: str) -> TensorDataset:
        return TensorDataset(torch.ones(8, 1))

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=1.0)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = -model(batch[0]).mean()
        if dist.is_initialized() and model.training is not self.in_validation:
            self.left -= 1
            if self.left == 0:
                self.event()
        return loss if model.training else torch.tensor(self.losses.get(-round(float(loss)), 5.0))


class Runs:
    """Runs in the folder `place / "run"`. `fit(task, train_steps=3)` trains with `train.steps` 3."""

    def __init__(self, place: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.place, self.checkpoints, self._capture = place, place / "run" / "checkpoints", capture

    def fit(self, task: object, **options: object) -> Fit:
        given = {key.replace("_", ".", 1): value for key, value in options.items()}
        return acc.fit(task, options={**QUIET, "run.dir": str(self.place / "run"), **given})

    def preempted(self, task: object, **options: object) -> None:
        with pytest.raises(SystemExit) as raised:
            self.fit(task, **options)
        assert raised.value.code == 75

    def printed(self) -> str:
        """Return what was printed since the last call."""
        return self._capture.readouterr().out


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """The signals that the program's own handlers received."""
    taken: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: taken.append(number)) for number in SIGNALS}
    yield taken
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], handled: list[int]) -> Runs:
    return Runs(tmp_path, capsys)


def test_a_few_steps_are_drawn_in_the_run_folder(runs: Runs) -> None:
    plain = runs.fit(Curve(), train_steps=8)
    shutil.rmtree(runs.place / "run")
    assert runs.fit(Curve(), train_steps=8, train_observe=3).loss == plain.loss
    trace = Trace.open(runs.place / "run" / "trace-3.json")
    assert [len(rank.steps) for rank in trace.ranks] == [3]
    assert '"steps"' in (runs.place / "run" / "trace-3.html").read_text()


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder).parent) for path in folder.rglob("manifest.json"))


def extra_of(checkpoint: Path) -> dict[str, Any]:
    return dict(opened(checkpoint_at(checkpoint)).manifest.extra)


def test_a_resumed_run_uses_its_own_options_of_the_optimizer(runs: Runs) -> None:
    task = Curve()
    task.optimizer = None  # the keys of the run choose it
    runs.fit(task, train_steps=1)
    resumed = runs.fit(task, train_steps=2, train_weight_decay=0.0)
    assert "changed since: train.steps 1 -> 2, train.weight_decay 0.1 -> 0.0\n" in runs.printed()
    groups = opened(checkpoint_at(Path(str(resumed.checkpoint)))).manifest.optimizer["groups"]
    assert [group["options"]["weight_decay"] for group in groups] == [0.0]


class ShownWeight(Curve):
    """The validation loss is the weight, which each step raises by one."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) if model.training else model(batch[0]).mean()


def test_the_average_is_validated_resumed_and_exported(runs: Runs) -> None:
    def ends(steps: int, decay: float, mean: float) -> str:
        runs.fit(ShownWeight(), train_steps=steps, train_ema=decay)
        shown = runs.printed()
        assert f"validation loss of the averaged weights {mean:.4f} after {steps} steps" in shown
        return shown

    def exported(name: str, **options: str) -> float:
        target = str(runs.place / f"{name}.safetensors")
        export(ExportOptions(source=str(runs.place / "run"), target=target, **options))
        return float(load_file(target)["weight"])

    ends(2, 0.5, 1.5)  # the first update copies the weight
    ends(3, 0.5, 2.25)
    assert "step-000003 has no average of decay 0.9: it begins with the next step" in ends(4, 0.9, 4.0)
    ends(5, 0.9, 4.1)
    assert (exported("average", ema="0.9"), exported("weights")) == pytest.approx((4.1, 5.0))
    with pytest.raises(UsageError, match=r"no average of decay 0.5; it has 0.9"):
        exported("other", ema="0.5")


def test_a_resumed_run_keeps_its_batch_or_reports_the_change(runs: Runs) -> None:
    first = runs.fit(Curve(), train_steps=1, train_accumulate=2)
    path = Path(str(first.checkpoint))
    runs.fit(Curve(), train_steps=2)
    assert "a step is 4 samples: 1 ranks x 2 x 2\n" in runs.printed().partition("resumed")[0]
    runs.fit(Curve(), train_steps=3, train_accumulate=1)
    assert "train.accumulate 2 -> 1, sequences in a step 4 -> 2\n" in runs.printed()
    sizes = {}
    for num_ranks in (1, 2, 3, 4, 8):
        options = with_batch_of(path, JobConfig(train=TrainConfig(micro_batch=3)), (), num_ranks).train
        sizes[num_ranks] = options.micro_batch, options.accumulate
    assert sizes == {1: (2, 2), 2: (2, 1), 3: (3, 1), 4: (1, 1), 8: (3, 1)}
    assert with_batch_of(path, JobConfig(), ("train.accumulate",), 1) == JobConfig()


def test_the_reported_best_is_the_one_in_the_folder(runs: Runs) -> None:
    """If best ones are kept from the second start on, lower losses before do not count."""
    best, often = runs.checkpoints / "best", {"train_eval_every": 2}
    runs.fit(Curve({2: 1.0, 4: 3.0}), train_steps=4, **often)
    assert not best.exists()
    often["train_keep_best"] = True
    for steps in (4, 6):
        runs.fit(Curve({4: 3.0, 6: 4.0}), train_steps=steps, **often)
        assert extra_of(best)["step"] == 4
        assert f"best: {best}, validation loss 3.0000 after 4 steps" in runs.printed()


def test_a_path_is_where_a_run_begins_that_has_no_checkpoint(runs: Runs) -> None:
    """Started again, the same call resumes from its own newest checkpoint."""
    folder, place = runs.checkpoints, runs.place / "other"
    runs.fit(Curve({3: 2.0, 6: 9.0}), train_steps=6, checkpoint_every=2, **BEST)
    with pytest.raises(UsageError, match=f"is not the newest checkpoint of its folder, {folder}/step-000006 is; take"):
        runs.fit(Curve(), train_steps=9, checkpoint_resume=str(folder / "best"))
    other: dict[str, object] = {"run_dir": str(place), "checkpoint_resume": str(folder / "best"), **BEST}
    runs.preempted(Curve(event_at=2), train_steps=9, **other)
    assert "best: 3 of 9 steps are done" in runs.printed()
    assert names_in(place / "checkpoints") == ["step-000005"]
    found = runs.fit(Curve({6: 3.0}), train_steps=9, **other)
    said = runs.printed()
    assert f"the run goes on from {place}/checkpoints/step-000005; to begin at {folder / 'best'} again" in said
    assert f"best: {place}/checkpoints/best, validation loss 3.0000 after 6 steps" in said
    assert found.step == 9


class LongToRead(Curve):
    """Takes half a second to read its data, before ranks start."""

    def dataset(self, split: str) -> TensorDataset:
        time.sleep(0 if dist.is_initialized() else 0.25)
        return super().dataset(split)


def test_the_time_limit_includes_the_preparation(runs: Runs) -> None:
    """The next start resumes exactly."""
    found = runs.fit(LongToRead(), train_steps=9, train_hours=0.5 / 3600)
    assert (found.state, found.step, found.why) == ("stopped", 1, "train.hours 0.000138889 have passed")
    assert "stopped after 1 of 9 steps: train.hours 0.000138889 have passed" in runs.printed()
    resumed = runs.fit(Curve(), train_steps=9)
    undisturbed = runs.fit(Curve(), train_steps=9, run_dir=str(runs.place / "undisturbed"))
    assert (resumed.state, resumed.step, resumed.loss) == ("finished", 9, undisturbed.loss)


@pytest.mark.parametrize(
    "limit", [{"train_patience": 1, "train_eval_every": 2}, {"train_hours": 1e-6}], ids=["patience", "hours"]
)
def test_a_run_that_made_its_last_step_is_finished(runs: Runs, limit: dict[str, object]) -> None:
    steps = 4 if "train_patience" in limit else 1
    found = runs.fit(Curve(), train_steps=steps, **limit)
    said = runs.printed()
    assert (found.state, found.why, found.step) == ("finished", "", steps)
    assert "stopped after" not in said
    assert "resumes from there" not in said
    runs.fit(Curve(), train_steps=steps, **limit)
    assert f"validation loss 5.0000 after {steps} steps" in runs.printed()


@pytest.mark.parametrize(("key", "value"), [("patience", 1), ("keep_best", True)])
def test_keys_of_validations_are_refused_without_validation_data(runs: Runs, key: str, value: object) -> None:
    task = Curve()
    task.dataset = lambda split: range(8) if split == "train" else None
    with pytest.raises(UsageError, match=f"train.{key} compares validations, and the task 'Curve"):
        runs.fit(task, train_steps=2, train_eval_every=1, **{f"train_{key}": value})
    assert not list(runs.place.iterdir())


def test_the_best_is_linked_if_its_step_is_saved(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays when the checkpoint of its step is removed, and it is linked on resume if the run was killed before that."""
    folder = runs.checkpoints
    monkeypatch.chdir(runs.place)
    often: dict[str, object] = {"run_dir": "run", "checkpoint_every": 3, "checkpoint_keep": 1, **BEST}
    runs.fit(Curve({3: 2.0}), train_steps=3, **often)
    (file,) = (folder / "step-000003").glob("*.safetensors")
    assert file.samefile(folder / "best" / file.name)
    assert not (folder / "step-000003" / "manifest.json").samefile(folder / "best" / "manifest.json")
    shutil.rmtree(folder / "best")  # as if it had been killed before that
    runs.fit(Curve({3: 2.0, 6: 3.0}), train_steps=6, **often)
    assert names_in(folder) == ["best", "step-000006"]
    assert extra_of(folder / "best")["step"] == 3
    assert verify(folder / "best") == []


def test_the_best_is_copied_without_hard_links(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError(errno.EPERM, "Operation not permitted")))
    runs.fit(Curve({3: 2.0}), train_steps=3, checkpoint_every=3, **BEST)
    assert names_in(runs.checkpoints) == ["best", "step-000003"]
    assert verify(runs.checkpoints / "best") == []


# -- failures, and what a program finds after them


def test_a_program_resumes_a_run_that_raised(runs: Runs) -> None:
    """While the error is kept, which refers to objects of the run, and with a background save of the previous step."""
    fails = Mock(side_effect=ValueError("the task's own"))
    with pytest.raises(ValueError, match="the task's own") as failed:
        runs.fit(Curve(event_at=3, event=fails), train_steps=4, checkpoint_every=2)
    assert not dist.is_initialized()
    assert not (runs.place / "run" / ".owner").exists()
    found = runs.fit(Curve(), train_steps=4)
    assert (found.state, found.step) == ("finished", 4)
    assert "2 of 4 steps are done" in runs.printed()
    del failed


def test_a_signal_after_the_run_is_sent_to_the_program(runs: Runs, handled: list[int]) -> None:
    """In the last validation no decision follows. In a step the signal ends the run by its exit code, and is not sent again."""
    send = partial(signal.raise_signal, signal.SIGTERM)
    found = runs.fit(Curve(event_at=1, event=send, in_validation=True), train_steps=4)
    assert (found.state, handled) == ("finished", [signal.SIGTERM])
    runs.preempted(Curve(event_at=2, event=send), train_steps=4, run_dir=str(runs.place / "early"))
    assert handled == [signal.SIGTERM]
    send()
    assert handled == [signal.SIGTERM] * 2


def test_a_checkpoint_that_cannot_be_written_ends_the_run(runs: Runs) -> None:
    folder = runs.checkpoints
    folder.mkdir(parents=True)
    (folder / "step-000002").write_text("in the way")
    with pytest.raises(CheckpointError, match="exists and is no checkpoint"):
        runs.fit(Curve(), train_steps=4, checkpoint_every=1)
    assert latest(folder) == str(folder / "step-000001")
    assert (folder / "step-000002").read_text() == "in the way"


def cut(manifest: Path) -> None:
    manifest.write_bytes(manifest.read_bytes()[:500])


def test_resume_reports_which_checkpoints_it_passes_over(runs: Runs) -> None:
    folder = runs.checkpoints
    steps = [folder / f"step-{step:06d}" for step in range(5)]
    runs.fit(Curve(), train_steps=3, checkpoint_every=1)

    def refused(error: type[Exception]) -> str:
        with pytest.raises(error) as caught:
            runs.fit(Curve(), train_steps=4)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    (file,) = steps[3].glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    message = refused(CheckpointError)
    assert f"{steps[3]} is damaged" in message
    assert "To resume from the one before it, move it away." in message

    cut(steps[3] / "manifest.json")
    (steps[2] / "manifest.json").unlink()
    runs.printed()
    found = runs.fit(Curve(), train_steps=4)
    shown = runs.printed()
    assert f"{steps[1]} is the newest complete checkpoint, newer ones are damaged: " in shown
    assert f"{steps[3]}" in shown
    assert "1 of 4 steps are done" in shown
    assert found.checkpoint == str(steps[4])

    for manifest in folder.glob("*/manifest.json"):
        cut(manifest)
    before = tree(runs.place)
    assert "there are checkpoints, and none is complete" in refused(UsageError)
    assert tree(runs.place) == before


def tree(folder: Path) -> dict[str, float]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


# -- decisions of one process


def test_a_time_limit_leaves_time_for_steps_and_saves(monkeypatch: pytest.MonkeyPatch, handled: list[int]) -> None:
    now = [1000.0]
    monkeypatch.setattr(ending_module, "time", types.SimpleNamespace(time=lambda: now[0]))
    with Signals() as signals:
        ending = Ending(signals, hours=1, began_s=1000, state_bytes=20_000_000_000)
        now[0] += 3600 - 401
        assert ending.wish() == GOES_ON
        now[0] += 2
        assert ending.wish() == TIME_IS_OVER  # the first save may take 200 s, twice
        ending.took("save", 10)
        ending.took("step", 5)
        ending.took("step", 2)
        assert ending.wish() == GOES_ON
        now[0] += 370
        assert ending.wish() == TIME_IS_OVER
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert ending.wish() == IS_PREEMPTED
        ending.decide(TIME_IS_OVER)
        ending.decide(GOES_ON)
        assert ending.decided == TIME_IS_OVER
        assert not handled
    assert handled == [signal.SIGUSR1, signal.SIGTERM]


def test_a_signal_is_sent_to_the_programs_handlers_unless_it_exits(
    handled: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    def ends_by(error: BaseException) -> None:
        with Signals():
            signal.raise_signal(signal.SIGTERM)
            raise error

    for error in (SystemExit(75), ValueError("no room")):
        with pytest.raises(type(error)):
            ends_by(error)
        assert handled == ([signal.SIGTERM] if isinstance(error, ValueError) else [])
    assert capsys.readouterr().err == "accordion: a signal arrived, then ValueError: no room\n"
    signal.raise_signal(signal.SIGUSR1)
    assert handled == [signal.SIGTERM, signal.SIGUSR1]


TASK_THAT_IS_ASKED_TO_END = """
import signal
from tests.support.own_tasks import Slow

class Task(Slow):
    def dataset(self, split):
        signal.raise_signal(signal.SIGTERM)
"""


def test_a_signal_in_the_preparation_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], handled: list[int]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("asked_to_end.py").write_text(TASK_THAT_IS_ASKED_TO_END)
    assert cli.main(["train", "--task", "asked_to_end.py", "--run.dir", "r", "--launch.device", "cpu"]) == 75
    message = "accordion: ended by a signal while no rank was running; there is nothing to save.\n"
    assert capsys.readouterr().err == message
    assert not Path("r").exists()
    signal.raise_signal(signal.SIGTERM)
    assert handled == [signal.SIGTERM]


def test_patience_needs_min_delta_and_the_best_does_not() -> None:
    best = Best(patience=2, min_delta=0.1)
    assert best.observe(1, 3.0)
    assert best.observe(2, 2.95)  # the lowest, and no clear gain
    other = Best(patience=2, min_delta=0.1)
    other.load(json.loads(json.dumps(best.state())))
    assert not other.observe(3, math.nan)
    assert other.is_over
    assert (other.loss, other.step) == (2.95, 2)


# -- in a process group of the program's own, in a thread, as Ray Train calls it

RANKS = 4


class Task(Held):
    """Stepped by a fused optimizer, so that an accelerator's figures are read one step later."""

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.02, fused=True)


def in_a_thread(run_dir: Path, steps: int, on_step: Any) -> Any:
    """Return what `acc.fit` returns, or the exception that it raises, in a thread that is not the main one."""
    results: list[Any] = []

    def train() -> None:
        try:
            options = {**QUIET, "run.dir": str(run_dir), "train.steps": steps, "train.micro_batch": 1}
            options["launch.device"] = devices.device().type
            results.append(acc.fit(Task(), options=options, on_step=on_step))
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    return results[0]


def test_the_package_travels_by_name() -> None:
    """Else Ray could not ship a function to its workers that says `acc.fit`."""
    assert pickle.loads(pickle.dumps(acc)) is acc


@on_world(RANKS)
def test_a_run_in_the_programs_group_saves_where_one_rank_asks_and_leaves_the_group(mesh: Any, tmp_path: Path) -> None:
    group, reported = dist.group.WORLD, list[dict[str, float]]()

    def on_step(metrics: dict[str, float]) -> bool:
        reported.append(metrics)
        return dist.get_rank() == 2 and metrics["step"] >= 3  # as a node that is about to be taken away

    fit = in_a_thread(tmp_path / "run", 6, on_step)
    assert (fit.state, fit.step) == ("finished", 6), fit
    assert dist.group.WORLD is group
    assert [metrics["step"] for metrics in reported] == [1, 2, 3, 4, 5, 6]
    losses: list[Any] = [None] * RANKS
    dist.all_gather_object(losses, [metrics["loss"] for metrics in reported])
    assert losses == [losses[0]] * RANKS
    assert fit.loss == losses[0][-1]
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    asked = 4 if devices.device().type == "cpu" else 5
    assert saved == [f"step-{asked:06d}", "step-000006"]  # asked for once; and the last one

    def fails(metrics: dict[str, float]) -> None:
        raise ConnectionError(f"no report of step {metrics['step']}")

    dist.barrier()
    error = in_a_thread(tmp_path / "run", 9, fails)  # resumes after the sixth
    assert str(error) == "no report of step 7", error
    assert latest(tmp_path / "run" / "checkpoints") == fit.checkpoint
    assert dist.group.WORLD is group
    dist.barrier()
    fit = in_a_thread(tmp_path / "run", 9, None)
    assert (fit.state, fit.step) == ("finished", 9), fit


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
