"""For gradients the host waits once in a step at most, and only if this rank lacked some; for replicas in no forward."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import accordion as acc
from tests.devices import device
from tests.engine.test_absent_gradients import Mixture, Routed
from tests.sim.test_gathers import small_blocks
from tests.support import models
from tests.support.checks import one_loss
from tests.support.ranked import on_mesh, on_world

pytestmark = pytest.mark.sim
STEPS = 6


@contextmanager
def counted_waits(counts: list[int]) -> Iterator[None]:
    """Context manager that appends the number of waits of the host inside to `counts`."""
    before = torch.sim.num_waits()
    yield
    counts.append(torch.sim.num_waits() - before)


ALL = (0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("mixture", "chosen", "waits"),
    [
        (False, ((), ()), (0, 0)),
        (True, (ALL, ALL), (0, 0)),
        # If gradients are absent, the backward waits once, to learn which ones.
        (True, ((0, 2), ALL), (1, 0)),
        (True, ((0,), (3,)), (1, 1)),
    ],
)
@on_world(2)
def test_a_step_lets_the_host_run_ahead(
    mesh, mixture: bool, chosen: tuple[tuple[int, ...], ...], waits: tuple[int, int]
) -> None:
    """A step is a forward, a backward, clipping and the optimizer."""
    rank = torch.distributed.get_rank()
    model = acc.shard(Mixture(), mesh, units={Routed}) if mixture else acc.shard(small_blocks(), mesh)
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
    counts: list[int] = []
    for _ in range(STEPS):
        x = torch.randn(4, 16, device=device())
        with counted_waits(counts):
            (model(x, chosen[rank]) if mixture else model(x)).square().mean().backward()
            acc.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert counts[3:] == [waits[rank]] * 3, "the first steps check what is new"


# -- replicas, which are compared before a save


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
