"""Ranks that step differently are named in the next backward, with each difference and its first step; others pass."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import accordion as acc
from accordion import _torch
from accordion.config import STRATEGIES
from accordion.optimizers.wrap import StepHooks
from tests.support import models
from tests.support.checks import mesh_of, one_loss, under
from tests.support.ranked import on_mesh, on_world
from tests.support.sample import sampled

NUM_STEPS = 12  # a reduce bears the digest at once; over the hub all say how they step a few backwards later


def trains(mesh, strategy: acc.Strategy, how: str, wrapped: bool, **more: Any) -> str:
    """Return this rank's error if the last rank does something else in step 3."""
    is_other = dist.get_rank() == mesh.size() - 1
    model = acc.shard(models.plain(), mesh=mesh, strategy=strategy, units={models.Block}, **more)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    if wrapped:
        optimizer = acc.wrap_optimizer(optimizer)
    optimizer.param_groups[0]["helper"] = object()  # whose text is another one in each process
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    try:
        for step in range(1, NUM_STEPS + 1):
            differs = is_other and step == 3
            if differs and how == "lr":
                optimizer.param_groups[0]["lr"] = 0.5
            if differs and how == "half":
                optimizer.param_groups[0]["params"].pop()
            model.train(not (differs and how == "eval"))
            with torch.autocast("cpu", torch.bfloat16, enabled=differs and how == "autocast"):
                loss = one_loss(model, step)
            loss.backward()
            acc.clip_grad_norm_(model, 0.5 if differs and how == "clip" else 1.0)
            if differs and how == "cleared":
                optimizer.zero_grad()
            if not (differs and how == "step"):
                optimizer.step()
            if not (differs and how == "zero_grad"):
                optimizer.zero_grad()
            if differs and how == "weights":
                with torch.no_grad():
                    next(model.parameters()).add_(1.0)
            schedule.step()
    except acc.DivergenceError as error:
        return str(error)
    return ""


DIFFERENCES = {
    "lr": "lr 0.5 (rank 0: 0.000333333)",
    "clip": "clip_grad_norm_ to 0.5 by norm 2 (rank 0: to 1 by norm 2)",
    "step": "steps before it 0 (rank 0: 1)",
    "zero_grad": "gradients not cleared before it (zero_grad) (rank 0: none)",
    "weights": "weights written after the optimizer's step (rank 0: none)",
    "half": "number of parameters ",
    "cleared": "gradients at its step cleared (rank 0: none)",
    "eval": "model in eval mode (rank 0: none)",
    "autocast": "autocast torch.bfloat16 (rank 0: none)",
}


def check_named(mesh, how: str, strategy: acc.Strategy = acc.FULL_SHARD, **more: Any) -> None:
    text = trains(mesh, strategy, how, True, **more)
    assert text.startswith("ranks step differently since step 3: "), (how, text)
    assert f"rank {mesh.size() - 1} has {DIFFERENCES[how]}" in text, (how, text)


# In the second and third rows no reduce carries the digest.
@pytest.mark.parametrize(
    ("hows", "more"),
    [
        (list(DIFFERENCES), {}),
        (["lr", "weights"], {"offload": acc.Offload(optimizer="host")}),
        (["lr", "weights"], {"precision": acc.Precision(params=torch.bfloat16, reduce=torch.bfloat16)}),
    ],
    ids=["default", "states on host", "reduced in bf16"],
)
@on_mesh((2,), pool="alone")
def test_ranks_that_step_differently_are_named(mesh, hows: list[str], more: dict[str, Any]) -> None:
    for how in hows:
        check_named(mesh, how, **more)


@under("shard_optim", "hybrid_shard")
@on_mesh(lambda given: mesh_of(STRATEGIES[given["strategy"]]), pool="alone")
def test_ranks_that_step_differently_are_named_with_every_strategy(mesh, strategy: str) -> None:
    check_named(mesh, "lr", STRATEGIES[strategy])


ALIKE = [(strategy, wrapped) for strategy in STRATEGIES for wrapped in (True, False)]
SHOWN = {("hybrid_shard", True), ("full_shard", False)}


@pytest.mark.parametrize(("strategy", "wrapped"), sampled(ALIKE, lambda *row: row in SHOWN))
def test_ranks_that_step_equally_pass(world, strategy, wrapped):
    assert set(world.run_mesh(*mesh_of(STRATEGIES[strategy]), trains, STRATEGIES[strategy], "alike", wrapped)) == {""}


@on_world(2)
def test_ranks_with_gradients_of_different_parameters_under_no_sync_pass(mesh) -> None:
    branches = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    branches.forward = lambda chosen: sum(branches[i](torch.ones(1, 4)).sum() for i in chosen)
    model = acc.shard(branches, mesh=mesh, units=lambda name, module: False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with acc.no_sync(model):
            model([mesh.get_local_rank()]).backward()
        model([0, 1]).backward()
        optimizer.step()
        optimizer.zero_grad()


@on_world(2)
def test_a_model_may_be_collected_during_a_step(mesh) -> None:
    """A model is collected while torch iterates over its hooks after a step."""
    kept: list[Any] = []

    def drop(*_: Any) -> None:
        del kept[1:]
        gc.collect()

    handle = register_optimizer_step_post_hook(drop)  # before those of the models
    try:
        kept += [acc.shard(models.plain(), mesh=mesh, strategy=acc.FULL_SHARD, units={models.Block}) for _ in range(2)]
        optimizer = torch.optim.SGD(kept[0].parameters(), lr=0.1)
        one_loss(kept[0], 0).backward()
        optimizer.step()
    finally:
        handle.remove()


@on_world(2)
def test_all_models_of_a_program_share_one_hook(mesh) -> None:
    for _ in range(3):
        acc.shard(models.plain(), mesh=mesh, units={models.Block})
    owners = [getattr(hook, "__self__", None) for hook in _torch.hooks_after_any_step()]
    assert sum(isinstance(owner, StepHooks) for owner in owners) == 1
