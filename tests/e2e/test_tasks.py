"""`accordion train --task`: a task of the user's trains as plain PyTorch does, on any number of ranks, and resumes exactly."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

import accordion as acc
from accordion import cli
from accordion.train import launch
from accordion.train.data import GlobalOrder, Share
from tests.e2e.jobs import job_of, lines_of, losses, of_task, several
from tests.support import forked, own_tasks
from tests.support.sample import sampled

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
TASKS = Path(__file__).parents[2] / "examples" / "tasks"
Metrics = list[dict[str, Any]]


def train(task: str, run_dir: Path, *flags: str) -> Metrics:
    assert cli.main(of_task(task, run_dir, "--train.clip", "0", *flags)) == 0
    return lines_of(run_dir)


def plain(task: Any, model: nn.Module, steps: int, global_batch: int) -> list[float]:
    """Train `model` in one process without this package, on the samples in the order of a run, and return the losses."""
    data = task.dataset("train")
    order = iter(GlobalOrder(len(data), Share(rank=0, world=1, micro_batch=global_batch, accumulate=1), seed=0))
    optimizer, found = task.optimizer([p for p in model.parameters() if p.requires_grad]), []
    for _ in range(steps):
        loss = task.loss(model, default_collate([data[i] for i in next(order)]))
        mean = loss[0] / loss[1] if isinstance(loss, tuple) else loss
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(mean.detach()))
    return found


@pytest.mark.parametrize(
    ("nproc", "accumulate", "kind"),
    sampled(
        [(*sizes, kind) for sizes in ((2, 1), (3, 2), (1, 3)) for kind in ("Task", "Weighed")],
        lambda nproc, accumulate, kind: (nproc, kind) in ((2, "Task"), (3, "Weighed")),
    ),
)
def test_a_task_trains_as_plain_torch_does(place: Path, kind: str, nproc: int, accumulate: int) -> None:
    """Sums and counts make the mean of the global batch, whatever each micro-batch of each rank has of it."""
    flags = ["--train.steps", "9", "--train.micro_batch", "3", "--train.accumulate", str(accumulate)]
    if kind == "Weighed":  # an optimizer by its class path, in place of the equal one of the task
        flags += ["--optimizer", "torch.optim.SGD", "--optimizer.lr", "0.02", "--optimizer.momentum", "0.9"]
    found = train(kind, place / f"{kind}-{nproc}", *flags, "--launch.nproc", str(nproc))
    task = getattr(own_tasks, kind)()
    torch.manual_seed(0)
    expected = plain(task, task.model(), 9, 3 * nproc * accumulate)
    assert losses(found) == pytest.approx(expected, rel=1e-5)
    assert "samples_per_s" in found[0]
    assert "tokens_per_s" not in found[0]


KINDS = ("Weighed", "Streamed", "Scheduled", "OnMeta")
ELASTIC = ["--train.micro_batch", "2", "--train.global_batch", "12", "--checkpoint.every", "6"]
OWN = ["--train.micro_batch", "4", "--checkpoint.every", "5"]
RUNS = {  # flags, and the step to resume from
    **dict.fromkeys(KINDS, (ELASTIC, 6)),
    "Loaded": (OWN, 10),  # the loader is the user's
    "Task": (
        [*OWN, "--task.dropout", "0.4", "--train.accumulate", "2"],
        10,
    ),  # each rank draws random numbers of its own
}


def trained(flags: dict[str, list[str]], name: str, nproc: int) -> dict[str, Metrics]:
    """Train 14 steps of each task in `flags` on ranks that start once. Return the metrics of each."""
    steps = ["--train.clip", "0", "--train.steps", "14"]
    jobs = [job_of(of_task(kind, f"{name}-{kind}", *steps, *own)[1:], nproc) for kind, own in flags.items()]
    assert launch.start(several, (jobs,), nproc) == 0
    return {kind: lines_of(Path(f"{name}-{kind}")) for kind in flags}


@pytest.fixture(scope="module")
def whole(place: Path) -> dict[str, Metrics]:
    """Runs on two ranks of several epochs."""
    return trained({kind: flags for kind, (flags, _) in RUNS.items()}, "whole", 2)


@pytest.mark.parametrize(
    ("nproc", "kinds"),
    sampled(
        [(2, tuple(RUNS)), (1, ("Streamed",)), (3, ("Weighed",)), (1, KINDS), (3, KINDS)],
        lambda nproc, kinds: kinds is not KINDS,
    ),
)
def test_resume_goes_on_with_the_same_curve(whole: dict[str, Metrics], kinds: tuple[str, ...], nproc: int) -> None:
    """Data, its order and random numbers, optimizer and scheduler; bit for bit on as many ranks."""
    resumed = {}
    for kind in kinds:
        flags, step = RUNS[kind]
        resumed[kind] = [*flags, "--checkpoint.resume", f"whole-{kind}/checkpoints/step-{step:06d}"]
    for kind, lines in trained(resumed, f"on-{nproc}-of-{len(kinds)}", nproc).items():
        for key in ("step", "loss", "grad_norm", "lr"):
            values, expected = ([line[key] for line in part] for part in (lines, whole[kind][RUNS[kind][1] :]))
            assert values == (expected if nproc == 2 else pytest.approx(expected, rel=1e-4)), (kind, key)


def test_a_scheduler_is_stepped(whole: dict[str, Metrics]) -> None:
    assert [line["lr"] for line in whole["Scheduled"][:7]] == pytest.approx([0.02] * 3 + [0.01] * 3 + [0.005])


@pytest.mark.parametrize("kind", ["Held", "Streamed"])
def test_held_out_data_counts_each_sample_once(place: Path, capfd: pytest.CaptureFixture[str], kind: str) -> None:
    """Seven samples over two ranks of three at a time: the last batch is one rank's alone."""
    capfd.readouterr()
    train(kind, place / f"held-{kind}", "--train.steps", "1", "--train.micro_batch", "3", "--task.width", "5")
    model = own_tasks.Net(5)
    cli_model = place / f"held-{kind}" / "checkpoints" / "step-000001"
    acc.load(str(cli_model), model)
    x, y, weight = (t[:7] for t in own_tasks.numbers())
    off = (model(x) - y).detach()
    loss, mean = float((off.square() * weight).sum() / weight.sum()), float(off.abs().mean())
    said = re.search(r"validation loss (\S+) after 1 steps, off (\S+), pair (\S+)", capfd.readouterr().out)
    assert said is not None
    assert [float(word) for word in said.groups()] == pytest.approx([loss, mean, mean], abs=1e-4)


def test_an_optimizer_by_class_path_trains_on_text(place: Path) -> None:
    words = ["--model.preset", "llama-tiny", "--data.path", str(Path(json.__file__).parent), "--data.seq_len", "16"]
    words += ["--train.steps", "2", "--train.micro_batch", "1", "--launch.nproc", "1", "--launch.device", "cpu"]
    words += ["--optimizer", "torch.optim.Adadelta", "--optimizer.lr", "0.5", "--run.dir", str(place / "text")]
    assert cli.main(["train", *words]) == 0
    assert [line["lr"] for line in lines_of(place / "text")] == [0.5, 0.5]
    assert list((place / "text").glob("events.out.tfevents.*"))


# -- the examples

EXAMPLES = {"vision_transformer": "accuracy", "digit_words": "spelled"}  # name -> metric
GLOBAL_BATCH, STEPS = 12, 6


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_command_of_an_example_learns_digits(place: Path, name: str) -> None:
    """Run the command in the docstring, as a person does, on two ranks."""
    pytest.importorskip("sklearn")
    command = re.search(r"^accordion (train --task examples/\S+ .*)$", (TASKS / f"{name}.py").read_text(), re.MULTILINE)
    assert command is not None
    words = command[1].replace("examples/tasks", str(TASKS)).split()
    words += ["--run.dir", f"whole-{name}", "--launch.device", "cpu", "--launch.nproc", "2"]
    done = subprocess.run([sys.executable, "-m", "accordion", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    merit = re.search(rf"after \d+ steps, {EXAMPLES[name]} (\S+)", done.stdout)
    assert merit is not None
    assert float(merit[1]) >= 0.95


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_train_as_one_process_does(place: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    """Two ranks of six samples against one process of twelve; names of digits are not equally long."""
    pytest.importorskip("sklearn")
    words = ["train", "--task", str(TASKS / f"{name}.py"), "--train.clip", "0"]
    words += ["--task.width", "16", "--task.layers", "1", "--task.held_out", "24"]
    words += ["--train.steps", str(STEPS), "--train.micro_batch", str(GLOBAL_BATCH // 2), "--run.dir", name]
    words += ["--optimizer", "torch.optim.SGD", "--optimizer.lr", "0.05", "--optimizer.momentum", "0.9"]
    assert cli.main([*words, "--launch.device", "cpu", "--launch.nproc", "2", *forked.UNTRACKED]) == 0
    shown = re.search(rf"after {STEPS} steps, {EXAMPLES[name]} (\S+)", capfd.readouterr().out)
    assert shown is not None
    assert 0 <= float(shown[1]) <= 1
    torch.manual_seed(0)
    task = runpy.run_path(str(TASKS / f"{name}.py"))["Task"](width=16, layers=1, held_out=24)
    model = task.model().train()
    task.optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    expected = plain(task, model, STEPS, GLOBAL_BATCH)
    assert losses(lines_of(place / name)) == pytest.approx(expected, rel=1e-5)
    loaded = task.model()
    acc.load(str(place / name / "checkpoints" / f"step-{STEPS:06d}"), loaded)
    for (key, value), trained in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert torch.allclose(value, trained, rtol=1e-3, atol=1e-5), key
