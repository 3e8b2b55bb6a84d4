"""Only the process that sharded a model may call it, from one thread at a time; other calls raise at once."""

from __future__ import annotations

import os
import threading

import pytest
import torch

import accordion as acc
from tests.support import models
from tests.support.checks import assert_at_rest, batch, one_loss


def called_in_a_child(mesh) -> str:
    model = acc.shard(models.plain(), mesh=mesh)
    one_loss(model).backward()
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        try:
            model(batch(model)[0])
        except BaseException as error:
            os.write(writes, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(writes)
    said = os.read(reads, 4096).decode()
    os.waitpid(child, 0)
    os.close(reads)
    one_loss(model).backward()  # it trains on
    return said


@pytest.mark.cpu("a device does not outlive a fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_call_in_a_forked_process_is_refused(world):
    for said in world.run(2, called_in_a_child):
        assert said.startswith("UsageError: a sharded model was called in process")
        assert "a fork of process" in said


def called_by_two_threads(mesh) -> list[str]:
    model = acc.shard(models.plain(), mesh=mesh)
    said: list[str] = []

    x = batch(model)[0]  # made here: a thread begins with the first device, of which another rank is

    def second() -> None:
        try:
            with torch.no_grad():
                model(x)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")

    def inside(*_: object) -> None:
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    handle = model.blocks[1].register_forward_pre_hook(inside)
    one_loss(model).backward()
    handle.remove()
    thread = threading.Thread(target=second)  # after it, any thread may
    thread.start()
    thread.join()
    one_loss(model).backward()
    assert_at_rest(model)
    return said


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_call_from_a_second_thread_is_refused_and_the_first_continues(world, num_ranks):
    for said in world.run(num_ranks, called_by_two_threads):
        assert len(said) == 1, said
        assert said[0].startswith("UsageError: a sharded model was called from two threads at once")
