"""The gradients of one group on their way from full ones on this rank to this rank's rows of their sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from accordion import _torch
from accordion.engine.reduction import Reduction, dense
from accordion.engine.streams import Flight, Steps
from accordion.engine.watch import ADVICE

if TYPE_CHECKING:
    from accordion.engine.group import Group


class Reduced:
    """The gradients of a group on their way; `finish` gives this rank's rows of the sum, None where no rank had any."""

    def __init__(
        self,
        group: Group,
        chosen: Sequence[int],
        grads: Sequence[Tensor | None],
        sent: torch.dtype,
        ours: Sequence[bool],
    ) -> None:
        self._group, self._chosen, wiring = group, chosen, group.wiring
        self._absent = [k for k, g in enumerate(grads) if g is None]
        self._flight: Flight | None = None
        self._results: Sequence[Tensor | None]
        if wiring.num_ranks == 1:
            self._results = [
                None if g is None else dense(g, g.dtype, copy=not mine) for g, mine in zip(grads, ours, strict=True)
            ]
            self._finish_sums([r for r in self._results if r is not None])
            return
        present: Sequence[Tensor] = grads  # type: ignore[assignment]
        if self._absent:
            pairs = zip(chosen, grads, strict=True)
            present = [torch.zeros_like(group.views[i], dtype=sent) if g is None else g for i, g in pairs]
            ours = [mine or g is None for g, mine in zip(grads, ours, strict=True)]
        reductions = [Reduction(plan, wiring.device) for plan in group.plans(chosen, sent)]
        if wiring.reduce_lane.late:
            for r in reductions:
                r.poison()
        flags = group.flags(self._absent, len(chosen), wiring.shard.num_ranks, sent)
        reductions[0].load(present, flags, ours)
        self._last = reductions[-1]
        held = [tensor for r in reductions for tensor in r.held]
        self._flight = wiring.reduce_lane.start(self._steps(*reductions), held, group.reduces)
        self._results = self._last.results

    def _steps(self, first: Reduction, second: Reduction | None = None) -> Steps:
        wiring = self._group.wiring
        yield from first.steps()
        if second is not None:
            flags = first.flag_sums.expand(wiring.replicate.num_ranks, -1)
            second.load(first.results, flags, [True] * len(first.results))
            yield from second.steps()
        elif wiring.replicate.num_ranks > 1:
            yield wiring.replicate.reduce.sum(first.buffers)
        self._finish_sums(self._last.buffers, self._last.flag_sums)

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

    def _check(self) -> None:
        """Ranks in different units would add up each other's gradients. Two bytes do not count as far as all tags add up to."""
        group, watch = self._group, self._group.wiring.watch
        if watch.looks(group.wiring.device) and group.reduce_dtype.itemsize >= 4:
            text = f"ranks reduce different units: this rank {group.place}; {ADVICE}"
            watch.same_everywhere(self._last.flag_sums[-1:], group.tag_sum, lambda _: text)

    def bring_home(self, adding: Sequence[bool]) -> tuple[Sequence[Tensor | None], Flight | None]:
        """`finish`, with rows where gradients rest, and the copy to there that is under way; see `Home.put`."""
        return self._group.home.put(self._chosen, self.finish(), adding)

    def finish(self) -> list[Tensor | None]:
        """Local rows for each chosen parameter, in the dtype of its shard."""
        if self._flight is not None:
            self._flight.land()
            self._check()
            if self._absent:  # the one read of the device, and only on a rank that lacked a gradient
                sums = self._last.flag_sums.tolist()
                nobody = [k for k in self._absent if sums[k] == 0]
                self._results = [None if k in nobody else r for k, r in enumerate(self._results)]
            if self._group.sums_are_shards:
                return list(self._results)
        dtypes = [self._group.params[i].dtype for i in self._chosen]
        return [r if r is None or r.dtype is d else r.to(d) for r, d in zip(self._results, dtypes, strict=True)]
