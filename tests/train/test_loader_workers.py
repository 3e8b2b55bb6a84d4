"""Workers of a loader and the signals of a scheduler: they stay for the run, and end when their loader or the program does."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from accordion.train.batches import LoaderBatches, validation_of
from accordion.train.data import Share
from accordion.train.loader_workers import Shelter

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*multi-threaded:UserWarning")
COUNT = 4


class Asked(Dataset[torch.Tensor]):
    """A scheduler signals the worker as it reads each sample, and then it ends a program of its own."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)
        if index == 0:
            program = subprocess.Popen(["sleep", "100"])
            program.terminate()
            assert program.wait(10) == -signal.SIGTERM
        return torch.tensor([index, int(os.environ.get("OWN_INIT", 0))])


def own_init(worker: int) -> None:
    os.environ["OWN_INIT"] = "1"


@pytest.fixture
def loader() -> DataLoader[torch.Tensor]:
    data = Asked()
    order = DistributedSampler(data, 1, 0, shuffle=False)
    return DataLoader(data, sampler=order, num_workers=1, multiprocessing_context="fork", worker_init_fn=own_init)


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_workers_outlive_signals_until_their_run_ends(loader: DataLoader[torch.Tensor]) -> None:
    before: list[BaseProcess] = multiprocessing.active_children()
    batches = LoaderBatches(loader, 0)
    read = [next(batches).tolist() for _ in range(COUNT + 1)]  # an epoch, and one of the next by another worker
    assert read == [[[index % COUNT, 1]] for index in range(COUNT + 1)]
    (worker,) = (child for child in multiprocessing.active_children() if child not in before)
    shelter: Any = loader.worker_init_fn
    assert isinstance(shelter, Shelter)
    shelter.end()  # as behind a run, and at the program's end
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGTERM)
    worker.join(10)
    assert worker.exitcode == 0


def test_workers_of_a_validation_do_so_each_time(loader: DataLoader[torch.Tensor], group_of_one: None) -> None:
    share = Share(rank=0, world=1, micro_batch=1, accumulate=1)
    for _ in range(2):
        found = validation_of(loader, share, lambda samples: samples, torch.device("cpu"))
        assert [batch.tolist() for batch, _ in found] == [[[index, 1]] for index in range(COUNT)]
