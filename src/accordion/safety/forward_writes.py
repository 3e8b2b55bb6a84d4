"""Detect writes to full parameters in a forward that autograd's version counters do not see, such as those through `.data`."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

import torch
from torch import Tensor

from accordion import _torch
from accordion.engine.engine import Engine
from accordion.engine.gather import FullBuffer
from accordion.engine.observer import CallInForward, Observer
from accordion.engine.unit import Unit
from accordion.tensor_checksum import checksum

STEPS = 2
CHUNK, COLUMNS = 2**22, 2**10  # elements: a checksum takes eight bytes for each one of a chunk, and a chunk is a table


class ForwardWrites(Observer):
    """Compares the checksums of a unit's full parameters before and after its forward, in its first training steps.

    Checksums stay on the device, and the host reads the result once, at the end of the outermost forward. Units that have been
    checked in `STEPS` steps are checked no more; after the last of them the observer detaches itself, unless it checks `always`.
    """

    def __init__(self, engine: Engine, *, always: bool) -> None:
        self._engine, self._always = engine, always
        self._full_buffers = {unit.index: full_buffers_of(unit) for unit in engine.units}
        self._steps_left = {index: STEPS for index, buffers in self._full_buffers.items() if buffers}
        self._checked: set[int] = set()  # since the last step
        self._is_checking = False
        self._before: dict[int, Tensor] = {}  # of each chunk, by id of the call
        self._changed: list[tuple[Unit, Tensor]] = []  # for each call that has ended, a 0-d bool

    def forward_begins(self, differentiable: bool, reduces: bool) -> None:
        self._is_checking = differentiable or self._always

    def unit_is_full(self, call: CallInForward, fulls: Sequence[Tensor]) -> None:
        if self._is_checking and call.unit.index in self._steps_left:
            self._before[id(call)] = self._checksum(call.unit)

    def unit_leaves(self, call: CallInForward, out: Any, error: BaseException | None) -> Any:
        before = self._before.pop(id(call), None)
        if before is not None and error is None:
            self._changed.append((call.unit, (self._checksum(call.unit) != before).any()))
            self._checked.add(call.unit.index)
        if self._engine.depth == 1 and error is None and self._changed:
            units, flags = zip(*self._changed, strict=True)
            for unit, is_changed in zip(units, torch.stack(flags).tolist(), strict=True):
                if is_changed:
                    raise unit.lost_write_error("modified a parameter")
        return out

    def forward_ends(self, error: BaseException | None) -> None:
        self.interrupted()

    def backward_ended(self, reduced: bool) -> None:
        """A training step has ended, if it reduced."""
        if self._always or not reduced:
            return
        for index in self._checked:
            self._steps_left[index] -= 1
            if not self._steps_left[index]:
                del self._steps_left[index]
        self._checked.clear()
        if not self._steps_left:
            self._engine.observers.detach(self)

    def interrupted(self) -> None:
        self._is_checking, self._before, self._changed = False, {}, []

    def _checksum(self, unit: Unit) -> Tensor:
        chunks = [chunk for buffer in self._full_buffers[unit.index] for chunk in buffer.flat.detach().split(CHUNK)]
        with torch.no_grad():
            return torch.stack([checksum(chunk.view(-1, gcd(chunk.numel(), COLUMNS))) for chunk in chunks])


def full_buffers_of(unit: Unit) -> list[FullBuffer]:
    """Return the full buffers of a unit. Groups whose shards are the full parameters have none; fake ones are left out."""
    buffers = [group.full_buffer for group in unit.groups]
    return [b for b in buffers if isinstance(b, FullBuffer) and _torch.told_device(b.flat) is None]
