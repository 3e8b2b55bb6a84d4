"""Early ends of a run: decisions of one process, without ranks."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from accordion import cli
from accordion.train import ending as ending_module
from accordion.train.ending import GOES_ON, IS_PREEMPTED, SIGNALS, TIME_IS_OVER, Best, Ending, Signals

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
    assert (
        capsys.readouterr().err == "accordion: ended by a signal while no rank was running; there is nothing to save.\n"
    )
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
