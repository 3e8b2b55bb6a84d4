"""To compare replicas the host waits once for their device, and in few forwards, however many parameters there are."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

import accordion as acc
from accordion.config import STRATEGIES
from tests.devices import device
from tests.support import models
from tests.support.checks import mesh_of, one_loss

pytestmark = pytest.mark.sim


def waits_of_forwards(mesh, strategy: acc.Strategy) -> list[list[str]]:
    """Return the waits of the host's main thread in each of the first four steps' forwards.

    Waits for events are left out: there is one only if the device has not reached the event.
    """
    model = acc.shard(models.plain().to(device()), mesh=mesh, strategy=strategy, units={models.Block})
    gc.collect()  # models of earlier tests may wait when they are freed
    thread = threading.get_ident()
    found: list[list[str]] = []

    def on_wait(why: str, stream: int) -> None:
        if threading.get_ident() == thread and why != "event.synchronize":
            found[-1].append(why)

    for step in range(4):
        found.append([])
        torch.sim.tell_waits(on_wait)
        loss = one_loss(model, step)
        torch.sim.tell_waits(None)
        loss.backward()
    return found


def test_to_compare_replicas_the_host_waits_once_in_few_forwards(world):
    full = acc.FULL_SHARD
    alone, *_ = world.run_mesh(*mesh_of(full), waits_of_forwards, full)
    for strategy in (acc.NO_SHARD, STRATEGIES["hybrid_shard"]):
        for waits in world.run_mesh(*mesh_of(strategy), waits_of_forwards, strategy):
            more = [len(told) - len(without) for told, without in zip(waits, alone, strict=True)]
            assert more == [1, 1, 0, 1], waits
