"""Endless micro-batches of a rank, from each kind of data: a dataset, an iterable of samples, or a loader."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from accordion.checkpoint import RandomState
from accordion.errors import UsageError
from accordion.tasks.loaded import is_indexed, is_loader
from accordion.train.data import GlobalOrder, Share, loader_of

Collate = Callable[[list[Any]], Any]


class Batches(Protocol):
    """Endless micro-batches of a rank. A checkpoint saves `position()` once, equal on all ranks, and `state()` of each rank."""

    def __next__(self) -> Any: ...
    def position(self) -> dict[str, Any]: ...
    def state(self) -> dict[str, Any]: ...
    def resume(self, position: dict[str, Any]) -> bool:
        """Continue at `position`, after `state` was loaded. Returns False if `position` was saved with other data."""
        ...


class OrderedBatches:
    """Micro-batches of a dataset with `__len__` and `__getitem__`. All ranks have one shuffled order of the samples, and each
    reads the positions of its `share`."""

    def __init__(
        self,
        dataset: Any,
        share: Share,
        seed: int,
        collate: Collate | None,
        *,
        pins: bool,
        order: type[GlobalOrder] = GlobalOrder,
    ) -> None:
        self.order = order(len(dataset), share, seed)
        self._loader = loader_of(dataset, self.order, collate, pins=pins)
        self._batches: Iterator[Any] | None = None

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = iter(self._loader)
        return next(self._batches)

    def position(self) -> dict[str, Any]:
        return self.order.state_dict()

    def state(self) -> dict[str, Any]:
        return {}

    def resume(self, position: dict[str, Any]) -> bool:
        if not ("count" in position and self.order.continues(position)):
            return False
        self.order.load_state_dict(position)
        return True


class LoaderBatches:
    """Batches of a loader. After its last batch the loader is started again, with `set_epoch(epoch)` if it has that.

    Random numbers drawn while reading depend on the epoch alone, and are equal on all ranks. A loader with `state_dict`
    resumes from its state; any other loader reads the batches of the epoch again.
    """

    counter, empty = "num_batches", "the loader of the training data returns no batch; give it data."

    def __init__(self, data: Any, seed: int, collate: Collate = lambda batch: batch) -> None:
        self._data, self._draws, self._collate = data, Draws(seed), collate
        generators = (getattr(thing, "generator", None) for thing in (data, getattr(data, "sampler", None)))
        self._generators = {id(g): (g, g.initial_seed()) for g in generators if isinstance(g, torch.Generator)}
        self._epoch, self._num_read = 0, 0
        self._batches: Iterator[Any] | None = None

    def __next__(self) -> Any:
        with self._draws.of(self._epoch):
            if self._batches is None:
                self._begin()
            batch: Any = next(self._batches, self)  # type: ignore[arg-type]  # `self` marks the end
        if batch is self:
            if self._num_read == 0:
                raise UsageError(self.empty)
            self._epoch, self._num_read, self._batches = self._epoch + 1, 0, None
            return next(self)
        return self._collate(batch)

    def _begin(self, *, tells_epoch: bool = True) -> Iterator[Any]:
        """Start an epoch and return the iterator of the data. `tells_epoch`: call `set_epoch`."""
        for generator, seed in self._generators.values():
            generator.manual_seed(seed + self._epoch)
        items = begun(self._data, self._epoch) if tells_epoch else iter(self._data)
        self._batches = self._batches_of(items)
        return items

    def _batches_of(self, items: Iterator[Any]) -> Iterator[Any]:
        for batch in items:
            self._num_read += 1
            yield batch

    def position(self) -> dict[str, Any]:
        return {"epoch": self._epoch, self.counter: self._num_read}

    def state(self) -> dict[str, Any]:
        return {"data": self._data, "draws": self._draws} if _is_stateful(self._data) else {}

    def resume(self, position: dict[str, Any]) -> bool:
        if self.counter not in position:
            return False
        self._epoch, self._num_read = position["epoch"], position[self.counter]
        with self._draws.of(self._epoch):
            if _is_stateful(self._data):
                self._begin(tells_epoch=is_loader(self._data))  # an iterable has the epoch in its state
                return True
            items = self._begin()
            return all(next(items, self) is not self for _ in range(self._num_read))


class StreamedBatches(LoaderBatches):
    """Micro-batches of an iterable of samples. Each rank reads all samples and uses those at the positions of its share.

    An epoch ends with the last complete global batch; then the iterable is started again, like a loader.
    """

    counter = "num_read"

    def __init__(self, data: Any, seed: int, share: Share, collate: Collate) -> None:
        super().__init__(data, seed, collate)
        self._share = share
        self.empty = (
            f"the training data ended before one step, {share.global_batch} samples over all ranks; give more data, lower "
            "train.micro_batch, or replace a generator by an object whose __iter__ starts again."
        )

    def _batches_of(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield lists of this rank's samples, a list for each micro-batch, after reading their whole global batch."""
        share = self._share
        while True:
            step = [list[Any]() for _ in range(share.accumulate)]
            for position in range(share.global_batch):
                item = next(items, self)  # `self` marks the end
                if item is self:
                    return
                if position % share.world == share.rank:
                    step[position // (share.world * share.micro_batch)].append(item)
            self._num_read += share.global_batch
            yield from step


class Draws:
    """State of the random numbers for reading data: separate from those of the training, and seeded in each epoch."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._epoch = -1
        self._state: dict[str, Any] = {}

    @contextmanager
    def of(self, epoch: int) -> Iterator[None]:
        """Context manager that sets the random numbers for reading `epoch`, and restores those of the training at its end."""
        outside = RandomState().state_dict()
        if epoch == self._epoch:
            RandomState().load_state_dict(self._state)
        else:
            seed_all(self._seed + 7919 * (epoch + 1))
            self._epoch = epoch
        try:
            yield
        finally:
            self._state = RandomState().state_dict()
            RandomState().load_state_dict(outside)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "held": self._state}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self._epoch, self._state = state["epoch"], state["held"]


def seed_all(seed: int) -> None:
    """Seed the generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def begun(data: Any, epoch: int) -> Iterator[Any]:
    """Call `set_epoch(epoch)` of `data`, its samplers and its dataset if they have that, and return `iter(data)`."""
    sampler = getattr(data, "sampler", None)
    inside = getattr(getattr(data, "batch_sampler", None), "sampler", None)
    for thing in {id(t): t for t in (data, sampler, inside, getattr(data, "dataset", None))}.values():
        set_epoch = getattr(thing, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
    return iter(data)


def _is_stateful(data: Any) -> bool:
    return hasattr(data, "state_dict") and hasattr(data, "load_state_dict")


# -- kinds of data


def kind_of(data: Any, split: str) -> str:
    """Return "loader", "dataset" or "iterable". Raises `UsageError` if `data` is none of these."""
    what = f"the task's dataset({split!r}) returned a {type(data).__name__}"
    if isinstance(data, DataLoader):
        plain = type(data.batch_sampler) is BatchSampler or data.batch_sampler is None
        sampled = plain and type(data.sampler) in (SequentialSampler, RandomSampler)
        if sampled and not isinstance(data.dataset, IterableDataset):
            raise UsageError(
                f"{what} with torch's {type(data.sampler).__name__}, by which every rank would read the same samples; return "
                "the dataset, of which each rank reads its share, or a loader of this rank's samples: dataset(split, rank, "
                "world)."
            )
    if is_loader(data):
        return "loader"
    if isinstance(data, str | bytes | Mapping | nn.Module):
        raise UsageError(f"{what}; it must return a dataset, an iterable of samples, a loader, or None.")
    if is_indexed(data):
        if len(data) == 0:
            raise UsageError(f"{what} without a sample; give it data, or return None if there is none.")
        return "dataset"
    if hasattr(data, "__iter__"):
        return "iterable"
    raise UsageError(
        f"{what}; it must return a dataset with __len__ and __getitem__, an iterable of samples, a loader, or None."
    )


def batches_of(data: Any, share: Share, seed: int, collate: Collate, *, pins: bool) -> Batches:
    """Return a rank's batches of the training data `data`. Raises `UsageError` if it is of no kind that can be read."""
    kind = kind_of(data, "train")
    if kind == "loader":
        return LoaderBatches(data, seed)
    if kind == "iterable":
        return StreamedBatches(data, seed, share, collate)
    return OrderedBatches(data, share, seed, collate, pins=pins)


# -- validation


def validation_of(data: Any, share: Share, collate: Collate, device: torch.device) -> Iterator[tuple[Any, int]]:
    """Return an iterator of (batch, number of samples that count), with equally many pairs on every rank. Every rank must call
    the model, so a rank that has no samples left gets samples of others, of which none counts."""
    kind = kind_of(data, "validation")
    if kind == "loader":
        return _in_step(data, begun(data, 0), device)
    if kind == "dataset":
        return _of_samples((data[i] for i in range(len(data))), share, collate, data)
    return _of_samples(begun(data, 0), share, collate, None)


def _of_samples(items: Iterator[Any], share: Share, collate: Collate, indexed: Any) -> Iterator[tuple[Any, int]]:
    if indexed is not None:
        each, count = share.world * share.micro_batch, len(indexed)
        for start in range(0, count, each):
            positions = [p for p in range(start + share.rank, start + each, share.world) if p < count]
            yield collate([indexed[i] for i in positions or [start]]), len(positions)
        return
    while True:
        samples, first, num_read = list[Any](), None, 0
        for position in range(share.world * share.micro_batch):
            item = next(items, share)  # `share` marks the end
            if item is share:
                break
            num_read += 1
            first = item if position == 0 else first
            if position % share.world == share.rank:
                samples.append(item)
        if num_read == 0:
            return
        yield collate(samples or [first]), len(samples)


def _in_step(loader: Any, batches: Iterator[Any], device: torch.device) -> Iterator[tuple[Any, int]]:
    last = None
    while True:
        batch = next(batches, loader)  # `loader` marks the end
        has = torch.full((), int(batch is not loader), device=device)
        dist.all_reduce(has)
        if not int(has):
            return
        if batch is loader and last is None:
            raise UsageError(
                f"the loader of the validation data returns no batch on rank {dist.get_rank()}; give each rank one."
            )
        last = last if batch is loader else batch
        yield last, 0 if batch is loader else rows_of(last)


def rows_of(batch: Any) -> int:
    """Return the number of samples in a batch: the rows of its first tensor; 1 if it has none."""
    leaves = tree_leaves(batch)
    first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
    return int(first.shape[0]) if first is not None and first.dim() else 1


def on_device(batch: Any, device: torch.device) -> Any:
    """Return `batch` with its tensors, and other leaves that have `to`, on `device`."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=True)
        return leaf.to(device) if hasattr(leaf, "to") and not isinstance(leaf, type) else leaf

    return tree_map(move, batch)
