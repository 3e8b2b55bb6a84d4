"""A unit: the parameters that are gathered and let go together, and the leases that keep them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accordion import _torch
from accordion.engine.context import ShardingContext
from accordion.engine.group import Group
from accordion.engine.local_sums import LocalSums
from accordion.engine.module_params import ModuleParams
from accordion.engine.order import Phase
from accordion.engine.pending_reduce import PendingReduce
from accordion.engine.streams import Transfer
from accordion.errors import UsageError

_ADDRESS = Tensor.data_ptr


@dataclass(slots=True, weakref_slot=True, eq=False)
class ReduceNode:
    """The node that waits for the reduces of some parameters: one for all their calls, for to make it takes 40 us.

    `token`: its output, of which Gather makes full parameters. `stream`: the one on which it was made, and runs. `reducing`:
    by backward task, the calls whose gradients are being reduced, each with its reduces.
    """

    token: Tensor
    stream: Any
    reducing: dict[int, list[tuple[Any, list[PendingReduce]]]]


@dataclass(slots=True)
class TrainedParams:
    """The parameters of a unit that required gradients when a call began, by index, as shards and in full; and their node.

    `likes`: DTensors that lie as their sharded gradients do. `by_group`: each group that has some, where they are among these,
    and their indices in the group.
    """

    indices: tuple[int, ...]
    params: list[nn.Parameter]
    views: list[Tensor]
    likes: list[Tensor]
    by_group: list[tuple[Group, slice, tuple[int, ...]]]
    reduce_node: ReduceNode | None = None


@dataclass(slots=True)
class UnitPolicy:
    """What a unit may do unlike its strategy; read at each use, so that it may change between passes.

    `keep`: full parameters stay from forward to backward (None: as the engine sees fit). `keep_on`: also from a backward
    to the next forward, until they are stale. `reduces`: False has backwards add up, as under no_sync. `ahead`: indices of
    units to gather ahead, in place of the order that was recorded. `on_convert`: what `module.to(...)` and its kin call
    first, where shards may change their dtype or device.
    """

    keep: bool | None = None
    keep_on: bool = False
    reduces: bool = True
    ahead: dict[Phase, list[int]] = field(default_factory=dict)
    on_convert: Callable[[], None] | None = None


def is_layer(module: nn.Module) -> bool:
    """An embedding or a linear layer and nothing more."""
    return isinstance(module, (nn.Embedding, nn.Linear)) and next(module.children(), None) is None


class FullParams(Enum):
    """Where the full parameters of a unit are."""

    LET_GO = "let go"  # they have no memory, or show shards as they were
    ARRIVING = "arriving"  # transfers fill them
    STANDING = "standing"


LET_GO, ARRIVING, STANDING = FullParams  # each unit asks often, and through the class it takes 0.1 us in Python 3.11


class Unit:
    """Owns the groups of one module and the count of leases on their full parameters.

    `module_params`: what modules see of them.
    """

    def __init__(
        self,
        context: ShardingContext,
        place: tuple[int, str],
        module: nn.Module,
        groups: list[Group],
        *,
        inputs: torch.dtype | None,
        outputs: torch.dtype | None,
        unit_policy: UnitPolicy | None = None,
    ) -> None:
        self.context, self.groups = context, groups
        self.index, self.name = place
        self.unit_policy = unit_policy or UnitPolicy()
        self.inputs, self.outputs = inputs, outputs  # dtypes to which floating arguments and results are cast
        self.module = weakref.ref(module)
        # Other units of whose parameters this one's module reads some: inner ones, owners of ties.
        self.reads: list[int] = []
        self.params = [p for g in groups for p in g.params]
        self._sharded = [p.sharded for p in self.params]
        self.views = [v for g in groups for v in g.views]
        self.full_bytes = sum(g.full_bytes for g in groups)
        self._gathered = [g for g in groups if not g.alias]
        self._full_buffers = [g.full_buffer for g in groups if g.full_buffer is not None]
        self.leases = 0
        self.full_params = LET_GO
        self.keep_until_stale = False  # they outlive their leases
        self._transfers: list[Transfer] = []  # those under way while they arrive
        # Of a device: the compute stream on which the full parameters have got their memory.
        self._opened_on: Any = None
        self._landed: list[Transfer] = []  # those that brought them
        self._aside: list[Any] = []  # other streams that compute with them
        for group in groups:
            group.sharded = [p.sharded for p in group.params]
            for param, dtype in zip(group.params, group.grad_dtypes, strict=True):
                alike = dtype is param.sharded.dtype
                param.grad_like = param.sharded if alike else _torch.like_in(param.sharded, dtype)
        self.local_sums = LocalSums(self.params, [g.reduce_dtype for g in groups for _ in g.params])
        self.takes_grads = any(g.context.shard.num_ranks == 1 for g in groups)  # large ones are summed where they are
        self._on_device = context.device.type != "cpu"
        self.trained = self.trained_at(_torch.which_train(self._sharded))
        # Whether gradients of inputs say that a backward of a call has ended, and not its Gather: see `Call`.
        self.views_inputs = self._on_device and len(self.trained.indices) < len(self.params)
        self.module_params = ModuleParams(self.params)
        self.is_layer = is_layer(module)
        self._is_embedding = self.is_layer and type(module).forward is nn.Embedding.forward
        # The memory of each full parameter, as nobody else sees it; an address of fake tensors tells nothing.
        is_told = not self.module_params.has_around and all(_torch.told_device(v) is None for v in self.views)
        self._memory = [v.data for v in self.views] if is_told else None

    @property
    def needs_full_in_backward(self) -> bool:
        """Whether its backward needs full parameters. An embedding's computes with indices alone, unless it is recomputed."""
        if not self._is_embedding:
            return True
        module = self.module()
        return module is None or "forward" in module.__dict__

    def trained_at(self, indices: tuple[int, ...]) -> TrainedParams:
        params, by_group, start, at = [self.params[i] for i in indices], [], 0, 0
        for group in self.groups:
            inside = tuple(i - start for i in indices if start <= i < start + len(group.params))
            if inside:
                by_group.append((group, slice(at, at + len(inside)), inside))
            start, at = start + len(group.params), at + len(inside)
        views, likes = [self.views[i] for i in indices], [p.grad_like for p in params]
        return TrainedParams(indices, [p.sharded for p in params], views, likes, by_group)

    def drop_stale(self) -> None:
        """A full copy older than the shards is filled again at its next use."""
        if self.is_launched and any(g.filled != g.version() for g in self._gathered):
            self._land()
            self.full_params = LET_GO
            if self._aside:  # who writes them anew waits for who read them
                self.context.gather_stream.join(self._aside)

    def see_trained(self) -> bool:
        """Return True if other parameters are trained than before; from now on these are."""
        indices = _torch.which_train(self._sharded)
        if indices == self.trained.indices:
            return False
        self.trained = self.trained_at(indices)
        self.views_inputs = self._on_device and len(indices) < len(self.params)
        return True

    # -- leases

    def launch(self) -> None:
        if self.full_params is not LET_GO:
            return
        try:
            for group in self.groups:
                transfer = group.gather()
                if transfer is not None:
                    self._transfers.append(transfer)
        except BaseException:  # out of memory, say: the next use gathers all of it anew
            for transfer in self._transfers:
                transfer.land()
            for group in self.groups:
                group.landed()
            self._transfers = []
            self._close()
            self.mark_stale()
            raise
        self.full_params = ARRIVING if self._transfers else STANDING
        if self._opened_on is None and self._transfers:
            self._opened_on = self._transfers[0].begun_on

    @property
    def is_full(self) -> bool:
        """Return True if the full parameters stand."""
        return self.full_params is STANDING

    @property
    def is_launched(self) -> bool:
        """Return True if the full parameters stand, or are on their way."""
        return self.full_params is not LET_GO

    def acquire(self) -> int:
        """Promise that the full parameters, which `launch` has begun to gather, stand until `release`.

        Gives the version of the shards that they show.
        """
        if self.full_params is STANDING:
            if self._on_device:  # the compute stream may be one that did not wait for that yet
                now = self.context.gather_stream.compute()
                if now != self._opened_on and now not in self._aside:
                    self._aside.append(now)
                    for transfer in self._landed:
                        transfer.lead(now)
            version = self.version()
        else:
            self._land()
            version = sum([g.filled for g in self._gathered])
        self.leases += 1
        return version

    def _land(self) -> None:
        transfers = self._transfers
        if transfers:
            for transfer in transfers:
                transfer.land()
            for group in self.groups:
                group.landed()
            if transfers[0].aside is not None:
                self._aside.append(transfers[0].aside)
            self._landed, self._transfers = transfers, []
        self.full_params = STANDING

    def dismantle(self) -> None:
        """The model is gone: what is being gathered waits for nobody, but its memory for what is at work on it."""
        self.module_params.forget()
        for transfer in self._transfers:
            transfer.abandon()

    def release(self) -> None:
        self.leases -= 1
        assert self.leases >= 0, f"unit {self.name!r}: released more often than acquired"
        if self.leases == 0:
            self.let_go()

    def let_go(self, waits: bool = True) -> None:
        """Free the full parameters that nobody keeps; without `waits` not those for whose gather the host must wait."""
        if self.leases or self.full_params is LET_GO or self.context.waiter.broken is not None:
            return
        if self._transfers:
            if not waits and not all(transfer.ended for transfer in self._transfers):
                return
            self._land()
        if not (self.context.keeps_full or self.keep_until_stale):
            self._close()

    def _close(self) -> None:
        if self._opened_on is not None:
            side_stream = self.context.gather_stream
            side_stream.join((*self._aside, side_stream.compute()), self._opened_on)
            self._opened_on = None
        self._aside.clear()
        self._landed.clear()
        for full_buffer in self._full_buffers:
            full_buffer.close()
        self.full_params = LET_GO

    def version(self) -> int:
        """Grows with every write to a shard; autograd's own counters tell where full parameters are the shards."""
        return sum([g.version() for g in self._gathered])

    def mark_stale(self) -> None:
        for group in self.groups:
            group.mark_stale()

    def writes(self) -> int:
        """Counts writes into full parameters, which are lost; a gather does not count."""
        return sum([full_buffer.flat._version for full_buffer in self._full_buffers])

    def lost_write(self, writes: int, fulls: Sequence[Tensor]) -> UsageError | None:
        """What to raise where a forward, before which `writes` were counted, changed full parameters: shards do not follow.

        `fulls`: what it was shown. A tensor that was given other memory, by `weight.data = ...`, gets its own again; with the
        same numbers in it that was no harm, as where an RNN lays its weights together.
        """
        if self.writes() != writes:
            return self.lost_write_error("modified a parameter")
        if self._memory is None or list(map(_ADDRESS, fulls)) == list(map(_ADDRESS, self._memory)):
            return None
        changed = []
        for full, own, param in zip(fulls, self._memory, self.params, strict=True):
            if _ADDRESS(full) != _ADDRESS(own):
                given, full.data = full.data, own
                is_alike = (given.shape, given.dtype, given.device) == (own.shape, own.dtype, own.device)
                changed += [] if is_alike and torch.equal(given, own) else [param.name]
        if not changed:
            return None
        return self.lost_write_error(f"assigned other values to the data of parameter {changed[0]!r}")

    def lost_write_error(self, change: str) -> UsageError:
        """Return the error to raise after a forward that modified full parameters."""
        return UsageError(
            f"unit {self.name or 'root'!r} {change} in its forward, and the change would be lost when the parameter is "
            "resharded; modify parameters inside full_params(model, write=True) or before shard(), or make the tensor a buffer."
        )

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is that of full parameters which are let go."""
        tensor = _torch.local_of(tensor) if isinstance(tensor, DTensor) else tensor
        if tensor.layout is not torch.strided:
            return False
        key = _torch.storage_key(tensor.untyped_storage())
        return any(key in full_buffer.storage_keys for full_buffer in self._full_buffers)

    # -- gradients

    def reduce(
        self, trained: TrainedParams, grads: Sequence[Tensor | None] | None, ours: Sequence[bool]
    ) -> list[PendingReduce]:
        """Begin to reduce full gradients and the local sums of their parameters.

        `grads`: None to reduce the local sums alone. `ours`: the gradients that nobody else has.
        """
        added = not self.local_sums.pending.isdisjoint(trained.indices)
        if added or grads is None:
            grads = self.local_sums.take(trained.indices, grads)
            ours = [False] * len(grads)  # a sum of one is the tensor that autograd gave
        return [
            PendingReduce(group, inside, grads[at], group.reduce_dtype if added else group.dtype, ours[at])
            for group, at, inside in trained.by_group
        ]

    def as_gradients(
        self, trained: TrainedParams, parts: Sequence[PendingReduce], adding: Sequence[bool], decide: bool = True
    ) -> tuple[list[DTensor | None], list[Transfer]]:
        """Wait for the reduce and give what autograd accumulates: one sharded gradient a trained parameter.

        And the copies under way that bring them to where they rest, if that is off the device.
        `adding`: see `ShardBuffer.put`. `decide`: see `PendingReduce.finish`.
        """
        local: list[Tensor | None] = []
        copies: list[Transfer] = []
        for (_, at, _), part in zip(trained.by_group, parts, strict=True):
            rows, transfer = part.finish_at_rest(adding[at], decide)
            local += rows
            if transfer is not None:
                copies.append(transfer)
        return _torch.as_dtensors(local, trained.likes), copies
