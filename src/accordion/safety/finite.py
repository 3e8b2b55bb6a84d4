"""NaN and inf: in which unit and phase they came up first (`debug="finite"`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accordion.engine.communicator import reduced
from accordion.engine.engine import Engine
from accordion.engine.observer import CallInForward, Observer
from accordion.engine.tree import tensors_of
from accordion.engine.unit import Unit
from accordion.errors import NonFiniteError


class Moment(Enum):
    """When a unit is looked at, and how messages call that."""

    PARAMETERS = "in its parameters"
    FORWARD = "in what its forward returned"
    BACKWARD = "in the gradients of its parameters, before they were reduced"


class FiniteCheck(Observer):
    """Owns a number for each unit and moment on the device, zero while all was finite; ranks compare them once a pass.

    The host waits once a pass only. Ranks visit units in the same order, so the first slot that any rank has filled is the first.
    """

    def __init__(self, engine: Engine) -> None:
        context = engine.context
        communicators = [context.shard.gather, context.replicate.gather]
        self._communicators = [communicator for communicator in communicators if communicator.num_ranks > 1]
        self._rank = dist.get_rank() if self._communicators else 0
        self._device, self._units = context.device, engine.units
        self._found: dict[tuple[int, Moment], Tensor] = {}

    def unit_is_full(self, call: CallInForward, fulls: Sequence[Tensor]) -> None:
        self.look(call.unit.index, Moment.PARAMETERS, call.unit.views)

    def unit_leaves(self, call: CallInForward, out: Any, error: BaseException | None) -> Any:
        if error is None:
            self.look(call.unit.index, Moment.FORWARD, tensors_of(out))
        return out

    def full_gradients(self, unit: Unit, grads: Sequence[Tensor | None]) -> None:
        self.look(unit.index, Moment.BACKWARD, grads)

    def forward_ends(self, error: BaseException | None) -> None:
        if error is None:
            self.report()

    def backward_ended(self, reduced: bool) -> None:
        self.report()

    def look(self, unit: int, moment: Moment, tensors: Iterable[Tensor | None]) -> None:
        floating = [t.detach() for t in tensors if t is not None and (t.is_floating_point() or t.is_complex())]
        found = self._found.get((unit, moment), torch.zeros((), device=self._device))
        for tensor in floating:
            found = torch.maximum(found, (~torch.isfinite(tensor)).any().to(found.dtype))
        self._found[unit, moment] = found

    def forget(self) -> None:
        self._found.clear()

    def report(self) -> None:
        """Raise `NonFiniteError` on every rank if one has found something since the last call."""
        slots, self._found = self._found, {}
        if not slots:
            return
        # The lowest rank has the largest number.
        mark = torch.stack(list(slots.values())) * float(2**20 - self._rank)
        marks = reduced(mark, self._communicators, dist.ReduceOp.MAX).tolist()
        for (unit, moment), value in zip(slots, marks, strict=True):
            if value:
                raise NonFiniteError(
                    f"NaN or inf came up first in unit {unit} ({self._units[unit].name or 'root'}), {moment.value}, on rank "
                    f"{2**20 - int(value)}; look at what goes into that unit there."
                )
