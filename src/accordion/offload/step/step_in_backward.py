"""The step inside of a backward: each unit as soon as its gradients are there, where the user promised that none follow."""

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
PROMISE = "Offload(step_in_backward=True) promised one backward a step, no clipping and no scaler"


class InBackward(Observer):
    """Owns which unit of one engine is stepped next in the backward under way, and whether a step is due before another.

    A unit waits until the one before it has its gradients: then its own have landed.
    """

    def __init__(self, step_unit: StepUnit) -> None:
        self._step_unit = step_unit
        self._optimizers: list[tuple[weakref.ref[Optimizer], type[Optimizer]]] = []
        self._optimizer_copies: dict[int, OptimizerCopy] = {}  # of this backward, by place of the optimizer
        self._waiting: Unit | None = None
        self._is_stepped = False
        self._task, self._seen = _torch.NO_BACKWARD, set[int]()  # the backward under way, and the units that came in it
        self._engine: Callable[[], Engine | None] = lambda: None

    def attach(self, engine: Engine) -> None:
        """Have the engine say when a unit has its gradients."""
        if self._engine() is None:
            self._engine = weakref.ref(engine)
            engine.observers.attach(self)

    def steps_with(self, optimizer: Optimizer, kind: type[Optimizer]) -> None:
        """Step what `optimizer` holds."""
        if all(known() is not optimizer for known, _ in self._optimizers):
            self._optimizers.append((weakref.ref(optimizer), kind))

    def gradients_arrive(self, unit: Unit) -> None:
        """The gradients of `unit` come. Raises `UsageError` where it had some already, in a second backward, or for hooks."""
        task = _torch.current_graph_task()
        if task != self._task:  # what a backward left that raised is gone
            self._task, self._waiting = task, None
            self._seen.clear()
            self._optimizer_copies.clear()
        if self._is_stepped:
            raise UsageError(
                f"{PROMISE}; this is another backward before optimizer.step(): call step after each, or leave it out "
                "to accumulate."
            )
        heard = [p.name for p in unit.params if _torch.has_hooks(p.sharded)]
        if heard:  # autograd accumulates those itself, on a device behind the step
            raise UsageError(
                f"{PROMISE}; {heard[0]!r} has a hook, which would see it stepped: remove the hook, or the promise."
            )
        self._come(unit)
        before, self._waiting = self._waiting, unit
        self._step(before)

    def _come(self, unit: Unit) -> None:
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
        """Step what still has gradients."""
        before, self._waiting = self._waiting, None
        self._step(before)
        engine = self._engine()
        for unit in engine.units if engine is not None else ():
            if any(p.sharded.grad is not None for p in unit.params):
                self._come(unit)
                self._step(unit)
        self._is_stepped = bool(self._optimizer_copies)
        self._optimizer_copies.clear()

    def stepped(self) -> None:
        """The caller has called `optimizer.step`, which had nothing left to do."""
        self._is_stepped = False


def refuse_in_backward(engine: Engine, what: str) -> None:
    """Raise `UsageError` where units are stepped in the backward, and `what` was asked for all the same."""
    steps: object = getattr(engine.context.shard_buffers, "in_backward", None)
    if steps is not None:
        raise UsageError(f"{PROMISE}; {what} comes too late or too early for that: leave out one of them.")
