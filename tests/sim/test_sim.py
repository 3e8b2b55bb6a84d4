"""The simulator itself: it computes the CPU's numbers, and a missing wait shows as it does on an accelerator."""

from __future__ import annotations

import copy
import os
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.sim.test_torch import assert_alike
from tests.support.ranked import on_world

pytestmark = pytest.mark.sim
TRIES = 20


def transformer(width: int = 32) -> nn.Module:
    torch.manual_seed(3)
    one = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
    return nn.Sequential(nn.Linear(8, width), one, copy.deepcopy(one), nn.Linear(width, 5))


def train(model: nn.Module, device: str, rank: int = 0, num_ranks: int = 1, steps: int = 4) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(step))[rank::num_ranks].to(device)
        with sdpa_kernel(SDPBackend.MATH):  # what the simulator runs too
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def test_training_equals_the_cpus_bit_for_bit():
    def run(device: str) -> list[Tensor]:
        model = transformer().to(device)
        return [*train(model, device), *model.parameters()]

    assert_alike(run, 0.0, 0.0)


def test_two_devices_do_not_mix():
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device="sim") + torch.ones(3)


def test_backward_runs_on_a_thread_of_the_device():
    threads: list[int] = []
    x = torch.ones(3, device="sim", requires_grad=True)
    (y := 2 * x).register_hook(lambda grad: threads.append(threading.get_ident()))
    y.sum().backward()
    assert threads
    assert threads[0] != threading.get_ident()
    assert x.grad.tolist() == [2.0] * 3


@pytest.mark.parametrize("waits", [False, True])
def test_a_missing_wait_between_streams_is_seen(waits):
    side, main = torch.sim.Stream(), torch.accelerator.current_stream()
    wrong = 0
    for _ in range(TRIES):
        x = torch.zeros(1000, device="sim")
        torch.accelerator.synchronize()
        with torch.sim.stream(side):
            torch.sim._sleep(2_000_000)
            x.fill_(1)
        if waits:
            main.wait_stream(side)
        wrong += int(x.sum().item() != 1000)
        torch.accelerator.synchronize()
    assert wrong == 0 if waits else wrong > TRIES // 2


@pytest.mark.parametrize("mend", ["none", "wait", "record_stream"])
def test_a_use_after_free_on_another_stream_is_seen(mend):
    side, main = torch.sim.Stream(), torch.accelerator.current_stream()
    wrong = 0
    for _ in range(TRIES):
        x = torch.ones(1000, device="sim")
        side.wait_stream(main)
        with torch.sim.stream(side):
            torch.sim._sleep(2_000_000)
            total = x.sum()
        if mend == "record_stream":
            x.record_stream(side)
        elif mend == "wait":
            main.wait_stream(side)
        del x
        other = torch.full((1000,), 7.0, device="sim")
        main.wait_stream(side)
        wrong += int(total.item() != 1000)
        del other
    assert wrong > TRIES // 2 if mend == "none" else wrong == 0


def test_memory_comes_as_nan_and_blocks_are_used_again():
    x = torch.ones(100003, device="sim")
    address = x.data_ptr()
    del x
    again = torch.empty(100003, device="sim")
    assert again.data_ptr() == address
    assert again.isnan().all().item()


@pytest.mark.parametrize("pinned", [False, True])
def test_copies_to_the_host(pinned):
    """The host does not wait for a copy to pinned memory, and reads the old values until it does."""
    host = torch.zeros(1000, pin_memory=pinned)
    x = torch.ones(1000, device="sim")
    torch.accelerator.synchronize()
    torch.sim._sleep(20_000_000)
    host.copy_(x, non_blocking=True)
    early = host[5].item()
    torch.accelerator.synchronize()
    assert early == (0 if pinned else 1)
    assert host.eq(1).all()


def test_memory_ends_as_it_does_on_a_device():
    with pytest.raises(torch.OutOfMemoryError, match="sim out of memory"):
        torch.empty(1 << 40, device="sim")


def test_asserts_take_texts_of_less_than_255_bytes():
    with pytest.raises(RuntimeError, match="255"):
        torch._assert_async(torch.ones((), dtype=torch.bool, device="sim"), "x" * 255)


def test_waits_of_the_host_are_reported():
    waits = []
    x = torch.ones(3, device="sim")
    torch.sim.tell_waits(lambda why, stream: waits.append(why))
    try:
        y = x + x
        assert not waits
        assert y.sum().item() == 6
        torch.accelerator.synchronize()
    finally:
        torch.sim.tell_waits(None)
    assert waits == ["item", "device.synchronize"]


@pytest.mark.skipif(
    os.environ.get("SIM_POISON") == "2", reason="torch's FSDP fails if memory is filled when it is freed"
)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@on_world(4)
def test_torchs_fsdp_equals_the_cpus_bit_for_bit(mesh) -> None:
    def run(device: str) -> list[Tensor]:
        model = transformer().to(device)
        for part in (*list(model)[1:3], model):
            fully_shard(part, mesh=init_device_mesh(device, (mesh.size(),)))
        losses = train(model, device, dist.get_rank(), mesh.size())
        return [*losses, *(p.full_tensor() for p in model.parameters())]

    assert_alike(run, 0.0, 0.0)


@on_world(4)
def test_a_missing_wait_for_a_collective_is_seen(mesh) -> None:
    """A sum before the wait for a collective differs from the sum after it, at least once in ten times."""
    wrong = 0
    for _ in range(10):
        x = torch.ones(1000, device="sim")
        work = dist.all_reduce(x, async_op=True)
        early = x.sum()
        work.wait()
        assert x.sum().item() == 1000 * mesh.size()
        wrong += int(early.item() != 1000 * mesh.size())
    assert wrong


@on_world(4)
def test_each_rank_has_delays_of_its_own(mesh) -> None:
    assert sys.modules["sim_C"].rank() == dist.get_rank()
