"""Early ends of a run, and trackers of metrics: decisions of one process, without ranks."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from accordion import cli
from accordion.train import ending as ending_module
from accordion.train.config import Config, LogConfig
from accordion.train.ending import GOES_ON, IS_PREEMPTED, SIGNALS, TIME_IS_OVER, Best, Ending, Signals
from accordion.train.metrics import MetricsLog, StepMetrics
from accordion.train.trackers import trackers_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """The signals that the program's own handlers received."""
    taken: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: taken.append(number)) for number in SIGNALS}
    yield taken
    for number, handler in before.items():
        signal.signal(number, handler)


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
    assert capsys.readouterr().err == "accordion: ended by a signal before the first step; there is nothing to save.\n"
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


def step(number: int) -> StepMetrics:
    return StepMetrics(step=number, loss=2.5, grad_norm=1.0, lr=1e-3, tokens_per_s=9.0, peak_bytes=7, skipped=False)


def test_figures_are_logged_to_wandb_until_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the package that records its calls."""
    wandb = mock.MagicMock()
    wandb.init.return_value.id = "abc"
    wandb.init.return_value.log.side_effect = lambda values: 1 / (values["step"] != 3)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config, said = Config(log=LogConfig(wandb="mine", tensorboard=False)), list[str]()
    for goes_on in (False, True):
        opened = trackers_of(config, tmp_path, int(goes_on), said.append)
        with MetricsLog(tmp_path, 0, said.append, opened) as log:
            log.step(step(1))
            log.validation(1, 2.0)
            if goes_on:
                log.step(step(3))
                log.step(step(4))
    begun = [(words["project"], words["id"], words["resume"]) for _, words in wandb.init.call_args_list]
    assert begun == [("mine", None, None), ("mine", "abc", "allow")]
    run = wandb.init.return_value
    logged = [
        (values["step"], values.get("loss", values.get("validation_loss"))) for (values,), _ in run.log.call_args_list
    ]
    assert logged == [(1, 2.5), (1, 2.0), (1, 2.5), (1, 2.0), (3, 2.5)]
    assert run.finish.mock_calls == [mock.call(exit_code=0)]
    assert said == ["no longer recorded in wandb: division by zero; training goes on"]
    assert not list(tmp_path.glob("events*"))


def test_a_resumed_run_continues_its_run_of_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a store in files, which the small package accepts too."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tracking = pytest.importorskip("mlflow.tracking")
    uri = f"file:{tmp_path}/ml"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    config = Config(log=LogConfig(mlflow="mine", tensorboard=False))
    for number in (1, 2):
        opened = trackers_of(config, tmp_path, number - 1, pytest.fail)
        with MetricsLog(tmp_path, number - 1, print, opened) as log:
            log.step(step(number))
    client = tracking.MlflowClient(tracking_uri=uri)
    runs = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert [run.info.status for run in runs] == ["FINISHED"]
    assert [metric.step for metric in client.get_metric_history(runs[0].info.run_id, "loss")] == [1, 2]


def test_figures_are_logged_to_mlflow_until_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the package that records its calls."""
    mlflow = mock.MagicMock()
    mlflow.start_run.return_value = mock.Mock(info=mock.Mock(run_id="r"), data=mock.Mock(params={"train.seed": "0"}))
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    said, config = list[str](), Config(log=LogConfig(mlflow="mine", tensorboard=False))
    for done in (0, 1):
        with MetricsLog(tmp_path, done, said.append, trackers_of(config, tmp_path, done, said.append)) as log:
            log.step(step(done + 1))
            log.validation(done + 1, 2.0)
    assert [call.kwargs["run_id"] for call in mlflow.start_run.mock_calls] == [None, "r"]
    (settings,) = mlflow.log_params.mock_calls[0].args
    assert settings["log.mlflow"] == "mine"
    assert "train.seed" not in settings, "the server has it already"
    assert mlflow.log_metrics.mock_calls[3] == mock.call({"validation_loss": 2.0}, step=2, synchronous=False)
    assert [call.kwargs["step"] for call in mlflow.log_metrics.mock_calls] == [1, 1, 2, 2]
    assert mlflow.end_run.mock_calls == [mock.call("FINISHED")] * 2
    assert not said
    with MetricsLog(tmp_path, 2, said.append, trackers_of(config, tmp_path, 2, said.append)) as log:
        mlflow.log_metrics.side_effect = mlflow.start_run.side_effect = OSError("the server\nis gone")
        log.step(step(3))
        log.step(step(4))
    assert not trackers_of(config, tmp_path, 4, said.append)
    assert said == [
        "no longer recorded in mlflow: the server is gone; training goes on",
        "not recorded in mlflow: the server is gone; training goes on",
    ]
