"""A group: parameters of one unit that are gathered in one dtype. Its memory, its gather, and the plans of its reduces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from accordion import _torch
from accordion.engine.communicator import Axis, Communicator, carried
from accordion.engine.context import ShardingContext
from accordion.engine.full_buffer import FullBuffer, FullMemory
from accordion.engine.gather import AxisGather
from accordion.engine.gloo import SendingGather
from accordion.engine.layout import KIB, Cut, Message, aligned, full_offsets, message, runs
from accordion.engine.params import Param
from accordion.engine.reduce import ReducePlan
from accordion.engine.shards import NO_VERSION, FlatShards, ShardBuffer
from accordion.engine.streams import Steps, Transfer

KEPT_FLAG_BYTES = 16 * KIB
NUM_TAGS = 120  # tags identify units; int8 counts to 127, bfloat16 to 256


def messages(context: ShardingContext, cuts: Sequence[Cut], dtype: torch.dtype) -> tuple[Message, Message]:
    """Return (layout of gathers over the `shard` axis, layout of shards) for tensors divided as `cuts` and gathered in `dtype`.
    The two differ only with `hybrid_shard_optim`."""
    limit = context.shard.gather.pack_limit_bytes
    outer = message(cuts, dtype.itemsize, num_flags=1, pack_limit_bytes=limit)
    if not context.cut_twice:
        return outer, outer
    return outer, message([context.levels(c)[1][1] for c in cuts], dtype.itemsize, pack_limit_bytes=limit)


class InnerShard(ShardBuffer):
    """This rank's shard over the `shard` axis, in the gathered dtype, with `hybrid_shard_optim`. The optimizer steps smaller
    shards, which are divided over the `replicate` axis too (layout `inner`, index `rank`); gathers fill this one from them."""

    def __init__(
        self, msg: Message, inner: Message, rank: int, dtype: torch.dtype, device: torch.device, *, poison: bool
    ) -> None:
        pairs = zip(msg.cuts, inner.cuts, strict=True)
        numels = [aligned(max(c.shard_numel, r.padded_numel), dtype.itemsize) for c, r in pairs]
        *offsets, numel = accumulate(numels, initial=0)
        flat = torch.zeros(numel, dtype=dtype, device=device)
        self.dtype = dtype
        self.tag = torch.zeros(msg.num_flags, dtype=dtype, device=device)
        self.full_buffer = FullBuffer(inner.cuts, offsets, flat, rank, cut_dim_first=True, poison=poison)
        self.padded = [flat.data[o : o + c.shard_numel] for o, c in zip(offsets, msg.cuts, strict=True)]
        self.pack_row = None
        self.filled = NO_VERSION


class GroupPlan(NamedTuple):
    """The arguments of a `Group`: parameters of one unit, the dtype in which they are gathered, and the dtype in which their
    gradients are summed. `context`: the ranks over which they are sharded; None for those of the model. `secondary`: a few
    ranks that keep, divided among them, a copy of the full parameters from a forward to its backward; None for no copy."""

    params: list[Param]
    dtype: torch.dtype
    reduce_dtype: torch.dtype
    context: ShardingContext | None = None
    secondary: Communicator | None = None


class Group(ABC):
    """The parameters of one unit that are gathered in one dtype: their memory, their gather and the plans of their reduces.

    Argument `place`: the unit's (index, name). Set by subclasses: `shard_buffer`, this rank's shards; `views`, full parameters;
    `full_buffer`, their memory, None if shards are themselves the full ones; `filled`, the shards' `version()` when gathered.
    """

    shard_buffer: ShardBuffer
    full_buffer: FullMemory | None
    views: list[Tensor]
    sharded: list[Tensor]  # the sharded parameters, once they exist
    message: Message  # layout of the shards
    _inner: Message  # layout of the rows of an inner shard
    _inner_shard: InnerShard | None = None
    inner_shard_bytes = 0  # of inner shards, which are always in memory
    secondary_bytes = 0  # of secondary shards, which are in memory from a forward to its backward

    def __init__(self, context: ShardingContext, planned: GroupPlan, place: tuple[int, str]) -> None:
        self.index, self.name = place  # the unit's
        self.context = context
        self.params, self.dtype, self.reduce_dtype = planned[:3]
        for param in self.params:
            param.context = context
        self.tag = self._reduce_tag = self.index % NUM_TAGS + 1  # sent with gathers, and with reduces until `remark`
        self._plans: dict[tuple[tuple[int, ...], torch.dtype, int | None], list[ReducePlan]] = {}
        self._ones: dict[tuple[int, torch.dtype], Tensor] = {}
        self.place = f"unit {self.index} ({self.name or 'root'}){context.where}"
        self._gathers, self.reduces = f"gathers {self.place}", f"reduces {self.place}"
        self.after_reduce: Callable[[Tensor], None] | None = None  # called with each buffer of sums; may modify it
        self.grad_dtypes = [p.grad_dtype or self.reduce_dtype for p in self.params]
        self.sums_are_grads = all(dtype is self.reduce_dtype for dtype in self.grad_dtypes)  # no cast is needed
        self.rescale(context.scale)
        self.filled = NO_VERSION

    def rescale(self, scale: float) -> None:
        """Set the factor by which later reduces multiply the sums of gradients (1 / number of ranks for a mean)."""
        self.scale = scale
        self._expect()

    def keep_slices(self, keeps: bool) -> None:  # noqa: B027 (most groups keep none)
        """In a `SecondaryGroup`, let ranks keep slices of full parameters from later forwards to their backwards, or not."""

    def remark(self, mark: int) -> None:
        """Set the number `mark`, which is added to the tag (number of the unit) that later reduces send, in place of the last
        mark. A reduce whose tags are compared fails if ranks have set different marks."""
        tag = (self.index + mark) % NUM_TAGS + 1
        if tag != self._reduce_tag:
            self._reduce_tag = tag
            for ones in self._ones.values():
                ones[:, -1] = tag
            self._expect()

    def _expect(self) -> None:
        """Set `tag_sum`, which a reduce returns if all ranks send the same tag: the sum of tags, scaled as gradients are."""
        dtype, expected = self.reduce_dtype, self._reduce_tag * self.context.num_ranks
        self.tag_sum = torch.full((1,), expected, dtype=dtype, device=self.context.device)
        if dtype.is_floating_point:
            self.tag_sum.mul_(self.scale)

    @property
    def caches(self) -> list[Tensor]:
        """The copies of shards on the device that are kept between steps, and are filled again after `mark_stale`."""
        inner = self._inner_shard
        return [*self.shard_buffer.caches, *([] if inner is None else [inner.full_buffer.flat])]

    def version(self) -> int:
        """Return a number that grows with every write to a shard: a load, a write of full parameters, or an optimizer step, but
        not with steps of torch's fused optimizers."""
        # Versions of DTensors and of local tensors, because an operator on one leaves the other's as it is. Neither changes the
        # version of `shard_buffer.locals`, although the memory is the same.
        return _torch.versions_of(self.sharded)

    def mark_stale(self) -> None:
        """Make the next use gather again, because steps of torch's fused optimizers write shards without a new version (2.13)."""
        self.filled = NO_VERSION
        self.shard_buffer.mark_stale()
        if self._inner_shard is not None:
            self._inner_shard.filled = NO_VERSION

    @abstractmethod
    def gather(self) -> Transfer | None:
        """Allocate memory for the full parameters and begin to gather them; return the transfer. Return None if the shards are
        the full parameters. Call `landed` after `Transfer.land`, or after an error."""

    @abstractmethod
    def landed(self) -> None:
        """Free the gather's temporary memory. Call this after `Transfer.land`, or after an error."""

    def plans(self, chosen: Sequence[int], sent: torch.dtype, height: int | None = None) -> list[ReducePlan]:
        """Return cached plans to reduce gradients of the parameters `chosen` (indices): one for the `shard` axis, and then one
        for `replicate` if `cut_twice`. `sent`: dtype to send. `height`: rows per rank if they are of a `Slice`; None: all."""
        key = tuple(chosen), sent, height
        plans = self._plans.get(key)
        if plans is None:
            context, dtype, num_flags = self.context, self.reduce_dtype, len(chosen) + 1
            cuts = [self.message.cuts[i] for i in chosen]
            if height is not None:
                cuts = [replace(c, shape=(height * c.num_ranks, *c.row_shape)) for c in cuts]
            plans = self._plans[key] = [ReducePlan(context.shard, cuts, num_flags, sent, dtype)]
            if context.cut_twice:
                inner = [self._inner.cuts[i] for i in chosen]
                plans.append(ReducePlan(context.replicate, inner, num_flags, dtype, dtype))
        return plans

    def flags(self, absent: Sequence[int], count: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor (num_ranks, count + 1) to send with `count` gradients. All rows are equal: 1 per gradient, or 0 if
        its position is in `absent`; last the tag (unit number). Sums over ranks tell how many ranks had each gradient, and if
        all reduce the same unit. Small results are cached if `absent` is empty; the host then waits once for the device."""
        key = (count, dtype)
        if not absent and key in self._ones:
            return self._ones[key]
        flags = torch.ones(self.context.shard.num_ranks, count + 1, dtype=dtype, device=self.context.device)
        flags[:, count] = self._reduce_tag
        if absent:
            for some in runs(absent):  # slices, because a list of indices would be copied to the device with a wait
                flags[:, some] = 0
        elif flags.nbytes <= KEPT_FLAG_BYTES:  # cached unless many ranks make them large
            self.context.reduce_stream.settle()
            self._ones[key] = flags
        return flags


class CutGroup(Group):
    """The usual group: each rank keeps its rows of the parameters, and an all-gather makes them full."""

    def __init__(self, context: ShardingContext, planned: GroupPlan, place: tuple[int, str]) -> None:
        super().__init__(context, planned, place)
        self._gatherings: list[AxisGather] = []  # into the inner shard, if there is one, and into the full buffer
        params, dtype = self.params, self.dtype
        cuts = [p.cut for p in params]
        self.message, self._inner = messages(context, cuts, dtype)
        rank, late = context.shard.rank, context.gather_stream.late
        inner_rank = context.replicate.rank if context.cut_twice else rank
        self.shard_buffer = context.shard_buffers(self.index, self._inner, inner_rank, [p.dtype for p in params], dtype)
        tagged = self.shard_buffer
        if context.cut_twice:
            inner = InnerShard(self.message, self._inner, inner_rank, dtype, context.device, poison=late)
            self.inner_shard_bytes = inner.full_buffer.num_bytes
            self._gather_over(context.replicate, self._inner, self.shard_buffer, inner.full_buffer)
            self._inner_shard = tagged = inner
        tagged.tag.fill_(self.tag)
        self._tag = carried(torch.full_like(tagged.tag, self.tag, device=context.device))
        alone = context.shard.num_ranks == 1 and not context.cut_twice
        is_full = alone and self.shard_buffer.dtype == dtype and self.shard_buffer.is_memory_of_locals
        self.full_buffer = self._full = None if is_full else self._make_full_buffer(cuts, rank, late)
        self.views = self.shard_buffer.locals if self._full is None else self._full.views
        if self._full is not None:
            self._gather_over(context.shard, self.message, tagged, self._full)
            self._full.close()
        self._is_direct = type(self.shard_buffer) is FlatShards and not context.cut_twice

    def _make_full_buffer(self, cuts: Sequence[Cut], rank: int, poison: bool) -> FullBuffer:
        offsets, numel = full_offsets(cuts, self.dtype.itemsize)
        flat = torch.empty(numel, dtype=self.dtype, device=self.context.device)
        return FullBuffer(cuts, offsets, flat, rank, poison=poison)

    def _gather_over(self, axis: Axis, msg: Message, shard_buffer: ShardBuffer, full_buffer: FullBuffer) -> None:
        kind = SendingGather if axis.gather.sends else AxisGather
        self._gatherings.append(kind(axis, msg, shard_buffer, full_buffer))

    def gather(self) -> Transfer | None:
        if self._full is None:
            return None
        side_stream = self.context.gather_stream
        if self._is_direct:  # the common case
            self.filled = self.version()
            self._full.open()
            self._gatherings[0].open()
            return side_stream.start(self._gatherings[0].steps(self._check), [], self._gathers)
        self.shard_buffer.ready()
        version, inner_shard = self.version(), self._inner_shard
        self._full.open()
        self.filled = version
        todo = self._gatherings
        if inner_shard is not None and inner_shard.filled == version:
            todo = todo[1:]
        elif inner_shard is not None:
            inner_shard.filled = version
            inner_shard.full_buffer.open()
        for gathering in todo:
            gathering.open()
        fetched = self._fetch(todo[0], version) if len(todo) == len(self._gatherings) else None

        def steps() -> Steps:
            if fetched is not None:
                fetched.join(side_stream)
            for gathering in todo:
                yield from gathering.steps(self._check)

        return side_stream.start(steps(), [fetched], self._gathers)

    def landed(self) -> None:
        for gathering in self._gatherings:
            gathering.close()

    def _fetch(self, gathering: AxisGather, version: int) -> Transfer | None:
        """Begin to copy shards of `version` from host or disk to the device; return the transfer, or None if none is needed."""
        transfer = self.shard_buffer.refresh(version)
        if gathering.off_device:
            transfer = self.context.fetch_stream.copy(gathering.load, [], f"fetches {self.place}")
            self.shard_buffer.read_by(transfer)
        return transfer

    def _check(self, tags: Tensor) -> None:
        """Raise `DivergenceError` if the `tags` that all ranks sent with a gather differ: they have then gathered different
        units. On an accelerator the device asserts this instead. Does nothing if the waiter does not ask for this check."""
        waiter = self.context.waiter
        if waiter.looks(self.context.device):
            waiter.same_everywhere(tags, self._tag, self._gathers)
