"""Inputs of recomputed units on the host: off the device between forward and backward, with results equal bit for bit."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import accordion as acc
from accordion.offload.activations import ActivationOffload
from tests.devices import device
from tests.inside import engine_in
from tests.support import models
from tests.support.checks import logged
from tests.support.meters import Allocations
from tests.support.offloads import chunks_of_at_most
from tests.support.ranked import on_world
from tests.support.reference import local_of, params_of

ON_HOST = acc.Offload(activations="host")
NUM_BLOCKS, INPUT = 6, 8 * 64 * 32 * 4  # INPUT: bytes of a block's input, of 8 sequences of 64


def recomputed(mesh, offload: acc.Offload | None = None, **options) -> nn.Module:
    options = {"checkpoint_activations": "full", **options}
    return acc.shard(models.seeded(num_blocks=NUM_BLOCKS), mesh=mesh, offload=offload, **options)


def activation_offload_of(model: nn.Module) -> ActivationOffload:
    return engine_in(model).context.shard_buffers.activation_offload


def loss_of(model: nn.Module, seed: int, shape: tuple[int, int] = (2, 8)) -> Tensor:
    tokens = torch.randint(8, shape, generator=torch.Generator().manual_seed(seed)).to(device())
    return model(tokens).square().mean()


def equal_to_inputs_on_the_device(mesh, path: Path, which: int) -> None:
    """Training with each kind of recomputation, other offload and debug="streams" is equal with activations on the host."""
    on_disk = dict.fromkeys(("params", "grads", "optimizer"), f"disk:{path}")
    checkpointing, places, debug, overrides = [
        ("full", {}, (), {}),
        ("full", {}, ("streams",), {"blocks.1": acc.Offload()}),
        ("selective", on_disk, (), {}),
        ("every:2", {"params": "host", "optimizer": "host"}, ("streams",), {}),
    ][which]
    offloads = acc.Offload(**places), acc.Offload(**places, activations="host", overrides=overrides)
    trained = [used(mesh, offload, checkpoint_activations=checkpointing, debug=debug) for offload in offloads]
    assert [i for i, (a, b) in enumerate(zip(*trained, strict=True)) if not torch.equal(a, b)] == []


def used(mesh, offload: acc.Offload, **options) -> list[Tensor]:
    """Train with unusual uses of forwards: several before a backward, one with two backwards or none, sums, other shapes."""
    model = recomputed(mesh, offload, **options)
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses, shapes = [], [(2, 8), (5, 3), (4, 16)]
    with chunks_of_at_most(4096):
        for step in range(3):
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
    acc.synchronize(model)
    return losses + [local_of(v).clone() for v in params_of(model).values()]


@pytest.mark.parametrize("which", [0, 1, *(pytest.param(i, marks=pytest.mark.slow) for i in (2, 3))])
def test_inputs_of_recomputed_units_off_the_device_change_no_bit(world, which, tmp_path):
    world.run(2, equal_to_inputs_on_the_device, tmp_path, which, timeout_s=180)


@on_world(1)
def test_inputs_take_memory_of_the_host_that_is_reused(mesh) -> None:
    """Live memory after a forward is less by the inputs of all blocks; the host stores them in memory that is reused."""
    live = []
    for offload in (None, ON_HOST):
        model = recomputed(mesh, offload)
        with logged() as messages:
            loss_of(model, 0, (8, 64)).backward()
        with Allocations() as memory:
            loss = loss_of(model, 0, (8, 64))
            gc.collect()
            memory.mark("forward")
            loss.backward()
        live.append(memory.live("forward"))
    assert any(f"recomputed units take {NUM_BLOCKS * INPUT} bytes of host memory" in m for m in messages)
    assert activation_offload_of(model).host_bytes == NUM_BLOCKS * INPUT, "the second step used what the first one took"
    assert (NUM_BLOCKS - 1) * INPUT - 4096 <= live[0] - live[1] <= NUM_BLOCKS * INPUT + 4096, live
    model = recomputed(mesh, ON_HOST)
    for length in (40, 8, 33, 64, 1, 57, 64):
        loss_of(model, 0, (8, length)).backward()
    most = NUM_BLOCKS * (INPUT + INPUT // 8)
    assert activation_offload_of(model).host_bytes <= most, "inputs of many shapes take the memory of the largest"


@on_world(1)
def test_inputs_of_another_forward_are_not_copied_back_together(mesh) -> None:
    """Inputs of another forward are not copied back together; a write into an input that is being copied is an error."""
    activation_offload = activation_offload_of(recomputed(mesh, ON_HOST))
    offloaded = []
    for value in (1.0, 2.0, 3.0):
        offloaded.append(activation_offload.offload(torch.full((4,), value, device=device())))
        offloaded[-1].leave()
        if value != 2:  # in the first and the last one a backward comes
            assert torch.equal(offloaded[-1].tensor(), torch.full((4,), value, device=device()))
    first, second, _ = offloaded
    assert first._fetched is None, "of a forward before a backward"
    assert second._fetched is not None, "of the same forward"
    live = torch.zeros(4, device=device())
    activation_offload.offload(live)
    live.add_(1)
    with pytest.raises(acc.UsageError, match=r"the input \(4,\) of a recomputed unit was changed in place while"):
        activation_offload.offload(torch.zeros(4, device=device()))


def test_inputs_that_grow_a_little_rarely_allocate_memory():
    """Replacing a buffer means waiting for the device and pinning memory."""
    activation_offload, made, page = ActivationOffload(torch.device("cpu"), ()), [], 4096
    for num_pages in range(100, 200):
        buffer = activation_offload.take(num_pages * page)
        made.extend([] if buffer in made else [buffer])
        activation_offload.give(buffer)
        assert activation_offload.host_bytes <= num_pages * page * 9 / 8 + page
    assert len(made) <= 8


@on_world(2)
def test_activations_without_recomputation_or_on_disk_are_refused(mesh) -> None:
    with pytest.raises(acc.UsageError, match="checkpoint_activations is 'none'; pass 'full'"):
        recomputed(mesh, ON_HOST, checkpoint_activations="none")
    with pytest.raises(acc.DivergenceError, match="different models or settings"):
        recomputed(mesh, ON_HOST if mesh.get_rank() else acc.Offload())
    with pytest.raises(acc.UsageError, match=r"Offload\(activations='disk:/x'\) is no place"):
        acc.Offload(activations="disk:/x")
    with pytest.raises(acc.UsageError, match=r"_bytes=10\) limits how much .* \(activations do not count\)"):
        acc.Offload(activations="host", device_bytes=10)
