"""The gradients of one group on their way from full ones on this rank to this rank's rows of their sum."""

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
    """The gradients of a group on their way; `finish` gives this rank's rows of the sum, None where no rank had any.

    Begins to reduce the full gradients `grads` of the parameters `chosen`, which are sent in the dtype `sent`; None where this
    rank has none. `ours`: which of them nobody else has, so that they may be written into.
    """

    def __init__(
        self,
        group: Group,
        chosen: Sequence[int],
        grads: Sequence[Tensor | None],
        sent: torch.dtype,
        ours: Sequence[bool],
    ) -> None:
        self._group, self._chosen, context = group, chosen, group.context
        # Positions among `chosen` of the parameters without a gradient of this rank's; others may have one.
        self.absent = [k for k, g in enumerate(grads) if g is None]
        self._transfer: Transfer | None = None
        self._outer: Transfer | None = None  # in a hybrid the second one, over `replicate`
        self.goes_on = context.shard.num_ranks > 1 and context.replicate.num_ranks > 1
        self._results: Sequence[Tensor | None]
        if context.num_ranks == 1:
            self._results = [
                None if g is None else dense(g, g.dtype, copy=not mine) for g, mine in zip(grads, ours, strict=True)
            ]
            self._finish_sums([r for r in self._results if r is not None])
            return
        present: Sequence[Tensor] = grads  # type: ignore[assignment]
        if self.absent:
            pairs = zip(chosen, grads, strict=True)
            present = [torch.zeros_like(group.views[i], dtype=sent) if g is None else g for i, g in pairs]
            ours = [mine or g is None for g, mine in zip(grads, ours, strict=True)]
        plans = group.plans(chosen, sent)
        reductions = [(SendingReduce if plan.sends else AxisReduce)(plan, context.device) for plan in plans]
        if context.reduce_stream.late:
            for r in reductions:
                r.poison()
        flags = group.flags(self.absent, len(chosen), context.shard.num_ranks, sent)
        reductions[0].load(present, flags, ours)
        self._first, self._last = reductions[0], reductions[-1]
        steps = self._first.steps() if self.goes_on else self._all_steps()
        self._transfer = context.reduce_stream.start(steps, self._first.held, group.reduces)
        self._results = self._last.results
        if self.goes_on and self._transfer.ended:
            self._go_on()

    def _all_steps(self) -> Steps:
        """All of it, where one axis has one rank."""
        yield from self._first.steps()
        if self._group.context.replicate.num_ranks > 1 or self._last is not self._first:
            yield from self._outer_steps()
        else:
            self._finish_sums(self._first.buffers, self._first.flag_sums)

    def _outer_steps(self) -> Steps:
        """Over `replicate`, whose ranks hold sums of the same rows."""
        first, last, replicate = self._first, self._last, self._group.context.replicate
        if last is not first:
            last.load(first.results, first.flag_sums.expand(replicate.num_ranks, -1), [True] * len(first.results))
            yield from last.steps()
        else:
            yield replicate.reduce.sum(first.buffers)
        self._finish_sums(last.buffers, last.flag_sums)

    def _go_on(self) -> None:
        """Begin what follows the first axis, on a side stream of its own: the next unit's gradients need not wait for that."""
        assert self._transfer is not None, "it has begun on the first axis"
        side_stream, held = self._group.context.replicate_stream, self._first.buffers
        if self._last is not self._first:
            held = [*held, *self._last.held]
        self._transfer.join(side_stream)
        self._outer = side_stream.start(self._outer_steps(), held, self._group.reduces)

    def arrive(self) -> None:
        """Wait for the first axis, and let go what only that needed: from here on a reduce holds memory of a shard's size."""
        if self._transfer is not None:
            self._transfer.land()
            if self.goes_on and self._outer is None:
                self._go_on()
            if self.goes_on:
                self._first.let_go()

    @property
    def lets_host_wait(self) -> bool:
        """Return True if `finish` lets the host wait for other ranks."""
        return any(transfer is not None and not transfer.ended for transfer in (self._transfer, self._outer))

    def abandon(self) -> None:
        """Give up the gradients. The host waits for nothing."""
        for transfer in (self._transfer, self._outer):
            if transfer is not None:
                transfer.abandon()

    def _finish_sums(self, buffers: list[Tensor], flag_sums: Tensor | None = None) -> None:
        group = self._group
        if group.scale != 1.0 and len(buffers) == 1:
            buffers[0].mul_(group.scale)
        elif group.scale != 1.0 and buffers:
            _torch.foreach_mul_(buffers, group.scale)
        if group.after_reduce is not None:
            # Flags lie in the buffers, and are not the caller's.
            flags = None if flag_sums is None else flag_sums.clone()
            for buffer in buffers:
                group.after_reduce(buffer)
            if flag_sums is not None and flags is not None:
                flag_sums.copy_(flags)

    def finish_at_rest(
        self, adding: Sequence[bool], decide: bool = True
    ) -> tuple[Sequence[Tensor | None], Transfer | None]:
        """`finish`, with rows where gradients rest, and the copy to there that is under way; see `ShardBuffer.put`."""
        rows, group = self.finish(decide), self._group
        # If the sums are cast to be gradients, the compute stream does that.
        made_by = (self._outer or self._transfer) if group.sums_are_grads else None
        return group.shard_buffer.put(self._chosen, rows, adding, made_by)

    def counted(self) -> list[tuple[Tensor, int] | None]:
        """For each chosen parameter without a gradient of this rank's, the place of the count of ranks that have one."""
        if not self.absent or self._transfer is None:
            return [None] * len(self._chosen)
        sums, absent = self._last.flag_sums, set(self.absent)
        return [(sums, k) if k in absent else None for k in range(len(self._chosen))]

    def finish(self, decide: bool = True) -> list[Tensor | None]:
        """Local rows for each chosen parameter, in the dtype of its sharded gradient.

        `decide`: None for what no rank has, for which a rank that lacked a gradient reads the device; else zeros.
        """
        group, waiter = self._group, self._group.context.waiter
        if self._transfer is not None:
            self.arrive()
            if self._outer is not None:
                self._outer.land()
            # Ranks in different units would add up each other's gradients. Two bytes do not count as far as all tags add up to.
            if waiter.looks(group.context.device) and group.reduce_dtype.itemsize >= 4:
                waiter.same_everywhere(self._last.flag_sums[-1:], group.tag_sum, group.reduces)
            if self.absent and decide:
                sums = self._last.flag_sums.tolist()
                nobody = [k for k in self.absent if sums[k] == 0]
                self._results = [None if k in nobody else r for k, r in enumerate(self._results)]
            if group.sums_are_grads:
                return list(self._results)
        dtypes = [group.grad_dtypes[i] for i in self._chosen]
        return [r if r is None or r.dtype is d else r.to(d) for r, d in zip(self._results, dtypes, strict=True)]
