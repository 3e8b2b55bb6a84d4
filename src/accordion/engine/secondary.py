"""Secondary shards of full parameters, over fewer ranks: kept from a forward to its backward, which gathers these alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from accordion import _torch
from accordion.engine.communicator import carried
from accordion.engine.context import ShardingContext
from accordion.engine.gather import FullBuffer
from accordion.engine.group import CutGroup, GroupPlan
from accordion.engine.layout import Cut, aligned, full_offsets
from accordion.engine.shards import NO_VERSION
from accordion.engine.streams import Steps, Transfer


class LeavingBuffer(FullBuffer):
    """A full buffer that leaves this rank its part of the memory when a forward lets it go.

    The parts are equal slices of the memory as it lies, so that one message brings everything back, whatever is in it.
    `shows`: the version of the shards that the full parameters show, `NO_VERSION` if nothing is known. `part`: what was left,
    None while nothing is; `left`: its version.
    """

    def __init__(
        self, cuts: Sequence[Cut], offsets: Sequence[int], flat: Tensor, rank: int, own: slice, *, poison: bool
    ) -> None:
        super().__init__(cuts, offsets, flat, rank, poison=poison)
        self.raw = flat.data
        self._own = own
        self.leaves = True
        self.part: Tensor | None = None
        self.shows = self.left = NO_VERSION

    def close(self) -> None:
        """Outside of a backward that may still come, a part stays; where it stands already, it is not copied again."""
        comes_back = self.leaves and torch.is_grad_enabled() and not _torch.is_in_backward()
        if comes_back and self.shows not in (NO_VERSION, self.left):
            self.part, self.left = self.raw[self._own].clone(), self.shows
        super().close()

    def drop(self) -> None:
        """The shards may have changed; who reads the part still holds it."""
        self.part, self.shows, self.left = None, NO_VERSION, NO_VERSION


class SecondaryGroup(CutGroup):
    """A group of whose full parameters the ranks of `over` keep one copy between a forward and its backward, a part each.

    As long as shards are what that forward saw, gathers ask these ranks alone.
    """

    def __init__(self, context: ShardingContext, planned: GroupPlan, place: tuple[int, str]) -> None:
        assert planned.secondary is not None, "it is made where a plan has one"
        over = self.over = planned.secondary
        super().__init__(context, planned, place)
        self._tags = self._tag.new_empty(over.num_ranks * self._tag.numel())

    def _make_full_buffer(self, cuts: Sequence[Cut], rank: int, poison: bool) -> FullBuffer:
        offsets, numel = full_offsets(cuts, self.dtype.itemsize)
        num = self.over.num_ranks
        share = aligned(-(-numel // num), self.dtype.itemsize)
        flat = torch.empty(share * num, dtype=self.dtype, device=self.context.device)
        own = slice(self.over.rank * share, (self.over.rank + 1) * share)
        self._leaving = LeavingBuffer(cuts, offsets, flat, rank, own, poison=poison)
        return self._leaving

    @property
    def secondary_bytes(self) -> int:
        return self._leaving.num_bytes // self.over.num_ranks

    def leaves(self, whether: bool) -> None:
        """Whether a part stays, from the next forward on."""
        self._leaving.leaves = whether

    def gather(self) -> Transfer | None:
        buffer, now = self._leaving, self.version()
        buffer.shows = NO_VERSION
        if buffer.part is None or buffer.left != now:
            try:
                return super().gather()
            except BaseException:
                self.filled = NO_VERSION  # `landed` follows all the same
                raise
        self.filled, part = now, buffer.part
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
