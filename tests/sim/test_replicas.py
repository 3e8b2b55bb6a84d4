"""Replicas are compared on their device: the host waits once, however many parameters there are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import accordion as acc
from accordion.config import STRATEGIES
from tests.devices import device
from tests.support import models
from tests.support.checks import mesh_of, one_loss

pytestmark = pytest.mark.sim


def waits_of(mesh, strategy: acc.Strategy, folder: Path) -> tuple[int, int]:
    """Waits of the host in the first forward, which compares a sample, and in a save in the background."""
    model = acc.shard(models.plain().to(device()), mesh=mesh, strategy=strategy, units={models.Block})
    before = torch.sim.num_waits()
    one_loss(model, 0)
    in_forward = torch.sim.num_waits() - before
    acc.save(folder / "first", model, background=True).wait()  # which pins memory
    before = torch.sim.num_waits()
    saving = acc.save(folder / "second", model, background=True)
    in_save = torch.sim.num_waits() - before
    saving.wait()
    return in_forward, in_save


def test_to_compare_replicas_the_host_waits_once(world, tmp_path):
    full = acc.FULL_SHARD
    (alone, saving), *_ = world.run_mesh(*mesh_of(full), waits_of, full, tmp_path / "full_shard")
    for name in ("no_shard", "hybrid_shard"):
        strategy = STRATEGIES[name]
        for in_forward, in_save in world.run_mesh(*mesh_of(strategy), waits_of, strategy, tmp_path / name):
            assert in_forward <= alone + 1
            assert in_save <= saving + 1
