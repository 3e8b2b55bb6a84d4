"""Fixtures that every test may use: the pool of rank processes, fake worlds, and the marker for accelerators."""

from __future__ import annotations

import gc
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

# Before torch is imported, here and in all that tests start: two workers with two threads each wait for each other in busy
# loops, which takes more of two cores than the sums do. What counts threads asks for its own number of them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

from tests import devices, pool

settings.register_profile("shared machine", deadline=None)  # rank processes may take the cores for a while
settings.load_profile("shared machine")

GLOO_TAKES = ("cuda",)  # beside the CPU
RANKS = {"world", "device_world", "crowded_world"}  # fixtures of who computes where `--device` says
UNAVAILABLE = pytest.StashKey[str | None]()  # why the device that was asked for is not to be had


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        default="cpu",
        choices=["cpu", "sim"],
        help="where the ranks of `world` compute: the CPU or a simulated accelerator, which is built first (tests/sim)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[UNAVAILABLE] = devices.load_sim() if config.getoption("device") == "sim" else None


def backends(device_type: str) -> str:
    """Gloo for what lies on the CPU, and what torch takes for the device itself."""
    return f"cpu:gloo,{device_type}:{torch.distributed.get_default_backend_for_device(device_type)}"


@pytest.fixture(scope="session")
def world(pytestconfig: pytest.Config) -> Iterator[pool.Pool]:
    """Four ranks on the CPU, or where `--device` says: `world.run(num_ranks, fn, *args)` calls `fn(mesh, *args)` on each.

    It returns their results. `fn` makes its tensors on `tests.devices.device()`.
    """
    device = pytestconfig.getoption("device")
    ranks = pool.Pool() if device == "cpu" else pool.Pool(pool.RANKS, device, backends(device))
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def device_world() -> Iterator[pool.Pool]:
    """As `world`, with one rank for each accelerator of this machine, up to four; for tests marked `accelerator`."""
    device = torch.accelerator.current_accelerator()
    assert device is not None, "a test that uses device_world needs the marker `accelerator`"
    count = min(pool.RANKS, torch.accelerator.device_count())
    ranks = pool.Pool(count, device.type, backends(device.type))
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def crowded_world() -> Iterator[pool.Pool]:
    """As `world`, four ranks that share the accelerators of this machine over gloo; NCCL takes one rank an accelerator."""
    device = torch.accelerator.current_accelerator()
    assert device is not None, "a test that uses crowded_world needs the marker `accelerator`"
    ranks = pool.Pool(pool.RANKS, device.type, "gloo" if device.type in GLOO_TAKES else backends(device.type))
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def run_fake() -> Callable[..., Any]:
    """`run_fake(num_ranks, rank, fn, *args)` calls `fn(mesh, *args)` as that rank of a world that does not exist."""
    return pool.run_fake


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Fork the server of ranks from what was collected, before a test starts a thread, or `accordion bench` another server."""
    if session.items:
        pool.fork_context()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # collections look only at what tests made, and not at all that was imported


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    device, unavailable = config.getoption("device"), config.stash[UNAVAILABLE]
    if device != "cpu":
        idle = [item for item in items if not asks_for_device(item)]
        items[:] = [item for item in items if asks_for_device(item)]
        config.hook.pytest_deselected(items=idle)
    for item in items:
        if reason := unavailable or why_not_here(item, device):
            item.add_marker(pytest.mark.skip(reason=reason))


def asks_for_device(item: pytest.Item) -> bool:
    return bool(RANKS & set(getattr(item, "fixturenames", ()))) or any(
        item.get_closest_marker(name) for name in ("accelerator", "sim")
    )


def why_not_here(item: pytest.Item, device: str) -> str | None:
    if item.get_closest_marker("accelerator") and not torch.accelerator.is_available():
        return "no accelerator on this machine"
    if item.get_closest_marker("sim") and device != "sim":
        return "needs the simulated accelerator: --device sim, as `make test-sim` says"
    if device != "cpu" and (marker := item.get_closest_marker("cpu")):
        return f"on the CPU only: {marker.args[0]}"
    return None


@pytest.fixture
def no_waiting(tmp_path: Path) -> Iterator[None]:
    """Who opens a pipe without a writer waits for good: one comes to those below `tmp_path`, and the test fails.

    From a thread, since code that is not Python's goes on to wait after a signal.
    """
    done, found = threading.Event(), list[str]()

    def write() -> None:
        while not done.wait(5.0):
            for folder, _, names in os.walk(tmp_path):
                for path in (os.path.join(folder, name) for name in names):
                    with suppress(OSError):  # gone, or a pipe for which nobody waits
                        if stat.S_ISFIFO(os.lstat(path).st_mode):
                            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                            found.append(path)

    writer = threading.Thread(target=write)
    writer.start()
    yield
    done.set()
    writer.join()
    assert not found, "it waits for a pipe"
