"""Let all ranks see an fp16 overflow of one rank's shards if the model also has parameters that are not sharded.

`torch.amp.GradScaler` reduces its flag only if the first gradient is sharded. If that gradient is whole, one rank may skip a
step that others take. So whole gradients become inf on every rank if any rank has overflowed.
"""

from __future__ import annotations

import torch

from accordion import _torch
from accordion.engine.communicator import reduced as all_reduced
from accordion.engine.engine import Engine
from accordion.engine.observer import Observer


class OverflowSpread(Observer):
    """Observer that adds inf to whole gradients of units in fp16 if any rank's shards have inf or NaN, after each reduce."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def backward_ended(self, reduced: bool) -> None:
        units, context = self._engine.units, self._engine.context
        params = [p for u in units if any(g.dtype == torch.float16 for g in u.groups) for p in u.params]
        grads = [(p.cut.dim is None, _torch.local_of(p.sharded.grad)) for p in params if p.sharded.grad is not None]
        whole = [grad for is_whole, grad in grads if is_whole]
        if not reduced or not whole or not context.cut_communicators:
            return
        # On their device, without a wait. Gradients of offloaded units may be on the host.
        overflows = [(~grad.isfinite()).any().to(context.device) for is_whole, grad in grads if not is_whole]
        overflow = torch.stack(overflows).any().float() if overflows else torch.zeros((), device=context.device)
        addend = torch.where(all_reduced(overflow, context.cut_communicators) > 0, float("inf"), 0.0)
        for grad in whole:
            grad.add_(addend.to(grad.device))
