"""Accordion's own engine under a trace: its communicators say nothing, and it tells the tracker where it is."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
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
from accordion.engine.gloo import GlooCommunicator
from accordion.engine.hooks import engine_of
from accordion.offload.arena import Arena
from accordion.offload.host_shards import OffDeviceShards
from accordion.offload.step.deferred_step import tiers_of
from accordion.optim import clip_grad_norm_, wrap_optimizer
from accordion.plan.events import COMPUTE, HOST
from accordion.plan.trace.instrument import owners_of, watch
from accordion.plan.trace.optimizers import OPTIMIZERS
from accordion.plan.trace.setup import Rig, TrainingSetup
from accordion.plan.trace.spread import ALL_AXES, silent_exchange, spread_experts
from accordion.plan.trace.tracker import Tracker
from accordion.shard.api import shard_over
from accordion.shard.topology import CommunicatorMaker
from accordion.sharding import MeshChoice
from accordion.state import no_sync


def build(model: nn.Module, mesh: DeviceMesh, run: TrainingSetup, tracker: Tracker) -> Rig:
    """`model` under `shard`, as a GPU rank or a CPU rank has it."""
    meshes: MeshChoice | None = None
    if run.expert_parallel > 1:
        with tracker.paused():
            meshes, mesh = spread_experts(model, mesh, silent_exchange(tracker)), _torch.flattened_mesh(mesh, ALL_AXES)
    arena = partial(TracedArena, tracker, run)
    shard_over(silent(tracker, run), model, mesh, replace(run.sharding, meshes=meshes), make_arena=arena)
    engine = engine_of(model)
    assert engine is not None
    if run.device == "cuda":
        engine.context.shard.one_node = run.shards <= run.node
        engine.context.replicate.one_node = run.ranks <= run.node
        for own in [g.context for unit in engine.units for g in unit.groups if g.context is not engine.context]:
            own.shard.one_node = run.ranks <= run.node
    watch(engine, tracker)
    if run.sharding.offload.asks:
        tiers = tiers_of(engine)
        vars(tiers)["stepper"] = AtOnce(partial(tracker.on, _rests_on(run)))
        vars(tiers)["pool"] = AtOnce(tracker.paused)
        for group in [group for unit in engine.units for group in unit.groups]:
            if isinstance(group.shard_buffer, OffDeviceShards):
                group.shard_buffer.grads.comes_from_device = run.device == "cuda"
                for slot in group.shard_buffer.grads.slots:  # fake ones of one arena share a storage
                    slot.num_holders = sys.maxsize
    kind = OPTIMIZERS[run.optimizer]
    optimizer = wrap_optimizer(kind.make(model.parameters()), elementwise=kind.elementwise)
    return Rig(
        optimizer=optimizer,
        units=[unit.name for unit in engine.units],
        clip=partial(clip_grad_norm_, model),
        no_sync=partial(no_sync, model),
        owners=partial(owners_of, engine, optimizer),
    )


class AtOnce:
    """In place of threads that step, read and write what rests elsewhere: modes that see memory are those of one thread, and fake
    tensors bear no second one.
    """

    def __init__(self, around: Callable[[], AbstractContextManager[None]]) -> None:
        self._around = around

    def submit(self, work: Callable[..., Any], *about: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._around():
            future.set_result(work(*about))
        return future


class _Done:
    """Work of a backend that does not order by streams; done at once."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class SilentCommunicator(Communicator):
    """A communicator that says nothing, and writes down what it would have said."""

    def __init__(self, tracker: Tracker, works: Sequence[Any], group: Any, device: torch.device) -> None:
        super().__init__(group, device)
        self._tracker, self._works = tracker, works

    def _said(self, kind: str, tensors: Sequence[Tensor]) -> Pending:
        if self.num_ranks == 1 or not tensors:
            return Pending(self)
        num_bytes = sum(t.numel() * t.itemsize for t in tensors)
        self._tracker.collective(kind, num_bytes, self._tracker.axes.get(id(self), "shard"))
        return Pending(self, self._works)

    def gather(self, fulls: list[Tensor], shards: list[Tensor]) -> Pending:
        return self._said("gather", fulls)

    def exchange(self, sends: Sequence[tuple[Tensor, Tensor, list[int], list[int]]]) -> Pending:
        return self._said("exchange", [sent for _, sent, _, _ in sends])

    def scatter_sum(self, outs: list[Tensor], inputs: list[Tensor]) -> Pending:
        return self._said("scatter_sum", inputs)

    def sum(self, tensors: Sequence[Tensor]) -> Pending:
        return self._said("sum", tensors)


class SilentGlooCommunicator(SilentCommunicator, GlooCommunicator):
    """As gloo's ranks speak, who send each other what is large."""

    def send_each(self, messages: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]]) -> list[Any]:
        return [_Done() for _ in messages]


def silent(tracker: Tracker, run: TrainingSetup) -> CommunicatorMaker:
    """What makes communicators that say nothing, of the kind that such a run has."""
    if run.device == "cuda":
        return partial(SilentCommunicator, tracker, ())
    return partial(SilentGlooCommunicator, tracker, (_Done(),))


class TracedArena(Arena):
    """An arena whose memory counts as the host's."""

    def __init__(self, tracker: Tracker, run: TrainingSetup, num_bytes: int, device: torch.device) -> None:
        with tracker.on(_rests_on(run)), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the arena asks for its address, which a fake tensor has not
            super().__init__(num_bytes, device)


def silenced(tracker: Tracker, run: TrainingSetup) -> AbstractContextManager[None]:
    """Nothing is to be silenced: `build` makes communicators that say nothing."""
    return nullcontext()


def _rests_on(run: TrainingSetup) -> str:
    """Memory of the host is the card's own where the CPU is the card."""
    return HOST if run.device == "cuda" else COMPUTE
