"""Observers that log an engine under a trace: starts of units, starts and ends of transfers, and the purpose of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accordion import _torch
from accordion.engine.engine import Engine
from accordion.engine.observer import CallInForward, Observer, Purpose
from accordion.engine.streams import SideStream, Steps, Transfer
from accordion.engine.unit import Unit
from accordion.offload.tiers import Tiers
from accordion.plan.events import (
    EXPERT_DATA,
    FETCH,
    NEAR,
    REPLICATE,
    STORE,
    Category,
    Land,
    Launch,
    StepPhase,
    Wait,
)
from accordion.plan.trace.tracker import Tracker, storages_of

CATEGORIES = {Purpose.GATHERED: Category.GATHERED, Purpose.GRADIENTS: Category.GRADIENTS}


def watch(engine: Engine, tracker: Tracker) -> None:
    """Attach `tracker` to `engine`: to its units, its side streams and the communicators of its mesh axes."""
    context = engine.context
    tracker.axes = {id(context.replicate.gather): "replicate", id(context.replicate.reduce): "replicate"}
    for group in [g for unit in engine.units for g in unit.groups if g.context is not context]:
        axis = group.context.shard
        tracker.axes |= {id(axis.gather): EXPERT_DATA, id(axis.reduce): EXPERT_DATA}
    # Groups that keep a shard per node: their backward gathers over neighbouring ranks, and `close` copies that shard.
    for group in [g for unit in engine.units for g in unit.groups if hasattr(g, "over")]:
        tracker.axes[id(group.over)] = NEAR
        buffer: Any = group.full_buffer
        vars(buffer)["close"] = _counted_as(Category.GATHERED, tracker, buffer.close)
    streams = {"gather": context.gather_stream, "reduce": context.reduce_stream, FETCH: context.fetch_stream}
    if context.replicate_stream is not context.reduce_stream:
        streams[REPLICATE] = context.replicate_stream
    if isinstance(context.shard_buffers, Tiers):
        streams[STORE] = context.shard_buffers.store_stream
    for name, stream in streams.items():
        stream.makes = partial(_launched, name, tracker)
    engine.observers.attach(StepTrace(tracker))


def _counted_as(category: Category, tracker: Tracker, function: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        with tracker.new_memory_as(category):
            function()

    return call


class StepTrace(Observer):
    """Logs the start of each unit's forward and backward, and sets the category of memory that the engine allocates."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker, self._before = tracker, tracker.category

    def unit_enters(self, unit: Unit, differentiable: bool, by_read: bool) -> None:
        self._tracker.enter(StepPhase.FORWARD, unit.index)

    def unit_returns(self, unit: Unit, call: CallInForward | None) -> None:
        self._tracker.enter(StepPhase.BACKWARD, unit.index)

    def full_gradients(self, unit: Unit, grads: Sequence[Tensor | None]) -> None:
        self._tracker.set_category(grads, Category.GRADIENTS)

    def memory_is_for(self, purpose: Purpose | None) -> None:
        if purpose is None:
            self._tracker.category = self._before
        else:
            self._before, self._tracker.category = self._tracker.category, CATEGORIES[purpose]


class _Traced(Transfer):
    """A transfer that logs its end, and its work on the side stream `name`. `number`: that of its `Launch` event."""

    __slots__ = ("name", "number", "tracker")
    name: str
    number: int
    tracker: Tracker

    def _run(self) -> None:
        with self.tracker.on(self.name):
            super()._run()

    def land(self) -> None:
        self.tracker.events.append(Land(self.number))
        super().land()

    def join(self, side_stream: SideStream) -> None:
        if self.name == "reduce":
            self.tracker.events.append(Wait(self.number, REPLICATE))
        super().join(side_stream)


def _launched(
    name: str,
    tracker: Tracker,
    stream: SideStream,
    steps: Steps,
    buffers: list[Any],
    label: str,
    after: Transfer | None = None,
) -> Transfer:
    transfer = _Traced.__new__(_Traced)
    transfer.name, transfer.number, transfer.tracker = name, tracker.next_transfer(), tracker
    tracker.events.append(Launch(transfer.number, name))
    transfer.__init__(stream, steps, buffers, label, after)  # type: ignore[misc]
    return transfer


def owners_of(engine: Engine, optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Return key of a storage -> index of its unit, for each storage that persists between steps."""
    owners: dict[int, int] = {}
    units: dict[int, int] = {}
    for unit in engine.units:
        for param in unit.params:
            units[id(param.sharded)] = unit.index
        for storage in storages_of(list(_tensors_below(unit.groups, 4))):
            owners[_torch.storage_key(storage)] = unit.index
    for parameter, state in optimizer.state.items():
        for storage in storages_of(state):
            owners[_torch.storage_key(storage)] = units.get(id(parameter), 0)
    return owners


def _tensors_below(value: Any, depth: int) -> Iterator[Tensor]:
    """Yield the tensors in lists, mappings and objects of the engine, down to `depth` attributes."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_below(item, depth)
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from _tensors_below(item, depth)
    elif depth and type(value).__module__.startswith("accordion.engine.") and hasattr(value, "__dict__"):
        for item in vars(value).values():
            if type(item).__name__ not in ("ShardingContext", "Engine", "Unit"):
                yield from _tensors_below(item, depth - 1)
