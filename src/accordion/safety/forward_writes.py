"""Detect writes to full parameters in a forward that autograd's version counters do not see, such as those through `.data`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from accordion import _torch
from accordion.devices import HostCopy
from accordion.engine.engine import Engine
from accordion.engine.full_buffer import FullBuffer
from accordion.engine.observer import CallInForward, Observer
from accordion.engine.unit import Unit
from accordion.tensor_checksum import checksum

STEPS = 2


class ForwardWrites(Observer):
    """Observer that compares checksums of a unit's full parameters before and after its forward, in its first training steps.

    Checksums stay on the device. In the first step of a unit the host waits for the result at the end of the outermost forward;
    later results are read without waiting, at the end of the first forward after they have reached the host. A unit is checked
    in `STEPS` steps, or in all with `always`. After the last result the observer detaches itself.
    """

    def __init__(self, engine: Engine, *, always: bool) -> None:
        self._engine, self._always = engine, always
        # Groups whose shards are the full parameters have no full buffer. Fake tensors have no numbers.
        self._full_buffers: dict[int, list[FullBuffer]] = {}
        for unit in engine.units:
            buffers = [group.full_buffer for group in unit.groups]
            real = [b for b in buffers if isinstance(b, FullBuffer) and _torch.fake_device(b.flat) is None]
            self._full_buffers[unit.index] = real
        self._steps_left = {index: STEPS for index, buffers in self._full_buffers.items() if buffers}
        self._checked: set[int] = set()  # units checked since the last step
        self._stepped: set[int] = set()  # units that have been checked in a whole step
        self._is_checking = False
        self._before: dict[int, Tensor] = {}  # checksums of the full buffers, by id of the call
        self._changed: list[tuple[Unit, Tensor]] = []  # for each call that has ended, a 0-d bool
        self._unread: list[tuple[Sequence[Unit], HostCopy]] = []  # for each forward its units, and a bool for each

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
        if self._engine.depth == 1 and error is None:
            units: tuple[Unit, ...] = ()
            if self._changed:
                units, flags = zip(*self._changed, strict=True)
                self._unread.append((units, HostCopy([torch.stack(flags)])))
            self._report(waits=any(unit.index not in self._stepped for unit in units))
        return out

    def _report(self, *, waits: bool) -> None:
        """Raise `UsageError` if a unit modified a parameter. `waits`: wait for results that are not on the host yet."""
        while self._unread and (waits or self._unread[0][1].is_ready()):
            units, flags = self._unread.pop(0)
            for unit, is_changed in zip(units, flags.read()[0], strict=True):
                if is_changed:
                    raise unit.lost_write_error("modified a parameter")

    def forward_ends(self, error: BaseException | None) -> None:
        self.interrupted()

    def backward_ended(self, reduced: bool) -> None:
        """Count a step of all checked units if gradients were `reduced`; detach after the last check."""
        if reduced:
            self._stepped |= self._checked
        if self._always or not reduced:
            return
        for index in self._checked:
            self._steps_left[index] -= 1
            if not self._steps_left[index]:
                del self._steps_left[index]
        self._checked.clear()
        if not self._steps_left and not self._unread:
            self._engine.observers.detach(self)

    def interrupted(self) -> None:
        self._is_checking, self._before, self._changed = False, {}, []

    def _checksum(self, unit: Unit) -> Tensor:
        with torch.no_grad():
            return torch.stack([checksum(buffer.flat) for buffer in self._full_buffers[unit.index]])
