"""The optimizer step inside the backward: each unit is stepped once its gradients are reduced, as `step_in_backward` allows."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch.optim import Optimizer

from accordion import _torch
from accordion.engine.engine import Engine
from accordion.engine.observer import Observer
from accordion.engine.unit import Unit
from accordion.errors import UsageError
from accordion.offload.step.optimizer_copy import OptimizerCopy

StepUnit = Callable[[Engine, Unit, Optimizer, OptimizerCopy], None]
"""Starts the step of those parameters of the unit that the optimizer has, with a copy of the optimizer."""
PROMISE = "Offload(step_in_backward=True) promised one backward a step, no clipping and no scaler"


class InBackward(Observer):
    """Observer of one engine that steps each unit with `step_in_backward` during the backward.

    A unit is stepped when the next unit's gradients are reduced, because then its own are complete.
    """

    def __init__(self, step_unit: StepUnit) -> None:
        self._step_unit = step_unit
        self._optimizers: list[tuple[weakref.ref[Optimizer], type[Optimizer]]] = []
        self._optimizer_copies: dict[int, OptimizerCopy] = {}  # those of this backward, by index in `_optimizers`
        self._waiting: Unit | None = None  # the unit to step next
        self._is_stepped = False  # `optimizer.step()` must be called before another backward
        self._task, self._seen = _torch.NO_BACKWARD, set[int]()  # the backward under way, and the units it has reduced
        self._engine: Callable[[], Engine | None] = lambda: None

    def attach(self, engine: Engine) -> None:
        if self._engine() is None:
            self._engine = weakref.ref(engine)
            engine.observers.attach(self)

    def steps_with(self, optimizer: Optimizer, kind: type[Optimizer]) -> None:
        """Register `optimizer`, of class `kind`: its parameters are stepped in the backward."""
        if all(known() is not optimizer for known, _ in self._optimizers):
            self._optimizers.append((weakref.ref(optimizer), kind))

    def gradients_arrive(self, unit: Unit) -> None:
        """When the gradients of `unit` are reduced: step the unit reduced before. Raise `UsageError` for a second backward
        before `optimizer.step()`, for a second reduce of `unit` in a backward, and for hooks of its parameters."""
        task = _torch.current_graph_task()
        if task != self._task:  # drop the state of a backward that raised
            self._task, self._waiting = task, None
            self._seen.clear()
            self._optimizer_copies.clear()
        if self._is_stepped:
            raise UsageError(
                f"{PROMISE}; this is another backward before optimizer.step(): call step after each, or leave it out "
                "to accumulate."
            )
        hooked = [p.name for p in unit.params if _torch.has_hooks(p.sharded)]
        if hooked:  # autograd accumulates these gradients itself, on a device after the step
            raise UsageError(
                f"{PROMISE}; {hooked[0]!r} has a hook, which would see it stepped: remove the hook, or the promise."
            )
        self._mark_seen(unit)
        before, self._waiting = self._waiting, unit
        self._step(before)

    def _mark_seen(self, unit: Unit) -> None:
        if unit.index in self._seen:
            raise UsageError(
                f"unit {unit.name or 'root'!r} has gradients more than once in a backward, since it is called twice or is used "
                "outside of its calls, and was stepped with the first ones; give it an override without step_in_backward."
            )
        self._seen.add(unit.index)

    def _step(self, unit: Unit | None) -> None:
        engine = self._engine()
        for i, (reference, kind) in enumerate(self._optimizers):
            optimizer = reference()
            if optimizer is not None and engine is not None and unit is not None:
                if i not in self._optimizer_copies:
                    self._optimizer_copies[i] = OptimizerCopy(optimizer, kind)
                self._step_unit(engine, unit, optimizer, self._optimizer_copies[i])

    def backward_ended(self, reduced: bool) -> None:
        """Step all units that still have gradients."""
        before, self._waiting = self._waiting, None
        self._step(before)
        engine = self._engine()
        for unit in engine.units if engine is not None else ():
            if any(p.sharded.grad is not None for p in unit.params):
                self._mark_seen(unit)
                self._step(unit)
        self._is_stepped = bool(self._optimizer_copies)
        self._optimizer_copies.clear()

    def stepped(self) -> None:
        """Called by `optimizer.step()`: another backward may follow."""
        self._is_stepped = False


def refuse_in_backward(engine: Engine, what: str) -> None:
    """Raise `UsageError` if units of `engine` are stepped in the backward, which excludes the feature named `what`."""
    steps: object = getattr(engine.context.shard_buffers, "in_backward", None)
    if steps is not None:
        raise UsageError(f"{PROMISE}; {what} cannot be used with it: leave out one of the two.")
