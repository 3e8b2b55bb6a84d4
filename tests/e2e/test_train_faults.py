"""`accordion train` in trouble: two jobs in one folder, full disks, deleted folders, killed ranks."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from accordion import cli
from accordion.checkpoint import latest
from accordion.checkpoint.reading import verify
from accordion.train import owner
from tests.e2e.jobs import TINY, lines_of, losses_of, of_task, started, until, workers_of
from tests.support import forked
from tests.support.checkpoints import differing
from tests.support.disks import mounted

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
ENDLESS = ["--train.steps", "100000", "--checkpoint.every", "3", "--checkpoint.keep", "2"]


def test_a_second_job_is_refused_and_a_killed_one_keeps_nobody_out(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir, log = place / "owned", place / "owned.log"
    words = of_task("Slow", run_dir)
    # On one rank, and mostly asleep, because it trains while the others are refused.
    with started(log, [*words, *ENDLESS, "--task.slow", "0.2", "--launch.nproc", "1"]):
        until(lambda: len(lines_of(run_dir)) >= 4, "four steps", log)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, "EXIT_S", 1.0)  # the first job trains all the while
            assert cli.main([*words, *ENDLESS]) == 2
        told = capfd.readouterr().err
        assert told.startswith(f"accordion: run.dir '{run_dir}' is in use by another job: process ")
        assert told.count("\n") == 1
        before = len(lines_of(run_dir))
        until(lambda: len(lines_of(run_dir)) > before, "steps of the first job", log)
    until(lambda: owner.holder_of(run_dir) is None, "the end of the rank", log)
    assert "frame #" not in log.read_text()
    assert "interrupted" not in log.read_text()
    at = latest(run_dir / "checkpoints")
    assert at is not None
    assert (run_dir / ".owner").exists()
    steps = str(int(at.rpartition("-")[2]) + 5)
    assert cli.main([*words, "--train.steps", steps]) == 0
    assert [line["step"] for line in lines_of(run_dir)] == list(range(1, int(steps) + 1))
    assert not list(run_dir.rglob(".owner"))


def test_ranks_of_torchrun_are_killed_with_it(place: Path) -> None:
    run_dir, log = place / "killed", place / "killed.log"
    words = ["-m", "accordion", *of_task("Slow", run_dir, "--task.slow", "0.1", "--train.steps", "10000")]
    with forked.Job(forked.torchrun, ["--nproc-per-node", "1", *words], log):
        until(lambda: bool(lines_of(run_dir)), "a step", log)
    until(lambda: owner.holder_of(run_dir) is None, "the end of the ranks", log)
    assert "frame #" not in log.read_text()


def test_a_run_outlives_its_reader_and_its_terminal(place: Path) -> None:
    run_dir, pipe = place / "unread", place / "unread.pipe"
    words = of_task("Slow", run_dir, "--task.slow", "0.1", "--launch.nproc", "1", "--train.steps", "9")
    os.mkfifo(pipe)
    reader, said = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), list[bytes]()

    def two_steps() -> bool:
        with suppress(BlockingIOError):  # nothing new
            said.append(os.read(reader, 65536))
        return b"step 2/9" in b"".join(said)

    with forked.Job(forked.command, words, pipe) as job:
        until(two_steps, "two steps")
        os.close(reader)
        os.killpg(job.pid, signal.SIGHUP)
        assert job.wait() == 0
    assert len(lines_of(run_dir)) == 9
    assert latest(run_dir / "checkpoints") == str(run_dir / "checkpoints" / "step-000009")


@pytest.mark.slow
def test_a_run_folder_that_is_deleted_is_told_and_the_last_weights_are_kept(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run_dir, log = place / "deleted", place / "deleted.log"
    job = started(log, ["train", *TINY, "--run.dir", str(run_dir), "--train.steps", "60", "--launch.nproc", "2"])
    until(lambda: len(lines_of(run_dir)) >= 3, "three steps", log)
    shutil.rmtree(run_dir)
    assert job.wait(300) == 0, log.read_text()
    said = log.read_text()
    assert len([line for line in said.splitlines() if "metrics.jsonl: " in line]) == 1
    assert "Traceback" not in said
    assert latest(run_dir / "checkpoints") == str(run_dir / "checkpoints" / "step-000060")
    assert not list(run_dir.rglob(".owner"))
    assert not list(tmp_path.iterdir())  # nothing of torch's launcher is left either


@pytest.mark.slow
def test_a_disk_that_fills_up(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = place / "full"
    run_dir.mkdir()
    with mounted(run_dir / "checkpoints", "size=8m") as checkpoints:
        flags = ["--run.dir", str(run_dir), "--launch.nproc", "2", "--train.steps", "6", "--checkpoint.every", "1"]
        assert cli.main(["train", *TINY, *flags]) == 1  # the last weights were not kept
        shown = capfd.readouterr()
        assert "No space left on device" in shown.err
        newest = latest(checkpoints)
        assert newest is not None
        assert verify(newest) == []
        found = [path for path in checkpoints.iterdir() if path.is_dir()]
        assert all(verify(path) == [] for path in found)


def torchrun(run_dir: str, *flags: str) -> list[str]:
    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3", "--monitor-interval", "0.2"]
    words += ["-m", "accordion", "train"]
    return [sys.executable, "-m", "torch.distributed.run", *words, *TINY, "--run.dir", run_dir, *flags]


@pytest.mark.slow
def test_a_rank_that_is_killed_under_torchrun_costs_the_steps_since_the_last_checkpoint(place: Path) -> None:
    flags = ["--train.steps", "12", "--checkpoint.every", "2", "--train.accumulate", "2", "--shard.precision", "fp16"]
    calm = subprocess.run(torchrun("calm", *flags), capture_output=True, text=True, check=False)
    assert calm.returncode == 0, calm.stderr
    job = subprocess.Popen(torchrun("hurt", *flags), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    kills = 0
    for at_step in (3, 8):  # once one rank, then the other
        while job.poll() is None and not any(line["step"] >= at_step for line in lines_of(place / "hurt")):
            time.sleep(0.05)
        ranks = workers_of(job.pid)
        if len(ranks) == 2:
            os.kill(ranks[kills % 2], signal.SIGKILL)
            kills += 1
            while job.poll() is None and not set(workers_of(job.pid)).isdisjoint(ranks):
                time.sleep(0.05)
    shown, _ = job.communicate(timeout=300)
    assert job.returncode == 0, shown
    assert kills == 2
    assert "resumed from" in shown
    ends = [place / name / "checkpoints" / "step-000012" for name in ("calm", "hurt")]
    assert differing(*ends) == set()
    assert losses_of(place / "calm") == losses_of(place / "hurt")
