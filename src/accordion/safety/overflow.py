"""fp16 beside parameters that are kept whole: an overflow of one rank's rows is seen by all ranks.

`torch.amp.GradScaler` looks at the first gradient's placement. If that one is whole, it asks no other rank, and ranks would
differ on whether to step. So the gradients that are whole become inf on every rank if any rank has overflowed.
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
    """Acts at the end of each backward that reduced, on units whose gradients are computed in fp16."""

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
    """Let every rank see an overflow that one rank has in its rows. `grads`: under fp16, each with whether it is whole."""
    whole, rows = (
        [_torch.local_of(g) for is_whole, g in grads if g is not None and is_whole is wanted]
        for wanted in (True, False)
    )
    if not communicators or not whole:
        return
    overflows = []
    for same in _together(rows):  # on their device, without a wait
        one, found = (torch.full((), value, device=same[0].device) for value in (1.0, 0.0))
        _torch.find_non_finite_(same, found, one)
        overflows.append(found.to(device))
    found = torch.stack(overflows).amax() if overflows else torch.zeros((), device=device)
    overflow = torch.where(reduced(found, communicators) > 0, float("inf"), 0.0)
    for same in _together(whole):
        _torch.foreach_add_(same, overflow.to(same[0].device))


def _together(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """By device and dtype: gradients of some units may rest on the host, and others not."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(by_kind.values())
