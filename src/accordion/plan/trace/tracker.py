"""The dispatch mode that logs the storages, kernels and collectives of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from accordion import _torch
from accordion.observe.allocations import StorageWatch
from accordion.plan.events import (
    ALL_TO_ALL,
    Alloc,
    Axes,
    Category,
    Collective,
    Enter,
    Event,
    Free,
    Op,
    StepPart,
    StepPhase,
    Streams,
)
from accordion.plan.trace.memo import Memo
from accordion.plan.trace.operators import bytes_moved_by, flops_of, num_bytes, row_of, tensors_of

COLLECTIVES = {  # torch's own collectives: (kind, index of the argument with the full tensors; None: they are the result)
    "_allgather_base_": ("gather", 0),
    "allreduce_": ("sum", 0),
    "_reduce_scatter_base_": ("scatter_sum", 1),
    "alltoall_base_": (ALL_TO_ALL, 0),  # of sequence parallelism
    "all_reduce": ("sum", 0),
    "all_gather_into_tensor": ("gather", None),
    "reduce_scatter_tensor": ("scatter_sum", 0),
}
ARGUMENT_CATEGORIES = {  # FSDP2's operators whose arguments have a known category
    "fsdp.all_gather_copy_in.default": Category.GATHERED,
    "fsdp.chunk_cat.default": Category.GRADIENTS,
    "fsdp.chunk_cat_mixed_dtype.default": Category.GRADIENTS,  # torch 2.15
    "c10d._reduce_scatter_base_.default": Category.GRADIENTS,
}
BY_PHASE = {  # category of new memory, if it is not set
    StepPhase.BUILD: Category.PARAMETERS,
    StepPhase.FORWARD: Category.ACTIVATIONS,
    StepPhase.BACKWARD: Category.OTHER,
}


class Tracker(StorageWatch):
    """Dispatch mode that appends to `events` storages, operators and collectives in order; the engine adds units and transfers.
    Set `with_workspaces` to log known workspaces of CUDA kernels too, and `only_memory` to log no operators."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.stream = Streams.COMPUTE
        self.place = StepPart(StepPhase.BUILD, -1)
        self.category: Category | None = None
        self.live: dict[int, Alloc] = {}  # by the storage's key
        self._operator = ""
        self._count = 0
        self._paused = 0
        self.only_memory = False  # log no operators and collectives, in the step before the one that is logged
        self.axes: dict[int, str] = {}  # mesh axis by id of the communicator, if it is not "shard"
        self.with_workspaces = False  # log the workspaces of CUDA kernels
        self.unknown_workspaces: dict[str, str] = {}  # operator that ran -> why its workspace is not known
        self.sum_axis = "shard"  # mesh axis of torch's own all-reduce
        self.transfers = count(1)  # numbers for transfers
        self._memo = Memo()

    # -- called by the traced engine

    def enter(self, phase: StepPhase, unit: int = -1) -> None:
        self.place = StepPart(phase, unit)
        self.events.append(Enter(self.place))

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Context manager in which all work is logged on `stream`."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def new_memory_as(self, category: Category) -> Iterator[None]:
        """Context manager in which new storages get `category`. Resized ones get `GATHERED`, as always."""
        before, self.category = self.category, category
        try:
            yield
        finally:
            self.category = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager in which operators, and new or resized storages, are not logged; frees of logged storages are. A
        storage that is created inside is logged when an operator first uses it outside."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def set_category(self, tensors: Any, category: Category) -> None:
        """Set the category of the live allocations of the tensors in the nested `tensors`. This changes their `Alloc` events,
        which are logged already."""
        for storage in storages_of(tensors):
            alloc = self.live.get(_torch.storage_key(storage))
            if alloc is not None:
                alloc.category = category

    def collective(self, kind: str, num_bytes: int, axis: str) -> None:
        self.events.append(Collective(kind, num_bytes, axis, self.stream))

    def exchange(self, rows: Tensor) -> Tensor:
        """Log an all-to-all over the ranks that share experts. Sends nothing; returns an uninitialized tensor like `rows`."""
        self.collective(ALL_TO_ALL, rows.nbytes, Axes.EXPERTS)
        return torch.empty_like(rows)

    # -- operators and storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _torch.ASKS_DEVICE and (device := _torch.fake_device(args[0])) is not None:
            return device
        return super().__torch_dispatch__(func, types, args, kwargs)

    def runs(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if self._paused or func.namespace == "prim":
            return func(*args, **kwargs)
        self._operator = str(func)
        for storage in storages_of((args, kwargs)):
            self._log_new(storage)
        out = self._memo.run(func, args, kwargs)
        self._operator = str(func)
        for storage in storages_of(out):
            self._log_new(storage)
        if self.with_workspaces and (workspace := row_of(func).workspace(args)):
            self._count += 1
            self.events.append(Alloc(self._count, workspace, Category.OTHER, self.stream, self._operator))
            self.events.append(Free(self._count))
        if self._operator in ARGUMENT_CATEGORIES:
            self.set_category((args, kwargs), ARGUMENT_CATEGORIES[self._operator])
        if self.only_memory:
            return out
        if func.namespace in ("c10d", "_c10d_functional"):
            kind, index = COLLECTIVES.get(func.__name__.partition(".")[0], ("", None))
            if kind:
                full = tensors_of(out if index is None else args[index])
                axis = {"sum": self.sum_axis, ALL_TO_ALL: Axes.SEQUENCE}.get(kind, "shard")
                self.collective(kind, sum(map(num_bytes, full)), axis)
        else:
            self._record(func, args, kwargs, out)
        return out

    def resized(self, key: int, storage: torch.UntypedStorage) -> None:
        if not self._paused:
            self._operator = "resize_"
            self.died(key)
            self._take(storage, Category.GATHERED)

    def _log_new(self, storage: torch.UntypedStorage) -> None:
        if self.watch(storage):
            by_phase = BY_PHASE.get(self.place.phase, Category.OTHER)
            self._take(storage, self.category or (Category.ACTIVATIONS if self._recomputes() else by_phase))

    def _recomputes(self) -> bool:
        return self.place.phase is StepPhase.BACKWARD and torch.is_grad_enabled()

    def _take(self, storage: torch.UntypedStorage, category: Category) -> None:
        if storage.nbytes():
            self._count += 1
            alloc = Alloc(self._count, storage.nbytes(), category, self.stream, self._operator)
            self.live[_torch.storage_key(storage)] = alloc
            self.events.append(alloc)

    def died(self, key: int) -> None:
        alloc = self.live.pop(key, None)
        if alloc is not None:
            self.events.append(Free(alloc.number))

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = str(func)
        if getattr(func, "is_view", False) or name.startswith(_torch.WITHOUT_KERNEL):
            return
        inputs, outputs = tensors_of((args, kwargs)), tensors_of(out)
        if not inputs and not outputs:
            return
        flops = flops_of(func, args, kwargs, out)
        moved = bytes_moved_by(func, args, kwargs, out)
        floating = next((t.dtype for t in (*inputs, *outputs) if t.is_floating_point()), torch.float32)
        row = row_of(func)
        unsure = int(row.bound(args, kwargs, out)) if self.with_workspaces else 0
        if unsure:
            self.unknown_workspaces[name] = row.why
        dtype = str(floating).removeprefix("torch.")
        self.events.append(Op(name, flops, moved, dtype, self.stream, self._recomputes(), unsure))


def storages_of(tree: Any) -> list[torch.UntypedStorage]:
    """Return the storage of each tensor in a nested `tree`, except for tensors that are on the meta device or not strided. For
    a DTensor it is that of the local tensor. A storage that several tensors share is repeated."""
    local = [_torch.local_of(t) if isinstance(t, DTensor) else t for t in tensors_of(tree)]
    return [t.untyped_storage() for t in local if t.device.type != "meta" and t.layout is torch.strided]
