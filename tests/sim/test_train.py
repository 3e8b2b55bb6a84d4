"""`accordion train` on an accelerator: it learns, saves, goes on, and lets the device run ahead of the host."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from accordion import cli
from accordion.train import language_work
from accordion.train.steps import Steps
from tests.support import forked
from tests.support.checkpoints import differing

pytestmark = [pytest.mark.sim, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
TEXT = str(Path(asyncio.__file__).parent)
TINY = [
    "train",
    "--model.preset",
    "llama-tiny",
    "--data.seq_len",
    "32",
    "--train.micro_batch",
    "2",
    "--launch.device",
    "sim",
]
TINY += ["--data.path", TEXT, *forked.UNTRACKED]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with a cache that the tests of this file share; their ranks come from the fork server."""
    folder = tmp_path_factory.mktemp("train")
    with forked.commands_in(folder):
        yield folder


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["--shard.precision", "fp16"], marks=pytest.mark.slow),
        ["--shard.precision", "bf16", "--shard.offload", "optimizer=host"],
    ],
    ids=["fp16", "states on host"],
)
def test_a_run_saves_and_goes_on_with_the_same_curve(place, tmp_path, capfd, flags):
    command = [*TINY, "--run.dir", str(tmp_path), "--launch.nproc", "2", "--train.steps", "4", *flags]
    assert cli.main([*command, "--checkpoint.every", "2"]) == 0
    whole = metrics(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "step-000004")  # as if it had ended behind its second step
    assert cli.main(command) == 0
    found = metrics(tmp_path)
    assert "2 of 4 steps are done" in capfd.readouterr().out
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    for key in ("loss", "grad_norm", "lr", "skipped"):
        assert [line[key] for line in found] == [line[key] for line in whole], key
    assert sum(line["skipped"] for line in found) <= 1
    assert all(0 < line["peak_bytes"] < 4e9 for line in found)


class Watched:
    """Prints the waits of the host in each step, and "ahead" if the host finished the step before the device.

    The loss of rank 1 for the data of the second step is NaN.
    """

    def __init__(self) -> None:
        self.now, self.spoilt = 0, list[Any]()

    def take(self, steps: Steps, number: int, real: Any = Steps.take) -> None:
        self.now, waits = number, list[str]()
        torch.sim.tell_waits(lambda why, stream: waits.append(why))
        if number > 3:
            torch.sim._sleep(1_000_000_000)  # a second
            behind = torch.Event("sim")
            behind.record()
        real(steps, number)
        torch.sim.tell_waits(None)
        ahead = number > 3 and not behind.query()
        print(f"step {number}: {'ahead' if ahead else 'behind'}, waits: {', '.join(waits)};", flush=True)

    def losses(
        self, model: nn.Module, batch: Any, real: Any = language_work.label_losses, **options: Any
    ) -> tuple[Tensor, Tensor]:
        total, count = real(model, batch, **options)
        if self.now == 2 and os.environ["RANK"] == "1":
            self.spoilt.append(batch)
        return (total * float("nan") if any(batch is one for one in self.spoilt) else total), count


def watched(words: list[str]) -> None:
    """Run the command `words` in a rank, watched."""
    watch = Watched()
    with (
        mock.patch.object(Steps, "take", lambda steps, number: watch.take(steps, number)),
        mock.patch.object(language_work, "label_losses", watch.losses),
    ):
        sys.exit(cli.main(words))


def run_watched(run_dir: Path, *flags: str) -> list[dict[str, Any]]:
    words = [*TINY, "--run.dir", str(run_dir), "--train.steps", "6", "--train.on_nonfinite", "skip", *flags]
    assert forked.under_torchrun(words, 2, watched) == 0
    return metrics(run_dir)


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.slow), "fp16"])
def test_the_host_gives_a_step_to_the_device_before_the_last_one_is_done(place, tmp_path, capfd, precision):
    """It waits at most for the metrics of the step before, with a forward and a backward in the queue."""
    found = run_watched(tmp_path, "--shard.precision", precision)
    said = capfd.readouterr().out
    steps = re.findall(r"step (\d): (\w+), waits: ([^;]*);", said)
    assert len(steps) == 12
    assert {waits for step, _, waits in steps if step in "456"} <= {"", "event.synchronize"}
    assert {where for step, where, _ in steps if step in "456"} == {"ahead"}
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
    assert [line["skipped"] for line in found][1:3] == [True, False]
    assert "outputs are finite and the loss is nan on rank 1" in said


def test_a_step_that_is_not_finite_is_left_out_alike_whenever_that_is_read(place, tmp_path, capfd):
    """One run saves after each step, so that it reads each at once; the other reads it after the next backward."""
    options = ["--shard.precision", "bf16", "--checkpoint.background", "false", "--checkpoint.keep", "6"]
    runs = {}
    for name, every in (("at once", 1), ("later", 6)):
        runs[name] = run_watched(tmp_path / name, *options, "--checkpoint.every", str(every))
        assert [line["skipped"] for line in runs[name]] == [False, True, False, False, False, False]
        assert "outputs are finite and the loss is nan on rank 1" in capfd.readouterr().out
        assert runs[name][2]["lr"] == runs[name][1]["lr"]
    for key in ("loss", "grad_norm", "lr"):
        assert [line[key] for line in runs["at once"]] == [line[key] for line in runs["later"]], key
    saved = tmp_path / "at once" / "checkpoints"
    assert differing(saved / "step-000001", saved / "step-000002") == set()
    assert differing(saved / "step-000002", saved / "step-000003")
    assert differing(saved / "step-000006", tmp_path / "later" / "checkpoints" / "step-000006") == set()
