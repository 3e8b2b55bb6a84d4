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


# What a rank runs: the waits of its host in each step, and NaN in the loss of rank 1 in the second one.
WATCHED = """
import os, sys, torch
from accordion import cli
from accordion.train import loop

real_step, real_losses, now = loop._step, loop.token_losses, 0

def step(run, batches, number, screen):
    global now
    now, told = number, []
    torch.sim.tell_waits(lambda why, stream: told.append(why))
    metrics = real_step(run, batches, number, screen)
    torch.sim.tell_waits(None)
    print(f"waits of step {number}: {', '.join(told)}", flush=True)
    return metrics

def losses(model, batch):
    found = real_losses(model, batch)
    return found * float("nan") if now == 2 and os.environ["RANK"] == "1" else found

loop._step, loop.token_losses = step, losses
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
    [["--shard.precision", "fp16"], ["--shard.precision", "bf16", "--shard.offload_optimizer", "host"]],
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


def test_a_step_waits_once_and_changes_nothing_where_it_is_not_finite(tmp_path):
    """The wait is for figures that were copied ahead of the optimizer's step."""
    (tmp_path / "watched.py").write_text(WATCHED)
    ranks = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "watched.py"]
    options = ["--train.on_nonfinite", "skip", "--checkpoint.every", "1", "--checkpoint.background", "false"]
    flags = ["--launch.device", "sim", "--shard.precision", "bf16", "--train.steps", "6", "--checkpoint.keep", "6"]
    found, said = run(tmp_path, *ranks, *flags, *options)
    waits = re.findall(r"waits of step (\d): (.*)", said)
    assert len(waits) == 12
    # The first is the model's own: transformers looks for packed sequences as a forward begins.
    assert {told for step, told in waits if step in "456"} == {"item, event.synchronize"}
    assert [line["skipped"] for line in found] == [False, True, False, False, False, False]
    assert "outputs are finite and the loss is nan on rank 1" in said
    assert found[2]["lr"] == found[1]["lr"]
    saved = tmp_path / "run" / "checkpoints"
    same = diff(saved / "step-000001", saved / "step-000002")
    assert (same["values"], same["kinds"]) == ({}, {})
    assert diff(saved / "step-000002", saved / "step-000003")["values"]
