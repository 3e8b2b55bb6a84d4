"""Runs that end early: signals to any rank or to the launcher, time limits, early stopping; and going on exactly from there."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from accordion import cli
from accordion.checkpoint import latest
from accordion.train import launch
from tests.e2e.jobs import lines_of, until
from tests.support import forked, own_tasks

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
SLOW = f"{own_tasks.__file__}:Slow"
FLAGS = ["--launch.device", "cpu", "--launch.nproc", "2", "--train.micro_batch", "2", "--run.report", "false"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("ending")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "start", forked.start)
        patch.setattr(sys, "path", list(sys.path))
        patch.chdir(folder)
        yield folder


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def children(pid: int) -> list[int]:
    found = subprocess.run(
        ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return [int(line.split()[0]) for line in found.stdout.splitlines() if "spawn_main" in line]


def started(run_dir: Path, log: Path, *flags: str, through: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    words = [*through, "-m", "accordion", "train", "--task", SLOW, *FLAGS, "--run.dir", str(run_dir), *flags]
    with log.open("w") as file:
        return subprocess.Popen([sys.executable, *words], stdout=file, stderr=subprocess.STDOUT, text=True)


def whole(place: Path, *flags: str) -> list[float]:
    """What a run of 12 steps that nothing disturbs finds."""
    run_dir = place / "whole"
    if not run_dir.exists():
        assert (
            cli.main(["train", "--task", SLOW, *FLAGS, "--run.dir", str(run_dir), "--train.steps", "12", *flags]) == 0
        )
    return losses(run_dir)


@pytest.mark.parametrize("who", ["launcher", "rank"])
def test_a_signal_saves_and_ends_with_a_code_of_its_own(place: Path, who: str) -> None:
    """SIGTERM to the launcher, or SIGUSR1 to one rank; once and again while it saves. Then the run goes on bit for bit."""
    run_dir, log = place / who, place / f"{who}.log"
    job = started(run_dir, log, "--train.steps", "12", "--task.slow", "0.3", "--checkpoint.every", "2")
    until(lambda: len(lines_of(run_dir)) >= 3, "three steps", log)
    if who == "launcher":
        os.kill(job.pid, signal.SIGTERM)
        os.kill(job.pid, signal.SIGUSR1)
    else:
        rank = children(job.pid)[-1]
        os.kill(rank, signal.SIGUSR1)
    assert job.wait(120) == 75, log.read_text()
    said = log.read_text()
    done = len(lines_of(run_dir))
    assert 3 <= done < 12
    assert f"stopped after {done} of 12 steps: preempted" in said
    assert "the same command goes on from there" in said
    assert "Traceback" not in said
    assert latest(run_dir / "checkpoints") == str(run_dir / "checkpoints" / f"step-{done:06d}")
    assert cli.main(["train", "--task", SLOW, *FLAGS, "--run.dir", str(run_dir), "--train.steps", "12"]) == 0
    assert losses(run_dir) == whole(place)
