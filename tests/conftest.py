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

# Set before torch is imported, for this process and all that tests start: the threads of two workers would wait for each
# other in busy loops and slow both down. Tests that count threads set their own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

from tests import devices, pool

settings.register_profile("shared machine", deadline=None)  # rank processes may occupy the cores for a while
settings.load_profile("shared machine")

GLOO_TAKES = ("cuda",)  # besides the CPU
RANKS = {"world", "device_world", "crowded_world"}  # fixtures whose ranks compute on the device of `--device`
UNAVAILABLE = pytest.StashKey[str | None]()  # the reason why the requested device is not available


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        default="cpu",
        choices=["cpu", "sim"],
        help="device of the ranks of `world`: the CPU or a simulated accelerator, which is built first (tests/sim)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[UNAVAILABLE] = devices.load_sim() if config.getoption("device") == "sim" else None


def backends(device_type: str) -> str:
    """Return the backends of a process group: gloo for CPU tensors, and torch's default backend for `device_type`."""
    return f"cpu:gloo,{device_type}:{torch.distributed.get_default_backend_for_device(device_type)}"


@pytest.fixture(scope="session")
def world(pytestconfig: pytest.Config) -> Iterator[pool.Pool]:
    """Yield four ranks on the device of `--device`.

    `world.run(num_ranks, fn, *args)` calls `fn(mesh, *args)` on each rank and returns the results. `fn` creates its
    tensors on `tests.devices.device()`.
    """
    device = pytestconfig.getoption("device")
    ranks = pool.Pool() if device == "cpu" else pool.Pool(pool.RANKS, device, backends(device))
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def device_world() -> Iterator[pool.Pool]:
    """Yield one rank for each accelerator of this machine, at most four, for tests marked `accelerator`."""
    device = torch.accelerator.current_accelerator()
    assert device is not None, "a test that uses device_world needs the marker `accelerator`"
    count = min(pool.RANKS, torch.accelerator.device_count())
    ranks = pool.Pool(count, device.type, backends(device.type))
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def crowded_world() -> Iterator[pool.Pool]:
    """Yield four ranks that share the accelerators of this machine over gloo (NCCL allows one rank per accelerator)."""
    device = torch.accelerator.current_accelerator()
    assert device is not None, "a test that uses crowded_world needs the marker `accelerator`"
    ranks = pool.Pool(pool.RANKS, device.type, "gloo" if device.type in GLOO_TAKES else backends(device.type))
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def run_fake() -> Callable[..., Any]:
    """Return `run_fake(num_ranks, rank, fn, *args)`, which calls `fn(mesh, *args)` as rank `rank` of a fake process group."""
    return pool.run_fake


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Fork the server of ranks from what was collected, before a test starts a thread, or `accordion bench` another server."""
    if session.items:
        pool.fork_context()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # the garbage collector skips imported objects


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
    """Fail the test if it waits for a writer of a named pipe below `tmp_path`.

    A thread opens such pipes for writing, since a signal does not end a wait in code that is not Python's.
    """
    done, pipes = threading.Event(), list[str]()

    def write() -> None:
        while not done.wait(5.0):
            for folder, _, names in os.walk(tmp_path):
                for path in (os.path.join(folder, name) for name in names):
                    with suppress(OSError):  # removed, or a pipe that has no reader
                        if stat.S_ISFIFO(os.lstat(path).st_mode):
                            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                            pipes.append(path)

    writer = threading.Thread(target=write)
    writer.start()
    yield
    done.set()
    writer.join()
    assert not pipes, "the test waited for a pipe"
