"""NaN and inf: in which unit and phase they came up first (`debug="finite"`), and an overflow that all ranks must see."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from accordion import _torch
from accordion.engine.communicator import Communicator, reduced
from accordion.errors import NonFiniteError


class Moment(IntEnum):
    """When a unit is looked at."""

    PARAMETERS = 0
    FORWARD = 1
    BACKWARD = 2


WORDS = {
    Moment.PARAMETERS: "in its parameters",
    Moment.FORWARD: "in what its forward returned",
    Moment.BACKWARD: "in the gradients of its parameters, before they were reduced",
}


class FiniteCheck:
    """Owns a number for each unit and moment on the device, zero while all was finite; ranks compare them once a pass.

    The host waits once a pass only. Ranks visit units in the same order, so the first slot that any rank has filled is the first.
    """

    def __init__(self, links: Sequence[Communicator], device: torch.device) -> None:
        self._links = [link for link in links if link.num_ranks > 1]
        self._rank = dist.get_rank() if self._links else 0
        self._device = device
        self._found: dict[tuple[int, Moment], Tensor] = {}

    def look(self, unit: int, moment: Moment, tensors: Iterable[Tensor | None]) -> None:
        floating = [t.detach() for t in tensors if t is not None and (t.is_floating_point() or t.is_complex())]
        found = self._found.get((unit, moment), torch.zeros((), device=self._device))
        for tensor in floating:
            found = torch.maximum(found, (~torch.isfinite(tensor)).any().to(found.dtype))
        self._found[unit, moment] = found

    def forget(self) -> None:
        self._found.clear()

    def report(self, names: Sequence[str]) -> None:
        """Raise `NonFiniteError` on every rank where one has found something since the last call. `names`: of the units."""
        slots, self._found = self._found, {}
        if not slots:
            return
        # The lowest rank has the largest number.
        mark = torch.stack(list(slots.values())) * float(2**20 - self._rank)
        marks = reduced(mark, self._links, dist.ReduceOp.MAX).tolist()
        for (unit, moment), value in zip(slots, marks, strict=True):
            if value:
                raise NonFiniteError(
                    f"NaN or inf came up first in unit {unit} ({names[unit] or 'root'}), {WORDS[moment]}, on rank "
                    f"{2**20 - int(value)}; look at what goes into that unit there."
                )


def spread(grads: Sequence[tuple[bool, Tensor | None]], links: Sequence[Communicator], device: torch.device) -> None:
    """Let every rank see an overflow that one rank has in its rows. `grads`: under fp16, each with whether it is whole.

    `GradScaler` looks at the first gradient's placement: where that one is whole it asks no other rank, and ranks
    would differ on whether to step. So, only for fp16 beside parameters that are kept whole, those become inf on all ranks.
    """
    whole = [_torch.local_of(g) for is_whole, g in grads if is_whole and g is not None]
    if not links or not whole:
        return
    one, found = (torch.full((), value, device=whole[0].device) for value in (1.0, 0.0))
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for is_whole, g in grads:
        if not is_whole and g is not None:
            row = _torch.local_of(g)
            by_dtype.setdefault(row.dtype, []).append(row)
    for same in by_dtype.values():
        _torch.find_non_finite_(same, found, one)
    overflow = torch.where(reduced(found.to(device), links) > 0, float("inf"), 0.0)
    _torch.foreach_add_(whole, overflow.to(whole[0].device))
