"""`debug="finite"`: in which unit and phase NaN or inf came up first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from accordion.engine.collectives import Link, reduced
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


class Finite:
    """Owns a number for each unit and moment on the device, zero while all was finite; ranks compare them once a pass.

    The host waits once a pass only. Ranks visit units in the same order, so the first slot that any rank has filled is the first.
    """

    def __init__(self, links: Sequence[Link], device: torch.device) -> None:
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
