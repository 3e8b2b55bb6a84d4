"""Groups of parameters gathered in one dtype: how they lie over ranks, how they are gathered, how their gradients are reduced."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from accordion import _torch
from accordion.engine.communicator import Communicator, carried
from accordion.engine.context import ShardingContext
from accordion.engine.gather import Axis, AxisGather, FullBuffer, FullMemory
from accordion.engine.gloo import SendingGather
from accordion.engine.late_gradients import runs
from accordion.engine.layout import KIB, Cut, Message, aligned, full_offsets, message
from accordion.engine.params import Param
from accordion.engine.reduce import ReducePlan
from accordion.engine.shards import NO_VERSION, FlatShards, ShardBuffer
from accordion.engine.streams import Steps, Transfer

KEPT_FLAG_BYTES = 16 * KIB
NUM_TAGS = 120  # int8 counts to 127, bfloat16 to 256


def messages(context: ShardingContext, cuts: Sequence[Cut], dtype: torch.dtype) -> tuple[Message, Message]:
    """How shards of tensors gathered in `dtype` travel over the axis that shards, and how a shard buffer keeps them."""
    limit = context.shard.gather.pack_limit_bytes
    outer = message(cuts, dtype.itemsize, num_flags=1, pack_limit_bytes=limit)
    if not context.cut_twice:
        return outer, outer
    return outer, message([context.levels(c)[1][1] for c in cuts], dtype.itemsize, pack_limit_bytes=limit)


class InnerShard(ShardBuffer):
    """Stands between the two axes of a hybrid: this rank's shard of `shard`, gathered over `replicate` once a step."""

    def __init__(
        self, msg: Message, inner: Message, rank: int, dtype: torch.dtype, device: torch.device, *, poison: bool
    ) -> None:
        offsets, at = [], 0
        for c, r in zip(msg.cuts, inner.cuts, strict=True):
            offsets.append(at)
            at += aligned(max(c.shard_numel, r.padded_numel), dtype.itemsize)
        flat = torch.zeros(at, dtype=dtype, device=device)
        self.dtype = dtype
        self.tag = torch.zeros(msg.num_flags, dtype=dtype, device=device)
        self.full_buffer = FullBuffer(inner.cuts, offsets, flat, rank, cut_dim_first=True, poison=poison)
        self.padded = [flat.data[o : o + c.shard_numel] for o, c in zip(offsets, msg.cuts, strict=True)]
        self.pack_row = None
        self.filled = NO_VERSION


class GroupPlan(NamedTuple):
    """A group before it has memory: its parameters, the dtype in which they are gathered, and that of their gradients' sum.

    `context`: of ranks of its own, if it does not lie over those of the model. `secondary`: the ranks over which its full
    parameters stay sharded from a forward to its backward, if they do.
    """

    params: list[Param]
    dtype: torch.dtype
    reduce_dtype: torch.dtype
    context: ShardingContext | None = None
    secondary: Communicator | None = None


class Group(ABC):
    """The parameters of one unit that are gathered in one dtype: how they are gathered, and what their reduce needs.

    `shard_buffer`: their shards. `full_buffer`: where they stand in full, None if the shards are the full parameters (`alias`);
    `views`: the full parameters. `filled`: the version of the shards that they show.
    """

    shard_buffer: ShardBuffer
    full_buffer: FullMemory | None
    views: list[Tensor]
    sharded: list[Tensor]  # the sharded parameters, once they are there
    message: Message  # how the shards travel
    _inner: Message  # how those of an inner shard do
    _inner_shard: InnerShard | None = None
    alias = False

    def __init__(self, context: ShardingContext, planned: GroupPlan, place: tuple[int, str]) -> None:
        self.index, self.name = place  # of the unit
        self.context = context
        self.params, self.dtype, self.reduce_dtype = planned[:3]
        for param in self.params:
            param.context = context
        self.tag = self.index % NUM_TAGS + 1  # of its gathers, and of its reduces until `remark`
        self._mark = 0
        self._plans: dict[tuple[tuple[int, ...], torch.dtype], list[ReducePlan]] = {}
        self._ones: dict[tuple[int, torch.dtype], Tensor] = {}
        self.place = f"unit {self.index} ({self.name or 'root'}){context.where}"
        self._gathers, self.reduces = f"gathers {self.place}", f"reduces {self.place}"
        self.after_reduce: Callable[[Tensor], None] | None = None  # sees each buffer of sums, and may write into it
        self.grad_dtypes = [p.grad_dtype or self.reduce_dtype for p in self.params]
        self.sums_are_grads = all(dtype is self.reduce_dtype for dtype in self.grad_dtypes)  # in dtype
        self.rescale(context.scale)
        self.filled = NO_VERSION

    def rescale(self, scale: float) -> None:
        """What sums of gradients over all ranks are multiplied by."""
        self.scale = scale
        self._expect()

    def remark(self, mark: int) -> None:
        """Have its next reduces tell whether all ranks have the same `mark`, with the tag that they send anyway."""
        if mark % NUM_TAGS != self._mark:
            self._mark = mark % NUM_TAGS
            for ones in self._ones.values():
                ones[:, -1] = self._reduce_tag
            self._expect()

    @property
    def _reduce_tag(self) -> int:
        return (self.index + self._mark) % NUM_TAGS + 1

    def _expect(self) -> None:
        """What the tags of a reduce add up to, exactly: scaled by the same operator as the sums."""
        dtype, expected = self.reduce_dtype, self._reduce_tag * self.context.num_ranks
        self.tag_sum = torch.full((1,), expected, dtype=dtype, device=self.context.device)
        if dtype.is_floating_point:
            self.tag_sum.mul_(self.scale)

    @property
    def full_bytes(self) -> int:
        return 0 if self.full_buffer is None else self.full_buffer.num_bytes

    @property
    def inner_shard_bytes(self) -> int:
        """What inner shards take: they are kept always."""
        return 0

    @property
    def secondary_bytes(self) -> int:
        """What secondary shards take: they are kept from a forward to its backward."""
        return 0

    def version(self) -> int:
        """Grows with every write to any shard: an optimizer step, a load, a write of full parameters.

        Operators on a DTensor count on the DTensor and not on its local tensor, those on the local tensor only there, and
        neither on `shard_buffer.locals`, which are the same memory.
        """
        return _torch.versions_of(self.sharded)

    def mark_stale(self) -> None:
        """A step may follow: torch's fused optimizers do not count as writes (2.13), so a reduced gradient does."""
        self.filled = NO_VERSION
        self.shard_buffer.mark_stale()
        if self._inner_shard is not None:
            self._inner_shard.filled = NO_VERSION

    @abstractmethod
    def gather(self) -> Transfer | None:
        """Begin to fill the full parameters; `landed` follows when it has ended. None if there is nothing to fill."""

    @abstractmethod
    def landed(self) -> None:
        """What `gather` began has landed: let go what it needed on the way."""

    def plans(self, chosen: Sequence[int], sent: torch.dtype) -> list[ReducePlan]:
        """How gradients of the parameters `chosen`, which are `sent`, are reduced over each axis that their rows are cut over."""
        key = tuple(chosen), sent
        plans = self._plans.get(key)
        if plans is None:
            context, dtype, num_flags = self.context, self.reduce_dtype, len(chosen) + 1
            cuts = [self.message.cuts[i] for i in chosen]
            plans = self._plans[key] = [ReducePlan(context.shard, cuts, num_flags, sent, dtype)]
            if context.cut_twice:
                inner = [self._inner.cuts[i] for i in chosen]
                plans.append(ReducePlan(context.replicate, inner, num_flags, dtype, dtype))
        return plans

    def flags(self, absent: Sequence[int], count: int, rows: int, dtype: torch.dtype) -> Tensor:
        """(rows, count + 1): one where this rank has a gradient, and the unit's tag. Kept only where few ranks make it small."""
        key = (rows * count, dtype)
        if not absent and key in self._ones:
            return self._ones[key]
        flags = torch.ones(rows, count + 1, dtype=dtype, device=self.context.device)
        flags[:, count] = self._reduce_tag
        if absent:
            for some in runs(absent):  # slices: an index of several would be copied to the device, and waited for
                flags[:, some] = 0
        elif flags.nbytes <= KEPT_FLAG_BYTES:
            self.context.reduce_stream.settle()
            self._ones[key] = flags
        return flags


class CutGroup(Group):
    """A group whose parameters are cut by rows; owns its full buffer and its shards."""

    def __init__(self, context: ShardingContext, planned: GroupPlan, place: tuple[int, str]) -> None:
        super().__init__(context, planned, place)
        self._gatherings: list[AxisGather] = []  # to the inner shard, if there is one, and to the full buffer
        params, dtype = self.params, self.dtype
        cuts = [p.cut for p in params]
        self.message, self._inner = messages(context, cuts, dtype)
        rank, late = context.shard.rank, context.gather_stream.late
        inner_shard, own = None, rank
        if context.cut_twice:
            own = context.replicate.rank
            inner_shard = InnerShard(self.message, self._inner, own, dtype, context.device, poison=late)
        self._inner_shard = inner_shard
        self.shard_buffer = context.shard_buffers(self.index, self._inner, own, [p.dtype for p in params], dtype)
        tagged = inner_shard or self.shard_buffer
        tagged.tag.fill_(self.tag)
        self._tag = carried(torch.full_like(tagged.tag, self.tag, device=context.device))
        alone = context.shard.num_ranks == 1 and not context.cut_twice
        self.alias = alone and self.shard_buffer.dtype == dtype and self.shard_buffer.is_memory_of_locals
        full_buffer: FullBuffer | None = None
        if not self.alias:
            full_buffer = self._make_full_buffer(cuts, rank, late)
        self.full_buffer = self._full = full_buffer
        self.views = self.shard_buffer.locals if full_buffer is None else full_buffer.views
        if inner_shard is not None:
            self._gather_over(context.replicate, self._inner, self.shard_buffer, inner_shard.full_buffer)
        if full_buffer is not None:
            self._gather_over(context.shard, self.message, tagged, full_buffer)
            full_buffer.close()
        self._is_direct = type(self.shard_buffer) is FlatShards and inner_shard is None

    def _make_full_buffer(self, cuts: Sequence[Cut], rank: int, poison: bool) -> FullBuffer:
        offsets, numel = full_offsets(cuts, self.dtype.itemsize)
        flat = torch.empty(numel, dtype=self.dtype, device=self.context.device)
        return FullBuffer(cuts, offsets, flat, rank, poison=poison)

    def _gather_over(self, axis: Axis, msg: Message, shard_buffer: ShardBuffer, full_buffer: FullBuffer) -> None:
        kind = SendingGather if axis.gather.sends else AxisGather
        self._gatherings.append(kind(axis, msg, shard_buffer, full_buffer))

    @property
    def inner_shard_bytes(self) -> int:
        return 0 if self._inner_shard is None else self._inner_shard.full_buffer.num_bytes

    def gather(self) -> Transfer | None:
        if self._full is None:
            return None
        side_stream = self.context.gather_stream
        if self._is_direct:  # the common case, without the questions below
            self.filled = self.version()
            self._full.open()
            self._gatherings[0].open()
            return side_stream.start(self._gatherings[0].steps(self._check), [], self._gathers)
        self.shard_buffer.ready()
        now, inner_shard = self.version(), self._inner_shard
        self._full.open()
        self.filled = now
        todo = self._gatherings
        if inner_shard is not None and inner_shard.filled == now:
            todo = todo[1:]
        elif inner_shard is not None:
            inner_shard.filled = now
            inner_shard.full_buffer.open()
        for gathering in todo:
            gathering.open()
        fetched = self._fetch(todo[0], now) if len(todo) == len(self._gatherings) else None

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
        """Bring shards to the device, where they rest elsewhere."""
        transfer = self.shard_buffer.refresh(version)
        if gathering.off_device:
            transfer = self.context.fetch_stream.copy(gathering.load, [], f"fetches {self.place}")
            self.shard_buffer.read_by(transfer)
        return transfer

    def _check(self, tags: Tensor) -> None:
        """Ranks that gather different units at the same time would take each other's numbers."""
        waiter = self.context.waiter
        if waiter.looks(self.context.device):
            waiter.same_everywhere(tags, self._tag, self._gathers)
