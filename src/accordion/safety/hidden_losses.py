"""Unshard a unit in a backward that reaches it from a loss outside the model's outputs: in an attribute, argument or global.

Until a unit's first backward, full parameters that autograd saves are wrapped: a read of one begins the backward of the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from accordion import _torch
from accordion.engine.observer import CallInForward, Observer
from accordion.engine.unit import Unit


class HiddenLosses(Observer):
    """Observer that begins the backward of a call, which unshards its unit, when autograd reads a full parameter saved in it.

    A hook on saved tensors costs two Python calls for each tensor. So after a unit's first backward a call has one only if a
    backward of the unit has begun at such a read, or if backwards do not gather the unit otherwise. No hook is installed inside
    saved-tensor hooks of other code, such as offload of activations, because torch calls only the innermost one.
    """

    def __init__(self) -> None:
        self._begins_at_reads: dict[int, bool] = {}  # by unit, after its first backward
        # Of calls in progress, by id of the call.
        self._watches: dict[int, torch.autograd.graph.saved_tensors_hooks] = {}

    def unit_is_full(self, call: CallInForward, fulls: Sequence[Tensor]) -> None:
        """Install a hook on tensors that autograd saves in the forward of `call`. If a backward reads a full parameter among
        them, the hook begins the backward of `call`. No hook is installed for a dummy call or a call without a backward, inside
        saved-tensor hooks of other code, or if the unit's first backward needed none and `call` needs full parameters in its
        backward anyway."""
        if self._begins_at_reads.get(call.unit.index) is False and call.needs_full_in_backward:
            return
        if call.is_dummy or not call.may_come_back:
            return
        unit, read, outer = call.unit, partial(self._read, call, fulls), _torch.saving_hook()
        if outer is not None and all(outer is not watch.pack_hook for watch in self._watches.values()):
            return

        def pack(tensor: Tensor) -> Any:
            if unit.holds(tensor):
                return partial(read, tensor)
            return tensor if outer is None else outer(tensor)

        watch = self._watches[id(call)] = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        watch.__enter__()

    def unit_leaves(self, call: CallInForward, out: Any, error: BaseException | None) -> Any:
        watch = self._watches.pop(id(call), None)
        if watch is not None:
            watch.__exit__()
        return out

    def unit_returns(self, unit: Unit, call: CallInForward | None) -> None:
        if call is not None:
            self._begins_at_reads.setdefault(unit.index, False)

    def interrupted(self) -> None:
        for watch in self._watches.values():
            watch.__exit__()
        self._watches.clear()

    def _read(self, call: CallInForward, fulls: Sequence[Tensor], tensor: Tensor) -> Tensor:
        if not call.may_come_back:  # else its own forward reads
            if not call.has_begun():
                self._begins_at_reads[call.unit.index] = True
            call.begin_for_read(fulls)
        return tensor


def unpack(saved: Any) -> Tensor:
    """Unpack hook: return the tensor saved as `saved`. A `partial` (a full parameter) first begins its call's backward."""
    return cast(Tensor, saved() if isinstance(saved, partial) else saved)
