"""Offload changes where data is kept, read and written, and no bit of the result, under every strategy, for many models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import accordion as acc
from accordion.config import STRATEGIES
from accordion.offload.budget import estimate_memory
from accordion.offload.disk_shards import DiskShards
from tests.devices import device
from tests.inside import engine_in, units_of
from tests.support import models
from tests.support.checks import assert_equal, go_on, logged, mesh_of, one_loss, under
from tests.support.offloads import (
    HOST,
    MIXED,
    OPTIMIZER,
    SCENARIOS,
    chunks_of_at_most,
    disk,
    disk_of_all,
    fresh,
    places,
    same_as_without,
)
from tests.support.ranked import on_world
from tests.support.reference import local_of, params_of


@under("full_shard", "hybrid_shard_optim")
def test_no_bit_differs(world, strategy, tmp_path):
    policy = STRATEGIES[strategy]
    which = list(STRATEGIES).index(strategy)
    chosen = [SCENARIOS[which % len(SCENARIOS)], SCENARIOS[(which + 3) % len(SCENARIOS)]]
    world.run_mesh(*mesh_of(policy), same_as_without, policy, chosen, [HOST, disk(tmp_path)])


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_bit_differs_for_any_model(world, strategy, num_ranks, tmp_path):
    policy = STRATEGIES[strategy]
    world.run_mesh(
        *mesh_of(policy, num_ranks),
        same_as_without,
        policy,
        SCENARIOS,
        [HOST, OPTIMIZER, MIXED, disk(tmp_path), *places(tmp_path).values()],
        timeout_s=300,
    )


# -- where things are


@on_world(1)
def test_shards_and_gradients_are_in_one_allocation(mesh) -> None:
    """Shards and gradients are in the arena, one allocation; those of a unit with an override are not."""
    with logged() as messages:
        model = acc.shard(models.wide(), mesh=mesh, precision=acc.Precision(params=torch.bfloat16), offload=MIXED)
    arena = engine_in(model).context.shard_buffers.arena
    assert f"offload: parameters and gradients take {arena.num_bytes} bytes on the host and 0 on disk" in messages
    low, high = arena.memory.data_ptr(), arena.memory.data_ptr() + arena.num_bytes
    one_loss(model).backward()
    first = {name: local_of(p.grad).data_ptr() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for address in (local_of(p).data_ptr(), local_of(p.grad).data_ptr()):
            assert (low <= address < high) != name.startswith("blocks.1"), name
    kept = model.head.weight.grad
    value = local_of(kept).clone()
    model.zero_grad()
    one_loss(model, 1).backward()
    assert torch.equal(local_of(kept), value), "a gradient that the caller holds is the caller's"
    assert not torch.equal(local_of(model.head.weight.grad), value)
    again = {name: local_of(p.grad).data_ptr() for name, p in model.named_parameters()}
    assert again["head.weight"] != first["head.weight"]
    assert again["norm.weight"] == first["norm.weight"]


@on_world(1)
def test_gradients_that_are_added_on_the_cpu_do_not_use_the_landing_buffer(mesh) -> None:
    """On the CPU added gradients do not use the landing buffer, which does not become resident."""
    model = acc.shard(models.plain(), mesh=mesh, offload=HOST)
    landing = engine_in(model).context.shard_buffers._landing.fill_(7)
    for micro in range(3):
        one_loss(model, micro).backward()
    assert len(landing)
    if device().type == "cpu":
        assert bool((landing == 7).all())


@on_world(2)
def test_budgets_are_kept(mesh, tmp_path: Path) -> None:
    """Budgets move parameters to the device first, then whole units, from the first on; results are equal bit for bit."""
    found, policy = [], disk_of_all(tmp_path, device_bytes=60_000, host_bytes=120_000)
    for offload in (None, policy):
        model = acc.shard(models.plain(), mesh=mesh, offload=offload)
        optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
        go_on(model, optimizer, range(2))
        found.append(acc.full_state_dict(model, rank0_only=False))
    assert_equal(found[0], found[1])
    tiers = engine_in(model).context.shard_buffers
    kinds = [[place.partition(":")[0] for place in (o.params, o.rest_of_grads, o.optimizer)] for o in tiers.offloads]
    assert kinds == [["device"] * 3, ["device", "host", "host"], ["device", "host", "disk"], ["device", "host", "disk"]]
    assert tuple(tiers.offloads) == estimate_memory(models.plain(), policy, 2).places
    for options, message in (
        ({"host_bytes": 1000}, "host_bytes=1000 is less than the"),
        ({"device_bytes": 5, "overrides": {"blocks.0": acc.Offload()}}, "device_bytes=5 is less than the"),
        ({"host_bytes": (10, 1 << 30)[mesh.get_rank()]}, "host_bytes=10 is less|other ranks"),
    ):
        with pytest.raises(acc.UsageError, match=message):
            acc.shard(models.plain(), mesh=mesh, offload=disk(tmp_path, **options))


@on_world(2)
def test_estimates_equal_what_is_allocated(mesh, tmp_path: Path) -> None:
    """`estimate_memory`, also of a meta model, equals the bytes that are allocated, except for rounding to pages."""
    precision, num_ranks = acc.Precision(params=torch.bfloat16), mesh.size()
    for name, offload in {**places(tmp_path), "host": HOST, "mixed": MIXED, "states on disk": disk(tmp_path)}.items():
        with torch.device("meta"):
            said = estimate_memory(models.wide(), offload, num_ranks, precision=precision)
        model = acc.shard(models.wide(), mesh=mesh, precision=precision, offload=offload)
        with logged() as messages:
            optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters()))
        tiers = engine_in(model).context.shard_buffers
        states = list(tiers.states.values())
        reports = [m for m in messages if "optimizer states take" in m]
        assert len(reports) == len(states), name
        for one, message in zip(states, reports, strict=True):
            used = f"{one.host_bytes} bytes of host memory and {sum(f.num_bytes for f in one.files)} bytes on disk"
            assert f"{used}, their buffers {one.buffer_bytes} bytes on the host" in message, name
        files = [
            *(allocator.file for allocator in tiers.allocators.values()),
            *(f for one in states for f in one.files),
        ]
        on_disk = sum(f.num_bytes for f in files)
        assert tiers.arena.num_bytes == said.arena, name
        assert on_disk <= said.disk <= 1.1 * on_disk, name
        assert (
            sum(one.buffer_bytes for one in states) <= said.host_buffers <= 1.2 * sum(s.buffer_bytes for s in states)
        ), name
        go_on(model, optimizer, [0])
        acc.synchronize(model)
        units = [unit for unit in units_of(model) if tiers.offloads[unit.index].optimizer == "host"]
        on_host = {id(p.sharded) for unit in units for p in unit.params}
        held = [v for p, entry in optimizer.state.items() if id(p) in on_host for v in entry.values() if v.dim()]
        assert len(held) == 2 * len(on_host), name
        num_bytes = sum(local_of(v).nbytes for v in held)
        assert num_bytes <= said.host_states <= 1.1 * num_bytes + 4096 * len(held), name


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


@on_world(2)
def test_a_run_with_offload_goes_on_without_it_and_the_other_way_round(mesh, tmp_path: Path) -> None:
    """A run with offload continues without it, and the other way round, bit for bit."""
    results = []
    on_disk = {"offload": disk_of_all(tmp_path)}
    for first, then in (({}, {}), ({"offload": HOST}, {}), ({}, {"offload": OPTIMIZER}), (on_disk, {}), ({}, on_disk)):
        model, optimizer = fresh(mesh, **first)
        go_on(model, optimizer, range(2))
        folder = tmp_path / f"{len(results)}"
        acc.save(folder, model, optimizer)
        model, optimizer = fresh(mesh, seed=7, **then)
        acc.load(folder, model, optimizer)
        go_on(model, optimizer, [2])
        results.append(acc.full_state_dict(model, rank0_only=False))
    for other in results[1:]:
        assert_equal(other, results[0])
