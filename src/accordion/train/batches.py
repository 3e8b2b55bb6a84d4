"""Micro-batches of a rank, without end: by a global order, from a stream that all ranks walk through, or from a loader."""

from __future__ import annotations

import random
from collections import deque
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
    def go_on(self, kept: Mapping[str, Any]) -> bool:
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

    def go_on(self, kept: Mapping[str, Any]) -> bool:
        place = kept.get("_index_sampler_state", kept)  # so named by torchdata, in checkpoints of older versions
        if not (isinstance(place, dict) and "count" in place and self.order.continues(place)):
            return False
        self.order.load_state_dict(place)
        return True


class StreamedBatches:
    """Micro-batches of an iterable of samples. Each rank walks through all of it and keeps the positions of its share.

    An epoch ends with the last whole global batch; then the iterable begins again, after `set_epoch(epoch)` where it has that.
    It draws random numbers of its own, the same on all ranks. An iterable with `state_dict` goes on by that, and any other one
    by reading again what was read of the epoch.
    """

    def __init__(self, data: Any, share: Share, seed: int, collate: Collate) -> None:
        self._data, self._share, self._collate = data, share, collate
        self._draws = Draws(seed)
        self._epoch, self._num_read = 0, 0  # samples of this epoch that all ranks have read
        self._items: Iterator[Any] | None = None
        self._ready: deque[list[Any]] = deque()

    def __next__(self) -> Any:
        if not self._ready:
            with self._draws.of(self._epoch):
                whole = self._read_step()
            while not whole:
                if self._num_read == 0:
                    raise UsageError(
                        f"the training data ended before one step, {self._share.global_batch} samples over all ranks; give more, "
                        "lower train.micro_batch, or, if it is a generator, an object whose __iter__ begins anew."
                    )
                self._epoch, self._num_read, self._items = self._epoch + 1, 0, None
                with self._draws.of(self._epoch):
                    whole = self._read_step()
        return self._collate(self._ready.popleft())

    def _read_step(self) -> bool:
        """Read the samples of a global batch, and keep this rank's; False where the epoch has no more as many."""
        share, step = self._share, list[list[Any]]()
        if self._items is None:
            self._items = begun(self._data, self._epoch)
        for position in range(share.global_batch):
            item = next(self._items, self)  # itself: no sample
            if item is self:
                return False
            if position % (share.world * share.micro_batch) == 0:
                step.append([])
            if position % share.world == share.rank:
                step[-1].append(item)
        self._num_read += share.global_batch
        self._ready.extend(step)
        return True

    def kept(self) -> dict[str, Any]:
        assert not self._ready, "a checkpoint is of a whole number of steps"
        return {"epoch": self._epoch, "num_read": self._num_read}

    def state(self) -> dict[str, Any]:
        return {"data": self._data, "draws": self._draws} if _is_stateful(self._data) else {}

    def go_on(self, kept: Mapping[str, Any]) -> bool:
        if "num_read" not in kept:
            return False
        self._epoch, self._num_read = kept["epoch"], kept["num_read"]
        with self._draws.of(self._epoch):
            if _is_stateful(self._data):
                self._items = iter(self._data)
                return True
            self._items = begun(self._data, self._epoch)
            return all(next(self._items, self) is not self for _ in range(self._num_read))


class LoaderBatches:
    """The batches of a loader, as it gives them; it begins again where it ends, after `set_epoch(epoch)` where it has that.

    Its shuffling draws random numbers that the epoch alone decides, the same on all ranks. A loader with `state_dict` goes on by
    that, and any other one by reading again what was read of the epoch.
    """

    def __init__(self, loader: Any, seed: int) -> None:
        self._loader, self._draws = loader, Draws(seed)
        self._generators = {id(g): (g, g.initial_seed()) for g in _generators_of(loader)}
        self._epoch, self._num_read = 0, 0
        self._batches: Iterator[Any] | None = None

    def __next__(self) -> Any:
        with self._draws.of(self._epoch):
            if self._batches is None:
                self._begin()
            batch = next(self._batches, self)  # type: ignore[arg-type]
        if batch is self:
            if self._num_read == 0:
                raise UsageError("the loader of the training data gives no batch; give it data.")
            self._epoch, self._num_read, self._batches = self._epoch + 1, 0, None
            return next(self)
        self._num_read += 1
        return batch

    def _begin(self) -> None:
        for generator, seed in self._generators.values():
            generator.manual_seed(seed + self._epoch)
        self._batches = begun(self._loader, self._epoch)

    def kept(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "num_batches": self._num_read}

    def state(self) -> dict[str, Any]:
        return {"data": self._loader, "draws": self._draws} if _is_stateful(self._loader) else {}

    def go_on(self, kept: Mapping[str, Any]) -> bool:
        if "num_batches" not in kept:
            return False
        self._epoch, self._num_read = kept["epoch"], kept["num_batches"]
        with self._draws.of(self._epoch):
            self._begin()
            if _is_stateful(self._loader):
                return True
            return all(next(self._batches, self) is not self for _ in range(self._num_read))  # type: ignore[arg-type]


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


def _generators_of(loader: Any) -> list[torch.Generator]:
    held = (getattr(thing, "generator", None) for thing in (loader, getattr(loader, "sampler", None)))
    return [generator for generator in held if isinstance(generator, torch.Generator)]


def _is_stateful(data: Any) -> bool:
    return hasattr(data, "state_dict") and hasattr(data, "load_state_dict")


# -- what the data is


def kind_of(data: Any, split: str) -> str:
    """`loader`, `dataset` or `iterable`. Raises `UsageError` for what is none of these."""
    what = f"the task's dataset({split!r}) gave a {type(data).__name__}"
    if isinstance(data, DataLoader):
        _check_sampler(data, what)
        return "loader"
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


def _check_sampler(loader: DataLoader[Any], what: str) -> None:
    """Raises `UsageError` for a loader by whose sampler every rank would read the same."""
    own = type(loader.batch_sampler) is not BatchSampler and loader.batch_sampler is not None
    if isinstance(loader.dataset, IterableDataset) or own:
        return
    if type(loader.sampler) in (SequentialSampler, RandomSampler):
        raise UsageError(
            f"{what} with torch's {type(loader.sampler).__name__}, by which every rank would read the same samples; return the "
            "dataset, of which each rank takes its share, or a loader with this rank's samples: dataset(split, rank, world)."
        )


def batches_of(data: Any, share: Share, seed: int, collate: Collate, *, pins: bool) -> Batches:
    """What a rank trains on. Raises `UsageError`."""
    kind = kind_of(data, "train")
    if kind == "loader":
        return LoaderBatches(data, seed)
    if kind == "iterable":
        return StreamedBatches(data, share, seed, collate)
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
