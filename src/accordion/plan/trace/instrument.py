"""How the engine tells a tracker where it is: where units begin, where flights start and land, what memory is taken for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accordion import _torch
from accordion.engine.engine import Engine
from accordion.engine.streams import SideStream, Steps, Transfer
from accordion.engine.unit import Unit
from accordion.offload.tiers import Tiers
from accordion.plan.events import FETCH, REPLICATE, STORE, Category, Land, Launch, Phase, Wait
from accordion.plan.trace.tracker import Tracker, storages_of


def watch(engine: Engine, tracker: Tracker) -> None:
    """Let the engine tell the tracker where it is. All by attributes of these objects, which nobody else has."""
    context = engine.context
    tracker.axes = {id(context.replicate.gather): "replicate", id(context.replicate.reduce): "replicate"}
    lanes = {"gather": context.gather_stream, "reduce": context.reduce_stream, FETCH: context.fetch_stream}
    if context.replicate_stream is not context.reduce_stream:
        lanes[REPLICATE] = context.replicate_stream
    if isinstance(context.home, Tiers):
        lanes[STORE] = context.home._store_lane
    for name, lane in lanes.items():
        vars(lane)["start"] = partial(_start, lane, name, tracker)
    for name, phase in (("enters", Phase.FORWARD), ("comes_back", Phase.BACKWARD)):
        vars(engine)[name] = partial(_entering, getattr(engine, name), tracker, phase)
    for unit in engine.units:
        for name, category in (
            ("launch", Category.GATHERED),
            ("reduce", Category.GRADIENTS),
            ("as_gradients", Category.GRADIENTS),
            ("add_up", Category.GRADIENTS),
        ):
            vars(unit)[name] = _taking(getattr(unit, name), tracker, category)


def _entering(method: Callable[..., None], tracker: Tracker, phase: Phase, unit: Unit, *args: Any) -> None:
    tracker.enter(phase, unit.index)
    method(unit, *args)


def _taking(method: Callable[..., Any], tracker: Tracker, category: Category) -> Callable[..., Any]:
    def taking(*args: Any, **kwargs: Any) -> Any:
        if category is Category.GRADIENTS:
            tracker.belongs(args[1:2], category)  # the full gradients
        with tracker.taken_for(category):
            return method(*args, **kwargs)

    return taking


class _Traced(Transfer):
    """A flight whose landing, and the stream of what it does, are written down. `number`: of its launch."""

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

    def join(self, lane: SideStream) -> None:
        if self.name == "reduce":
            self.tracker.events.append(Wait(self.number, REPLICATE))
        super().join(lane)


def _start(
    lane: SideStream,
    name: str,
    tracker: Tracker,
    steps: Steps,
    held: list[Any],
    what: str,
    after: Transfer | None = None,
) -> Transfer:
    flight = _Traced.__new__(_Traced)
    flight.name, flight.number, flight.tracker = name, tracker.next_flight(), tracker
    tracker.events.append(Launch(flight.number, name))
    flight.__init__(lane, steps, held, what, after)  # type: ignore[misc]
    return flight


def owners_of(engine: Engine, optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """The unit of each storage that stays from step to step, by the storage's key."""
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
    """Tensors in lists, mappings and the engine's own objects."""
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
