"""Only the process that sharded a model may call it, from one thread at a time; other calls raise at once."""

from __future__ import annotations

import os
import threading

import pytest
import torch

import accordion as acc
from tests.support import models
from tests.support.checks import assert_at_rest, batch, one_loss
from tests.support.ranked import on_num_ranks, on_world


@pytest.mark.cpu("a device does not outlive a fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@on_world(2)
def test_a_call_in_a_forked_process_is_refused(mesh) -> None:
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
    error = os.read(reads, 4096).decode()
    os.waitpid(child, 0)
    os.close(reads)
    assert error.startswith("UsageError: a sharded model was called in process"), error
    assert "a fork of process" in error
    one_loss(model).backward()  # training continues


@pytest.mark.parametrize("num_ranks", [1, 2])
@on_num_ranks
def test_a_call_from_a_second_thread_is_refused_and_the_first_continues(mesh) -> None:
    model = acc.shard(models.plain(), mesh=mesh)
    errors: list[str] = []
    x = batch(model)[0]  # created here, because a new thread begins with the first device, which is another rank's

    def second() -> None:
        try:
            with torch.no_grad():
                model(x)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

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
    assert len(errors) == 1, errors
    assert errors[0].startswith("UsageError: a sharded model was called from two threads at once")
