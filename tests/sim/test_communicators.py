"""The communicators of a model: of a job's own kind, and on streams of their own."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

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
