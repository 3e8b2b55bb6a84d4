"""Collectives between ranks. Those of a training step are called on the process group, without the cost of `dist` wrappers."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from accordion import _torch
from accordion.engine import layout

HOST_ORDERED = ("gloo", "fake", "mpi", "ucc")  # the host waits, also for an accelerator's tensors
EXCHANGE_BYTES_PER_PEER = 256 * layout.KIB  # below it latency dominates, and a reduce-scatter is one launch
LAUNCHES_EACH = ("nccl2", "nccl-lazy")  # these launch each tensor of a coalesced collective separately

CARRIED = frozenset(
    (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64)
)
"""The dtypes that every backend can send; tensors of others are sent as bytes."""


def device_type_of_job() -> str:
    """Return the device type on which the default process group communicates: the accelerator's, such as "cuda", or "cpu". A
    backend that also serves the CPU (gloo, MPI, fake) counts as "cpu"; to shard on an accelerator with it, pass a mesh."""
    # The group is asked, because `init_process_group()` without a backend leaves the name "undefined" (torch 2.11 to 2.13).
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "cpu"
    backends = dict(pair.split(":", 1) for pair in dist.get_backend_config().split(","))
    backend = backends.get(accelerator.type)
    return accelerator.type if backend is not None and backend != backends.get("cpu") else "cpu"


def is_stream_ordered(backend: str, device: torch.device) -> bool:
    """Return True if collectives of `backend` on `device` run in the order of a device stream, without a wait of the host."""
    return device.type != "cpu" and backend not in HOST_ORDERED


class Pending(NamedTuple):
    """The `Work`s of a collective of `communicator` for which the host must wait; none if the backend runs in the order of
    streams. `sends`: works of point-to-point messages. Wait for `sends` after `works`, because all ranks have then begun to
    send: a wait for a message that times out closes gloo's connections."""

    communicator: Communicator
    works: Sequence[Any] = ()
    sends: Sequence[Any] = ()


class Communicator:
    """A process group whose collectives return a `Pending` to wait for. With `group` None it is a single rank, on which only
    `sum` may be called. `rank`: index of this rank in the group. `ranks`: global ranks of its members.

    Properties of the backend. `exchanges`: all-to-all is faster than reduce-scatter at every size. `in_one_piece`: splitting an
    all-to-all gains nothing. `sends`: point-to-point messages are faster than collectives. `can_poll`: a wait may time out and
    be repeated (other backends fail after a timeout). `pack_limit_bytes`: smaller tensors are packed into one message.
    `is_ordered`: collectives run in the order of a stream, without a wait of the host. `is_fake`: ranks are simulated.
    """

    # On a stream-ordered backend collectives run on the current stream with `asyncOp=False`; the default, True, moves them to a
    # stream of the backend. On other backends (gloo, fake) the caller gets their works. The `dist.*` wrappers do the same and
    # cost 57 us more per unit and step.

    exchanges = in_one_piece = sends = can_poll = is_ordered = is_fake = False

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group = group
        self.num_ranks: int = group.size() if group is not None else 1
        self.rank: int = group.rank() if group is not None else 0
        self.device = device
        self.ranks: list[int] = dist.get_process_group_ranks(group) if group is not None else []
        self.pack_limit_bytes = layout.PACK_LIMIT_BYTES
        if group is None:
            return
        backend = _torch.backend_of(group, device)
        if backend in LAUNCHES_EACH:
            self.pack_limit_bytes = layout.LARGE_PACK_LIMIT_BYTES
        self.is_ordered, self.is_fake = is_stream_ordered(backend, device), backend == "fake"
        self._gather_options = _torch.gather_options(not self.is_ordered)
        self._exchange_options = _torch.exchange_options(not self.is_ordered)
        self._scatter_options = _torch.reduce_scatter_options(not self.is_ordered)
        self._sum_options = _torch.all_reduce_options(not self.is_ordered)
        self._gather = _torch.collective(group, "all_gather_single")
        self._exchange = _torch.collective(group, "all_to_all_single")
        self._gather_coalesced = _torch.collective(group, "all_gather_single_coalesced")
        self._scatter_coalesced = _torch.collective(group, "reduce_scatter_single_coalesced")

    def _pending(self, *works: Any) -> Pending:
        return Pending(self, () if self.is_ordered else works)

    def gather(self, fulls: list[Tensor], shards: list[Tensor]) -> Pending:
        """All-gather: fill each `fulls[i]` (num_ranks * n,) with the `shards[i]` (n,) of all ranks in rank order."""
        # One launch if the backend is stream-ordered; gloo would copy in and out, and has none for CUDA tensors.
        if not self.is_ordered:
            gather, options, pairs = self._gather, self._gather_options, zip(fulls, shards, strict=True)
            return self._pending(*[gather(full, shard, options) for full, shard in pairs])
        if fulls:
            self._gather_coalesced(fulls, shards, self._gather_options)
        return self._pending()

    def exchange(self, sends: Sequence[tuple[Tensor, Tensor, list[int], list[int]]]) -> Pending:
        """All-to-all for each tuple (1-D output, 1-D input, output split sizes, input split sizes); [] splits equally."""
        return self._launch(self._exchange, [(*send, self._exchange_options) for send in sends])

    def scatter_sum(self, outs: list[Tensor], inputs: list[Tensor]) -> Pending:
        """Reduce-scatter: fill each `outs[i]` (n,) with chunk `rank` of the sum of `inputs[i]` (num_ranks * n,) over ranks."""
        return self._pending(self._scatter_coalesced(outs, inputs, self._scatter_options)) if outs else self._pending()

    def sum(self, tensors: Sequence[Tensor]) -> Pending:
        """All-reduce: replace each tensor, in place, by its sum over ranks."""
        if self.num_ranks == 1:
            return Pending(self)
        return self._launch(self.group.allreduce, [([t], self._sum_options) for t in tensors])

    def _launch(self, collective: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> Pending:
        """Call `collective(*arguments)` for each tuple in `calls`, in one launch if the backend is stream-ordered."""
        if not self.is_ordered or len(calls) < 2:
            return self._pending(*[collective(*arguments) for arguments in calls])
        self.group._start_coalescing(self.device)
        for arguments in calls:
            collective(*arguments)
        self.group._end_coalescing(self.device)
        return self._pending()


class Axis:
    """One mesh axis: `gather` and `reduce`, the communicators over its ranks for gathers and for reduces. `one_node`: True if
    all ranks are on one machine. `algorithm`: how to reduce; "auto" lets `takes_exchange` choose by backend and size."""

    def __init__(
        self,
        gather: Communicator,
        reduce: Communicator,
        *,
        one_node: bool,
        algorithm: Literal["auto", "exchange", "reduce_scatter"],
    ) -> None:
        self.gather, self.reduce = gather, reduce
        self.num_ranks, self.rank = gather.num_ranks, gather.rank
        self.one_node, self._algorithm = one_node, algorithm

    def takes_exchange(self, cuts: Sequence[layout.Cut], itemsize: int) -> bool:
        """Return True if gradients divided as `cuts` are reduced by an exchange (all-to-all, then a local sum), False if by a
        reduce-scatter. `itemsize`: bytes of an element that is sent."""
        # An exchange sends gradients in their own dtype and sums in float32, but each rank sends to every other one.
        if self._algorithm != "auto":
            return self._algorithm == "exchange"
        if self.reduce.exchanges:
            return True
        per_peer = sum(c.shard_numel for c in cuts) * itemsize
        return self.one_node and per_peer >= EXCHANGE_BYTES_PER_PEER


def own_communicator(communicator: Communicator, device: torch.device) -> Communicator:
    """Return a communicator for reduces over the ranks of `communicator`: one with a second process group if collectives run in
    stream order (NCCL), because reduces would wait for gathers on the first; otherwise `communicator` itself. All models over
    these ranks share the second group, which takes hundreds of megabytes of device memory until the job ends. A collective."""
    if communicator.num_ranks == 1 or not communicator.is_ordered:
        return communicator
    return Communicator(group_of_job([communicator], communicator.ranks, device), device)


def group_of_job(communicators: Sequence[Communicator], ranks: list[int], device: torch.device) -> Any:
    """Return a process group of the global ranks `ranks`, one of which is this rank; all models share it until the job ends.
    The first call creates the group, with the timeout of `communicators[0]`, and is a collective: all ranks of all
    `communicators` must call this function, each with the ranks of its own group."""
    names = "/".join(_torch.name_of_group(communicator.group) for communicator in communicators)
    key = f"accordion/group/{names}/{len(ranks)}/"
    groups = _torch.kept_with_job(key)
    if not groups:
        name = f"accordion/{common_name([] if communicators[0].is_fake else communicators)}/{ranks[0]}"
        timeout, bound_to = _torch.timeout_of(communicators[0].group, device), None if device.type == "cpu" else device
        groups = [_torch.named_group(name, ranks, bound_to, timeout)]
        _torch.keep_with_job(key, groups[0])
    return groups[0]


def carried(tensor: Tensor) -> Tensor:
    """Return `tensor` if all backends can send its dtype, else a view as bytes, for which its last dim must be contiguous."""
    return tensor if tensor.dtype in CARRIED else tensor.view(torch.uint8)


def gathered_rows(row: Tensor, communicator: Communicator) -> Tensor:
    """All-gather the 1-D `row` (n,) of each rank into a new tensor (num_ranks, n), and return it. The host waits, unless the
    backend is stream-ordered. `communicator` must have a group."""
    out = row.new_empty(communicator.num_ranks * row.numel())
    for work in communicator.gather([carried(out)], [carried(row)]).works:
        work.wait()
    return out.view(communicator.num_ranks, -1)


def reduced(value: Tensor, communicators: Sequence[Communicator], op: Any = dist.ReduceOp.SUM) -> Tensor:
    """All-reduce `value` in place over the ranks of each communicator in turn, and return `value`. `op`: by default a sum."""
    for communicator in communicators:
        if communicator.num_ranks > 1:
            dist.all_reduce(value, op=op, group=communicator.group)
    return value


def extremes(value: Tensor, communicators: Sequence[Communicator]) -> tuple[Tensor, Tensor]:
    """Return (minimum, maximum) of `value` over the ranks of all `communicators`, by element, as new tensors. A collective."""
    low = reduced(value.clone(), communicators, dist.ReduceOp.MIN)
    return low, reduced(value.clone(), communicators, dist.ReduceOp.MAX)


def broadcast(tensors: Sequence[Tensor], communicators: Sequence[Communicator]) -> None:
    """Overwrite each tensor, of any dtype, with its value on the first rank of each communicator in turn. A collective."""
    for communicator in communicators:
        if communicator.num_ranks > 1:
            for tensor in tensors:
                whole = tensor.detach().contiguous()
                dist.broadcast(whole.view(-1).view(torch.uint8), group=communicator.group, group_src=0)
                if whole.data_ptr() != tensor.data_ptr():
                    tensor.detach().copy_(whole)


def common_name(communicators: Sequence[Communicator]) -> str:
    """Return a random hexadecimal name, the same on all ranks of `communicators`; "" without communicators. A collective."""
    if not communicators:
        return ""
    number = torch.tensor(secrets.randbits(62), device=communicators[0].device)
    broadcast([number], communicators)
    return f"{int(number):x}"
