"""Fixtures that every test may use: the pool of rank processes, fake worlds, and the marker for accelerators."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests import pool

settings.register_profile("shared machine", deadline=None)  # rank processes may take the cores for a while
settings.load_profile("shared machine")


@pytest.fixture(scope="session")
def world() -> Iterator[pool.Pool]:
    """Four ranks on CPU: `world.run(num_ranks, fn, *args)` calls `fn(mesh, *args)` on each, returns their results."""
    ranks = pool.Pool()
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def device_world() -> Iterator[pool.Pool]:
    """As `world`, with one rank for each accelerator of this machine, up to four; for tests marked `accelerator`."""
    device = torch.accelerator.current_accelerator()
    assert device is not None, "a test that uses device_world needs the marker `accelerator`"
    backend = torch.distributed.get_default_backend_for_device(device)
    count = min(pool.RANKS, torch.accelerator.device_count())
    ranks = pool.Pool(count, device.type, f"cpu:gloo,{device.type}:{backend}")
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def crowded_world() -> Iterator[pool.Pool]:
    """As `world`, four ranks that share the accelerators of this machine over gloo; NCCL takes one rank an accelerator."""
    device = torch.accelerator.current_accelerator()
    assert device is not None, "a test that uses crowded_world needs the marker `accelerator`"
    ranks = pool.Pool(pool.RANKS, device.type, "gloo")
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def run_fake() -> Callable[..., Any]:
    """`run_fake(num_ranks, rank, fn, *args)` calls `fn(mesh, *args)` as that rank of a world that does not exist."""
    return pool.run_fake


def pytest_sessionstart(session: pytest.Session) -> None:
    """A worker's fork server imports while the worker collects, and before `accordion bench` starts one with less in it."""
    if hasattr(session.config, "workerinput"):
        pool.fork_context()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # collections look only at what tests made, and not at all that was imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.accelerator.is_available():
        return
    skip = pytest.mark.skip(reason="no accelerator on this machine")
    for item in items:
        if item.get_closest_marker("accelerator"):
            item.add_marker(skip)
