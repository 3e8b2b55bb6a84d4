"""Jobs that meet trouble: a checkpoint that cannot be written, and ranks that are killed under torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import transformers

from accordion import cli
from accordion.checkpoint import latest
from accordion.checkpoint.convert import export
from accordion.checkpoint.inspect import diff, verify
from accordion.train import owner
from tests.e2e.jobs import TINY, lines_of, workers_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.parametrize(("on_error", "code"), [("continue", 0), pytest.param("stop", 1, marks=pytest.mark.slow)])
def test_a_checkpoint_that_cannot_be_written(
    place: Path, capfd: pytest.CaptureFixture[str], on_error: str, code: int
) -> None:
    run_dir = place / on_error
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "checkpoints" / "step-000002").write_text("in the way")
    flags = ["--run.dir", str(run_dir), "--launch.nproc", "2", "--train.steps", "4", "--checkpoint.every", "1"]
    assert cli.main(["train", *TINY, *flags, "--checkpoint.on_error", on_error]) == code
    shown = capfd.readouterr()
    assert "exists and is no checkpoint" in (shown.out if code == 0 else shown.err)
    newest = latest(run_dir / "checkpoints")
    if code == 0:
        assert newest == str(run_dir / "checkpoints" / "step-000004")
        assert len(lines_of(run_dir)) == 4
        export(newest, run_dir / "hf")  # the configuration is in it
        transformers.AutoModelForCausalLM.from_pretrained(run_dir / "hf")
    else:
        assert newest == str(run_dir / "checkpoints" / "step-000001")
    assert (run_dir / "checkpoints" / "step-000002").read_text() == "in the way"


@pytest.mark.slow
@pytest.mark.parametrize("on_error", ["continue", "stop"])
def test_a_disk_that_fills_up(place: Path, capfd: pytest.CaptureFixture[str], on_error: str) -> None:
    run_dir = place / f"full-{on_error}"
    checkpoints = run_dir / "checkpoints"
    checkpoints.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "accordion", str(checkpoints)], check=False)
    if mounted.returncode != 0:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        flags = ["--run.dir", str(run_dir), "--launch.nproc", "2", "--train.steps", "6", "--checkpoint.every", "1"]
        assert (
            cli.main(["train", *TINY, *flags, "--checkpoint.on_error", on_error]) == 1
        )  # the last weights were not kept
        shown = capfd.readouterr()
        assert "No space left on device" in shown.err
        assert ("training goes on" in shown.out) == (on_error == "continue")
        newest = latest(checkpoints)
        assert newest is not None
        assert verify(newest) == []
        found = [path for path in checkpoints.iterdir() if not path.name.startswith(owner.FILE)]  # of a job that failed
        assert all(verify(path) == [] for path in found)
        if on_error == "continue":
            assert len(lines_of(run_dir)) == 6
    finally:
        subprocess.run(["umount", "-l", str(checkpoints)], check=True)


def torchrun(run_dir: str, *flags: str) -> list[str]:
    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3", "--monitor-interval", "0.2"]
    words += ["-m", "accordion", "train"]
    return [sys.executable, "-m", "torch.distributed.run", *words, *TINY, "--run.dir", run_dir, *flags]


@pytest.mark.slow
def test_a_rank_that_is_killed_under_torchrun_costs_the_steps_since_the_last_checkpoint(place: Path) -> None:
    flags = ["--train.steps", "12", "--checkpoint.every", "2", "--train.accumulate", "2", "--shard.precision", "fp16"]
    calm = subprocess.run(torchrun("calm", *flags), capture_output=True, text=True, check=False)
    assert calm.returncode == 0, calm.stderr
    job = subprocess.Popen(torchrun("killed", *flags), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    kills = 0
    for at_step in (3, 8):  # once one rank, then the other
        while job.poll() is None and not any(line["step"] >= at_step for line in lines_of(place / "killed")):
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
    ends = [place / name / "checkpoints" / "step-000012" for name in ("calm", "killed")]
    found = diff(*ends)
    assert (found["values"], found["kinds"], found["only_first"], found["only_second"]) == ({}, {}, [], [])
    losses = [[line["loss"] for line in lines_of(place / name)] for name in ("calm", "killed")]
    assert losses[0] == losses[1]
