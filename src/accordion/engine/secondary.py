"""Secondary shards: full parameters that a few ranks keep sharded between a forward and its backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from accordion import _torch
from accordion.engine.communicator import carried
from accordion.engine.context import ShardingContext
from accordion.engine.full_buffer import FullBuffer
from accordion.engine.group import CutGroup, GroupPlan
from accordion.engine.layout import Cut, aligned, full_offsets
from accordion.engine.shards import NO_VERSION
from accordion.engine.streams import Steps, Transfer


class LeavingBuffer(FullBuffer):
    """A full buffer of which each rank keeps a copy of one slice, the attribute `part`, after `close` in a forward.

    `own_slice`: this rank's slice of `flat`. All slices are equally long, so that one all-gather of `part` restores `flat`.
    `leaves`: False to keep none. `shows`, set by the group, and `left`: versions of the shards in the buffer and in `part`,
    `NO_VERSION` if unknown.
    """

    def __init__(
        self, cuts: Sequence[Cut], offsets: Sequence[int], flat: Tensor, rank: int, own_slice: slice, *, poison: bool
    ) -> None:
        super().__init__(cuts, offsets, flat, rank, poison=poison)
        self.raw = flat.data
        self._slice = own_slice
        self.leaves = True
        self.part: Tensor | None = None
        self.shows = self.left = NO_VERSION

    def close(self) -> None:
        """Free the full parameters. In a forward with gradients and `leaves`, first copy this rank's slice into `part`, if
        `shows` is known and `part` does not have that version yet."""
        comes_back = self.leaves and torch.is_grad_enabled() and not _torch.is_in_backward()
        if comes_back and self.shows not in (NO_VERSION, self.left):
            self.part, self.left = self.raw[self._slice].clone(), self.shows
        super().close()

    def drop(self) -> None:
        """Drop the slice `part`, because the shards may have changed. A running gather keeps its own reference to it."""
        self.part, self.shows, self.left = None, NO_VERSION, NO_VERSION


class SecondaryGroup(CutGroup):
    """A group whose full parameters stay sharded over a few ranks between a forward and its backward. `over`: the communicator
    of these ranks. All gathers after the forward use it alone, until shards are written or a backward reduces gradients."""

    def __init__(self, context: ShardingContext, planned: GroupPlan, place: tuple[int, str]) -> None:
        assert planned.secondary is not None, "the plan names the ranks"
        over = self.over = planned.secondary
        super().__init__(context, planned, place)
        self._tags = self._tag.new_empty(over.num_ranks * self._tag.numel())
        self.secondary_bytes = self._leaving.num_bytes // over.num_ranks

    def _make_full_buffer(self, cuts: Sequence[Cut], rank: int, poison: bool) -> FullBuffer:
        offsets, numel = full_offsets(cuts, self.dtype.itemsize)
        num = self.over.num_ranks
        share = aligned(-(-numel // num), self.dtype.itemsize)
        flat = torch.empty(share * num, dtype=self.dtype, device=self.context.device)
        own_slice = slice(self.over.rank * share, (self.over.rank + 1) * share)
        self._leaving = LeavingBuffer(cuts, offsets, flat, rank, own_slice, poison=poison)
        return self._leaving

    def keep_slices(self, keeps: bool) -> None:
        self._leaving.leaves = keeps

    def gather(self) -> Transfer | None:
        buffer, version = self._leaving, self.version()
        buffer.shows = NO_VERSION
        if buffer.part is None or buffer.left != version:
            try:
                return super().gather()
            except BaseException:
                self.filled = NO_VERSION  # `landed` is called after an error too
                raise
        self.filled, part = version, buffer.part
        buffer.open()

        def steps() -> Steps:
            yield self.over.gather([carried(buffer.raw), self._tags], [carried(part), self._tag])
            self._check(self._tags.view(self.over.num_ranks, -1))

        return self.context.gather_stream.start(steps(), [part], self._gathers)

    def landed(self) -> None:
        super().landed()
        self._leaving.shows = self.filled

    def mark_stale(self) -> None:
        super().mark_stale()
        self._leaving.drop()
