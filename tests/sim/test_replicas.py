"""Replicas are compared before a save, so in no forward does the host wait for them."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

import accordion as acc
from tests.devices import device
from tests.support import models
from tests.support.checks import one_loss
from tests.support.ranked import on_mesh

pytestmark = pytest.mark.sim


def num_waits_of_forwards(mesh, strategy: acc.Strategy) -> list[int]:
    """Return the number of waits of the host's main thread in each of the first four steps' forwards.

    Waits for events are left out: there is one only if the device has not reached the event.
    """
    model = acc.shard(models.plain().to(device()), mesh=mesh, strategy=strategy, units={models.Block})
    gc.collect()  # models of earlier tests may wait when they are freed
    thread = threading.get_ident()
    counts: list[int] = []

    def on_wait(why: str, stream: int) -> None:
        counts[-1] += threading.get_ident() == thread and why != "event.synchronize"

    for step in range(4):
        counts.append(0)
        torch.sim.tell_waits(on_wait)
        loss = one_loss(model, step)
        torch.sim.tell_waits(None)
        loss.backward()
    return counts


@on_mesh((2, 2), ("replicate", "shard"))
def test_replicas_let_the_host_wait_in_no_forward(mesh) -> None:
    full = num_waits_of_forwards(mesh["shard"], acc.FULL_SHARD)
    assert num_waits_of_forwards(mesh["shard"], acc.NO_SHARD) == full
    assert num_waits_of_forwards(mesh, acc.HYBRID_SHARD) == full
