"""Micro-batches of a rank, without end: by a global order, from a stream that all ranks walk through, or from a loader."""

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
    """Owns a place in the data. `state` goes into a checkpoint for each rank, `kept` once: it must be the same on all ranks."""

    def __next__(self) -> Any: ...
    def kept(self) -> dict[str, Any]: ...
    def state(self) -> dict[str, Any]: ...
    def go_on(self, kept: dict[str, Any]) -> bool:
        """Go on where another run stopped, of which `state` is loaded; False where that was in other data."""
        ...


class OrderedBatches:
    """Micro-batches of a dataset with `__len__` and `__getitem__`, each rank its share of one order over all samples."""

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

    def kept(self) -> dict[str, Any]:
        return self.order.state_dict()

    def state(self) -> dict[str, Any]:
        return {}

    def go_on(self, kept: dict[str, Any]) -> bool:
        if not ("count" in kept and self.order.continues(kept)):
            return False
        self.order.load_state_dict(kept)
        return True


class LoaderBatches:
    """The batches of a loader, as it gives them; it begins again where it ends, after `set_epoch(epoch)` where it has that.

    Reading draws random numbers that the epoch alone decides, the same on all ranks. A loader with `state_dict` goes on by
    that, and any other one by reading again what was read of the epoch.
    """

    counter, empty = "num_batches", "the loader of the training data gives no batch; give it data."

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
            batch: Any = next(self._batches, self)  # type: ignore[arg-type]  # itself: no batch
        if batch is self:
            if self._num_read == 0:
                raise UsageError(self.empty)
            self._epoch, self._num_read, self._batches = self._epoch + 1, 0, None
            return next(self)
        return self._collate(batch)

    def _begin(self, *, tells_epoch: bool = True) -> Iterator[Any]:
        """Begin a pass over the data, and return it."""
        for generator, seed in self._generators.values():
            generator.manual_seed(seed + self._epoch)
        items = begun(self._data, self._epoch) if tells_epoch else iter(self._data)
        self._batches = self._batches_of(items)
        return items

    def _batches_of(self, items: Iterator[Any]) -> Iterator[Any]:
        for batch in items:
            self._num_read += 1
            yield batch

    def kept(self) -> dict[str, Any]:
        return {"epoch": self._epoch, self.counter: self._num_read}

    def state(self) -> dict[str, Any]:
        return {"data": self._data, "draws": self._draws} if _is_stateful(self._data) else {}

    def go_on(self, kept: dict[str, Any]) -> bool:
        if self.counter not in kept:
            return False
        self._epoch, self._num_read = kept["epoch"], kept[self.counter]
        with self._draws.of(self._epoch):
            if _is_stateful(self._data):
                self._begin(tells_epoch=is_loader(self._data))  # the state of an iterable has its epoch
                return True
            items = self._begin()
            return all(next(items, self) is not self for _ in range(self._num_read))


class StreamedBatches(LoaderBatches):
    """Micro-batches of an iterable of samples. Each rank walks through all of it and keeps the positions of its share.

    An epoch ends with the last whole global batch; then the iterable begins again, as a loader does.
    """

    counter = "num_read"

    def __init__(self, data: Any, seed: int, share: Share, collate: Collate) -> None:
        super().__init__(data, seed, collate)
        self._share = share
        self.empty = (
            f"the training data ended before one step, {share.global_batch} samples over all ranks; give more, lower "
            "train.micro_batch, or, if it is a generator, an object whose __iter__ begins anew."
        )

    def _batches_of(self, items: Iterator[Any]) -> Iterator[Any]:
        """Read the samples of a whole global batch before yielding this rank's micro-batches of it."""
        share = self._share
        while True:
            step = [list[Any]() for _ in range(share.accumulate)]
            for position in range(share.global_batch):
                item = next(items, self)  # itself: no sample
                if item is self:
                    return
                if position % share.world == share.rank:
                    step[position // (share.world * share.micro_batch)].append(item)
            self._num_read += share.global_batch
            yield from step


class Draws:
    """Owns the random numbers that reading data draws, apart from those of the training; begun anew with each epoch."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._epoch = -1
        self._held: dict[str, Any] = {}

    @contextmanager
    def of(self, epoch: int) -> Iterator[None]:
        """Inside, random numbers are those of reading this epoch."""
        outside = RandomState().state_dict()
        if epoch == self._epoch:
            RandomState().load_state_dict(self._held)
        else:
            seed_all(self._seed + 7919 * (epoch + 1))
            self._epoch = epoch
        try:
            yield
        finally:
            self._held = RandomState().state_dict()
            RandomState().load_state_dict(outside)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "held": self._held}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self._epoch, self._held = state["epoch"], state["held"]


def seed_all(seed: int) -> None:
    """Python's, numpy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def begun(data: Any, epoch: int) -> Iterator[Any]:
    """A new pass over `data`, which is told the epoch where it, its sampler or its dataset takes that."""
    sampler = getattr(data, "sampler", None)
    inside = getattr(getattr(data, "batch_sampler", None), "sampler", None)
    for thing in {id(t): t for t in (data, sampler, inside, getattr(data, "dataset", None))}.values():
        tell = getattr(thing, "set_epoch", None)
        if callable(tell):
            tell(epoch)
    return iter(data)


def _is_stateful(data: Any) -> bool:
    return hasattr(data, "state_dict") and hasattr(data, "load_state_dict")


# -- what the data is


def kind_of(data: Any, split: str) -> str:
    """`loader`, `dataset` or `iterable`. Raises `UsageError` for what is none of these."""
    what = f"the task's dataset({split!r}) gave a {type(data).__name__}"
    if isinstance(data, DataLoader):
        plain = type(data.batch_sampler) is BatchSampler or data.batch_sampler is None
        sampled = plain and type(data.sampler) in (SequentialSampler, RandomSampler)
        if sampled and not isinstance(data.dataset, IterableDataset):
            raise UsageError(
                f"{what} with torch's {type(data.sampler).__name__}, by which every rank would read the same samples; return "
                "the dataset, of which each rank takes its share, or a loader with this rank's samples: dataset(split, rank, "
                "world)."
            )
    if is_loader(data):
        return "loader"
    if isinstance(data, str | bytes | Mapping | nn.Module):
        raise UsageError(f"{what}; it takes a dataset, an iterable of samples, a loader, or None.")
    if is_indexed(data):
        if len(data) == 0:
            raise UsageError(f"{what} without a sample; give it data, or return None where there is none.")
        return "dataset"
    if hasattr(data, "__iter__"):
        return "iterable"
    raise UsageError(
        f"{what}; it takes a dataset with __len__ and __getitem__, an iterable of samples, a loader, or None."
    )


def batches_of(data: Any, share: Share, seed: int, collate: Collate, *, pins: bool) -> Batches:
    """What a rank trains on. Raises `UsageError`."""
    kind = kind_of(data, "train")
    if kind == "loader":
        return LoaderBatches(data, seed)
    if kind == "iterable":
        return StreamedBatches(data, seed, share, collate)
    return OrderedBatches(data, share, seed, collate, pins=pins)


# -- validation


def validation_of(data: Any, share: Share, collate: Collate, device: torch.device) -> Iterator[tuple[Any, int]]:
    """This rank's batches and how many samples of them count, equally many on every rank.

    A rank that has none left is given samples that others have, of which none counts: the model is called all the same.
    """
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
            mine = [p for p in range(start + share.rank, start + each, share.world) if p < count]
            yield collate([indexed[i] for i in mine or [start]]), len(mine)
        return
    while True:
        mine_, first, num_read = list[Any](), None, 0
        for position in range(share.world * share.micro_batch):
            item = next(items, share)  # itself: no sample
            if item is share:
                break
            num_read += 1
            first = item if position == 0 else first
            if position % share.world == share.rank:
                mine_.append(item)
        if num_read == 0:
            return
        yield collate(mine_ or [first]), len(mine_)


def _in_step(loader: Any, batches: Iterator[Any], device: torch.device) -> Iterator[tuple[Any, int]]:
    last = None
    while True:
        batch = next(batches, loader)  # itself: no batch
        has = torch.full((), int(batch is not loader), device=device)
        dist.all_reduce(has)
        if not int(has):
            return
        if batch is loader and last is None:
            raise UsageError(
                f"the loader of the validation data gives rank {dist.get_rank()} no batch; give each rank one."
            )
        last = last if batch is loader else batch
        yield last, 0 if batch is loader else rows_of(last)


def rows_of(batch: Any) -> int:
    """How many samples a batch holds: the rows of its first tensor; 1 where it has none."""
    leaves = tree_leaves(batch)
    first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
    return int(first.shape[0]) if first is not None and first.dim() else 1


def on_device(batch: Any, device: torch.device) -> Any:
    """`batch` with its tensors, and whatever else in it has `to`, on `device`."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=True)
        return leaf.to(device) if hasattr(leaf, "to") and not isinstance(leaf, type) else leaf

    return tree_map(move, batch)
