"""`accordion.compat.fsdp2` with threads as ranks, as in torch's own tests (`MultiThreadedTestCase`)."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed import multi_threaded_pg as threaded

import accordion.compat.fsdp2 as ours
from tests.support import models
from tests.support.checks import step_all

pytestmark = [
    pytest.mark.cpu("threads stand for ranks on the CPU"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]
JOIN_S = 60.0


def run_threads(num_ranks: int, program: Callable[[], None]) -> None:
    """Do what `MultiThreadedTestCase` does around a test; it needs a package that is not installed."""
    failed: list[str] = []
    hook = sys.excepthook
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    store = dist.HashStore()

    def rank(number: int) -> None:
        dist.init_process_group("threaded", rank=number, world_size=num_ranks, store=store)
        try:
            program()
        except BaseException as error:
            failed.append(f"rank {number}: {traceback.format_exc()}")
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=rank, args=(r,), daemon=True) for r in range(num_ranks)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(JOIN_S)
        threaded.ProcessLocalGroup.reset()
    finally:
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        sys.excepthook = hook  # torch puts one before it for each rank
        with warnings.catch_warnings():  # the ranks' lines end with the process, where they are processes
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
    assert not failed, "\n".join(failed)
    assert not any(thread.is_alive() for thread in threads)


def trains(made: nn.Module) -> None:
    """`made`: modules created before, because threads share one random number generator."""
    mesh = init_device_mesh("cpu", (2,))
    plain, model = copy.deepcopy(made), copy.deepcopy(made)
    for block in model.blocks:
        ours.fully_shard(block, mesh=mesh)
    ours.fully_shard(model, mesh=mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for step in range(3):
        batches = [models.batch(step, 0, rank, vocab=48) for rank in range(2)]  # of generators of their own
        (sum(models.loss_of(plain(tokens), targets) for tokens, targets in batches) / 2).backward()
        tokens, targets = batches[dist.get_rank()]
        models.loss_of(model(tokens), targets).backward()
        for wanted, p in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.allclose(p.grad.full_tensor(), wanted.grad, rtol=1e-5, atol=1e-7)
        step_all(optimizers)


def test_training_is_that_of_the_unsharded_model() -> None:
    run_threads(2, partial(trains, models.plain()))
