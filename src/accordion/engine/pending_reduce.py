"""A running reduce of gradients: from full gradients on this rank to its rows of their sum over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from accordion import _torch
from accordion.engine.gloo import SendingReduce
from accordion.engine.group import Group
from accordion.engine.reduce import AxisReduce, dense
from accordion.engine.streams import Steps, Transfer


class PendingReduce:
    """A reduce of full gradients under way: the constructor begins it, and `finish` returns this rank's rows of the sums.

    `chosen`: indices of the parameters in `group`. `grads`: a full gradient for each; None if this rank has none. `sent`: the
    dtype in which they are sent. `ours`: True for gradients to which nothing else refers, so that they may be overwritten.
    `height`: number of rows per rank if the gradients are those of a `Slice`; None for those of all rows. The attribute
    `goes_on` is True if a reduce over a second axis follows, on another stream.
    """

    def __init__(
        self,
        group: Group,
        chosen: Sequence[int],
        grads: Sequence[Tensor | None],
        sent: torch.dtype,
        ours: Sequence[bool],
        height: int | None = None,
    ) -> None:
        self._group, self._chosen, context = group, chosen, group.context
        # Positions in `chosen` of the parameters for which this rank has no gradient; other ranks may have one.
        self.absent = [k for k, g in enumerate(grads) if g is None]
        self._transfer: Transfer | None = None
        self._outer: Transfer | None = None  # over `replicate`, with hybrid strategies
        self.goes_on = context.shard.num_ranks > 1 and context.replicate.num_ranks > 1
        self._results: Sequence[Tensor | None]
        if context.num_ranks == 1:
            pairs = zip(grads, ours, strict=True)
            self._results = [None if g is None else dense(g, g.dtype, copy=not free) for g, free in pairs]
            self._finish_sums([r for r in self._results if r is not None])
            return
        present: Sequence[Tensor] = grads  # type: ignore[assignment]
        if self.absent:
            views = [group.views[i] for i in chosen]
            present = [torch.zeros_like(v, dtype=sent) if g is None else g for v, g in zip(views, grads, strict=True)]
            ours = [free or g is None for g, free in zip(grads, ours, strict=True)]
        plans = group.plans(chosen, sent, height)
        reductions = [(SendingReduce if plan.sends else AxisReduce)(plan, context.device) for plan in plans]
        if context.reduce_stream.late:
            for r in reductions:
                r.poison()
        flags = group.flags(self.absent, len(chosen), sent)
        reductions[0].load(present, flags, ours)
        self._first, self._last = reductions[0], reductions[-1]
        steps = self._first.steps() if self.goes_on else self._all_steps()
        self._transfer = context.reduce_stream.start(steps, self._first.tensors, group.reduces)
        self._results = self._last.results
        if self.goes_on and self._transfer.ended:
            self._go_on()

    def _all_steps(self) -> Steps:
        """Generator: reduce over both mesh axes on one stream. Used if at most one of them has several ranks."""
        yield from self._first.steps()
        if self._group.context.replicate.num_ranks > 1 or self._last is not self._first:
            yield from self._outer_steps()
        else:
            self._finish_sums(self._first.buffers, self._first)

    def _outer_steps(self) -> Steps:
        """Generator: sum the results of the reduce over the `shard` axis over the `replicate` axis too, and scale the sums."""
        first, last, replicate = self._first, self._last, self._group.context.replicate
        if last is not first:
            last.load(first.results, first.flag_sums.expand(replicate.num_ranks, -1), [True] * len(first.results))
            yield from last.steps()
        else:
            yield replicate.reduce.sum(first.buffers)
        self._finish_sums(last.buffers, last)

    def _go_on(self) -> None:
        """Begin the reduce over the `replicate` axis, on a second stream, so that other units' gradients need not wait."""
        assert self._transfer is not None, "the reduce over the first axis has begun"
        side_stream, buffers = self._group.context.replicate_stream, self._first.buffers
        if self._last is not self._first:
            buffers = [*buffers, *self._last.tensors]
        self._transfer.join(side_stream)
        self._outer = side_stream.start(self._outer_steps(), buffers, self._group.reduces)

    def arrive(self) -> None:
        """Let the compute stream wait for the reduce over the first axis; with gloo, the host waits too. If a reduce over a
        second axis follows (`goes_on`), begin it, unless it has begun, and free buffers that only the first one needed."""
        if self._transfer is not None:
            self._transfer.land()
            if self.goes_on and self._outer is None:
                self._go_on()
            if self.goes_on:
                self._first.free()

    @property
    def lets_host_wait(self) -> bool:
        """True if `finish` would make the host wait for other ranks."""
        return any(transfer is not None and not transfer.ended for transfer in (self._transfer, self._outer))

    def abandon(self) -> None:
        """Give up the results and drop the buffers, without a wait of the host."""
        for transfer in (self._transfer, self._outer):
            if transfer is not None:
                transfer.abandon()

    def _finish_sums(self, buffers: list[Tensor], reduction: AxisReduce | None = None) -> None:
        """Scale the sums in `buffers` in place, then call `group.after_reduce`, if set, with each buffer. `reduction`: the
        reduce whose flags are in `buffers`: scaled too, but unchanged by the callback; None on a single rank (no flags)."""
        group = self._group
        if group.scale != 1.0 and len(buffers) == 1:
            buffers[0].mul_(group.scale)
        elif group.scale != 1.0 and buffers:
            _torch.foreach_mul_(buffers, group.scale)
        if group.after_reduce is not None:
            # The buffers include the flags, which the callback must not change.
            flags = None if reduction is None else reduction.flag_sums.clone()
            for buffer in buffers:
                group.after_reduce(buffer)
            if reduction is not None and flags is not None:
                reduction.flag_sums.copy_(flags)

    def finish_in_tier(self, adding: Sequence[bool], decide: bool) -> tuple[Sequence[Tensor | None], Transfer | None]:
        """Call `finish(decide)`, and begin to move the rows that it returns to host or disk if gradients are offloaded there.
        Returns (the rows, moved or not; copy under way or None). `adding`: True for rows that are only added to a `.grad`."""
        rows, group = self.finish(decide), self._group
        # If the sums are cast to be gradients, the compute stream does that.
        made_by = (self._outer or self._transfer) if group.sums_are_grads else None
        return group.shard_buffer.put(self._chosen, rows, adding, made_by)

    def counted(self) -> list[tuple[Tensor, int] | None]:
        """Return for each parameter None if this rank has a gradient or is the only rank, otherwise (sums, k): after the reduce
        `sums[k]`, on the device, is 0 if no rank has a gradient."""
        if not self.absent or self._transfer is None:
            return [None] * len(self._chosen)
        sums, absent = self._last.flag_sums, set(self.absent)
        return [(sums, k) if k in absent else None for k in range(len(self._chosen))]

    def finish(self, decide: bool = True) -> list[Tensor | None]:
        """Let the compute stream wait for the reduce; return this rank's rows of each sum, in the sharded gradient's dtype.
        `decide`: return None, not zeros, for gradients that no rank has; the host waits for the device if this rank lacks any.
        On one rank: always None. Raises `DivergenceError` if ranks reduced different units and the waiter asks to check."""
        group, waiter = self._group, self._group.context.waiter
        if self._transfer is not None:
            self.arrive()
            if self._outer is not None:
                self._outer.land()
            # Check that no rank reduces another unit. Dtypes of two bytes cannot represent the sum of all tags.
            if waiter.looks(group.context.device) and group.reduce_dtype.itemsize >= 4:
                waiter.same_everywhere(self._last.flag_sums[-1:], group.tag_sum, group.reduces)
            if self.absent and decide:
                sums = self._last.flag_sums.tolist()
                missing = [k for k in self.absent if sums[k] == 0]
                self._results = [None if k in missing else r for k, r in enumerate(self._results)]
            if group.sums_are_grads:
                return list(self._results)
        dtypes = [group.grad_dtypes[i] for i in self._chosen]
        return [r if r is None or r.dtype is d else r.to(d) for r, d in zip(self._results, dtypes, strict=True)]
