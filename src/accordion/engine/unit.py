"""A unit: parameters that are gathered and freed together, and the count of leases (uses) that keep them in memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accordion import _torch
from accordion.engine.context import ShardingContext
from accordion.engine.gradients import LocalSums
from accordion.engine.group import Group
from accordion.engine.module_params import ModuleParams
from accordion.engine.order import Phase
from accordion.engine.pending_reduce import PendingReduce
from accordion.engine.streams import Transfer
from accordion.errors import UsageError


@dataclass(slots=True, weakref_slot=True, eq=False)
class ReduceNode:
    """The autograd node that waits for the reduces of a unit's gradients; calls share it, because creating one takes 40 us.

    `edge`: the node's output, a scalar that links it to each call's node Gather. `stream`: the compute stream on which it runs.
    `reducing`: id of a running backward -> list of (call, its reduces, one per group) for which the node will wait.
    """

    edge: Tensor
    stream: Any
    reducing: dict[int, list[tuple[Any, list[PendingReduce]]]]


@dataclass(slots=True)
class TrainedParams:
    """The parameters of a unit that require gradients, as parallel lists, and the autograd node that their calls share.

    `indices`: theirs in the unit. `params`: the sharded parameters. `views`: the full ones. `likes`: DTensors with placement
    and dtype of the sharded gradients. `by_group`: (group, slice of these lists, indices in the group) per group that has some.
    """

    indices: tuple[int, ...]
    params: list[nn.Parameter]
    views: list[Tensor]
    likes: list[Tensor]
    by_group: list[tuple[Group, slice, tuple[int, ...]]]
    reduce_node: ReduceNode | None = None


@dataclass(slots=True)
class UnitPolicy:
    """Settings of one unit that may differ from the strategy and change between passes.

    `keep`: keep full parameters from forward to backward (None: the engine decides). `keep_on`: keep them after a backward too;
    the next forward still gathers again if gradients were reduced, or shards written, in between. `reduces`: False to sum
    gradients on this rank, as under no_sync. `ahead`: phase -> indices of the units to prefetch while this one runs ([]: none);
    a phase without an entry follows the recorded order. `on_convert`: called, without arguments, before `module.to(...)` etc.
    """

    keep: bool | None = None
    keep_on: bool = False
    reduces: bool = True
    ahead: dict[Phase, list[int]] = field(default_factory=dict)
    on_convert: Callable[[], None] | None = None


def is_layer(module: nn.Module) -> bool:
    """Return True for an embedding or a linear layer without submodules."""
    return isinstance(module, (nn.Embedding, nn.Linear)) and next(module.children(), None) is None


class Unit:
    """The parameters of a module that are gathered and freed together. To use them, call `unshard`, `acquire`, and `release` at
    the end. The last two count the `leases`; without any, the full parameters are freed, unless the strategy or the unit's
    policy keeps them. `place`: (index, name)."""

    observers: Any  # the engine's `Observers`, which `Hooks` sets; its module imports this one

    def __init__(
        self,
        context: ShardingContext,
        place: tuple[int, str],
        module: nn.Module,
        groups: list[Group],
        *,
        inputs: torch.dtype | None,
        outputs: torch.dtype | None,
        unit_policy: UnitPolicy,
    ) -> None:
        self.context, self.groups, self.unit_policy = context, groups, unit_policy
        self.index, self.name = place
        self.inputs, self.outputs = inputs, outputs  # dtypes to which floating arguments and results are cast
        self.module = weakref.ref(module)
        # Indices of other units whose parameters this module reads: units inside it, and owners of tied parameters.
        self.reads: list[int] = []
        self.params = [p for g in groups for p in g.params]
        self.views = [v for g in groups for v in g.views]
        self._gathered = [g for g in groups if g.full_buffer is not None]
        self._full_buffers = [g.full_buffer for g in groups if g.full_buffer is not None]
        self.leases = 0
        self.is_unsharded = False  # True if the full parameters are gathered, or a gather is under way
        self.keep_until_stale = False  # keep full parameters without a lease
        self._under_way: list[Transfer] = []  # of a gather, until the compute stream waits for them
        self._landed: list[Transfer] = []  # of the last gather, after that
        # Compute streams that use the full parameters; the first has allocated them. Empty on a device without streams.
        self._used_on: list[Any] = []
        for group in groups:
            group.sharded = [p.sharded for p in group.params]
            for param, dtype in zip(group.params, group.grad_dtypes, strict=True):
                same_dtype = dtype is param.sharded.dtype
                param.grad_like = param.sharded if same_dtype else _torch.like_in(param.sharded, dtype)
        self.local_sums = LocalSums(self.params, [g.reduce_dtype for g in groups for _ in g.params])
        self.takes_grads = any(g.context.shard.num_ranks == 1 for g in groups)  # large ones are summed in place
        self.module_params = ModuleParams(self.params)
        self.trained = self.trained_at(_torch.which_train(self.module_params.shards))
        # True if gradients of inputs, and not Gather, show the end of a call's backward: see `Call._watch_inputs`.
        self.views_inputs = context.gather_stream.sleeps and len(self.trained.indices) < len(self.params)
        self.is_layer = is_layer(module)
        self.note_memory()

    @property
    def full_bytes(self) -> int:
        return sum(full_buffer.num_bytes for full_buffer in self._full_buffers)

    @property
    def needs_full_in_backward(self) -> bool:
        """True, except for an `nn.Embedding` whose forward was not replaced: its backward needs no weight."""
        if not self.is_layer:
            return True
        module = self.module()
        return module is None or type(module).forward is not nn.Embedding.forward or "forward" in vars(module)

    def trained_at(self, indices: tuple[int, ...]) -> TrainedParams:
        """Return the `TrainedParams` of the parameters `indices` (ascending), without an autograd node yet."""
        params, by_group, start, at = [self.params[i] for i in indices], [], 0, 0
        for group in self.groups:
            inside = tuple(i - start for i in indices if start <= i < start + len(group.params))
            if inside:
                by_group.append((group, slice(at, at + len(inside)), inside))
            start, at = start + len(group.params), at + len(inside)
        views, likes = [self.views[i] for i in indices], [p.grad_like for p in params]
        return TrainedParams(indices, [p.sharded for p in params], views, likes, by_group)

    def drop_stale(self) -> None:
        """Mark full parameters for a new gather if shards were written since they were gathered; memory stays allocated."""
        if self.is_unsharded and any(g.filled != g.version() for g in self._gathered):
            if self._under_way:
                self._land()
            self.is_unsharded = False
            if len(self._used_on) > 1:  # the next gather must wait for streams that read them
                self.context.gather_stream.join(self._used_on[1:])

    def see_trained(self) -> bool:
        """Update `trained` and `views_inputs` from the parameters' `requires_grad`; return True if `trained` has changed."""
        indices = _torch.which_train(self.module_params.shards)
        if indices == self.trained.indices:
            return False
        self.trained = self.trained_at(indices)
        self.views_inputs = self.context.gather_stream.sleeps and len(indices) < len(self.params)
        return True

    # -- leases

    def unshard(self) -> None:
        """Begin to gather the full parameters, unless they are gathered or a gather is under way. `acquire` waits for the gather.
        After an error, such as out of memory, nothing is gathered, and the next use begins again."""
        if self.is_unsharded:
            return
        transfers = self._under_way
        try:
            for group in self.groups:
                transfer = group.gather()
                if transfer is not None:
                    transfers.append(transfer)
        except BaseException:
            self._land()
            self._close()
            self.mark_stale()
            raise
        self.is_unsharded = True
        for notify in self.observers.unit_unshards:
            notify(self)
        if transfers and transfers[0].begun_on is not None and not self._used_on:
            self._used_on.append(transfers[0].begun_on)

    @property
    def is_full(self) -> bool:
        """True if the full parameters are gathered, and no gather is under way."""
        return self.is_unsharded and not self._under_way

    def acquire(self) -> int:
        """Take a lease on the full parameters; call `unshard` before. The compute stream waits for the gather. The memory is
        kept until every lease is released. Returns the version of shards that a running gather read, else the current one."""
        if self._under_way:
            self._land()
            version = sum([g.filled for g in self._gathered])
        else:
            if self._used_on and (stream := self.context.gather_stream.compute()) not in self._used_on:
                self._used_on.append(stream)  # this compute stream may not have waited for the gather yet
                for transfer in self._landed:
                    transfer.lead(stream)
            version = self.version()
        self.leases += 1
        return version

    def _land(self) -> None:
        """Let the compute stream wait for the gathers under way, and free their temporary memory."""
        transfers = self._under_way
        for transfer in transfers:
            transfer.land()
        for group in self.groups:
            group.landed()
        if transfers and transfers[0].landed_on is not None:
            self._used_on.append(transfers[0].landed_on)
        self._landed, self._under_way = transfers, []

    def dismantle(self) -> None:
        """Drop references to modules and abandon running gathers, because the model is deleted. The host does not wait."""
        self.module_params.forget()
        for transfer in self._under_way:
            transfer.abandon()

    def release(self) -> None:
        self.leases -= 1
        assert self.leases >= 0, f"unit {self.name!r}: released more often than acquired"
        if self.leases == 0:
            self.reshard()

    def reshard(self, waits: bool = True) -> None:
        """Free the full parameters, unless a lease, the strategy or the unit's policy keeps them, or ranks have diverged.
        `waits`: False to do nothing if the host would have to wait."""
        if self.leases or not self.is_unsharded or self.context.waiter.broken is not None:
            return
        if self._under_way:
            if not waits and not all(transfer.ended for transfer in self._under_way):
                return
            self._land()
        if not (self.context.keeps_full or self.keep_until_stale):
            self._close()

    def free(self) -> None:
        """Free the full parameters, also those that are kept between uses. There must be no lease; the next use gathers again."""
        assert self.leases == 0, f"unit {self.name!r} is in use"
        if self._under_way:
            self._land()
        self._close()
        self.mark_stale()

    def note_memory(self) -> None:
        """Record the memory of full parameters, if they are plain tensors, for `lost_write` to detect `weight.data = ...`. Call
        this again after shards that are themselves the full parameters have got other memory."""
        # None for fake tensors, which have no addresses.
        is_real = not self.module_params.has_around and all(_torch.fake_device(v) is None for v in self.views)
        self._memory = [v.data for v in self.views] if is_real else None

    def _close(self) -> None:
        if self._used_on:
            side_stream = self.context.gather_stream
            side_stream.join((*self._used_on[1:], side_stream.compute()), self._used_on[0])
        self._used_on.clear()
        self._landed.clear()
        for full_buffer in self._full_buffers:
            full_buffer.close()
        self.is_unsharded = False
        for notify in self.observers.unit_reshards:
            notify(self)

    def version(self) -> int:
        """Return a number that grows with every write to a shard, except steps of torch's fused optimizers. Shards that are
        themselves the full parameters do not count."""
        return sum([g.version() for g in self._gathered])

    def mark_stale(self) -> None:
        for group in self.groups:
            group.mark_stale()

    def writes(self) -> int:
        """Return the number of writes into full parameters so far; such writes do not reach shards. Not counted: gathers, and
        writes into tensor subclasses or shards that are themselves the full parameters."""
        return sum([full_buffer.flat._version for full_buffer in self._full_buffers])

    def lost_write(self, writes: int, fulls: Sequence[Tensor]) -> UsageError | None:
        """Return an error if a forward wrote into its full parameters `fulls`, which does not change the shards; else None.

        `writes`: result of `writes()` before the forward. A parameter whose memory was replaced (`weight.data = ...`) gets its
        own back, which is no error if the values are equal: an RNN joins its weights in this way.
        """
        if self.writes() != writes:
            return self.lost_write_error("modified a parameter")
        address = Tensor.data_ptr
        if self._memory is None or list(map(address, fulls)) == list(map(address, self._memory)):
            return None
        error = None
        for full, memory, param in zip(fulls, self._memory, self.params, strict=True):
            if address(full) != address(memory):
                data, full.data = full.data, memory
                is_alike = (data.shape, data.dtype, data.device) == (memory.shape, memory.dtype, memory.device)
                if error is None and not (is_alike and torch.equal(data, memory)):
                    error = self.lost_write_error(f"assigned other values to the data of parameter {param.name!r}")
        return error

    def lost_write_error(self, change: str) -> UsageError:
        return UsageError(
            f"unit {self.name or 'root'!r} {change} in its forward, and the change would be lost when the parameter is "
            "resharded; modify parameters inside full_params(model, write=True) or before shard(), or make the tensor a buffer."
        )

    def holds(self, tensor: Tensor) -> bool:
        """Return True if `tensor` shares memory with full parameters of this unit, which will be freed."""
        tensor = _torch.local_of(tensor) if isinstance(tensor, DTensor) else tensor
        if tensor.layout is not torch.strided:
            return False
        key = _torch.storage_key(tensor.untyped_storage())
        return any(key in full_buffer.storage_keys for full_buffer in self._full_buffers)

    # -- gradients

    def reduce(
        self, trained: TrainedParams, grads: Sequence[Tensor | None] | None, ours: Sequence[bool]
    ) -> list[PendingReduce]:
        """Begin to reduce full gradients over ranks; return one `PendingReduce` per entry of `trained.by_group`.

        Sums that backwards under no_sync left on this rank are added and forgotten. `grads`: one or None per trained parameter;
        None to reduce those sums alone. `ours`: True for gradients to which nothing else refers: they may be overwritten.
        """
        added = not self.local_sums.pending.isdisjoint(trained.indices)
        if added or grads is None:
            grads = self.local_sums.take(trained.indices, grads)
            ours = [False] * len(grads)  # the sum of one gradient is autograd's tensor
        return [
            PendingReduce(group, inside, grads[at], group.reduce_dtype if added else group.dtype, ours[at])
            for group, at, inside in trained.by_group
        ]

    def as_gradients(
        self, trained: TrainedParams, parts: Sequence[PendingReduce], adding: Sequence[bool], decide: bool = True
    ) -> tuple[list[DTensor | None], list[Transfer]]:
        """Wait for the reduces `parts`; return (sharded gradient or None per trained parameter, copies to host or disk under
        way). `adding`: True for gradients that the caller only adds to others. `decide`: return None, not zeros, for a gradient
        that no rank has; if this rank lacks one, the host then waits for the device."""
        local: list[Tensor | None] = []
        copies: list[Transfer] = []
        for (_, at, _), part in zip(trained.by_group, parts, strict=True):
            rows, transfer = part.finish_in_tier(adding[at], decide)
            local += rows
            if transfer is not None:
                copies.append(transfer)
        return _torch.as_dtensors(local, trained.likes), copies
