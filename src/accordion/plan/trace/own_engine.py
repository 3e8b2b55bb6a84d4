"""Accordion's own engine under a trace: communicators that send nothing, and observers that log units, transfers and memory."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from accordion import _torch
from accordion.engine.communicator import Communicator, Pending
from accordion.engine.engine import Engine
from accordion.engine.gloo import GlooCommunicator
from accordion.engine.hooks import engine_of
from accordion.engine.observer import CallInForward, Observer, Purpose
from accordion.engine.streams import SideStream, Steps, Transfer
from accordion.engine.unit import Unit
from accordion.offload.arena import Arena
from accordion.offload.host_shards import OffDeviceShards
from accordion.offload.step.deferred_step import tiers_of
from accordion.offload.tiers import Tiers
from accordion.optimizers.wrap import clip_grad_norm_, wrap_optimizer
from accordion.plan.events import Axes, Category, Launch, StepPhase, Streams, Wait
from accordion.plan.trace.experts import ALL_AXES, spread_experts
from accordion.plan.trace.optimizers import OPTIMIZERS
from accordion.plan.trace.setup import ShardedTraining, TrainingSetup
from accordion.plan.trace.tracker import Tracker, storages_of
from accordion.shard.api import shard_over
from accordion.sharding import MeshChoice
from accordion.state import no_sync
from accordion.workers.ranks import Done

CATEGORIES = {Purpose.GATHERED: Category.GATHERED, Purpose.GRADIENTS: Category.GRADIENTS}


def build(model: nn.Module, mesh: DeviceMesh, run: TrainingSetup, tracker: Tracker) -> ShardedTraining:
    """Shard `model` in place as `accordion.shard` does, and return its new optimizer with the functions that a trace calls to
    run steps. The engine's communicators send nothing; they and observers log to `tracker`. If experts are shared, the forward
    of their modules is replaced. Offload runs in the caller's thread."""
    meshes: MeshChoice | None = None
    if run.expert_parallel > 1:
        with tracker.paused():
            meshes, mesh = spread_experts(model, mesh, tracker.exchange), _torch.flattened_mesh(mesh, ALL_AXES)
    communicator = SilentCommunicator if run.device == "cuda" else SilentGlooCommunicator
    arena = partial(TracedArena, tracker, run)
    shard_over(partial(communicator, tracker), model, mesh, replace(run.sharding, meshes=meshes), make_arena=arena)
    engine = engine_of(model)
    assert engine is not None
    groups = [group for unit in engine.units for group in unit.groups]
    if run.device == "cuda":
        engine.context.shard.one_node = run.shards <= run.node
        engine.context.replicate.one_node = run.ranks <= run.node
        for group in groups:
            if group.context is not engine.context:
                group.context.shard.one_node = run.ranks <= run.node
    watch(engine, tracker)
    if run.sharding.offload.asks:
        tiers = tiers_of(engine)
        vars(tiers)["stepper"] = AtOnce(partial(tracker.on, _host_stream(run)))
        vars(tiers)["pool"] = AtOnce(tracker.paused)
        for group in groups:
            if isinstance(group.shard_buffer, OffDeviceShards):
                group.shard_buffer.grads_come_from_device = run.device == "cuda"
                # The fake slots of one arena share a storage, so each would count the others as holders of its memory.
                for slot in group.shard_buffer.slots:
                    slot.num_holders = sys.maxsize
    kind = OPTIMIZERS[run.optimizer]
    optimizer = wrap_optimizer(kind.make(model.parameters()), elementwise=kind.elementwise)
    return ShardedTraining(
        optimizer=optimizer,
        units=[unit.name for unit in engine.units],
        clip=partial(clip_grad_norm_, model),
        no_sync=partial(no_sync, model),
        owners=partial(owners_of, engine, optimizer),
    )


class AtOnce:
    """An executor without threads. `submit` runs the work at once in the caller's thread, inside the context manager that
    `wrapper()` returns, and returns a finished future. If the work raises an error, `submit` raises it."""

    # In place of offload's worker threads: dispatch modes see one thread, and fake tensors do not work in a second one.

    def __init__(self, wrapper: Callable[[], AbstractContextManager[None]]) -> None:
        self._wrapper = wrapper

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._wrapper():
            future.set_result(work(*args))
        return future


class SilentCommunicator(Communicator):
    """A communicator that sends nothing, and logs each collective in `tracker` unless it has one rank or no tensors."""

    works: Sequence[Any] = ()  # in the `Pending` that each collective returns

    def __init__(self, tracker: Tracker, group: Any, device: torch.device) -> None:
        super().__init__(group, device)
        self._tracker = tracker

    def _logged(self, kind: str, tensors: Sequence[Tensor]) -> Pending:
        if self.num_ranks == 1 or not tensors:
            return Pending(self)
        num_bytes = sum(t.numel() * t.itemsize for t in tensors)
        self._tracker.collective(kind, num_bytes, self._tracker.axes.get(id(self), "shard"))
        return Pending(self, self.works)

    def gather(self, fulls: list[Tensor], shards: list[Tensor]) -> Pending:
        return self._logged("gather", fulls)

    def exchange(self, sends: Sequence[tuple[Tensor, Tensor, list[int], list[int]]]) -> Pending:
        return self._logged("exchange", [sent for _, sent, _, _ in sends])

    def scatter_sum(self, outs: list[Tensor], inputs: list[Tensor]) -> Pending:
        return self._logged("scatter_sum", inputs)

    def sum(self, tensors: Sequence[Tensor]) -> Pending:
        return self._logged("sum", tensors)


class SilentGlooCommunicator(SilentCommunicator, GlooCommunicator):
    """The silent communicator for CPU ranks with gloo. `send_each`, which sends large tensors between pairs of ranks, neither
    sends nor logs them."""

    works = (Done(),)

    def send_each(self, messages: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]]) -> list[Any]:
        return [Done() for _ in messages]


class TracedArena(Arena):
    """Offload's arena of host memory. `tracker` logs its memory, which the constructor allocates, under `_host_stream(run)`."""

    def __init__(self, tracker: Tracker, run: TrainingSetup, num_bytes: int, device: torch.device) -> None:
        with tracker.on(_host_stream(run)), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the arena reads its address, and a fake tensor has none
            super().__init__(num_bytes, device)


def silenced(tracker: Tracker, run: TrainingSetup) -> AbstractContextManager[None]:
    """Return a context manager that does nothing, since the communicators that `build` creates send nothing anyway."""
    return nullcontext()


def _host_stream(run: TrainingSetup) -> str:
    """Return the stream under which host memory is logged: HOST; for CPU ranks COMPUTE, since device memory is host memory."""
    return Streams.HOST if run.device == "cuda" else Streams.COMPUTE


# -- observers


def watch(engine: Engine, tracker: Tracker) -> None:
    """Make `engine` report units and transfers to `tracker`. Sets `tracker.axes`: id of a communicator -> mesh axis, unless it
    is "shard". Attaches a `StepTrace`, and replaces attributes of side streams and methods of buffers of full parameters."""
    context = engine.context
    tracker.axes = {id(context.replicate.gather): "replicate", id(context.replicate.reduce): "replicate"}
    for group in [g for unit in engine.units for g in unit.groups if g.context is not context]:
        axis = group.context.shard
        tracker.axes |= {id(axis.gather): Axes.EXPERT_DATA, id(axis.reduce): Axes.EXPERT_DATA}
    # Groups that keep a shard per node: their backward gathers over neighbouring ranks, and `close` copies that shard.
    for group in [g for unit in engine.units for g in unit.groups if hasattr(g, "over")]:
        tracker.axes[id(group.over)] = Axes.NEAR
        buffer: Any = group.full_buffer
        vars(buffer)["close"] = tracker.new_memory_as(Category.GATHERED)(buffer.close)
    streams = {"gather": context.gather_stream, "reduce": context.reduce_stream, Streams.FETCH: context.fetch_stream}
    if context.replicate_stream is not context.reduce_stream:
        streams[Streams.REPLICATE] = context.replicate_stream
    if isinstance(context.shard_buffers, Tiers):
        streams[Streams.STORE] = context.shard_buffers.store_stream
    for name, stream in streams.items():
        stream.makes = partial(_TracedTransfer, name, tracker)
    engine.observers.attach(StepTrace(tracker))


class StepTrace(Observer):
    """Observer that logs the start of each unit's forward and backward in `tracker`, and sets the category of memory that the
    engine allocates."""

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


class _TracedTransfer(Transfer):
    """A transfer that logs its launch, its work on the side stream `name`, and waits of the compute stream for its end. A
    reduce also logs the wait of the stream that then reduces over replicas."""

    __slots__ = ("name", "number", "tracker")

    def __init__(
        self, name: str, tracker: Tracker, stream: SideStream, steps: Steps, buffers: list[Any], label: str
    ) -> None:
        super().__init__(stream, steps, buffers, label)
        self.name, self.tracker = name, tracker
        self.number = next(tracker.transfers)  # identifies it in events
        tracker.events.append(Launch(self.number, name))

    def _run(self) -> None:
        with self.tracker.on(self.name):
            super()._run()

    def land(self) -> None:
        self.tracker.events.append(Wait(self.number, Streams.COMPUTE))
        super().land()

    def join(self, side_stream: SideStream) -> None:
        if self.name == "reduce":
            self.tracker.events.append(Wait(self.number, Streams.REPLICATE))
        super().join(side_stream)


def owners_of(engine: Engine, optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Return storage key -> index of the unit, for storages of the units' parameters, shards and gradients, and of the
    optimizer states of these parameters. Optimizer states of a parameter that is in no unit get index 0."""
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
    """Yield the tensors in nested `value` and in the engine's objects (no context, engine or unit), `depth` attributes deep."""
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
