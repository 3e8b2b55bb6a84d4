"""Replicas are compared before a save, so in no forward does the host wait for them."""

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


def test_replicas_let_the_host_wait_in_no_forward(world):
    full = acc.FULL_SHARD
    alone, *_ = world.run_mesh(*mesh_of(full), waits_of_forwards, full)
    for strategy in (acc.NO_SHARD, STRATEGIES["hybrid_shard"]):
        for waits in world.run_mesh(*mesh_of(strategy), waits_of_forwards, strategy):
            assert [len(each) for each in waits] == [len(each) for each in alone]
