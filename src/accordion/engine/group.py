"""Groups of parameters gathered in one dtype: how they lie over ranks, how they are gathered, how their gradients are reduced."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accordion import _torch
from accordion.engine.around import TensorParallelView
from accordion.engine.communicator import CARRIED, Communicator, carried, gathered_rows
from accordion.engine.gather import Axis, AxisGather, FullBuffer
from accordion.engine.late_gradients import runs
from accordion.engine.layout import KIB, Cut, Message, aligned, full_offsets, message
from accordion.engine.pending_reduce import PendingReduce
from accordion.engine.reduce import ReducePlan
from accordion.engine.shards import ShardBuffer, ShardBufferMaker
from accordion.engine.streams import SideStream, Steps, Transfer
from accordion.engine.watch import ADVICE, DivergenceMonitor

KEPT_FLAG_BYTES = 16 * KIB
NUM_TAGS = 120  # int8 counts to 127, bfloat16 to 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingContext:
    """Over which ranks a model is spread. `replicate` has one rank where every rank keeps rows of its own.

    `relay`: the optimizer's rows are cut over `replicate` too, and gathered over it once a step. `resident`: full copies
    outlive a step. `scale`: what sums over all ranks are multiplied by.
    """

    shard: Axis
    replicate: Axis
    relay: bool
    resident: bool
    keep_until_backward: bool
    scale: float
    gather_stream: SideStream
    reduce_stream: SideStream
    replicate_stream: SideStream  # what goes on over `replicate`, in a hybrid
    fetch_stream: SideStream  # from homes elsewhere to the device
    watch: DivergenceMonitor
    device: torch.device
    home: ShardBufferMaker

    @property
    def num_ranks(self) -> int:
        return self.shard.num_ranks * self.replicate.num_ranks

    def levels(self, c: Cut) -> list[tuple[Axis, Cut]]:
        """How a tensor is cut, the outermost cut first: over `shard`, then this rank's rows over `replicate` with a relay.

        Where rows do not divide evenly this is not what torch's strided placement does; its redistribution is never used.
        """
        first = (self.shard, c)
        if not self.relay:
            return [first]
        return [first, (self.replicate, Cut(c.local_shape(self.shard.rank), c.dim, self.replicate.num_ranks))]

    @property
    def cut_communicators(self) -> list[Communicator]:
        """The links over whose ranks a sharded tensor has its rows."""
        return [a.gather for a in ((self.shard, self.replicate) if self.relay else (self.shard,)) if a.num_ranks > 1]


@dataclass(slots=True)
class Param:
    """One tensor of the model: its sharded parameter and every place where a module reads it.

    `extension`: makes of a gathered tensor what stands for it in modules, a tensor subclass. `around`: the DTensor of other
    parallelism around that.
    """

    name: str
    places: list[tuple[weakref.ref[nn.Module], str]]
    cut: Cut
    dtype: torch.dtype  # of the shard
    requires_grad: bool
    extension: Callable[[Tensor], Tensor] | None = None
    around: TensorParallelView | None = None
    sharded: nn.Parameter = field(init=False)


def own_rows(full: Tensor, c: Cut, context: ShardingContext) -> Tensor:
    """This rank's part of a full tensor, a view."""
    for axis, level in context.levels(c):
        if level.dim is not None:
            start = min(axis.rank * level.chunk, level.rows)
            full = full.narrow(level.dim, start, level.rows_of(axis.rank))
    return full


def gathered(local: Tensor, c: Cut, context: ShardingContext) -> Tensor:
    """The full tensor of which every rank holds `local`, in memory of its own; waits, and is not for the hot path."""
    local = local.detach().to(context.device)
    for axis, level in reversed(context.levels(c)):
        if level.dim is None or axis.num_ranks == 1:
            continue
        shape = list(level.shape)
        shape[level.dim] = level.chunk
        padded = local.new_zeros(shape)
        padded.narrow(level.dim, 0, local.shape[level.dim]).copy_(local)
        rows = gathered_rows(padded.view(-1), axis.gather) if padded.numel() else padded.new_empty(axis.num_ranks, 0)
        chunks = rows.view(axis.num_ranks, *shape).movedim(0, level.dim).flatten(level.dim, level.dim + 1)
        local = chunks.narrow(level.dim, 0, level.rows)
    return local.clone(memory_format=torch.contiguous_format)


def messages(context: ShardingContext, cuts: Sequence[Cut], dtype: torch.dtype) -> tuple[Message, Message]:
    """How shards of tensors gathered in `dtype` travel over the axis that shards, and how a home keeps them."""
    outer = message(cuts, dtype.itemsize, num_flags=1)
    if not context.relay:
        return outer, outer
    return outer, message([context.levels(c)[1][1] for c in cuts], dtype.itemsize)


class SecondaryShard(ShardBuffer):
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
        self.room = FullBuffer(inner.cuts, offsets, flat, rank, relay=True, poison=poison)
        self.padded = [flat.data[o : o + c.shard_numel] for o, c in zip(offsets, msg.cuts, strict=True)]
        self.pack_row = None
        self.filled = -1


class GroupPlan(NamedTuple):
    """A group before it has memory: its parameters, the dtype in which they are gathered, and that of their gradients' sum."""

    params: list[Param]
    dtype: torch.dtype
    reduce_dtype: torch.dtype


class Group:
    """The parameters of one unit that are gathered in one dtype; owns their full storage and their shards."""

    def __init__(self, context: ShardingContext, planned: GroupPlan, place: tuple[int, str]) -> None:
        self._prepare(context, planned, place)
        params, dtype = self.params, self.dtype
        cuts = [p.cut for p in params]
        self.message, self._inner = messages(context, cuts, dtype)
        rank, late = context.shard.rank, context.gather_stream.late
        if context.relay:
            over = context.replicate
            self._relay = SecondaryShard(self.message, self._inner, over.rank, dtype, context.device, poison=late)
        own = over.rank if context.relay else rank
        self.home = context.home(self.index, self._inner, own, [p.dtype for p in params], dtype)
        tagged = self._relay if context.relay else self.home
        tagged.tag.fill_(self.tag)
        self._tag = carried(torch.full_like(tagged.tag, self.tag, device=context.device))
        alone = context.shard.num_ranks == 1 and not context.relay
        self.alias = alone and self.home.dtype == dtype and self.home.is_memory_of_locals
        self.filled = -1  # version of the shards that the full copy shows
        self.room: FullBuffer | None = None
        if not self.alias:
            offsets, numel = full_offsets(cuts, dtype.itemsize)
            flat = torch.empty(numel, dtype=dtype, device=context.device)
            self.room = FullBuffer(cuts, offsets, flat, rank, poison=late)
        self.views = self.home.locals if self.room is None else self.room.views
        if context.relay:
            self._gatherings.append(AxisGather(context.replicate, self._inner, self.home, self._relay.room))
        if self.room is not None:
            self._gatherings.append(AxisGather(context.shard, self.message, tagged, self.room))
            self.room.close()
        self._is_direct = type(self.home) is ShardBuffer and not context.relay

    def _prepare(self, context: ShardingContext, planned: GroupPlan, place: tuple[int, str]) -> None:
        """What does not depend on how shards rest."""
        self.index, self.name = place  # of the unit
        self.context = context
        self.params, self.dtype, self.reduce_dtype = planned
        self.tag = self.index % NUM_TAGS + 1
        self._is_direct = False
        self._gatherings: list[AxisGather] = []  # to the relay, where there is one, and to the room
        self._plans: dict[tuple[tuple[int, ...], torch.dtype], list[ReducePlan]] = {}
        self._ones: dict[tuple[int, torch.dtype], Tensor] = {}
        self.place = f"unit {self.index} ({self.name or 'root'})"
        self._gathers, self.reduces = f"gathers {self.place}", f"reduces {self.place}"
        self.after_reduce: Callable[[Tensor], None] | None = None  # sees each buffer of sums, and may write into it
        self.sums_are_shards = all(p.dtype is self.reduce_dtype for p in self.params)  # in dtype
        self.rescale(context.scale)

    def rescale(self, scale: float) -> None:
        """What sums of gradients over all ranks are multiplied by."""
        self.scale, dtype = scale, self.reduce_dtype
        # What the tags of a reduce add up to, exactly: scaled by the same operator as the sums.
        self.tag_sum = torch.full((1,), self.tag * self.context.num_ranks, dtype=dtype, device=self.context.device)
        if dtype.is_floating_point:
            self.tag_sum.mul_(scale)

    @property
    def full_bytes(self) -> int:
        return 0 if self.room is None else self.room.num_bytes

    @property
    def relay_bytes(self) -> int:
        return self._relay.room.num_bytes if self.context.relay else 0

    def version(self) -> int:
        """Grows with every write to any shard: an optimizer step, a load, a write of full parameters.

        Operators on a DTensor count on the DTensor and not on its local tensor, those on the local tensor only there, and
        neither on `home.locals`, which are the same memory.
        """
        return _torch.versions_of([p.sharded for p in self.params])

    def mark_stale(self) -> None:
        """A step may follow: torch's fused optimizers do not count as writes (2.13), so a reduced gradient does."""
        self.filled = -1
        self.home.mark_stale()
        if self.context.relay:
            self._relay.filled = -1

    def is_stale(self) -> bool:
        return not self.alias and self.filled != self.version()

    def gather(self) -> Transfer | None:
        """Begin to fill the full storage; `landed` follows."""
        if self.room is None:
            return None
        if self._is_direct:  # the common case, without the questions below
            self.filled = self.version()
            self.room.open()
            self._gatherings[0].open()
            return self.context.gather_stream.start(self._gatherings[0].steps(self._check), [], self._gathers)
        self.home.ready()
        now = self.version()
        self.room.open()
        self.filled = now
        todo = self._gatherings
        if self.context.relay and self._relay.filled == now:
            todo = todo[1:]
        elif self.context.relay:
            self._relay.filled = now
            self._relay.room.open()
        for gathering in todo:
            gathering.open()
        fetched = self._fetch(todo[0], now) if len(todo) == len(self._gatherings) else None
        lane = self.context.gather_stream
        if fetched is None and len(todo) == 1:
            return lane.start(todo[0].steps(self._check), [], self._gathers)

        def steps() -> Steps:
            if fetched is not None:
                fetched.join(lane)
            for gathering in todo:
                yield from gathering.steps(self._check)

        return lane.start(steps(), [fetched], self._gathers)

    def landed(self) -> None:
        """What `gather` began has landed: let go what it needed on the way."""
        for gathering in self._gatherings:
            gathering.close()

    def _fetch(self, gathering: AxisGather, version: int) -> Transfer | None:
        """Bring shards to the device, where they rest elsewhere."""
        flight = self.home.refresh(version)
        if gathering.away:
            flight = self.context.fetch_stream.copy(gathering.load, [], f"fetches {self.place}")
            self.home.read_by(flight)
        return flight

    def _check(self, tags: Tensor) -> None:
        """Ranks that gather different units at the same time would take each other's numbers."""
        if not self.context.watch.looks(self.context.device):
            return

        def text(tags: list[Any]) -> str:
            said = tags if self.dtype in CARRIED else []
            others = {r: int(tag[0]) - 1 for r, tag in enumerate(said) if int(tag[0]) - 1 != self.index % NUM_TAGS}
            where = ", ".join(f"rank {r} unit {i}" for r, i in others.items()) or "another rank another one"
            return f"ranks are in different units: this rank gathers {self.place}, {where}; {ADVICE}"

        self.context.watch.same_everywhere(tags, self._tag, text)

    def reduce(
        self, chosen: Sequence[int], grads: Sequence[Tensor | None], sent: torch.dtype, ours: Sequence[bool]
    ) -> PendingReduce:
        """Begin to reduce the full gradients of the parameters `chosen`, which are `sent`; None where this rank has none.

        `ours`: which of them nobody else has, so that they may be written into.
        """
        return PendingReduce(self, chosen, grads, sent, ours)

    def plans(self, chosen: Sequence[int], sent: torch.dtype) -> list[ReducePlan]:
        """How gradients of the parameters `chosen`, which are `sent`, are reduced over each axis that their rows are cut over."""
        key = tuple(chosen), sent
        if key not in self._plans:
            context, dtype, num_flags = self.context, self.reduce_dtype, len(chosen) + 1
            self._plans[key] = [
                ReducePlan(context.shard, [self.message.cuts[i] for i in chosen], num_flags, sent, dtype)
            ]
            if context.relay:
                inner = [self._inner.cuts[i] for i in chosen]
                self._plans[key].append(ReducePlan(context.replicate, inner, num_flags, dtype, dtype))
        return self._plans[key]

    def flags(self, absent: Sequence[int], count: int, rows: int, dtype: torch.dtype) -> Tensor:
        """(rows, count + 1): one where this rank has a gradient, and the unit's tag. Kept only where few ranks make it small."""
        key = (rows * count, dtype)
        if not absent and key in self._ones:
            return self._ones[key]
        flags = torch.ones(rows, count + 1, dtype=dtype, device=self.context.device)
        flags[:, count] = self.tag
        if absent:
            for some in runs(absent):  # slices: an index of several would be copied to the device, and waited for
                flags[:, some] = 0
        elif flags.nbytes <= KEPT_FLAG_BYTES:
            self.context.reduce_stream.settle()
            self._ones[key] = flags
        return flags
