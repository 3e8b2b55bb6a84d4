"""Gather the parameters of a unit a few rows of each rank at a time, and reduce their gradients in the same slices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from accordion import _torch
from accordion.engine.autograd import hand_over
from accordion.engine.calls import Call, changed_error
from accordion.engine.communicator import carried
from accordion.engine.engine import Engine
from accordion.engine.gradients import weighted
from accordion.engine.layout import Slice
from accordion.engine.observer import GATHERED, GRADIENTS
from accordion.engine.pending_reduce import PendingReduce
from accordion.engine.streams import Steps, Transfer
from accordion.engine.unit import Unit


def why_not_sliced(unit: Unit) -> str:
    """Return why the parameters of `unit` cannot be gathered in slices; "" if they can."""
    group = unit.groups[0]
    if len(unit.groups) > 1 or unit.module_params.has_around:
        return "its parameters differ in dtype or mesh, or are tensor subclasses"
    if group.context.cut_twice:
        return "its rows are sharded over both axes of the mesh (hybrid_shard_optim)"
    if group.shard_buffer.off_device:
        return "its parameters are offloaded"
    if any(cut.dim != 0 for cut in group.message.cuts):
        return "it has too few rows for so many ranks"
    return ""


class Slices:
    """The parameters of a unit for which `why_not_sliced` returns "", in slices of at most `max_rows` rows of all ranks
    together, but at least one row of each rank. `gathered` iterates over them."""

    def __init__(self, engine: Engine, unit: Unit, max_rows: int) -> None:
        self.engine, self.unit, self.group = engine, unit, unit.groups[0]
        cut = self.group.message.cuts[0]  # that of the others has as many rows
        height = min(max(1, max_rows // cut.num_ranks), cut.chunk)
        starts = range(0, cut.chunk, height)
        self.slices = [Slice(cut, start, min(start + height, cut.chunk)) for start in starts]

    def gathered(self) -> Iterator[tuple[Slice, list[Tensor]]]:
        """Yield (slice, list with the rows of all ranks of each parameter in the slice, unpadded); meanwhile gather the next.
        The caller must not write shards, and should drop the rows of a slice before it takes the next one. A collective."""
        buffer = self.group.shard_buffer
        buffer.ready()
        copy = buffer.refresh(self.group.version())
        if copy is not None:
            copy.land()
        ahead = self.engine.allocate(GATHERED, self._gather, self.slices[0])
        try:
            for part, following in zip(self.slices, [*self.slices[1:], None], strict=True):
                fulls, transfer = ahead
                transfer.land()
                if following is not None:
                    ahead = self.engine.allocate(GATHERED, self._gather, following)
                yield part, [full[: part.num_rows] for full in fulls]
        finally:
            ahead[1].abandon()

    def _gather(self, part: Slice) -> tuple[list[Tensor], Transfer]:
        group, communicator = self.group, self.group.context.shard.gather
        shards, fulls = [], []
        for padded, cut in zip(group.shard_buffer.padded, group.message.cuts, strict=True):
            rows = padded.detach()[part.start * cut.row_numel : part.stop * cut.row_numel].to(group.dtype)
            shards.append(rows)
            fulls.append(rows if cut.num_ranks == 1 else rows.new_empty(rows.numel() * cut.num_ranks))

        def steps() -> Steps:
            if communicator.num_ranks > 1:
                yield communicator.gather(list(map(carried, fulls)), list(map(carried, shards)))

        transfer = group.context.gather_stream.start(steps(), [*shards, *fulls], f"gathers rows of {group.place}")
        shapes = [(-1, *cut.row_shape) for cut in group.message.cuts]
        return [full.view(shape) for full, shape in zip(fulls, shapes, strict=True)], transfer


class SlicedReduce(PendingReduce):
    """The reduce of the gradients of a call, slice by slice: `add` begins one after the other, `write` ends the last. The
    constructor registers it in `GradientsUnderWay.reduces`; `write`, or `Engine.recover` after an error, removes it."""

    def __init__(self, call: Call) -> None:
        ((self._group, _, self._chosen),) = call.trained.by_group
        self._call, self._rank = call, self._group.context.shard.rank
        self.absent, self._transfer, self._outer, self.goes_on = [], None, None, False
        self._under_way: tuple[Slice, PendingReduce] | None = None
        locals_of = self._group.shard_buffer.locals
        self._totals = [  # this rank's rows, without padding
            torch.empty(locals_of[i].shape, dtype=self._group.grad_dtypes[i], device=self._group.context.device)
            for i in self._chosen
        ]
        call.engine.gradients.reduces.append([self])  # until `hand_over`, or `Engine.recover` after an error

    def add(self, part: Slice, grads: Sequence[Tensor]) -> None:
        """End the reduce of the slice before, and begin to reduce the gradients of the slice `part`. `grads`: one per trained
        parameter, each (rows of all ranks with padding, ...); they may be overwritten."""
        self.finish()
        group, sent, ours, allocate = self._group, self._group.dtype, [True] * len(grads), self._call.engine.allocate
        grads = [grad.to(sent) for grad in weighted(grads, self._call.weight, zeros=True) if grad is not None]
        reduce = allocate(GRADIENTS, PendingReduce, group, self._chosen, grads, sent, ours, part.height)
        self._under_way = part, reduce

    def finish(self, decide: bool = True) -> list[Tensor | None]:
        if self._under_way is not None:
            (part, reduce), self._under_way = self._under_way, None
            num_rows = part.rows_of(self._rank)
            for total, rows in zip(self._totals, reduce.finish(decide), strict=True):
                assert rows is not None, "every rank has all gradients"
                total[part.start : part.start + num_rows] = rows[:num_rows]
        return list(self._totals)

    def write(self) -> Sequence[Tensor | None]:
        """Add the sharded gradients to `.grad`; return those left to autograd, one or None per trained parameter."""
        grads = hand_over(self._call, [self], self._call.engine.gradients.may_write())
        return [None] * len(self._totals) if grads is None else grads[2:]

    @property
    def lets_host_wait(self) -> bool:
        return self._under_way is not None and self._under_way[1].lets_host_wait

    def abandon(self) -> None:
        if self._under_way is not None:
            self._under_way[1].abandon()


def begin_call(engine: Engine, unit: Unit) -> Call:
    """Return a call of `unit` without a gather or hooks, for gradients of its slices. Raises `DivergenceError` if collectives are
    not safe any more, and `UsageError` if a parameter was replaced or its data assigned."""
    engine.context.waiter.check()
    unit.module_params.check_registry()
    unit.module_params.check_data()
    unit.see_trained()
    call = Call(engine, unit)
    call.version = unit.groups[0].version()
    return call


def begin_backward(call: Call) -> None:
    """Record that the running backward reaches `call`. Raises `UsageError` if parameters were changed since `begin_call`."""
    if call.version != call.unit.groups[0].version():
        raise changed_error(call.unit)
    call.engine.join(_torch.current_graph_task(), call)
