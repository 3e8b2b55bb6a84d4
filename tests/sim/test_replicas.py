"""Replicas are compared on their device: the host waits once, however many parameters there are."""

from __future__ import annotations

import gc
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import accordion as acc
from accordion.config import STRATEGIES
from tests.devices import device
from tests.support import models
from tests.support.checks import mesh_of, one_loss

pytestmark = pytest.mark.sim


@contextmanager
def waits_of_this_thread() -> Iterator[list[str]]:
    """Context manager that yields a list of the host's waits in this thread, each with the lines of source that led to it."""
    gc.collect()  # models of earlier tests may wait when they are freed
    thread = threading.get_ident()
    waits: list[str] = []

    def on_wait(why: str, stream: int) -> None:
        if threading.get_ident() == thread:
            waits.append(f"{why}:\n{''.join(traceback.format_stack(limit=8))}")

    torch.sim.tell_waits(on_wait)
    try:
        yield waits
    finally:
        torch.sim.tell_waits(None)


def waits_of(mesh, strategy: acc.Strategy, folder: Path) -> tuple[list[str], list[str]]:
    """Return the waits of the host in the first forward, which compares a sample, and in a save in the background."""
    model = acc.shard(models.plain().to(device()), mesh=mesh, strategy=strategy, units={models.Block})
    with waits_of_this_thread() as in_forward:
        one_loss(model, 0)
    acc.save(folder / "first", model, background=True).wait()  # which pins memory
    with waits_of_this_thread() as in_save:
        saving = acc.save(folder / "second", model, background=True)
    saving.wait()
    return in_forward, in_save


def test_to_compare_replicas_the_host_waits_once(world, tmp_path):
    full = acc.FULL_SHARD
    (alone, saving), *_ = world.run_mesh(*mesh_of(full), waits_of, full, tmp_path / "full_shard")
    for name in ("no_shard", "hybrid_shard"):
        strategy = STRATEGIES[name]
        for in_forward, in_save in world.run_mesh(*mesh_of(strategy), waits_of, strategy, tmp_path / name):
            assert len(in_forward) <= len(alone) + 1, "\n".join(in_forward)
            assert len(in_save) <= len(saving) + 1, "\n".join(in_save)
