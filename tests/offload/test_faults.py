"""Errors of offload: a disk that fails or is full, a killed job, memory that is refused, ranks that differ."""

from __future__ import annotations

import errno
import multiprocessing as mp
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import accordion as acc
from accordion.offload import arena
from accordion.offload.swap_file import SwapFile
from tests.devices import device
from tests.support import models
from tests.support.checks import assert_equal, go_on, one_loss
from tests.support.offloads import HOST, disk, disk_of_all, fresh
from tests.support.processes import run_python
from tests.support.ranked import on_world
from tests.support.reference import grads_of, params_of


def killed(path: Path) -> None:
    """Run a job that is killed while states are written to the disk."""
    file = SwapFile(path, 1 << 22)
    for _ in range(3):
        threading.Thread(
            target=lambda: [file.write(0, arena.aligned_buffer(1 << 22)) for _ in range(1000)], daemon=True
        ).start()
    while not file.traffic["written"]:
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_job_leaves_nothing(world, tmp_path):
    world.run(1, repr)  # the pool's server of new processes has torch at hand
    job = mp.get_context("forkserver").Process(target=killed, args=(tmp_path,))
    job.start()
    job.join(60)
    assert job.exitcode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


def stepped(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    acc.synchronize(model)


@contextmanager
def failing_calls(call: str, number: int) -> Iterator[None]:
    def broken(*_: Any) -> int:  # a new error each time, without the frames of earlier ones
        raise OSError(number, os.strerror(number))

    with mock.patch.object(os, call, broken):
        yield


@on_world(1)
def test_a_disk_that_is_full_or_unreadable_is_named(mesh, tmp_path: Path) -> None:
    """A full disk and one that cannot be read raise an error that names it, for all kinds of data."""
    for what, offload in {
        "states": disk(tmp_path),
        "all": disk_of_all(tmp_path),
        "device": disk_of_all(tmp_path, step="device"),
    }.items():
        for breaks, message in (
            (
                partial(failing_calls, "pwritev", errno.ENOSPC),
                r"bytes at \d+ of .* could not be written: No space left on device. The last check",
            ),
            (partial(failing_calls, "preadv", errno.EIO), "could not be read: Input/output error"),
        ):
            model, optimizer = fresh(mesh, offload=offload)
            go_on(model, optimizer, [0])
            acc.synchronize(model)
            one_loss(model).backward()
            with breaks(), pytest.raises(acc.OffloadError, match=message):
                stepped(model, optimizer)
            assert os.listdir(tmp_path) == [], what


@on_world(1)
def test_an_optimizer_that_must_be_wrapped_is_refused_where_it_is_not(mesh, tmp_path: Path) -> None:
    for offload in (disk(tmp_path), acc.Offload(optimizer="host", step="device")):
        model = acc.shard(models.plain(), mesh=mesh, offload=offload)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one_loss(model).backward()
        with pytest.raises(
            acc.UsageError, match=r"SGD steps parameters of unit 'root', .* pass the optimizer to wrap_optimizer"
        ):
            optimizer.step()


@on_world(1)
def test_an_error_of_the_step_is_not_lost(mesh) -> None:
    """An error on the step's thread is raised in the next call that needs the step."""
    model = acc.shard(models.plain(), mesh=mesh, offload=HOST)
    optimizer = acc.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    one_loss(model).backward()
    for group in optimizer.param_groups:
        group["lr"] = "fast"
    optimizer.step()
    with pytest.raises(TypeError):
        acc.synchronize(model)


# -- what is refused


@on_world(2)
def test_what_cannot_be_offloaded_is_named_and_leaves_the_model_as_it_was(mesh, tmp_path: Path) -> None:
    with pytest.raises(acc.UsageError, match=r"overrides names blocks.9, which is no unit"):
        acc.shard(models.plain(), mesh=mesh, offload=acc.Offload(overrides={"blocks.9": HOST}))
    folder = "/nowhere" if mesh.get_rank() == 0 else str(tmp_path)
    with pytest.raises(acc.UsageError, match="cannot create a file for offloaded state in /nowhere"):
        acc.shard(models.plain(), mesh=mesh, offload=acc.Offload(optimizer=f"disk:{folder}"))
    if dist.get_rank() == 0:
        with pytest.raises(acc.UsageError, match=r"the machine refuses to pin 4096 bytes of host memory \(denied\)"):
            pin_on(denied := FakeAccelerator(1))
        assert denied.calls == ["register 4096", "launch"], "else the runtime's last error is raised by the next launch"
    model = acc.shard(models.plain(), mesh=mesh, offload=HOST)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert_equal(params_of(model), dict(models.plain().named_parameters()))
    one_loss(model).backward()
    assert grads_of(model)


def pin_on(module: Any) -> list[str]:
    owner, memory = torch.nn.Identity(), torch.empty(4096, dtype=torch.uint8, device=device())

    def launch() -> None:  # the first one after an error of the runtime raises that
        module.calls.append("launch")
        raise RuntimeError("CUDA error: out of memory")

    arena.pin(owner, memory, module, lambda: module.calls.append("settle"), launch)
    del owner
    return module.calls


class FakeAccelerator:
    """The part of an accelerator's driver that pins memory. `answer`: the result of pinning, 0 for success."""

    def __init__(self, answer: int) -> None:
        self.answer, self.calls = answer, []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        self.calls.append(f"register {num_bytes}")
        return self.answer

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        self.calls.append("unregister")

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802
        return "denied"


@on_world(2)
def test_memory_that_one_rank_cannot_pin_is_an_error_on_all(mesh) -> None:
    """If one rank cannot pin memory, `shard` raises on all ranks."""

    make = arena.Arena.__init__

    def refusing(self: arena.Arena, num_bytes: int, device: torch.device) -> None:
        make(self, num_bytes, device)
        if mesh.get_rank() == 1:
            arena.pin(self, self.memory, FakeAccelerator(1), lambda: None, lambda: None)

    others = "other ranks refused their arguments or lack a resource: rank 1 has a refusal: the machine refuses to pin"
    message = "the machine refuses to pin" if mesh.get_rank() == 1 else others
    with mock.patch.object(arena.Arena, "__init__", refusing), pytest.raises(acc.AccordionError, match=message):
        acc.shard(models.plain(), mesh=mesh, offload=HOST)


def test_memory_is_unpinned_when_its_owner_goes():
    assert pin_on(FakeAccelerator(0)) == ["register 4096", "settle", "unregister"]


def test_pinned_memory_is_dropped_although_its_device_never_ends(monkeypatch):
    monkeypatch.setattr(arena, "SETTLE_S", 0.0)
    ends, unpinned, driver, owner = threading.Event(), threading.Event(), FakeAccelerator(0), torch.nn.Identity()
    monkeypatch.setattr(driver, "cudaHostUnregister", lambda _: unpinned.set())
    arena.pin(owner, torch.empty(4096, dtype=torch.uint8), driver, ends.wait, lambda: None)
    del owner
    assert not unpinned.is_set()
    ends.set()
    assert unpinned.wait(60)


PINS = """
from types import SimpleNamespace
import torch
from accordion.offload.arena import pin

owner, driver = torch.nn.Identity(), SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=print)
pin(owner, torch.empty(4096, dtype=torch.uint8), driver, lambda: print("waits"), lambda: None)
"""


def test_pinned_memory_does_not_wait_for_the_device_at_exit():
    done = run_python("-c", PINS)
    assert (done.returncode, done.stdout) == (0, "")
