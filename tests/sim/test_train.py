"""`accordion train` on an accelerator: it learns, saves, goes on, and lets the device run ahead of the host."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accordion.checkpoint.inspect import diff

pytestmark = [pytest.mark.sim, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
TEXT = str(Path(asyncio.__file__).parent)
TINY = ["--model.preset", "llama-tiny", "--data.path", TEXT, "--data.seq_len", "32", "--train.micro_batch", "2"]


# What a rank runs: the waits of its host in each step, whether the device still had the step's own work before it when the
# host was through, and NaN in the loss of rank 1 for the data of the second step.
WATCHED = """
import os, sys, torch
from accordion import cli
from accordion.train import language_work
from accordion.train.steps import Steps

real_take, real_losses, now, spoilt = Steps.take, language_work.token_losses, 0, []

def take(steps, number):
    global now
    now, told = number, []
    torch.sim.tell_waits(lambda why, stream: told.append(why))
    if number > 3:
        torch.sim._sleep(1_000_000_000)  # a second
        behind = torch.Event("sim")
        behind.record()
    real_take(steps, number)
    torch.sim.tell_waits(None)
    ahead = number > 3 and not behind.query()
    print(f"step {number}: {'ahead' if ahead else 'behind'}, waits: {', '.join(told)};", flush=True)

def losses(model, batch):
    found = real_losses(model, batch)
    if now == 2 and os.environ["RANK"] == "1":
        spoilt.append(batch)
    return found * float("nan") if any(batch is one for one in spoilt) else found

Steps.take, language_work.token_losses = take, losses
sys.exit(cli.main(["train", *sys.argv[1:]]))
"""


def run(folder: Path, *command: str) -> tuple[list[dict[str, Any]], str]:
    """The record of a run and what it printed."""
    shown = subprocess.run(
        [sys.executable, "-m", *command, *TINY, "--run.dir", "run"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        timeout=500,
    )
    assert shown.returncode == 0, shown.stderr
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()], shown.stdout


@pytest.mark.parametrize(
    "flags",
    [["--shard.precision", "fp16"], ["--shard.precision", "bf16", "--shard.offload", "optimizer=host"]],
    ids=["fp16", "states on host"],
)
def test_a_run_saves_and_goes_on_with_the_same_curve(tmp_path, flags):
    command = ["accordion", "train", "--launch.device", "sim", "--launch.nproc", "2", "--train.steps", "4", *flags]
    whole, _ = run(tmp_path, *command, "--checkpoint.every", "2")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")  # as if it had ended behind its second step
    found, said = run(tmp_path, *command)
    assert "2 of 4 steps are done" in said
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    for key in ("loss", "grad_norm", "lr", "skipped"):
        assert [line[key] for line in found] == [line[key] for line in whole], key
    assert sum(line["skipped"] for line in found) <= 1
    assert all(0 < line["peak_bytes"] < 4e9 for line in found)


WATCHED_RUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "watched.py"]
WATCHED_RUN += ["--launch.device", "sim", "--train.steps", "6", "--train.on_nonfinite", "skip"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_host_gives_a_step_to_the_device_before_the_last_one_is_done(tmp_path, precision):
    """It waits for the figures of the step before, where those have not come, with a forward and a backward in the queue."""
    (tmp_path / "watched.py").write_text(WATCHED)
    found, said = run(tmp_path, *WATCHED_RUN, "--shard.precision", precision)
    steps = re.findall(r"step (\d): (\w+), waits: ([^;]*);", said)
    assert len(steps) == 12
    assert {told for step, _, told in steps if step in "456"} <= {"", "event.synchronize"}
    assert {where for step, where, _ in steps if step in "456"} == {"ahead"}
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
    assert [line["skipped"] for line in found][1:3] == [True, False]
    assert "outputs are finite and the loss is nan on rank 1" in said


def test_a_step_that_is_not_finite_is_left_out_alike_whenever_that_is_read(tmp_path):
    """One run saves behind each step, so that each is read at once; the other reads it behind the next one's backward."""
    options = ["--shard.precision", "bf16", "--checkpoint.background", "false"]
    runs = {}
    for name, every in (("at once", 1), ("later", 6)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "watched.py").write_text(WATCHED)
        more = ["--checkpoint.every", str(every), "--checkpoint.keep", "6"]
        runs[name], said = run(folder, *WATCHED_RUN, *options, *more)
        assert [line["skipped"] for line in runs[name]] == [False, True, False, False, False, False]
        assert "outputs are finite and the loss is nan on rank 1" in said
        assert runs[name][2]["lr"] == runs[name][1]["lr"]
    for key in ("loss", "grad_norm", "lr"):
        assert [line[key] for line in runs["at once"]] == [line[key] for line in runs["later"]], key
    saved = tmp_path / "at once" / "run" / "checkpoints"
    same = diff(saved / "step-000001", saved / "step-000002")
    assert (same["values"], same["kinds"]) == ({}, {})
    assert diff(saved / "step-000002", saved / "step-000003")["values"]
    same = diff(saved / "step-000006", tmp_path / "later" / "run" / "checkpoints" / "step-000006")
    assert (same["values"], same["kinds"]) == ({}, {})
