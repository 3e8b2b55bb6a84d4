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


class ForwardWrites(Observer):
    """Observer that raises `UsageError` if checksums show that a unit's forward has changed the unit's full parameters.

    By default each unit is checked in its first training step only, and the observer detaches itself after the last unit; with
    `always` every forward is checked. Checksums stay on the device until the outermost call of a unit ends; then the host waits
    for the device, and the error is raised. Units whose shards are the full parameters are not checked.
    """

    def __init__(self, engine: Engine, *, always: bool) -> None:
        self._engine, self._always = engine, always
        # Groups whose shards are the full parameters have no full buffer. Fake tensors have no numbers.
        self._full_buffers: dict[int, list[FullBuffer]] = {}
        for unit in engine.units:
            buffers = [group.full_buffer for group in unit.groups]
            if real := [b for b in buffers if isinstance(b, FullBuffer) and _torch.fake_device(b.flat) is None]:
                self._full_buffers[unit.index] = real
        self._unchecked = set(self._full_buffers)
        self._checked: set[int] = set()  # units checked since the last step
        self._is_checking = False
        self._before: dict[int, Tensor] = {}  # checksums of the full buffers, by id of the call
        self._changed: list[tuple[Unit, Tensor]] = []  # for each call that has ended, a 0-d bool

    def forward_begins(self, differentiable: bool, reduces: bool) -> None:
        self._is_checking = differentiable or self._always

    def unit_is_full(self, call: CallInForward, fulls: Sequence[Tensor]) -> None:
        if self._is_checking and call.unit.index in self._unchecked:
            self._before[id(call)] = self._checksum(call.unit)

    def unit_leaves(self, call: CallInForward, out: Any, error: BaseException | None) -> Any:
        before = self._before.pop(id(call), None)
        if before is not None and error is None:
            self._changed.append((call.unit, (self._checksum(call.unit) != before).any()))
            self._checked.add(call.unit.index)
        if self._engine.depth == 1 and error is None and self._changed:
            flags = HostCopy([torch.stack([is_changed for _, is_changed in self._changed])]).read()[0]
            for (unit, _), is_changed in zip(self._changed, flags, strict=True):
                if is_changed:
                    raise unit.lost_write_error("modified a parameter")
        return out

    def forward_ends(self, error: BaseException | None) -> None:
        self.interrupted()

    def backward_ended(self, reduced: bool) -> None:
        if self._always or not reduced:
            return
        self._unchecked -= self._checked
        self._checked.clear()
        if not self._unchecked:
            self._engine.observers.detach(self)

    def interrupted(self) -> None:
        self._is_checking, self._before, self._changed = False, {}, []

    def _checksum(self, unit: Unit) -> Tensor:
        with torch.no_grad():
            return torch.stack([checksum(buffer.flat) for buffer in self._full_buffers[unit.index]])
