"""Inputs of recomputed units on the host or disk: off the device between forward and backward, with results equal bit for bit."""

from __future__ import annotations

import errno
import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import accordion as acc
from accordion.offload import swap_file
from accordion.offload.activations import NUM_STAGES, ActivationOffload, HostActivationStore
from tests.devices import device
from tests.inside import engine_in
from tests.offload.test_faults import failing_calls
from tests.offload.test_files import cpu_resources
from tests.offload.test_programs import end_of
from tests.support import models
from tests.support.disks import fill, mounted
from tests.support.meters import Allocations
from tests.support.offloads import chunks_of_at_most, taken_by
from tests.support.ranked import on_world
from tests.support.reference import local_of
from tests.support.sample import sampled

ON_HOST = acc.Offload(activations="host")
NUM_BLOCKS = 6  # more than there are staging buffers for the disk


def on_disk(path: Path, **options: Any) -> acc.Offload:
    return acc.Offload(activations=f"disk:{path}", **options)


def activation_offload_of(model: nn.Module) -> ActivationOffload:
    return engine_in(model).context.shard_buffers.activation_offload


def recomputed(mesh, offload: acc.Offload | None, num_blocks: int = NUM_BLOCKS) -> nn.Module:
    """Return a sharded model whose blocks are all recomputed in the backward."""
    model = models.seeded(num_blocks=num_blocks)
    return acc.shard(model, mesh=mesh, checkpoint_activations="full", offload=offload)


def loss_of(model: nn.Module, seed: int, shape: tuple[int, int] = (2, 8)) -> Tensor:
    tokens = torch.randint(8, shape, generator=torch.Generator().manual_seed(seed)).to(device())
    return model(tokens).square().mean()


def same(mesh, path: Path, which: int) -> None:
    """Training with each kind of recomputation, other offload and debug="streams" is equal with activations in each tier."""
    all_away = dict.fromkeys(("params", "grads", "optimizer"), f"disk:{path}")
    mixed = {"blocks.1": acc.Offload(), "blocks.2": ON_HOST, "blocks.4": acc.Offload(activations=f"disk:{path}/other")}
    (path / "other").mkdir(exist_ok=True)
    cases = [
        ("full", {}, (), {}),
        ("full", {}, ("streams",), mixed),
        ("selective", {}, (), {}),
        ("every:2", {"params": "host", "optimizer": "host"}, ("streams",), {}),
        ("full", all_away, (), {}),
    ]
    checkpointing, places, debug, overrides = cases[which]
    wanted = None
    for activations in ("device", "host", f"disk:{path}"):
        offload = acc.Offload(activations=activations, **places)
        offload = replace(offload, overrides=overrides if activations != "device" else {})
        states = used(mesh, offload, checkpoint_activations=checkpointing, debug=debug)
        wanted = states if wanted is None else wanted
        pairs = enumerate(zip(states, wanted, strict=True))
        wrong = [i for i, (a, b) in pairs if not torch.equal(a, b)]
        assert not wrong, (checkpointing, activations, places, wrong)
    assert os.listdir(path) == ["other"]
    assert os.listdir(path / "other") == []


def used(mesh, offload: acc.Offload, **options: Any) -> list[Tensor]:
    """Train with unusual uses of forwards: several before a backward, one with two backwards or none, sums, other shapes."""
    model = acc.shard(models.seeded(num_blocks=NUM_BLOCKS), mesh=mesh, offload=offload, **options)
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses, shapes = [], [(5, 3), (4, 16)]
    with chunks_of_at_most(4096):
        for step in range(2):
            first, second = loss_of(model, step, shapes[step]), loss_of(model, step + 7)
            second.backward(retain_graph=True)
            loss_of(model, 50)  # nobody goes back
            (first + second).backward()
            model.eval()
            with torch.no_grad():
                losses.append(loss_of(model, 60))
            losses.append(loss_of(model, 61).detach())
            model.train()
            with acc.no_sync(model):
                loss_of(model, step + 20, shapes[-1 - step]).backward()
            loss_of(model, step + 30).backward()
            losses += [first.detach(), second.detach(), acc.clip_grad_norm_(model, 0.1)]
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    return losses + end_of(model, optimizer)


@on_world(1)
def test_inputs_leave_the_device_into_host_memory_that_is_reused(mesh) -> None:
    """Live memory after a forward is less by the inputs of all blocks; the host stores them in memory that is reused."""
    live, activation_offload = [], None
    num_blocks, inputs = 6, 8 * 64 * 32 * 4
    for offload in (None, ON_HOST):
        model = recomputed(mesh, offload, num_blocks)
        tokens = torch.zeros(8, 64, dtype=torch.int64, device=device())
        model(tokens).sum().backward()
        if offload is not None:
            activation_offload = activation_offload_of(model)
            assert taken_by(activation_offload) == (num_blocks * inputs, 0)
        with Allocations() as memory:
            loss = model(tokens).sum()
            gc.collect()
            memory.mark("forward")
            loss.backward()
        live.append(memory.live("forward"))
    assert taken_by(activation_offload) == (num_blocks * inputs, 0), (
        "the second step reuses the memory of the first one"
    )
    saved = live[0] - live[1]
    assert (num_blocks - 1) * inputs - 4096 <= saved <= num_blocks * inputs + 4096, (live, inputs)


@pytest.mark.parametrize("which", sampled(range(5), (1).__eq__))
def test_inputs_off_the_device_with_everything_else(world, which, tmp_path):
    world.run(2, same, tmp_path, which, timeout_s=300)


@pytest.mark.parametrize("direct", [swap_file.DIRECT, 0])
@on_world(1)
def test_inputs_on_disk_past_the_page_cache_and_through_it(mesh, direct: int, tmp_path: Path) -> None:
    """Host memory is a few buffers and the file as large as all inputs; neither grows in later steps of the same shapes."""
    inputs, num_blocks = 8 * 64 * 32 * 4, 8
    with mock.patch.object(swap_file, "DIRECT", direct), mock.patch.object(swap_file, "CHUNK_BYTES", 4096 * 3):
        model = recomputed(mesh, on_disk(tmp_path), num_blocks)
        loss_of(model, 0, (8, 64)).backward()
    activation_offload = activation_offload_of(model)
    taken = NUM_STAGES * inputs, num_blocks * inputs
    assert taken_by(activation_offload) == taken
    for seed in range(3):
        loss_of(model, seed, (8, 64))  # its graph goes, with what is on its way
        gc.collect()
        loss_of(model, seed, (8, 64)).backward()
    assert taken_by(activation_offload) == taken
    (store,) = activation_offload._stores.values()
    before = dict(store.file.traffic)
    loss_of(model, 9, (8, 64)).backward()
    store._collect()  # waits for what is under way
    assert store.file.traffic["written"] - before["written"] == num_blocks * inputs
    assert store.file.traffic["read"] - before["read"] == (num_blocks - NUM_STAGES) * inputs, "the last ones are there"
    loss_of(model, 9, (8, 65)).backward()
    assert taken_by(activation_offload)[1] <= 2 * num_blocks * (inputs + inputs // 64)
    store._collect()
    assert store._free == [(0, store.file.num_bytes)], "all of it is free, in one part"
    assert os.listdir(tmp_path) == []


@on_world(1)
def test_inputs_of_many_shapes_take_the_memory_of_the_largest(mesh, tmp_path: Path) -> None:
    """Inputs of many shapes in turn take as much host memory or disk as the largest ones."""
    for offload in (ON_HOST, on_disk(tmp_path)):
        model = recomputed(mesh, offload)
        for length in (40, 8, 33, 64, 1, 57, 64):
            loss_of(model, 0, (8, length)).backward()
        (on_host, disk_bytes), largest = taken_by(activation_offload_of(model)), 8 * 64 * 32 * 4
        assert on_host <= NUM_BLOCKS * (largest + largest // 8), "buffers that grew are larger"
        assert disk_bytes <= 2 * NUM_BLOCKS * largest


def test_inputs_that_grow_a_little_rarely_allocate_memory():
    """Replacing a buffer means waiting for the device and pinning memory."""
    store, made, page = HostActivationStore(cpu_resources()), [], 4096
    for num_pages in range(100, 200):
        slot = store.take(num_pages * page)
        made.extend([] if slot._buffer in made else [slot._buffer])
        slot.free(None)
        assert store.host_bytes <= num_pages * page * 9 / 8 + page
    assert len(made) <= 8


# -- faults


@on_world(1)
def test_a_disk_of_activations_that_fails_is_named(mesh, tmp_path: Path) -> None:
    """A failed write and a failed read raise an error that names the folder; the next step is correct."""
    faults = [
        (("pwritev", errno.ENOSPC), rf"of the swap file in {tmp_path} could not be written: No space left on device"),
        (("preadv", errno.EIO), rf"of the swap file in {tmp_path} could not be read: Input/output error"),
    ]
    wanted = None
    for fault, message in [(None, None), *faults]:
        model = recomputed(mesh, on_disk(tmp_path))
        if fault is not None:
            with failing_calls(*fault), pytest.raises(acc.OffloadError, match=message):
                loss_of(model, 1).backward()
        model.zero_grad()
        gc.collect()
        loss_of(model, 2).backward()
        grads = [local_of(p.grad).clone() for p in model.parameters()]
        wanted = grads if wanted is None else wanted
        assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True)), message
    assert os.listdir(tmp_path) == []


@on_world(2)
def test_activations_without_a_folder_or_recomputation_or_with_budgets_are_refused(mesh, tmp_path: Path) -> None:
    with pytest.raises(acc.UsageError, match="checkpoint_activations is 'none'; pass 'full'"):
        acc.shard(models.plain(), mesh=mesh, offload=ON_HOST)
    with pytest.raises(acc.UsageError, match=r"Offload\(activations='disk'\) is no place; did you mean 'disk:/path'?"):
        acc.Offload(activations="disk")
    with pytest.raises(acc.UsageError, match="offloaded state in /nowhere: No such file or directory; name a folder"):
        acc.shard(models.plain(), mesh=mesh, checkpoint_activations="full", offload=on_disk(Path("/nowhere")))
    for one, another in ((ON_HOST, on_disk(tmp_path)), (acc.Offload(), ON_HOST)):
        mine = one if mesh.get_rank() else another
        with pytest.raises(acc.DivergenceError, match="different models or settings"):
            acc.shard(models.plain(), mesh=mesh, checkpoint_activations="full", offload=mine)
    for options in ({"device_bytes": 10}, {"host_bytes": 10}):
        with pytest.raises(acc.UsageError, match=r"_bytes=10\) limits how much .* \(activations do not count\)"):
            on_disk(tmp_path, **options)
    offload = on_disk(tmp_path, optimizer="host", device_bytes=2**40)  # everything else is nearer
    model = recomputed(mesh, offload)
    loss_of(model, 1).backward()
    (store,) = activation_offload_of(model)._stores.values()
    assert store.file.folder == tmp_path


def full(mesh, folder: Path) -> None:
    """A disk without space for the inputs of a forward is named in an error; with space again, training goes on."""
    model = recomputed(mesh, on_disk(folder))
    for shape in ((1, 8), (8, 64)):
        filler = fill(folder)
        with pytest.raises(acc.OffloadError, match=rf"{folder} has no room for [0-9]+ bytes of what is offloaded"):
            loss_of(model, 1, shape)
        filler.unlink()
        loss_of(model, 1, shape).backward()
    assert os.listdir(folder) == []


def test_a_disk_without_room_for_activations_is_named(world, tmp_path):
    with mounted(tmp_path / "small", "size=8m") as folder:
        world.run(1, full, folder)


@on_world(1)
def test_inputs_of_another_forward_are_not_copied_back_together(mesh) -> None:
    """Inputs of another forward are not copied back together; a write into an input that is being copied is an error."""
    model = acc.shard(models.plain(), mesh=mesh, checkpoint_activations="full", offload=ON_HOST)
    activation_offload = activation_offload_of(model)
    offloaded = []
    for value in (1.0, 2.0, 3.0):
        offloaded.append(activation_offload.offload(torch.full((4,), value, device=device()), "host"))
        offloaded[-1].leave()
        if value != 2:  # in the first and the last one a backward comes
            assert torch.equal(offloaded[-1].tensor(), torch.full((4,), value, device=device()))
    first, second, _ = offloaded
    assert first._fetched is None, "of a forward before a backward"
    assert second._fetched is not None, "of the same forward"
    live = torch.zeros(4, device=device())
    activation_offload.offload(live, "host")
    live.add_(1)
    with pytest.raises(acc.UsageError, match=r"the input \(4,\) of a recomputed unit was changed in place while"):
        activation_offload.offload(torch.zeros(4, device=device()), "host")
