"""Parameters, gradients and states on disk: in chunks, read ahead, read and written as often as planned."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import accordion as acc
from accordion.offload.disk_shards import DiskShards
from tests.inside import engine_in, units_of
from tests.support import models
from tests.support.checks import go_on, one_loss
from tests.support.offloads import chunks_of_at_most, disk, disk_of_all
from tests.support.ranked import on_world
from tests.support.reference import local_of, params_of


@on_world(1)
def test_states_on_disk_go_through_small_buffers(mesh, tmp_path: Path) -> None:
    """States in a file are read and written once a step through small buffers, and equal those without offload."""
    found = []
    for options in ({}, {"offload": disk(tmp_path)}):
        with chunks_of_at_most(8192):
            model = acc.shard(models.wide(), mesh=mesh, **options)
            optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, amsgrad=True))
            go_on(model, optimizer, range(3))
        state = [local_of(v) for entry in optimizer.state_dict()["state"].values() for v in entry.values()]
        acc.synchronize(model)
        found.append([*state, *params_of(model).values()])
        if options:
            (held,) = engine_in(model).context.shard_buffers.states.values()
            (file,) = held.files
            numel = sum(local_of(p).numel() for p in model.parameters())
            floor = 3 * 4 * numel  # three states of four bytes
            assert held.buffer_bytes == 4 * 3 * 4 * 8192
            assert floor <= file.traffic["written"] / 3 <= 1.25 * floor
            assert file.traffic["read"] * 3 == file.traffic["written"] * 2, "there is nothing to read in the first step"
            low = file._bytes.data_ptr()
            shaped = [v for v in state if v.dim()]
            assert all(low <= v.data_ptr() < low + file.num_bytes for v in shaped if v.numel())
            assert os.listdir(tmp_path) == []
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*found, strict=True))


class KeepsHistory(torch.optim.SGD):
    """An optimizer whose states are lists of gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p].setdefault("history", []).append(p.grad.clone())


@on_world(2)
def test_an_optimizer_with_lists_of_states_is_refused(mesh, tmp_path: Path) -> None:
    """States in lists cannot be split into chunks."""
    model = acc.shard(models.plain(), mesh=mesh, offload=disk(tmp_path))
    optimizer = acc.wrap_optimizer(KeepsHistory(model.parameters()), elementwise=True)
    go_on(model, optimizer, [0])
    with pytest.raises(acc.UsageError, match=r"created a state 'history' .* or that is a list or dict"):
        acc.synchronize(model)


@on_world(1)
def test_each_step_reads_and_writes_everything_on_disk_once(mesh, tmp_path: Path) -> None:
    """Only the estimated memory is used; each step reads and writes all data once, and parameters again for each gather."""
    model = acc.shard(
        models.wide(), mesh=mesh, precision=acc.Precision(params=torch.bfloat16), offload=disk_of_all(tmp_path)
    )
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
    tiers = engine_in(model).context.shard_buffers
    (allocator,) = tiers.allocators.values()
    numel = sum(local_of(p).numel() for p in model.parameters())
    before = dict(allocator.file.traffic)
    for step in range(4):
        if step == 1:
            acc.synchronize(model)
            before = dict(allocator.file.traffic)
        go_on(model, optimizer, [step])
    acc.synchronize(model)
    moved = {key: (allocator.file.traffic[key] - before[key]) / 3 for key in before}
    masters, rows = 4 * numel, 2 * numel
    assert 2 * masters + rows <= moved["written"] + masters <= 1.3 * (2 * masters + rows) + masters, "and the gradients"
    assert moved["read"] <= 1.3 * (2 * masters + 2 * rows) + 2**18, moved
    low, high = tiers.arena.memory.data_ptr(), tiers.arena.memory.data_ptr() + tiers.arena.num_bytes
    assert not any(low <= local_of(p).data_ptr() < high for p in model.parameters())
    largest = max(sum(p.cut.shard_numel for p in unit.params) for unit in units_of(model))
    assert tiers.arena.num_bytes <= (4 + 2 * 2) * largest + 2**18, "a landing buffer and two staging buffers"
    assert os.listdir(tmp_path) == []


@on_world(1)
def test_shards_on_disk_are_read_ahead(mesh, tmp_path: Path) -> None:
    """From the second pass on, reading the shards of a unit begins before its gather, in forward and backward."""
    model = acc.shard(models.plain(), mesh=mesh, offload=acc.Offload(params=f"disk:{tmp_path}", optimizer="host"))
    one_loss(model).backward()
    begun, late = [], []
    begin_read, refresh = DiskShards.begin_read, DiskShards.refresh

    def watched_read(shard_buffer: DiskShards, version: int) -> None:
        begun.append(shard_buffer)
        begin_read(shard_buffer, version)

    def watched_refresh(shard_buffer: DiskShards, version: int) -> Any:
        late.extend([shard_buffer] if shard_buffer not in begun else [])
        begun.clear()
        return refresh(shard_buffer, version)

    with mock.patch.multiple(DiskShards, begin_read=watched_read, refresh=watched_refresh):
        one_loss(model, 1)
    assert len(late) == 1, "the first unit, which nobody announces"
