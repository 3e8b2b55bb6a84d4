"""A hybrid's two reduces: the one between nodes runs beside the one inside, and the backward does not wait for it."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

import accordion as acc
from accordion.engine.communicator import Communicator, Pending
from tests.devices import device
from tests.inside import engine_in
from tests.support.ranked import on_mesh

pytestmark = pytest.mark.sim
UNITS = 6
SLOW = 200_000_000  # cycles at 1 GHz: far longer than a loaded machine takes to give the device four units


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(UNITS)])


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "HYBRID_SHARD_OPTIM"])
@on_mesh((2, 2), ("replicate", "shard"))
def test_what_goes_over_nodes_holds_up_neither_the_backward_nor_the_reduce_inside_of_one(mesh, strategy: str) -> None:
    """Reduces between nodes are slow in this backward."""
    model = acc.shard(blocks(), mesh, units={nn.Sequential}, strategy=getattr(acc, strategy))
    context = engine_in(model).context
    between, x = context.replicate.reduce, torch.randn(4, 32, device=device())
    plain = {name: getattr(Communicator, name) for name in ("sum", "exchange", "scatter_sum")}

    def slowly(name: str):
        def call(communicator: Communicator, *args) -> Pending:
            if communicator is between:
                torch.sim._sleep(SLOW)
            return plain[name](communicator, *args)

        return call

    for _ in range(2):
        model(x).square().mean().backward()
        model.zero_grad()
    loss = model(x).square().mean()
    torch.accelerator.synchronize()
    torch.sim.trace(True)
    with mock.patch.multiple(Communicator, **{name: slowly(name) for name in plain}):
        loss.backward()
    torch.accelerator.synchronize()
    events = torch.sim.trace(False)
    inside, between = (
        [end for kind, name, on, _, _, end in events if kind == "kernel" and name.startswith("ccl_") and on == stream]
        for stream in (context.reduce_stream.stream.stream_id, context.replicate_stream.stream.stream_id)
    )
    assert len(inside) == len(between) == UNITS
    assert inside[3] < between[1], "the fourth reduce inside a node waited for the second between nodes"


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "HYBRID_SHARD_OPTIM"])
@on_mesh((2, 2), ("replicate", "shard"))
def test_gradients_are_those_without_sharding(mesh, strategy: str) -> None:
    model = acc.shard(blocks(), mesh, units={nn.Sequential}, strategy=getattr(acc, strategy))
    alone = blocks()
    for _ in range(3):
        x = torch.randn(4, 32)
        for m in (model, alone):
            m.zero_grad()
            m(x.to(device()) if m is model else x).square().mean().backward()
        for own, want in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(own.grad.full_tensor().cpu(), want.grad)
