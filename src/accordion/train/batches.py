"""Endless micro-batches of a rank, and its validation batches, from a dataset, an iterable of samples or a loader."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from accordion.checkpoint import RandomState
from accordion.errors import UsageError
from accordion.even_batches import in_step
from accordion.tasks.loaded import count_of, is_indexed, is_loader, number_of
from accordion.train.data import GlobalOrder, Share, validation_batches

Collate = Callable[[list[Any]], Any]


class OrderedBatches:
    """Endless micro-batches (`Batches`) of one rank from a dataset with `__len__` and `__getitem__`. Each epoch shuffles all
    samples, equally on all ranks, and each rank reads the positions of its `share`. `collate`: batch from a list of samples;
    None: torch's default. `pins`: put batches into pinned memory."""

    def __init__(self, dataset: Any, share: Share, seed: int, collate: Collate | None, *, pins: bool) -> None:
        self._order = order = GlobalOrder(len(dataset), share, seed)
        # A loader draws a number when it starts. That must not change the random numbers of the run.
        draws = torch.Generator()
        self._batches = iter(
            DataLoader(dataset, batch_sampler=order, collate_fn=collate, pin_memory=pins, generator=draws)
        )

    def __next__(self) -> Any:
        return next(self._batches)

    def position(self) -> dict[str, Any]:
        return {"num_read": self._order.num_read, "count": self._order.count, "seed": self._order.seed}

    def state(self) -> dict[str, Any]:
        return {}

    def resume(self, position: dict[str, Any]) -> bool:
        if (position.get("count"), position.get("seed")) != (self._order.count, self._order.seed):
            return False
        self._order.num_read = position["num_read"]
        return True


class LoaderBatches:
    """Endless batches (`Batches`) of one rank from a loader, which `begun` starts again in each epoch. Random numbers drawn
    while reading depend on seed and epoch alone, so all ranks draw equal ones. After `resume`, a loader with `state_dict` and
    `load_state_dict` goes on from its loaded state; with any other, batches used before in this epoch are read again and
    dropped. `counter`: key in `position()`, to which a batch adds `size`. `next()` raises `UsageError` for an empty epoch."""

    def __init__(self, data: Any, seed: int, *, counter: str = "num_batches", size: int = 1) -> None:
        self._data, self._draws, self._counter, self._size = data, Draws(seed), counter, size
        generators = (getattr(thing, "generator", None) for thing in (data, getattr(data, "sampler", None)))
        self._generators = {id(g): (g, g.initial_seed()) for g in generators if isinstance(g, torch.Generator)}
        self._epoch, self._num_read = 0, 0
        self._batches: Iterator[Any] | None = None

    def __next__(self) -> Any:
        with self._draws.of(self._epoch):
            if self._batches is None:
                self._batches = self._begun()
            batch = next(self._batches, self)  # `self` marks the end
        if batch is self:
            if self._num_read == 0:
                raise UsageError(
                    f"epoch {self._epoch + 1} of the training data has no batch, or less than a step; give more data, and "
                    "in place of a generator an object whose __iter__ starts again."
                )
            self._epoch, self._num_read, self._batches = self._epoch + 1, 0, None
            return next(self)
        self._num_read += self._size
        return batch

    def _begun(self) -> Iterator[Any]:
        for generator, seed in self._generators.values():
            generator.manual_seed(seed + self._epoch)
        return begun(self._data, self._epoch)

    def position(self) -> dict[str, Any]:
        return {"epoch": self._epoch, self._counter: self._num_read}

    def state(self) -> dict[str, Any]:
        return {"data": self._data, "draws": self._draws} if self._is_stateful else {}

    @property
    def _is_stateful(self) -> bool:
        return hasattr(self._data, "state_dict") and hasattr(self._data, "load_state_dict")

    def resume(self, position: dict[str, Any]) -> bool:
        if "epoch" not in position or self._counter not in position:
            return False
        self._epoch, self._num_read = position["epoch"], position[self._counter]
        with self._draws.of(self._epoch):
            self._batches = self._begun()
            num_again = 0 if self._is_stateful else self._num_read // self._size
            if all(next(self._batches, self) is not self for _ in range(num_again)):
                return True
        self._epoch, self._num_read, self._batches = 0, 0, None
        return False


Batches = OrderedBatches | LoaderBatches
"""Endless micro-batches of a rank, by `next()`. A checkpoint stores `position()`, equal on all ranks, and of each rank the
objects in `state()` (name -> object with `state_dict`). To continue, load these objects first, then call `resume(position)`,
which returns False if `position` does not belong to this data."""


class RankSamples(IterableDataset[Any]):
    """Dataset of the samples of an iterable that one rank reads: those at the positions of `share`. Each rank iterates over all
    samples and skips those of other ranks. `drops`: leave out the samples at the end that fill no global batch."""

    def __init__(self, samples: Any, share: Share, *, drops: bool) -> None:
        self._samples, self._share, self._drops = samples, share, drops
        self.set_epoch = getattr(samples, "set_epoch", None)

    def __iter__(self) -> Iterator[Any]:
        own = []
        for position, sample in enumerate(self._samples):
            if position % self._share.world == self._share.rank:
                own.append(sample)
            if (position + 1) % self._share.global_batch == 0:
                yield from own
                own = []
        yield from [] if self._drops else own


class Draws:
    """Random generators of Python, numpy and torch for reading data, separate from those of the training: read the data of an
    epoch inside `of(epoch)`. They are seeded anew in each epoch, and saved in checkpoints."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._epoch = -1
        self._state: dict[str, Any] = {}

    @contextmanager
    def of(self, epoch: int) -> Iterator[None]:
        """Context manager in which Python, numpy and torch draw the random numbers for reading the data of `epoch`. Seeds them
        at a new epoch, else goes on where the last use ended. At its end, restores the random states from before."""
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
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def begun(data: Any, epoch: int) -> Iterator[Any]:
    """Call `set_epoch(epoch)` of `data`, its samplers and its dataset, each if it has that method, and return `iter(data)`."""
    sampler = getattr(data, "sampler", None)
    inside = getattr(getattr(data, "batch_sampler", None), "sampler", None)
    for thing in {id(t): t for t in (data, sampler, inside, getattr(data, "dataset", None))}.values():
        set_epoch = getattr(thing, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
    return iter(data)


# -- kinds of data


def check_kind(data: Any, split: str) -> None:
    """Raise `UsageError` if `data`, which the task's `dataset(split)` returned, is no loader, iterable or dataset, is a dataset
    without samples, or is a `DataLoader` with torch's sequential or random sampler, which are equal on all ranks."""
    what = f"the task's dataset({split!r}) returned a {type(data).__name__}"
    if isinstance(data, DataLoader):  # of an iterable dataset it has neither of these samplers
        plain = type(data.batch_sampler) is BatchSampler or data.batch_sampler is None
        if plain and type(data.sampler) in (SequentialSampler, RandomSampler):
            raise UsageError(
                f"{what} with torch's {type(data.sampler).__name__}, by which every rank would read the same samples; return "
                "the dataset, of which each rank reads its share, or a loader of this rank's samples: dataset(split, rank, "
                "world)."
            )
    if is_loader(data):
        return
    if isinstance(data, str | bytes | Mapping | nn.Module) or not (is_indexed(data) or hasattr(data, "__iter__")):
        raise UsageError(
            f"{what}; it must return a dataset with __len__ and __getitem__, an iterable of samples, a loader, or None."
        )
    if is_indexed(data) and len(data) == 0:
        raise UsageError(f"{what} without a sample; give it data, or return None if there is none.")


def batches_of(data: Any, share: Share, seed: int, collate: Collate, *, pins: bool) -> Batches:
    """Return this rank's endless batches of `data`, a task's training data. Unless `data` is a loader, `collate` makes a batch
    from a list of samples, and `pins` puts batches into pinned memory. Raises `UsageError` if `check_kind` refuses `data`."""
    check_kind(data, "train")
    if is_loader(data):
        return LoaderBatches(data, seed)
    if is_indexed(data):
        return OrderedBatches(data, share, seed, collate, pins=pins)
    samples = RankSamples(data, share, drops=True)
    loader = DataLoader(samples, share.micro_batch, collate_fn=collate, pin_memory=pins)
    # Counted in samples of all ranks, so that any number of ranks can continue.
    return LoaderBatches(loader, seed, counter="num_read", size=share.world * share.micro_batch)


# -- validation


def validation_of(data: Any, share: Share, collate: Collate, device: torch.device) -> Iterator[tuple[Any, int]]:
    """Return an iterator of (batch, number of samples in it that count), with equally many pairs on every rank, because all
    ranks must call the model equally often. A rank without samples left gets a batch with number 0. For loaders and iterables,
    each step of the iterator is collective, and raises `UsageError` if some ranks have batches and others none at all.
    `collate`: batch from a list of samples, unless `data` is a loader. Raises `UsageError` if `check_kind` refuses `data`."""
    check_kind(data, "validation")
    if not is_loader(data) and not is_indexed(data):
        data = DataLoader(RankSamples(data, share, drops=False), share.micro_batch, collate_fn=collate)
    if is_loader(data):
        steps = in_step(_drawn(data), dist.all_reduce, dist.get_world_size(), device)
        return ((batch, rows_of(batch) if is_new else 0) for batch, is_new, _ in steps)
    return validation_batches(data, range(len(data)), share, collate)


def _drawn(loader: Any) -> Iterator[Any]:
    draws = Draws(0)  # ranks that take turns need the same order
    with draws.of(0):
        batches = begun(loader, 0)
    while True:
        with draws.of(0):
            batch = next(batches, loader)  # `loader` marks the end
        if batch is loader:
            return
        yield batch


def rows_of(batch: Any) -> int:
    """Return the size of dim 0 of the first tensor in `batch`; 1 if that tensor is 0-d, or if there is none."""
    first = next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)), None)
    return int(first.shape[0]) if first is not None and first.dim() else 1


def on_device(batch: Any, device: torch.device) -> Any:
    """Return `batch`, nested containers, with each leaf that has a method `to`, such as a tensor, moved to `device`."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=True)
        return leaf.to(device) if hasattr(leaf, "to") and not isinstance(leaf, type) else leaf

    return tree_map(move, batch)


def means_of(
    model: nn.Module,
    batches: Iterable[tuple[Any, int]],
    values_of: Callable[[Any], Mapping[str, Any]],
    device: torch.device,
) -> dict[str, float]:
    """Return name -> mean over all samples of all ranks; {} without batches. Calls the model in evaluation mode, then restores
    the mode of each module and the random generators, also after an error. Collective. `batches`: (batch, number of its samples
    that count), as many on each rank. `values_of`, called with a batch on `device`, returns name -> mean over the batch, or
    (sum, count), with equal names in equal order on all ranks. Raises `UsageError` for a value of another form."""
    drawn, modes = RandomState().state_dict(), {module: module.training for module in model.modules()}
    sums: dict[str, Tensor] = {}  # name -> sum and count, (2,)
    try:
        model.eval()
        for batch, num_samples in batches:
            for name, value in values_of(on_device(batch, device)).items():
                what = f"the task's {name}"
                if num_samples == 0:
                    pair = torch.zeros(2, dtype=torch.float64, device=device)
                elif isinstance(value, tuple) and len(value) == 2:
                    total = number_of(value[0], device, what)
                    pair = torch.stack([total, count_of(value[1], device, what).double()])
                else:
                    mean = number_of(value, device, what)
                    pair = torch.stack([mean * num_samples, torch.full_like(mean, num_samples)])
                sums[name] = sums.get(name, 0.0) + pair
    finally:
        model.train(modes[model])  # a module may do more in `train` than set its mode
        for module, mode in modes.items():
            module.training = mode  # a module that is frozen in evaluation mode stays so
        RandomState().load_state_dict(drawn)
    if not sums:
        return {}
    totals = torch.stack(list(sums.values()))
    dist.all_reduce(totals)
    return {name: float(pair[0] / pair[1]) for name, pair in zip(sums, totals, strict=True)}
