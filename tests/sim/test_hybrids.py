"""A hybrid's two reduces: the one between nodes runs during the next one inside a node, and the backward does not wait for it."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

import accordion as acc
from accordion.engine.communicator import Communicator, Pending
from tests.devices import device
from tests.inside import engine_in
from tests.sim.test_gathers import one_step, small_blocks, traced
from tests.support.ranked import on_mesh

pytestmark = pytest.mark.sim
UNITS = 6
SLOW = 200_000_000  # cycles at 1 GHz: far longer than a loaded machine takes to give the device four units


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "HYBRID_SHARD_OPTIM"])
@on_mesh((2, 2), ("replicate", "shard"))
def test_reduces_between_nodes_delay_neither_the_backward_nor_reduces_inside_a_node(mesh, strategy: str) -> None:
    """Reduces between nodes are slow in one backward. Gradients are those without sharding."""
    alone, model = small_blocks(UNITS), small_blocks(UNITS)
    acc.shard(model, mesh, units={nn.Sequential}, strategy=getattr(acc, strategy))
    context = engine_in(model).context
    between = context.replicate.reduce
    plain = {name: getattr(Communicator, name) for name in ("sum", "exchange", "scatter_sum")}

    def slowly(name: str):
        def call(communicator: Communicator, *args) -> Pending:
            if communicator is between:
                torch.sim._sleep(SLOW)
            return plain[name](communicator, *args)

        return call

    for _ in range(3):
        x = torch.randn(4, 16)
        for m, inputs in ((alone, x), (model, x.to(device()))):
            m.zero_grad()
            one_step(m, inputs)
        for own, want in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(own.grad.full_tensor().cpu(), want.grad)
    model.zero_grad()
    loss = model(x.to(device())).square().mean()
    with mock.patch.multiple(Communicator, **{name: slowly(name) for name in plain}):
        events = traced(loss.backward)
    inside, between = (
        [end for kind, name, on, _, _, end in events if kind == "kernel" and name.startswith("ccl_") and on == stream]
        for stream in (context.reduce_stream.stream.stream_id, context.replicate_stream.stream.stream_id)
    )
    assert len(inside) == len(between) == UNITS
    assert inside[3] < between[1], "the fourth reduce inside a node waited for the second between nodes"
