"""A process group of which only this rank exists, to measure host time: its collectives return finished work at once.

torch's fake group copies each message into every chunk of its output, so host time measured with it grows with the number of
ranks and bytes, and differs between collectives. With this group only the time of the host remains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from accordion import _torch

NAME = "still"


class Done(dist.Work):
    """A `Work` that is complete, returned by all collectives of `StillGroup`."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


_Group: Any = dist.ProcessGroup  # its signatures differ between versions


class StillGroup(_Group):  # type: ignore[misc]
    """A process group that reports `num_ranks` ranks, of which only this one exists. Collectives return finished work and leave
    outputs as they are, with one exception: all-gathers copy their input into each chunk of the output until `moves` is set to
    False, because the setup of a model needs values."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__(rank, num_ranks)
        self._rank, self._num_ranks = rank, num_ranks
        self._done = Done()
        self.moves = True

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._num_ranks

    @property
    def group_name(self) -> str:
        return _torch.name_of_group(self)

    def name(self) -> str:
        return "fake"  # callers must not expect other ranks, as in torch's fake group

    getBackendName = name  # noqa: N815

    def _get_backend(self, device: Any) -> StillGroup:
        return self

    def all_gather_single(self, out: Tensor, shard: Tensor, *_: Any) -> Any:
        if self.moves:
            out.view(self._num_ranks, -1).copy_(shard.reshape(1, -1).clone())
        return self._done

    def allgather(self, outs: Sequence[Sequence[Tensor]], shards: Sequence[Tensor], *_: Any) -> Any:
        if self.moves:
            for out, shard in zip(outs, shards, strict=True):
                for chunk in out:
                    chunk.copy_(shard)
        return self._done

    def all_gather_single_coalesced(self, outs: Sequence[Tensor], shards: Sequence[Tensor], *_: Any) -> Any:
        for out, shard in zip(outs, shards, strict=True):
            self.all_gather_single(out, shard)
        return self._done

    def _nothing(self, *_: Any) -> Any:
        return self._done

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    allreduce = allreduce_coalesced = broadcast = _nothing
    reduce_scatter = reduce_scatter_single = _reduce_scatter_base = _nothing
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = _nothing
    alltoall = all_to_all_single = alltoall_base = send = recv = barrier = _nothing


def register() -> None:
    """Register the backend `NAME`, which makes a `StillGroup`, with torch in this process, unless it is registered."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            NAME, lambda store, rank, num_ranks, timeout: StillGroup(rank, num_ranks), devices=["cpu", "cuda"]
        )
