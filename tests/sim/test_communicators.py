"""The communicators of a model: of a job's own kind, and on streams of their own."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import accordion as acc
from tests.devices import device
from tests.inside import engine_in

pytestmark = pytest.mark.sim


def time_outs(mesh) -> list[timedelta]:
    """Of the groups over which a model gathers and reduces."""
    axis = engine_in(acc.shard(nn.Sequential(nn.Linear(8, 8)), mesh)).context.shard
    assert axis.gather.group is not axis.reduce.group
    return [
        communicator.group._get_backend(torch.device(device().type)).options._timeout
        for communicator in (axis.gather, axis.reduce)
    ]


def test_the_second_communicator_waits_as_long_as_the_jobs_own(world):
    for gathering, reducing in world.run(world.num_ranks, time_outs):
        assert gathering == reducing != timedelta(minutes=30), "the job's is not torch's default"


def num_groups(mesh, num_models: int) -> int:
    """How many process groups models add that are sharded over one mesh and collected, one after the other."""
    groups = dist.distributed_c10d._world.pg_map
    before = len(groups)
    for _ in range(num_models):
        model = acc.shard(nn.Sequential(nn.Linear(8, 8)), mesh)
        model(torch.ones(2, 8, device=device())).sum().backward()
    return len(groups) - before


def test_models_over_one_mesh_share_its_communicators(world):
    for added in world.run(3, num_groups, 4):
        assert added <= 1


@contextmanager
def mesh_of(library: str) -> Iterator[DeviceMesh]:
    """A mesh of all ranks, which communicate through a library of that name; so do the groups that are made inside."""
    with mock.patch.dict(os.environ, SIM_CCL_NAME=library):
        yield DeviceMesh.from_group(dist.new_group(), "sim")


class Block(nn.Module):
    """As in a small Llama: seven weights of at most 2 MiB, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(512)
        self.attention = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(512, 1024, bias=False) for _ in range(2))
        self.down = nn.Linear(1024, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        for linear in self.attention:
            y = linear(y)
        return x + self.down(self.up[0](y).tanh() * self.up[1](y))


NUM_BLOCKS = 3


def waits_and_launches(mesh, library: str, reduce: str) -> tuple[list[int], int]:
    """Of each of four steps how often the host waits; of the last one how many collectives are launched."""
    torch.manual_seed(0)
    with mesh_of(library) as own:
        model = nn.Sequential(*[Block() for _ in range(NUM_BLOCKS)]).to(device())
        acc.shard(model, own, units={Block}, strategy=dataclasses.replace(acc.SHARD_GRAD_OP, reduce=reduce))
    axis = engine_in(model).context.shard
    assert axis.gather.is_ordered
    assert axis.gather.group is not axis.reduce.group
    x, waits = torch.randn(4, 512, device=device()), []
    for step in range(4):
        if step == 3:
            torch.accelerator.synchronize()
            torch.sim.trace(True)
        before = torch.sim.num_waits()
        model(x).square().mean().backward()
        model.zero_grad()
        waits.append(torch.sim.num_waits() - before)
    torch.accelerator.synchronize()
    events = torch.sim.trace(False)
    return waits, sum(kind == "kernel" and name.startswith("ccl_") for kind, name, *_ in events)


@pytest.mark.parametrize("reduce", ["exchange", "reduce_scatter"])
@pytest.mark.parametrize("library", ["nccl", "nccl2", "a vendor's"])
def test_every_library_of_a_device_is_left_to_its_streams(world, library, reduce):
    """torch 2.15 makes an nccl2 where NCCL is asked for, which does not coalesce: there more is packed."""
    for waits, launches in world.run(world.num_ranks, waits_and_launches, library, reduce):
        assert waits[1:] == [0, 0, 0]
        assert launches == 2 * NUM_BLOCKS, "one to gather, one to reduce"
