"""Properties of process groups by their backend, and of a second group over the same ranks."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from accordion import _torch
from accordion.engine.communicator import HOST_ORDERED, Communicator, is_stream_ordered
from accordion.engine.layout import LARGE_PACK_LIMIT_BYTES, PACK_LIMIT_BYTES

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("backend", ["nccl", "nccl2", "nccl-lazy", "nccl-legacy", "rccl", "xccl", "hccl", "simccl"])
def test_a_backend_of_an_accelerator_is_ordered_by_its_streams(backend, monkeypatch) -> None:
    """torch 2.15 creates an "nccl2" if "nccl" is asked for, and every vendor has a name of its own."""
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    group = mock.Mock(size=lambda: 2, rank=lambda: 0)
    group.name.return_value, group._get_backend.return_value = backend, group
    communicator = Communicator(group, CUDA)
    assert communicator.is_ordered
    assert not communicator.can_poll
    launches_each_tensor = backend in ("nccl2", "nccl-lazy")
    assert communicator.pack_limit_bytes == (LARGE_PACK_LIMIT_BYTES if launches_each_tensor else PACK_LIMIT_BYTES)


@pytest.mark.parametrize(("backend", "device"), [*((backend, CUDA) for backend in HOST_ORDERED), ("ccl", CPU)])
def test_some_backends_and_every_one_of_a_cpu_are_waited_for_by_the_host(backend, device) -> None:
    assert not is_stream_ordered(backend, device)


PLAIN = SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(hours=2)))


@pytest.mark.parametrize(
    ("backend", "timeout"),
    [(PLAIN, timedelta(hours=2)), (SimpleNamespace(wrapped_pg=PLAIN), timedelta(hours=2)), (SimpleNamespace(), None)],
    ids=["plain", "wrapped in checks", "without options"],
)
def test_a_second_communicator_takes_over_the_timeout_of_the_first(backend, timeout) -> None:
    assert _torch.timeout_of(SimpleNamespace(_get_backend=lambda _: backend), CPU) == timeout
