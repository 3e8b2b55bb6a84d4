"""The learning rate of each step, against closed formulas and torch's schedulers; optimizers by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from accordion.errors import UsageError
from accordion.tasks.classes import OPTIMIZERS
from accordion.tasks.loaded import optimizer_of
from accordion.train import command
from accordion.train.config import TrainConfig
from accordion.train.own_task import check_optimizer
from accordion.train.rates import LearningRates, share_at

N, WARM = 100, 10
FORMULAS = {  # of step t = 11 .. 100, behind the warmup
    "auto": ({}, lambda t: 0.1 + 0.45 * (1 + math.cos(math.pi * (t - WARM) / 90))),
    "cosine": ({"final_lr": 0.0}, lambda t: 0.5 * (1 + math.cos(math.pi * (t - WARM) / 90))),
    "linear": ({"final_lr": 0.25}, lambda t: 1 - 0.75 * (t - WARM) / 90),
    "constant": ({}, lambda t: 1.0),
    "wsd": ({"decay_steps": 25, "final_lr": 0.0}, lambda t: 1.0 if t <= 75 else (N - t) / 25),
    "wsd by default": ({}, lambda t: 1.0 if t <= 80 else 0.1 + 0.9 * (N - t) / 20),  # a fifth of all steps
}


@pytest.mark.parametrize("schedule", FORMULAS)
def test_each_schedule_has_its_closed_formula(schedule: Any) -> None:
    more, formula = FORMULAS[schedule]
    options = TrainConfig(steps=N, warmup=WARM, lr=2.0, schedule=schedule.split()[0], **more)
    found = [2.0 * share_at(step, options) for step in range(1, N + 1)]
    assert found[:WARM] == pytest.approx([2.0 * t / WARM for t in range(1, WARM + 1)])
    assert found[WARM:] == pytest.approx([2.0 * formula(t) for t in range(WARM + 1, N + 1)])


def test_groups_of_an_optimizer_keep_their_proportions() -> None:
    """Also after a checkpoint restored the rates of an earlier step."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.4, 0.1)]
    optimizer = torch.optim.SGD(groups)
    options = TrainConfig(steps=10, warmup=0, schedule="linear", final_lr=0.0)
    rates = LearningRates(options, optimizer, None, None, is_own=True)
    for group in optimizer.param_groups:
        group["lr"] = 123.0
    assert rates.before(5) == pytest.approx(0.2)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2, 0.05])
    left = LearningRates(TrainConfig(warmup=50), torch.optim.SGD(groups), None, None, is_own=True)
    assert left.before(1) == 0.2  # as it is


OLD, NEW = {"lr": 0.4, "momentum": 0.9}, {"lr": 0.3, "momentum": 0.5}


def test_a_resumed_optimizer_has_the_runs_options_and_the_checkpoints_counts() -> None:
    old, new = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], **options) for options in (OLD, NEW))
    for optimizer, count in ((old, 5), (new, 0)):  # a count such as schedule-free optimizers have
        optimizer.param_groups[0]["count"] = count
    rates = LearningRates(TrainConfig(), new, None, None, is_own=True)
    new.load_state_dict(old.state_dict())
    rates.resume()
    (group,) = new.param_groups
    assert {name: group[name] for name in (*NEW, "count")} == {**NEW, "count": 5}


@pytest.mark.parametrize("name", [*OPTIMIZERS, "torch.optim.RMSprop", "torch.optim:Adam"])
def test_optimizers_are_found_by_name(name: str) -> None:
    config = command.read(["--optimizer", name, "--optimizer.lr", "0.25"])[0]
    make = optimizer_of(config.parts)
    assert make is not None
    made = make([torch.nn.Parameter(torch.zeros(2))])
    assert type(made).__name__.lower() == name.rpartition(".")[2].rpartition(":")[2].lower()
    assert made.param_groups[0]["lr"] == 0.25
    check_optimizer(make)


def test_options_may_be_several_numbers(tmp_path: Any) -> None:
    run_file = tmp_path / "run.yaml"
    run_file.write_text("optimizer: {class_path: adamw, betas: [0.5, 0.75], fused: true}\n")
    by_flags = command.read(["--optimizer", "adamw", "--optimizer.betas", "0.5,0.75", "--optimizer.fused", "true"])[0]
    assert by_flags == command.read(["--config", str(run_file)])[0]
    assert by_flags.parts["optimizer"].options["betas"] == (0.5, 0.75)
    assert command.read(["--optimizer", "Rprop"])[0].parts["optimizer"].options["step_sizes"] == (1e-06, 50)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sgd", "--optimizer.lr", "-1"], "optimizer: Invalid learning rate: -1"),
        (["adamw", "--optimizer.betas", "2,3"], "optimizer: Invalid beta parameter at index 0: 2.0."),
        (["torch.optim.LBFGS"], "optimizer LBFGS recomputes the loss in its step"),
        (["torch.optim.Muon"], "optimizer: Muon only supports 2D parameters"),
        (["torch.nn.Linear", "--optimizer.out_features", "2"], "optimizer"),
    ],
)
def test_an_optimizer_that_refuses_its_options_is_reported_before_ranks_start(words: list[str], expected: str) -> None:
    make = optimizer_of(command.read(["--optimizer", *words])[0].parts)
    with pytest.raises(UsageError) as error:
        check_optimizer(make)
    assert expected in str(error.value)
