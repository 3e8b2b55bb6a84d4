"""Real disks that fill up during a job: allocated files stay usable, and new ones are refused with an error."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accordion as acc
from tests.support import disks, models
from tests.support.checks import assert_equal, one_loss
from tests.support.offloads import disk_of_all

FULL_STEP, STEPS = 2, 4  # the disk is full in this step


class Job:
    """A training job that leaves out one block until a step, at which its states are first written."""

    def __init__(self, seed: int = 0, **options: Any) -> None:
        self.model = acc.shard(models.seeded(seed), **options)
        self.optimizer = acc.wrap_optimizer(torch.optim.AdamW(self.model.parameters(), lr=1e-2))

    def step(self, step: int) -> None:
        one_loss(self.model, step).backward()
        for p in self.model.blocks[2].parameters() if step < FULL_STEP else ():
            p.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad()
        acc.synchronize(self.model)

    def full(self) -> dict[str, torch.Tensor]:
        return acc.full_state_dict(self.model, rank0_only=False)


def wanted(mesh: Any, checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the result without offload, and save a checkpoint before the step at which the disk is full."""
    job = Job(mesh=mesh)
    for step in range(STEPS):
        if step == FULL_STEP:
            acc.save(checkpoint, job.model, job.optimizer)
        job.step(step)
    return job.full()


def resumed(mesh: Any, checkpoint: Path, offload: acc.Offload) -> dict[str, torch.Tensor]:
    job = Job(seed=5, mesh=mesh, offload=offload)
    acc.load(checkpoint, job.model, job.optimizer)
    for step in range(FULL_STEP, STEPS):
        job.step(step)
    return job.full()


def fills_up(mesh: Any, swap: Path, checkpoint: Path) -> None:
    """A job continues on a disk that was filled meanwhile; a new model is refused, and leaves no file."""
    expected = wanted(mesh, checkpoint)
    job = Job(mesh=mesh, offload=disk_of_all(swap))
    for step in range(STEPS):
        if step == FULL_STEP:
            filler = disks.fill(swap)
            extra = nn.Linear(256, 256)
            with pytest.raises(acc.OffloadError, match=rf"{swap} has no room for \d+ bytes .*No space left on device"):
                acc.shard(extra, mesh=mesh, offload=disk_of_all(swap))
            assert os.listdir(swap) == [filler.name]
        job.step(step)
    assert_equal(job.full(), expected)
    filler.unlink()
    assert_equal(resumed(mesh, checkpoint, disk_of_all(swap)), expected)


def test_a_disk_that_fills_up_during_a_job(world, tmp_path):
    with disks.mounted(tmp_path / "swap", "size=2m") as swap:
        world.run(1, fills_up, swap, tmp_path / "checkpoint")
