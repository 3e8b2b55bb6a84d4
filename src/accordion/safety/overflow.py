"""Let all ranks see an fp16 overflow of one rank's shards if the model also has parameters that are not sharded.

`torch.amp.GradScaler` reduces its flag only if the first gradient is sharded. If that gradient is whole, one rank may skip a
step that others take. So whole gradients become inf on every rank if any rank has overflowed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from accordion import _torch
from accordion.engine.communicator import Communicator, reduced
from accordion.engine.engine import Engine
from accordion.engine.observer import Observer


class OverflowSpread(Observer):
    """Observer that calls `spread` on the gradients of units that compute in fp16, after each backward that reduced."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def backward_ended(self, reduced: bool) -> None:
        units, context = self._engine.units, self._engine.context
        if reduced:
            params = [p for u in units if any(g.dtype == torch.float16 for g in u.groups) for p in u.params]
            grads = [(p.cut.dim is None, p.sharded.grad) for p in params]
            spread(grads, context.cut_communicators, context.device)


def spread(
    grads: Sequence[tuple[bool, Tensor | None]], communicators: Sequence[Communicator], device: torch.device
) -> None:
    """Add inf to all whole gradients on every rank if any rank has inf or NaN in its shards. A collective.

    `grads`: pairs (gradient is whole, gradient or None) of parameters under fp16.
    """
    whole, rows = (
        [_torch.local_of(g) for is_whole, g in grads if g is not None and is_whole is wanted]
        for wanted in (True, False)
    )
    if not communicators or not whole:
        return
    overflows = []
    for same in _by_device_and_dtype(rows):  # on their device, without a wait
        scale, overflow = (torch.full((), value, device=same[0].device) for value in (1.0, 0.0))
        _torch.find_non_finite_(same, overflow, scale)
        overflows.append(overflow.to(device))
    has_overflow = torch.stack(overflows).amax() if overflows else torch.zeros((), device=device)
    addend = torch.where(reduced(has_overflow, communicators) > 0, float("inf"), 0.0)
    for same in _by_device_and_dtype(whole):
        _torch.foreach_add_(same, addend.to(same[0].device))


def _by_device_and_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group `tensors` by device and dtype; gradients of offloaded units may be on the host."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(by_kind.values())
