"""Optimizers of sharded parameters: ordinary, wrapped and refused ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import accordion as acc
from tests.support import models, reference
from tests.support.checks import assert_close, assert_equal, mean_grads, one_loss
from tests.support.ranked import on_world
from tests.support.reference import params_of
from tests.support.sample import sampled


@on_world(2)
def test_optimizer_made_before_shard_raises(mesh) -> None:
    for wrong in ("step", "zero_grad", "wrap"):
        plain = models.plain()
        optimizer = reference.adamw(plain.parameters())
        model = acc.shard(plain, mesh=mesh)
        one_loss(model).backward()
        with pytest.raises(acc.UsageError, match=r"made before shard.*model\.parameters\(\)"):
            acc.wrap_optimizer(optimizer) if wrong == "wrap" else getattr(optimizer, wrong)()


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam_foreach": (torch.optim.Adam, {"lr": 1e-2, "foreach": True}),
    "adamw_fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "adamw_amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "adamax": (torch.optim.Adamax, {"lr": 1e-2}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-2}),
    "radam": (torch.optim.RAdam, {"lr": 1e-2}),
    "asgd": (torch.optim.ASGD, {"lr": 1e-2}),
    "rprop": (torch.optim.Rprop, {"lr": 1e-3}),
}


@pytest.mark.parametrize("kind", sampled(OPTIMIZERS, ("sgd", "adamw_fused", "adagrad", "rprop").__contains__))
@on_world(2)
def test_optimizers_step_equally_with_and_without_wrap_optimizer(mesh, kind: str) -> None:
    """Step an ordinary optimizer, wrapped or not, with groups and a scheduler."""
    make, options = OPTIMIZERS[kind]
    found = []
    for way in (
        ("plain", "wrapped") if kind == "rprop" else ("plain", "sharded", "wrapped")
    ):  # torch has no rule for rprop
        model = models.plain()
        if way != "plain":
            model = acc.shard(model, mesh=mesh)
        decay = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() <= 1]
        optimizer = make([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], **options)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        if way == "wrapped":  # the schedule goes on counting the steps, else it warns, which fails here
            assert acc.wrap_optimizer(optimizer) is optimizer
            assert acc.wrap_optimizer(optimizer) is optimizer
            assert isinstance(optimizer, make)
        losses = []
        for step in range(4):
            loss = one_loss(model, step)
            loss.backward()
            if way == "plain":
                for p, grad in zip(model.parameters(), mean_grads(mesh, model).values(), strict=True):
                    p.grad = grad
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            schedule.step()
            losses.append(loss.item())
        found.append((losses, schedule.get_last_lr(), params_of(model)))
        if way == "wrapped":
            assert all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
            assert [p for group in optimizer.param_groups for p in group["params"]] == [*decay, *rest]
            states = [v for entry in optimizer.state.values() for v in entry.values() if v.dim()]
            assert all(isinstance(v, DTensor) for v in states)
    for losses, rates, params in found[1:]:
        assert losses == pytest.approx(found[0][0], rel=1e-6)
        assert rates == found[0][1]
        assert_close(params, found[0][2], 1e-4)
    assert_equal(found[1][2], found[-1][2])


@on_world(2)
def test_wrapped_optimizer_takes_a_closure(mesh) -> None:
    """Step a wrapped optimizer with a closure, and with parameters without a gradient."""
    model = acc.shard(models.spare(), mesh=mesh)
    optimizer = acc.wrap_optimizer(reference.adamw(model.parameters()))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = one_loss(model)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(3)]
    assert losses[2] < losses[0]
    assert model.blocks[0].never not in optimizer.state
    assert model.blocks[0].up.weight in optimizer.state


@on_world(2)
def test_adafactor_and_lbfgs_raise_and_name_adamw(mesh) -> None:
    model = acc.shard(models.plain(), mesh=mesh)
    one_loss(model).backward()
    for use in (lambda optimizer: optimizer.step(), partial(acc.wrap_optimizer, elementwise=True)):
        with pytest.raises(acc.UsageError, match=r"Adafactor keeps .* a rank holds only some rows.*use AdamW"):
            use(torch.optim.Adafactor(model.parameters()))
    lbfgs = torch.optim.LBFGS(model.parameters())
    for use in (lambda: lbfgs.step(lambda: one_loss(model)), lambda: acc.wrap_optimizer(lbfgs)):
        with pytest.raises(acc.UsageError, match=r"LBFGS computes with .* sharded parameters are rows.*use AdamW"):
            use()
    whole = acc.shard(models.plain(), mesh=mesh, strategy=acc.NO_SHARD)
    one_loss(whole).backward()
    torch.optim.Adafactor(whole.parameters()).step()
