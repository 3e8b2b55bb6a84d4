"""How often optimizers have stepped a model's parameters."""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from accordion import _torch
from accordion.engine.engine import Engine
from accordion.engine.observer import Observer
from accordion.safety.divergence import DivergenceMonitor


class StepWatch(Observer):
    """Owns which optimizers step a model's parameters. A hook on the steps of all optimizers goes with the model."""

    def __init__(self, engine: Engine, monitor: DivergenceMonitor) -> None:
        self._monitor = monitor
        params = [param.sharded for unit in engine.units for param in unit.params]
        # Both, since a wrapped optimizer steps on local tensors.
        self._ids = {id(p) for p in params} | {id(_torch.local_of(p)) for p in params}
        self._ours: MutableMapping[Optimizer, bool] = weakref.WeakKeyDictionary()
        reference = weakref.ref(self)

        def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            watch = reference()
            if watch is not None:
                watch.stepped(optimizer)

        weakref.finalize(self, register_optimizer_step_post_hook(stepped).remove)

    def stepped(self, optimizer: Optimizer) -> None:
        ours = self._ours.get(optimizer)
        if ours is None:
            ours = any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"])
            self._ours[optimizer] = ours
        if ours:
            self._monitor.num_steps += 1
