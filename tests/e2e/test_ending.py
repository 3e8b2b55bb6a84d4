"""Runs of two ranks that end early, by signals or early stopping, and resume exactly from there."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from accordion import cli
from accordion.checkpoint import latest
from tests.e2e.jobs import lines_of, losses_of, of_task, started, until
from tests.support import forked

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
FLAGS = ["--launch.nproc", "2", "--train.micro_batch", "2"]


def words_of(run_dir: Path | str, *flags: str) -> list[str]:
    return of_task("Slow", run_dir, *FLAGS, *flags)


def train(run_dir: Path | str, *flags: str) -> int:
    return cli.main(words_of(run_dir, *flags))


def whole(place: Path, *flags: str) -> list[float]:
    """Return the losses of 12 undisturbed steps."""
    run_dir = place / "whole"
    if not run_dir.exists():
        assert train(run_dir, "--train.steps", "12", *flags) == 0
    return losses_of(run_dir)


@pytest.mark.parametrize("who", ["launcher", "rank"])
def test_a_signal_saves_and_ends_with_its_own_exit_code(
    place: Path, capfd: pytest.CaptureFixture[str], who: str
) -> None:
    """SIGTERM to the launcher, and another signal while it saves; or SIGUSR1 to one rank. The run then resumes bit for bit."""
    run_dir, flags = place / who, ["--train.steps", "12", "--task.slow", "0.3", "--checkpoint.every", "2"]
    if who == "launcher":
        log = place / "launcher.log"
        job = started(log, words_of(run_dir, *flags))
        until(lambda: len(lines_of(run_dir)) >= 3, "three steps", log)
        os.kill(job.pid, signal.SIGTERM)
        os.kill(job.pid, signal.SIGUSR1)
        code, said = job.wait(120), log.read_text()
    else:  # forked ranks, which know nothing of their launcher
        capfd.readouterr()
        with ThreadPoolExecutor(1) as threads:
            training = threads.submit(train, run_dir, *flags)
            until(lambda: len(lines_of(run_dir)) >= 3, "three steps")
            (rank,) = (child.pid for child in multiprocessing.active_children() if child.name == "forked rank 1")
            assert rank is not None
            os.kill(rank, signal.SIGUSR1)
            code, said = training.result(120), "".join(capfd.readouterr())
    assert code == 75, said
    done = len(lines_of(run_dir))
    assert 3 <= done < 12
    assert f"stopped after {done} of 12 steps: preempted" in said
    assert "the same command resumes from there" in said
    assert "Traceback" not in said
    assert latest(run_dir / "checkpoints") == str(run_dir / "checkpoints" / f"step-{done:06d}")
    assert train(run_dir, "--train.steps", "12") == 0
    assert losses_of(run_dir) == whole(place)


EARLY = ["--train.steps", "12", "--train.eval_every", "3", "--train.keep_best", "--checkpoint.every", "3"]
PATIENT = ["--train.patience", "2", "--train.min_delta", "100"]


def test_early_stopping_and_the_best_are_the_same_after_a_resume(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """No validation is lower by 100: the third one ends the run, also after a resume."""
    assert train("early", *EARLY, *PATIENT) == 0
    assert "stopped after 9 of 12 steps: no lower validation loss in 2 validations" in capfd.readouterr().out
    at = "early/checkpoints/step-000006"
    assert train("again", *EARLY, *PATIENT, "--checkpoint.resume", at) == 0
    assert losses_of(Path("again")) == losses_of(Path("early"))[6:]
    assert losses_of(Path("early")) == whole(place)[:9]
    capfd.readouterr()
    assert train("early", *EARLY) == 0
    assert "/checkpoints/step-000009: 9 of 12 steps are done" in capfd.readouterr().out
    assert losses_of(Path("early")) == whole(place)


FIT = """
import accordion as acc
from tests.support.own_tasks import Slow
if __name__ == "__main__":
    found = acc.fit(Slow(), config="fit.yaml", options={"train.steps": 12})
    print(found.state, found.step, found.checkpoint)
"""


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_fit_trains_as_the_command_does(place: Path, ranks: int) -> None:
    (place / "fit.py").write_text(FIT)
    size = f"train: {{micro_batch: {4 // ranks}}}\nlaunch: {{device: cpu}}\nrun: {{dir: fit-{ranks}}}\n"
    (place / "fit.yaml").write_text(size)
    out, through = place / f"fit-{ranks}.log", ["--standalone", "--nproc-per-node", "2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]))
        start = (forked.script, ["fit.py"]) if ranks == 1 else (forked.torchrun, [*through, "fit.py"])
        with forked.Job(*start, out) as job:
            assert job.wait() == 0, out.read_text()
    assert f"finished 12 {place / f'fit-{ranks}' / 'checkpoints' / 'step-000012'}" in out.read_text()
    found = losses_of(place / f"fit-{ranks}")
    assert found == (whole(place) if ranks == 2 else pytest.approx(whole(place), rel=1e-4))
