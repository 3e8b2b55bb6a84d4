"""Calls to a process group with a stream-ordered backend, also a checked one and a second one."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from accordion import _torch
from accordion.engine.communicator import HOST_ORDERED, Communicator, is_stream_ordered
from accordion.engine.layout import LARGE_PACK_LIMIT_BYTES, PACK_LIMIT_BYTES

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Checked:
    """NCCL in the wrapper that torch 2.11 puts around it under TORCH_DISTRIBUTED_DEBUG=DETAIL; two ranks that hold the same."""

    def __init__(self, name: str = "nccl") -> None:
        self._name = name

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0

    def name(self) -> str:
        return self._name

    def _get_backend(self, device: torch.device) -> Checked:
        return self

    def _refuses(self, *_: Any) -> None:
        raise RuntimeError("Backend nccl does not support allgather_into_tensor_coalesced")

    allgather_into_tensor_coalesced = reduce_scatter_tensor_coalesced = _start_coalescing = _refuses

    def _allgather_base(self, full: Tensor, shard: Tensor, options: Any) -> None:
        full.copy_(shard.repeat(2))

    def _reduce_scatter_base(self, out: Tensor, given: Tensor, options: Any) -> None:
        out.copy_(2 * given[: out.numel()])

    def allreduce(self, tensors: list[Tensor], options: Any) -> None:
        tensors[0].mul_(2)

    def alltoall_base(self, out: Tensor, given: Tensor, *_: Any) -> None:
        out.copy_(given[: given.numel() // 2].repeat(2))


@pytest.fixture
def detail() -> Iterator[None]:
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    yield
    dist.set_debug_level(before)


def test_a_group_that_is_checked_is_asked_for_one_tensor_after_the_other(detail, monkeypatch) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    communicator = Communicator(Checked(), CUDA)
    shards = [torch.arange(3.0), torch.arange(5.0)]
    fulls, outs, sums = (
        [torch.zeros(6), torch.zeros(10)],
        [torch.zeros(3), torch.zeros(5)],
        [torch.ones(2), torch.ones(4)],
    )
    received = [torch.zeros(6), torch.zeros(10)]
    pending = [
        communicator.gather(fulls, shards),
        communicator.scatter_sum(outs, fulls),
        communicator.sum(sums),
        communicator.exchange([(out, full, [], []) for out, full in zip(received, fulls, strict=True)]),
    ]
    assert not any(p.works for p in pending)
    for full, out, shard, total, all_of in zip(fulls, outs, shards, sums, received, strict=True):
        assert torch.equal(full, shard.repeat(2))
        assert torch.equal(out, 2 * shard)
        assert torch.equal(all_of, full)
        assert (total == 2).all()


@pytest.mark.parametrize("backend", ["nccl", "nccl2", "nccl-lazy", "nccl-legacy", "rccl", "xccl", "hccl", "simccl"])
def test_a_backend_of_an_accelerator_is_ordered_by_its_streams(backend, monkeypatch) -> None:
    """torch 2.15 makes an "nccl2" where "nccl" is asked for, and every vendor has a name of its own."""
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    communicator = Communicator(Checked(backend), CUDA)
    assert communicator.is_ordered
    assert not communicator.can_poll


@pytest.mark.parametrize(("backend", "device"), [*((backend, CUDA) for backend in HOST_ORDERED), ("ccl", CPU)])
def test_some_backends_and_every_one_of_a_cpu_are_waited_for_by_the_host(backend, device) -> None:
    assert not is_stream_ordered(backend, device)


@pytest.mark.parametrize(("backend", "limit"), [("nccl", PACK_LIMIT_BYTES), ("nccl2", LARGE_PACK_LIMIT_BYTES)])
def test_more_is_packed_where_each_tensor_is_a_launch(backend, limit, monkeypatch) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    assert Communicator(Checked(backend), CUDA).pack_limit_bytes == limit


class Options:
    """Those of NCCL, as far as callers set them, and what a group writes there of itself."""

    def __init__(self) -> None:
        self._timeout, self.is_high_priority_stream = timedelta(minutes=10), False
        self.config, self.split_from = SimpleNamespace(max_ctas=32), None


@pytest.mark.parametrize("is_checked", [False, True])
def test_a_second_communicator_takes_over_what_the_caller_set_of_the_first(monkeypatch, is_checked) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    options = Options()
    options._timeout, options.is_high_priority_stream, options.config.max_ctas = timedelta(hours=2), True, 4
    options.split_from = object()
    backend = SimpleNamespace(options=options)
    group = SimpleNamespace(_get_backend=lambda _: SimpleNamespace(wrapped_pg=backend) if is_checked else backend)
    timeout, taken = _torch.options_of(group, CPU)
    assert timeout == taken._timeout == timedelta(hours=2)
    assert (taken.is_high_priority_stream, taken.config.max_ctas, taken.split_from) == (True, 4, None)


def test_a_backend_without_options_has_a_second_communicator_all_the_same() -> None:
    assert _torch.options_of(SimpleNamespace(_get_backend=lambda _: SimpleNamespace()), CPU) == (None, None)
