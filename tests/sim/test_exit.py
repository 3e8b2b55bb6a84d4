"""After a pass that fails, the host does not wait for the device, where a collective may never end."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import accordion as acc
from tests.devices import device
from tests.inside import engine_in
from tests.safety.test_exit import ALONE, assert_each_exits_alone
from tests.support.fails_alone import Block, Model
from tests.support.ranked import on_world

pytestmark = pytest.mark.sim


def test_a_rank_that_fails_alone_exits_at_once(tmp_path):
    assert_each_exits_alone("sim", tmp_path, ALONE)


waits: list[str] = []
"""Waits of the host since the last pass that failed."""


def fail() -> None:
    waits.clear()
    torch.sim.tell_waits(lambda why, stream: waits.append(why))
    raise ValueError("planted")


def trained(model: nn.Module, steps: int) -> list[Tensor]:
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters()))
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(4, 16, device="cpu").to(device())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    acc.synchronize(model)
    return [p.to_local().detach().clone() for p in model.parameters()]


def waits_after(model: nn.Module, fails: str, then: Callable[[], None]) -> list[str]:
    """Return the waits of the host from the error of a pass until `then` has returned."""
    gc.collect()
    model.fails = f"{fails}, absent gradients"
    with pytest.raises(ValueError, match="planted"):
        model(torch.ones(4, 16, device=device(), requires_grad=True)).square().mean().backward()
    model.fails = ""
    then()
    torch.sim.tell_waits(None)
    return list(waits)


OFFLOADS = [None, acc.Offload(params="host", optimizer="host"), acc.Offload(activations="host")]


@pytest.mark.parametrize("fails", ["forward", "backward"])
@pytest.mark.parametrize("offload", OFFLOADS, ids=["none", "host", "activations"])
@on_world(2)
def test_the_host_waits_for_nothing_after_a_pass_that_failed(mesh, fails: str, offload: acc.Offload | None) -> None:
    """Fail, go on as a model that did not fail, fail again, and end the model."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        activations = "full" if offload is not None and offload.activations != "device" else "none"
        model = acc.shard(
            Model(16, fail).to(device()), mesh, units=[Block], offload=offload, checkpoint_activations=activations
        )
        trained(model, 2)
        models.append(model)
    model, other = models
    assert waits_after(model, fails, engine_in(model).recover) == []
    model.zero_grad()
    for mine, same in zip(trained(model, 2), trained(other, 2), strict=True):
        assert torch.equal(mine, same)
    assert waits_after(model, fails, engine_in(model).dismantle) == []
