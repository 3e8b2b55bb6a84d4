"""`even`: equally many steps on all ranks although their data is unequal: ranks that run out repeat their last batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from accordion.devices import HostCopy
from accordion.engine.communicator import reduced
from accordion.errors import UsageError
from accordion.state import sharded_engine

Batch = TypeVar("Batch")


class EvenBatches(Generic[Batch]):
    """Iterable that `even` returns; each `for` loop over it is one pass over `loader`.

    `weight`: factor of this rank's gradients in the step that runs now: 0.0 for a repeated batch, else (number of ranks) /
    (number of ranks with a new batch), or 1.0 under `shard(reduce_op="sum")`. Outside of a loop it is 1.0.
    """

    def __init__(self, loader: Iterable[Batch], model: nn.Module) -> None:
        self._loader, self._engine = loader, sharded_engine(model, "even")
        self.weight = 1.0

    def __iter__(self) -> Iterator[Batch]:
        engine, context = self._engine, self._engine.context
        total = partial(reduced, communicators=[context.shard.gather, context.replicate.gather])
        num_ranks, sums = context.num_ranks, context.scale == 1.0  # reduce_op="sum"
        try:
            for batch, is_new, num_new in in_step(self._loader, total, num_ranks, context.device):
                self.weight = engine.weight = is_new * (1.0 if sums else num_ranks / num_new)
                yield batch
        finally:
            self.weight = engine.weight = 1.0


def even(loader: Iterable[Batch], model: nn.Module) -> EvenBatches[Batch]:
    """Return an iterable over the batches of `loader` with as many steps on each rank as on the rank that has most batches.

    Every rank runs the body of the loop in every step, since it has to step its shards of `model`. A rank that has no batch left
    gets its last one again, and its gradients do not count: the gradient of a step is the mean over the ranks with a new batch,
    or their sum under `shard(reduce_op="sum")`, and None if none of these ranks uses the parameter. Each micro-batch under
    `no_sync` is averaged by itself. Buffers, such as the statistics of a batch norm, and the loss see a repeated batch like a
    new one. For the loss of new batches, log the mean over all ranks of `loss * batches.weight` (`batches`: the iterable).

    Iterating is collective: a number is summed over the ranks of `model` one step ahead, so that the host does not wait for the
    step that it has just queued. End a loop early on all ranks together.

    Raises:
        UsageError: if `model` is not sharded; when iterating, on every rank, if only some ranks have a batch at all.
    """
    return EvenBatches(loader, model)


def in_step(
    batches: Iterable[Batch], total: Callable[[Tensor], object], num_ranks: int, device: torch.device
) -> Iterator[tuple[Batch, bool, int]]:
    """Yield (batch, True if it is new, number of ranks with a new batch), equally often on all ranks; a rank that has no batch
    left repeats its last one. Each step is collective. Raises `UsageError` on every rank if only some have a batch at all.
    `total`: function that replaces a tensor on `device`, in place, by its sum over the `num_ranks` ranks."""

    def counted(batch: Any) -> HostCopy:
        num = torch.full((), int(batch is not end), device=device)
        total(num)
        return HostCopy([num])

    end: Any = object()
    rest = iter(batches)
    last, batch = end, next(rest, end)
    count = counted(batch)
    while num_new := count.read()[0]:
        if last is end and num_new < num_ranks:
            raise UsageError(
                f"{num_ranks - num_new} of {num_ranks} ranks have no batch at all, and a rank without data left repeats its "
                "last batch; give each rank at least one."
            )
        is_new = batch is not end
        last = batch if is_new else last
        # Counted before the step is queued, so that the host never waits for its work.
        batch = next(rest, end) if is_new else end
        count = counted(batch)
        yield last, is_new, num_new
