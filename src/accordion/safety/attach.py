"""Attach the checks of a model to its engine, in the order in which they act."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from accordion.engine.engine import Engine
from accordion.engine.hooks import Hooks
from accordion.safety.agreement import OrderAgreement
from accordion.safety.divergence import monitor_of
from accordion.safety.finite import FiniteCheck, OverflowSpread
from accordion.safety.first_inputs import FirstInputs, have_own_data
from accordion.safety.forward_writes import ForwardWrites
from accordion.safety.hidden_losses import HiddenLosses
from accordion.safety.refusals import OneCaller, guard
from accordion.safety.steps import StepWatch
from accordion.safety.weight_reads import WeightReads


def attach_safety(engine: Engine, hooks: Sequence[Hooks], debug: Collection[str]) -> None:
    """Attach the checks of this folder to `engine` and its modules. Call this after all units exist. `hooks`: those of each
    unit, in the order of their indices, the root's first. `debug`: any of "order", "finite" and "streams", for more checks."""
    monitor, reads = monitor_of(engine.context), WeightReads(engine)
    engine.observers.attach(OneCaller(alone=not monitor.listens))
    if monitor.listens:
        engine.observers.attach(StepWatch(engine, monitor, hooks[0].modules[0]))
        if have_own_data(engine):
            engine.observers.attach(FirstInputs(engine, monitor))
    # `OrderAgreement` waits for other ranks, so it is before all observers that examine a unit. `WeightReads` is before
    # it, so that the calls that reads began end first.
    for observer in (reads, monitor, OrderAgreement(engine, hooks, monitor, always="order" in debug), HiddenLosses()):
        engine.observers.attach(observer)
    engine.observers.attach(ForwardWrites(engine, always=bool(debug)))
    if "finite" in debug:
        engine.observers.attach(FiniteCheck(engine))
    engine.observers.attach(OverflowSpread(engine))
    for each in hooks:
        guard(each)
        # A read of a layer's parameter begins a call of the layer. Not if the unit wraps gathered tensors in a subclass: the
        # wrapper reads the module while the unit is gathered.
        if each.unit.index and not each.unit.module_params.has_around:
            for module in each.attached_modules():
                if next(module.children(), None) is None:
                    reads.listen(each, module)
