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


def group_of(backend: str) -> mock.Mock:
    """Return a process group of two ranks with one backend."""
    group = mock.Mock(size=lambda: 2, rank=lambda: 0)
    group.name.return_value, group._get_backend.return_value = backend, group
    return group


@pytest.mark.parametrize("backend", ["nccl", "nccl2", "nccl-lazy", "nccl-legacy", "rccl", "xccl", "hccl", "simccl"])
def test_a_backend_of_an_accelerator_is_ordered_by_its_streams(backend, monkeypatch) -> None:
    """torch 2.15 makes an "nccl2" where "nccl" is asked for, and every vendor has a name of its own."""
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    communicator = Communicator(group_of(backend), CUDA)
    assert communicator.is_ordered
    assert not communicator.can_poll


@pytest.mark.parametrize(("backend", "device"), [*((backend, CUDA) for backend in HOST_ORDERED), ("ccl", CPU)])
def test_some_backends_and_every_one_of_a_cpu_are_waited_for_by_the_host(backend, device) -> None:
    assert not is_stream_ordered(backend, device)


@pytest.mark.parametrize(("backend", "limit"), [("nccl", PACK_LIMIT_BYTES), ("nccl2", LARGE_PACK_LIMIT_BYTES)])
def test_more_is_packed_where_each_tensor_is_a_launch(backend, limit, monkeypatch) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    assert Communicator(group_of(backend), CUDA).pack_limit_bytes == limit


@pytest.mark.parametrize("is_checked", [False, True])
def test_a_second_communicator_takes_over_the_timeout_of_the_first(is_checked) -> None:
    backend = SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(hours=2)))
    group = SimpleNamespace(_get_backend=lambda _: SimpleNamespace(wrapped_pg=backend) if is_checked else backend)
    assert _torch.timeout_of(group, CPU) == timedelta(hours=2)


def test_a_backend_without_options_has_a_second_communicator_all_the_same() -> None:
    assert _torch.timeout_of(SimpleNamespace(_get_backend=lambda _: SimpleNamespace()), CPU) is None
