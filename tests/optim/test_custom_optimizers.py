"""Optimizers of users: counts in groups and attributes, states that belong to no parameter, lists of parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import accordion as acc
from tests.support import models
from tests.support.checks import assert_close, go_on, mean_grads, one_loss, step_all
from tests.support.offloads import HOST, disk, disk_of_all
from tests.support.ranked import on_world, under_strategies
from tests.support.reference import params_of


class Momentum(torch.optim.Optimizer):
    """Momentum with bias correction by a count of steps that a subclass keeps."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def count(self) -> float:
        raise NotImplementedError

    def parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        correction = 1 - 0.9 ** self.count()
        for p in self.parameters():
            if p.grad is not None:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(0.9).add_(p.grad, alpha=0.1)
                p.sub_(momentum / correction, alpha=self.param_groups[0]["lr"])


class InGroup(Momentum):
    def count(self) -> float:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr_max"] = max(group["lr"], group.get("lr_max", 0.0))
            group.setdefault("decay", torch.ones(())).mul_(0.5)
        return self.param_groups[0]["count"]


class InState(Momentum):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.state["steps"] = {"count": 0, "sum": torch.zeros(())}

    def count(self) -> float:
        self.state["steps"]["count"] += 1
        self.state["steps"]["sum"] += 1
        return self.state["steps"]["sum"].item()


class Listing(Momentum):
    """An optimizer that counts in an attribute, and has its parameters in a list and as keys of a dict."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.own = super().parameters()
        self.signs = dict.fromkeys(self.own, 1.0)
        self.calls = {"count": 0}

    def count(self) -> float:
        self.calls["count"] += 1
        return self.calls["count"]

    def parameters(self) -> list[Tensor]:
        return [p for p in self.own if self.signs[p]]


class ByNorm(Momentum):
    """An optimizer that is not elementwise: its group has a number that depends on all gradients."""

    def count(self) -> float:
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.param_groups[0]["norm"] = float(torch.stack(norms).norm())
        return 1.0


class Hidden(Momentum):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        params = super().parameters()
        self.find = lambda: params

    def count(self) -> float:
        return 1.0

    def parameters(self) -> list[Tensor]:
        return self.find()


KINDS = (InGroup, InState, Listing)


def built(kind: type[Momentum], model: torch.nn.Module) -> Any:
    params = list(model.parameters())
    return kind([{"params": params[::2]}, {"params": params[1::2]}])


def left_by(optimizer: Any) -> list[Any]:
    """Return what a step changes besides parameters and their states."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    shared = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    return [str(groups), str(shared), str(getattr(optimizer, "calls", None))]


def expected(mesh, kind: type[Momentum]) -> Any:
    plain = models.plain()
    optimizer = built(kind, plain)
    for step in range(3):
        one_loss(plain, step).backward()
        for p, grad in zip(plain.parameters(), mean_grads(mesh, plain).values(), strict=True):
            p.grad = grad
        step_all([optimizer])
    return dict(plain.named_parameters()), left_by(optimizer)


def trained(model: Any, optimizer: Any, steps: range) -> Any:
    for step in steps:
        one_loss(model, step).backward()
        optimizer.step()
        left = left_by(optimizer)  # as soon as `step` returns
        optimizer.zero_grad()
    acc.synchronize(model)
    return left


@under_strategies("full_shard")
def test_custom_optimizer_counts_each_step_once_also_in_partial_steps_of_offload(
    mesh, strategy: acc.Strategy, tmp_path: Path
) -> None:
    device = acc.Offload(optimizer="host", step="device")
    for kind, tier in zip(KINDS, (HOST, disk_of_all(tmp_path), device), strict=True):
        params, left = expected(mesh, kind)
        for offload in (None, tier):
            model = acc.shard(models.plain(), mesh=mesh, strategy=strategy, offload=offload)
            optimizer = acc.wrap_optimizer(built(kind, model), elementwise=True)
            assert trained(model, optimizer, range(3)) == left, (kind, offload)
            assert_close(params_of(model), params, 1e-5)


@on_world(2)
def test_checkpoint_keeps_states_that_belong_to_no_parameter(mesh, tmp_path: Path) -> None:
    for kind in KINDS[:2]:
        params, left = expected(mesh, kind)
        for offload in (None, disk(tmp_path)):
            folder = tmp_path / f"{kind.__name__}-{offload is None}"
            model = acc.shard(models.plain(), mesh=mesh, offload=offload)
            optimizer = acc.wrap_optimizer(built(kind, model), elementwise=True)
            trained(model, optimizer, range(2))
            acc.save(folder, model, optimizer)
            model = acc.shard(models.plain(), mesh=mesh, offload=offload)
            optimizer = acc.wrap_optimizer(built(kind, model), elementwise=True)
            acc.load(folder, model, optimizer)
            assert trained(model, optimizer, range(2, 3)) == left
            assert_close(params_of(model), params, 1e-5)


@on_world(2)
def test_shared_state_that_differs_between_ranks_is_refused(mesh, tmp_path: Path) -> None:
    model = acc.shard(models.plain(), mesh=mesh)
    optimizer = acc.wrap_optimizer(InState(model.parameters()), elementwise=True)
    optimizer.state["steps"]["count"] = dist.get_rank()
    with pytest.raises(
        acc.CheckpointError, match=r"different states of the optimizer that belong to no parameter.*steps"
    ):
        acc.save(tmp_path / "c", model, optimizer)


@on_world(2)
def test_optimizers_that_hide_parameters_or_are_not_elementwise_are_refused(mesh) -> None:
    model = acc.shard(models.plain(), mesh=mesh, offload=acc.Offload(optimizer="host"))
    optimizer = acc.wrap_optimizer(ByNorm(model.parameters()), elementwise=True)
    go_on(model, optimizer, [0])
    with pytest.raises(acc.UsageError, match="ByNorm sets 'norm' by the elements that it steps"):
        acc.synchronize(model)
    model = acc.shard(models.plain(), mesh=mesh)
    optimizer = acc.wrap_optimizer(Hidden(model.parameters()), elementwise=True)
    one_loss(model).backward()
    with pytest.raises(acc.UsageError, match="Hidden holds its parameters in an object"):
        optimizer.step()
