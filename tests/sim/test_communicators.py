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
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import accordion as acc
from accordion.bench.model import NineBlock
from tests.devices import device
from tests.inside import engine_in
from tests.sim.test_gathers import one_step, traced
from tests.sim.test_host_waits_for_gradients import counted_waits
from tests.support.ranked import on_world

pytestmark = pytest.mark.sim


@on_world(4)
def test_the_second_communicator_waits_as_long_as_the_jobs_own(mesh) -> None:
    axis = engine_in(acc.shard(nn.Sequential(nn.Linear(8, 8)), mesh)).context.shard
    assert axis.gather.group is not axis.reduce.group
    gathering, reducing = (
        communicator.group._get_backend(torch.device(device().type)).options._timeout
        for communicator in (axis.gather, axis.reduce)
    )
    assert gathering == reducing != timedelta(minutes=30), "the job's is not torch's default"


@on_world(3)
def test_models_over_one_mesh_share_its_communicators(mesh) -> None:
    """Models are sharded and garbage-collected one after the other."""
    groups = dist.distributed_c10d._world.pg_map
    before = len(groups)
    for _ in range(4):
        model = acc.shard(nn.Sequential(nn.Linear(8, 8)), mesh)
        model(torch.ones(2, 8, device=device())).sum().backward()
    assert len(groups) - before <= 1


@contextmanager
def mesh_of(library: str) -> Iterator[DeviceMesh]:
    """Context manager that yields a mesh of all ranks, whose groups, and those created inside, use a library of that name."""
    with mock.patch.dict(os.environ, SIM_CCL_NAME=library):
        yield DeviceMesh.from_group(dist.new_group(), "sim")


NUM_BLOCKS = 3


@pytest.mark.parametrize("reduce", ["exchange", "reduce_scatter"])
@pytest.mark.parametrize("library", ["nccl", "nccl2", "a vendor's"])
@on_world(4)
def test_every_library_of_a_device_is_left_to_its_streams(mesh, library: str, reduce: str) -> None:
    """torch 2.15 makes an nccl2 where NCCL is asked for, which does not coalesce: there more is packed."""
    torch.manual_seed(0)
    with mesh_of(library) as own:
        # Seven matrices of 2 MiB and two vectors in each block.
        model = nn.Sequential(*[NineBlock(1024, 512) for _ in range(NUM_BLOCKS)]).to(device())
        acc.shard(model, own, units={NineBlock}, strategy=dataclasses.replace(acc.SHARD_GRAD_OP, reduce=reduce))
    axis = engine_in(model).context.shard
    assert axis.gather.is_ordered
    assert axis.gather.group is not axis.reduce.group
    x, waits = torch.randn(4, 512, device=device()), list[int]()

    def step() -> None:
        with counted_waits(waits):
            one_step(model, x)
        model.zero_grad()

    for _ in range(3):
        step()
    launches = sum(kind == "kernel" and name.startswith("ccl_") for kind, name, *_ in traced(step))
    assert waits[1:] == [0, 0, 0]
    assert launches == 2 * NUM_BLOCKS, "one to gather, one to reduce"
