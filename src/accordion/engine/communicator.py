"""What is said between ranks: the one file that communicates, through the process group's own methods."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from accordion import _torch
from accordion.engine import layout

HOST_ORDERED = ("gloo", "fake", "mpi", "ucc", "threaded")  # also where tensors are an accelerator's
LAUNCHES_EACH = ("nccl2", "nccl-lazy")  # each tensor of a coalesced collective by itself

CARRIED = frozenset(
    (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64)
)
"""The dtypes that every backend knows; others travel as bytes."""


def device_type_of_job() -> str:
    """The kind of device on which the default group's ranks compute: the accelerator's, if the group has a backend for it alone.

    The group is asked and not the name of its backend: `init_process_group()` without a backend leaves "undefined" there (torch
    2.11 to 2.13), and not every accelerator's library is called something with "nccl". A backend that serves the CPU as well
    (gloo, MPI, fake) says nothing of accelerators; who computes on one through it passes a mesh.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "cpu"
    backends = dict(pair.split(":", 1) for pair in dist.get_backend_config().split(","))
    here = backends.get(accelerator.type)
    return accelerator.type if here is not None and here != backends.get("cpu") else "cpu"


def is_stream_ordered(backend: str, device: torch.device) -> bool:
    """Return whether collectives of a backend on `device` run in the order of a stream: on accelerators most do."""
    return device.type != "cpu" and backend not in HOST_ORDERED


class Pending(NamedTuple):
    """What the host must wait for; no works where the backend orders by streams.

    `sends`: begun by every rank before `works` end, and waited for then: a time-out would close gloo's connections.
    """

    communicator: Communicator
    works: Sequence[Any] = ()
    sends: Sequence[Any] = ()


class Communicator:
    """One process group; every method returns what to wait for. Without a group: of one rank, which never communicates.

    On a stream-ordered backend calls run on the current stream with `asyncOp=False`: the default, True, moves them to a stream
    of the backend's own. Elsewhere (gloo, fake) calls are asynchronous and their works are handed to the caller.
    The `dist.*` wrappers do the same and cost 57 us more a unit and step.

    What a backend is better at, for those who plan a reduce or a gather: `exchanges`, all-to-all beats reduce-scatter at every
    size; `in_one_piece`, what is begun in pieces is no faster; `sends`, messages from rank to rank beat collectives. `can_poll`:
    a wait for a work may time out and be repeated; every other backend takes a timeout for the end of the communicator.
    `pack_limit_bytes`: smaller tensors travel packed with others.
    """

    exchanges = in_one_piece = sends = can_poll = False

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group = group
        self.num_ranks: int = group.size() if group is not None else 1
        self.rank: int = group.rank() if group is not None else 0
        self.device = device
        self.ranks: list[int] = dist.get_process_group_ranks(group) if group is not None else []
        self.is_fake, self.pack_limit_bytes = False, layout.PACK_LIMIT_BYTES
        if group is None:
            return
        backend = _torch.backend_of(group, device)
        if backend in LAUNCHES_EACH:
            self.pack_limit_bytes = layout.LARGE_PACK_LIMIT_BYTES
        self._async, self.is_fake = not is_stream_ordered(backend, device), backend == "fake"
        self._waits = self._async and backend != "threaded"  # whose ranks are threads, and meet in the call itself
        self._gather_options = _torch.gather_options(self._async)
        self._exchange_options = _torch.exchange_options(self._async)
        self._scatter_options = _torch.reduce_scatter_options(self._async)
        self._sum_options = _torch.all_reduce_options(self._async)
        # What torch puts around each backend to check it has none for several tensors before 2.12.
        self._coalesces = not _torch.checks_groups()
        self._gather = _torch.collective(group, "all_gather_single")
        self._exchange = _torch.collective(group, "all_to_all_single")
        self._scatter = _torch.collective(group, "reduce_scatter_single")
        self._gather_coalesced = _torch.collective(group, "all_gather_single_coalesced")
        self._scatter_coalesced = _torch.collective(group, "reduce_scatter_single_coalesced")

    @property
    def is_ordered(self) -> bool:
        """Whether what is asked of it runs in the order of a stream, and no host waits."""
        return self.group is not None and not self._async

    def _pending(self, *works: Any) -> Pending:
        return Pending(self, works if self._waits else ())

    def gather(self, fulls: list[Tensor], shards: list[Tensor]) -> Pending:
        """Every `fulls[i]` (1-D, num_ranks * n) becomes the `shards[i]` (1-D, n) of all ranks in rank order.

        One launch on a stream-ordered backend that coalesces. gloo copies in and out of a coalesced gather, and has none for
        CUDA tensors.
        """
        if self._async or not self._coalesces:
            gather, options, pairs = self._gather, self._gather_options, zip(fulls, shards, strict=True)
            return self._pending(*[gather(full, shard, options) for full, shard in pairs])
        if fulls:
            self._gather_coalesced(fulls, shards, self._gather_options)
        return self._pending()

    def exchange(self, sends: Sequence[tuple[Tensor, Tensor, list[int], list[int]]]) -> Pending:
        """All-to-all of each (received, sent, received splits, sent splits), 1-D; empty splits mean equal parts."""
        if self._async or len(sends) < 2 or not self._coalesces:
            return self._pending(
                *[self._exchange(out, sent, a, b, self._exchange_options) for out, sent, a, b in sends]
            )
        self.group._start_coalescing(self.device)
        for out, sent, a, b in sends:
            self._exchange(out, sent, a, b, self._exchange_options)
        self.group._end_coalescing(self.device)
        return self._pending()

    def scatter_sum(self, outs: list[Tensor], inputs: list[Tensor]) -> Pending:
        """Each `outs[i]` (1-D, n) becomes this rank's part of the sum over ranks of `inputs[i]` (1-D, num_ranks * n)."""
        if not outs:
            return self._pending()
        if not self._coalesces:
            scatter, pairs = self._scatter, zip(outs, inputs, strict=True)
            return self._pending(*[scatter(out, given, self._scatter_options) for out, given in pairs])
        return self._pending(self._scatter_coalesced(outs, inputs, self._scatter_options))

    def sum(self, tensors: Sequence[Tensor]) -> Pending:
        """Sum each tensor over ranks in place."""
        if self.num_ranks == 1:
            return Pending(self)
        if self._async or len(tensors) < 2 or not self._coalesces:
            return self._pending(*[self.group.allreduce([t], self._sum_options) for t in tensors])
        self.group._start_coalescing(self.device)
        for t in tensors:
            self.group.allreduce([t], self._sum_options)
        self.group._end_coalescing(self.device)
        return self._pending()


def own_communicator(communicator: Communicator, device: torch.device) -> Communicator:
    """A second communicator over the same ranks where one would serialise gather and reduce (NCCL), else the same communicator.

    All models over one group share it, as they share the first: a program that shards many would run out of them, and of
    the hundreds of megabytes that each takes on a device. It goes with the job's groups.
    """
    if communicator.num_ranks == 1 or not communicator.is_ordered:
        return communicator
    return Communicator(group_of_job(communicator, communicator.ranks, device), device)


def group_of_job(communicator: Communicator, ranks: list[int], device: torch.device) -> Any:
    """Return another process group of these `ranks` of a communicator, made once in a job. A collective over all of its ranks."""
    key = f"accordion/group/{_torch.group_name(communicator.group)}/{len(ranks)}/"
    groups = _torch.kept_with_job(key)
    if not groups:
        name = f"accordion/{common_name([] if communicator.is_fake else [communicator])}/{ranks[0]}"
        timeout, options = _torch.options_of(communicator.group, device)
        bound_to = None if device.type == "cpu" else device
        groups = [_torch.named_group(name, ranks, bound_to, timeout, options)]
        _torch.keep_with_job(key, groups[0])
    return groups[0]


def carried(tensor: Tensor) -> Tensor:
    """A tensor, its last dim dense, as a backend takes it that only moves numbers: its bytes where not all know its dtype."""
    return tensor if tensor.dtype in CARRIED else tensor.view(torch.uint8)


def gathered_rows(row: Tensor, communicator: Communicator) -> Tensor:
    """(num_ranks, n): the 1-D `row` of every rank of a communicator of several; waits."""
    out = row.new_empty(communicator.num_ranks * row.numel())
    for work in communicator.gather([carried(out)], [carried(row)]).works:
        work.wait()
    return out.view(communicator.num_ranks, -1)


def reduced(value: Tensor, communicators: Sequence[Communicator], op: Any = dist.ReduceOp.SUM) -> Tensor:
    """`value` reduced over every communicator in place; waits."""
    for communicator in communicators:
        if communicator.num_ranks > 1:
            dist.all_reduce(value, op=op, group=communicator.group)
    return value


def extremes(value: Tensor, communicators: Sequence[Communicator]) -> tuple[Tensor, Tensor]:
    """The smallest and the largest of each element over all ranks; equal where all ranks hold the same."""
    low = reduced(value.clone(), communicators, dist.ReduceOp.MIN)
    return low, reduced(value.clone(), communicators, dist.ReduceOp.MAX)


def broadcast(tensors: Sequence[Tensor], communicators: Sequence[Communicator]) -> None:
    """Every tensor takes the value of the first rank of each communicator; waits. As bytes: gloo knows few dtypes."""
    for communicator in communicators:
        if communicator.num_ranks > 1:
            for tensor in tensors:
                whole = tensor.detach().contiguous()
                dist.broadcast(whole.view(-1).view(torch.uint8), group=communicator.group, group_src=0)
                if whole.data_ptr() != tensor.data_ptr():
                    tensor.detach().copy_(whole)


def common_name(communicators: Sequence[Communicator]) -> str:
    """A name that nothing else of this job has, the same on all ranks; a collective."""
    if not communicators:
        return ""
    number = torch.tensor(secrets.randbits(62), device=communicators[0].device)
    broadcast([number], communicators)
    return f"{int(number):x}"
