"""Stand-ins for a device on a CPU: streams, an NCCL-like group of one rank, threads that do not run ahead."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accordion import _torch
from accordion.engine.communicator import Communicator
from accordion.engine.streams import SideStream, Transfer
from accordion.offload.arena import Arena
from accordion.offload.tiers import Tiers
from accordion.safety.divergence import DivergenceMonitor
from tests.happens_before.checker import Checker, Event, Stream, where

SHARD, TOPOLOGY = (importlib.import_module(f"accordion.shard.{name}") for name in ("api", "topology"))
COMMUNICATOR = importlib.import_module("accordion.engine.communicator")
FORWARD_WRITES = importlib.import_module("accordion.safety.forward_writes")
NO_KERNEL = (
    "aten.detach", "aten.empty", "aten.new_empty", "aten.as_strided", "aten.lift", "aten._unsafe_view", "aten.set_", "aten.alias",
    "aten.empty_like", "aten.empty_strided", "aten._local_scalar_dense", "aten.equal", "prim.device",
)  # fmt: skip
READ_BY_HOST = ("aten._local_scalar_dense", "aten.equal")


class Kernels(TorchDispatchMode):
    """Dispatch mode that records every operator as a kernel of the current stream."""

    def __init__(self, checker: Checker) -> None:
        super().__init__()
        self._checker = checker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        name = str(func)
        if name.startswith(READ_BY_HOST):
            self._checker.waits[f"{name}: {where()}"] += 1
        given = plain_tensors((args, kwargs))
        for tensor in given:
            self._checker.born(tensor.untyped_storage())
        out = func(*args, **kwargs)
        made = plain_tensors(out)
        for tensor in made:
            self._checker.born(tensor.untyped_storage())
        if not name.startswith(NO_KERNEL):
            self._run(func, given, made, args, kwargs)
        return out

    def _run(self, func: Any, given: list[Tensor], made: list[Tensor], args: Any, kwargs: Any) -> None:
        written = set()
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = kwargs.get(argument.name, args[i] if i < len(args) else None)
                written.update(key(tensor) for tensor in plain_tensors(value))
        known = {key(tensor) for tensor in given}
        fresh = [tensor for tensor in made if key(tensor) not in known]
        if made and not fresh and not written:
            return  # a view
        reads = [tensor for tensor in given if key(tensor) not in written]
        self._checker.run(str(func), reads, [tensor for tensor in given if key(tensor) in written] + fresh)


def plain_tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in `tree` that have memory."""
    found = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and not leaf.is_meta]
    return [tensor for tensor in found if type(tensor).__name__ != "FakeTensor"]


def key(tensor: Tensor) -> int:
    return _torch.storage_key(tensor.untyped_storage())


class OrderedGroup(dist.ProcessGroup):
    """A process group like NCCL's: collectives run on the current stream and return nothing. Zeros arrive."""

    checker: Checker  # of the test that runs

    def name(self) -> str:
        return "nccl"

    def getBackendName(self) -> str:  # noqa: N802
        return "nccl"

    @property
    def group_name(self) -> str:
        return _torch.name_of_group(self)

    def _get_backend(self, device: Any) -> OrderedGroup:
        return self

    def _start_coalescing(self, device: Any) -> None: ...

    def _end_coalescing(self, device: Any) -> None: ...

    def _arrive(self, what: str, own: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        self.checker.run(what, own, outs)
        for out in outs:  # not by an operator: no kernel runs, and no version counts
            ctypes.memset(out.data_ptr(), 0, out.numel() * out.itemsize)

    def allgather_into_tensor_coalesced(self, outs: Sequence[Tensor], own: Sequence[Tensor], *options: Any) -> None:
        self._arrive("gather", own, outs)

    def reduce_scatter_tensor_coalesced(self, outs: Sequence[Tensor], own: Sequence[Tensor], *options: Any) -> None:
        self._arrive("reduce-scatter", own, outs)

    def alltoall_base(self, out: Tensor, own: Tensor, *options: Any) -> None:
        self._arrive("exchange", [own], [out])

    def allreduce(self, tensors: Sequence[Tensor], *options: Any) -> None:
        self.checker.run("all-reduce", tensors, tensors)

    def broadcast(self, tensors: Sequence[Tensor], *options: Any) -> None:
        self.checker.run("broadcast", tensors, tensors)

    def _allgather_base(self, out: Tensor, own: Tensor, *options: Any) -> None:
        self._arrive("gather", [own], [out])

    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base


class Inline:
    """Stands in for a thread pool: work runs in `submit`, which is one of the orders that threads may take."""

    def submit(self, fn: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args))
        except BaseException as error:
            future.set_exception(error)
        return future


class DeviceModule:
    """The part of `torch.cuda` that side streams use."""

    def __init__(self, checker: Checker) -> None:
        self._checker = checker

    def current_stream(self, device: Any = None) -> Stream:
        return self._checker.current

    def stream(self, stream: Stream | None) -> Any:
        return self._checker.entered(stream)

    def Event(self, **options: Any) -> Event:  # noqa: N802
        return Event(self._checker)

    def synchronize(self, device: Any = None) -> None:
        self._checker.waits[f"device: {where()}"] += 1


class PinnedCopy:
    """Stands in for `HostCopy`: a read without a poll before it counts as a wait of the host."""

    def __init__(self, checker: Checker, read: Callable[[Tensor], Any], tensors: list[Tensor]) -> None:
        self._event, self._read, self._tensors, self._is_polled = checker.current.record_event(), read, tensors, False

    def is_ready(self) -> bool:
        self._is_polled = True
        return self._event.query()

    def read(self) -> list[Any]:
        if not self._is_polled:
            self._event.synchronize()
        return [self._read(tensor) for tensor in self._tensors]


@contextmanager
def checked(num_ranks: int) -> Iterator[Checker]:
    """Context manager in which this process is rank 0 of `num_ranks` on a device that is stood in for. Yields its checker."""
    checker, num_streams = Checker(), 0
    module = DeviceModule(checker)
    resize, read = torch.UntypedStorage.resize_, Tensor.tolist
    make_arena, make_watch = Arena.__init__, DivergenceMonitor.__init__

    def side_stream(self: Any, device: torch.device, waiter: DivergenceMonitor, late: bool = False) -> None:
        nonlocal num_streams
        self._device, self.waiter, self.late, self._module, self.sleeps = device, waiter, late, module, True
        self.stream, self.makes = Stream(checker, f"side stream {num_streams}"), Transfer
        num_streams += 1

    def resized(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        checker.resized(storage, num_bytes)
        return resize(storage, num_bytes)

    def arena(self: Any, num_bytes: int, device: torch.device) -> None:
        make_arena(self, num_bytes, device)
        if num_bytes:
            checker.pin(self.memory)

    def watch(self: Any, communicators: Any, ranks: Any) -> None:
        make_watch(self, [], ranks)  # nobody to talk to
        self.listens = True

    def same_everywhere(self: Any, rows: Tensor, mine: Tensor, text: Any) -> None:
        checker.run("assert", [(rows == mine).all()], [])

    def tolist(tensor: Tensor) -> Any:
        checker.waits[f"tolist: {where()}"] += 1
        return read(tensor)

    def all_reduce(value: Tensor, op: Any = None, group: Any = None) -> None:
        group.allreduce([value])

    def second(first: Any, device: torch.device) -> Any:
        return Communicator(first.group, device) if first.num_ranks > 1 else first

    OrderedGroup.checker = checker
    if "ordered" not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            "ordered", lambda store, rank, size, timeout: OrderedGroup(rank, size), devices=["cpu"]
        )
    replaced = [
        (SideStream, "__init__", side_stream), (Arena, "__init__", arena),
        (DivergenceMonitor, "__init__", watch),
        (DivergenceMonitor, "same_everywhere", same_everywhere), (Tiers, "_thread_pool", lambda *_: Inline()),
        (torch.UntypedStorage, "resize_", resized), (dist, "all_reduce", all_reduce), (Tensor, "tolist", tolist),
        (TOPOLOGY, "own_communicator", second), (COMMUNICATOR, "is_stream_ordered", lambda backend, device: True),
        (TOPOLOGY, "_one_node", lambda communicator, device: True), (SHARD, "same_structure", lambda *args, **kwargs: None),
        (TOPOLOGY, "same_mesh", lambda mesh: None),
        (FORWARD_WRITES, "HostCopy", partial(PinnedCopy, checker, read)),
        (SHARD, "same_values", lambda *args: lambda owned: owned.original.detach()),
    ]  # fmt: skip
    dist.init_process_group("ordered", store=_torch.fake_store(), rank=0, world_size=num_ranks)
    try:
        with ExitStack() as stack:
            for owner, name, value in replaced:
                stack.enter_context(mock.patch.object(owner, name, value))
            stack.enter_context(Kernels(checker))
            yield checker
    finally:
        dist.destroy_process_group()
