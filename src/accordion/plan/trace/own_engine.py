"""Accordion's own engine under a trace: its communicators say nothing, and it tells the tracker where it is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from accordion.engine.communicator import SENDING_RANKS, Communicator, Pending
from accordion.engine.hooks import engine_of
from accordion.offload.arena import Arena
from accordion.offload.gradient_slots import Slot
from accordion.offload.host_shards import OffDeviceShards
from accordion.offload.step.deferred_step import tiers_of
from accordion.optim import clip_grad_norm_, wrap_optimizer
from accordion.plan.events import COMPUTE, HOST
from accordion.plan.trace.instrument import owners_of, watch
from accordion.plan.trace.setup import OPTIMIZERS, Rig, TrainingSetup
from accordion.plan.trace.tracker import Tracker
from accordion.shard.api import shard
from accordion.state import no_sync


def build(model: nn.Module, mesh: DeviceMesh, run: TrainingSetup, tracker: Tracker) -> Rig:
    """`model` under `shard`, as a GPU rank or a CPU rank has it."""
    shard(model, mesh, **run.sharding)
    engine = engine_of(model)
    assert engine is not None
    if run.device == "cuda":
        engine.context.shard.one_node = run.shards <= run.node
        engine.context.replicate.one_node = run.ranks <= run.node
    watch(engine, tracker)
    if run.sharding.get("offload") is not None:
        tiers = tiers_of(engine)
        vars(tiers)["stepper"] = AtOnce(partial(tracker.on, _rests_on(run)))
        vars(tiers)["pool"] = AtOnce(tracker.paused)
        for group in [group for unit in engine.units for group in unit.groups]:
            if isinstance(group.shard_buffer, OffDeviceShards):
                group.shard_buffer.grads.comes_from_device = run.device == "cuda"
    optimizer = wrap_optimizer(OPTIMIZERS[run.optimizer](model.parameters()))
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


_make = Communicator.__init__


def _made_to_send(communicator: Communicator, group: Any, device: torch.device) -> None:
    _make(communicator, group, device)
    communicator.is_gloo = True
    communicator.sends = 2 <= communicator.num_ranks <= SENDING_RANKS


def _sends(communicator: Communicator, messages: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]]) -> list[Any]:
    return [_Done() for _ in messages]


class _Done:
    """Work of a backend that does not order by streams; done at once."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@contextmanager
def silenced(tracker: Tracker, run: TrainingSetup) -> Iterator[None]:
    """Let communicators say nothing, and write down what they would have said."""
    stream_ordered = run.device == "cuda"
    works = () if stream_ordered else (_Done(),)

    def said(kind: str, which: Callable[..., Sequence[Tensor]]) -> Callable[..., Pending]:
        def say(communicator: Communicator, *args: Any) -> Pending:
            tensors = which(*args)
            if communicator.num_ranks > 1 and tensors:
                tracker.collective(kind, sum(t.numel() * t.itemsize for t in tensors), axis_of(communicator))
                return Pending(communicator, works)
            return Pending(communicator)

        return say

    def axis_of(communicator: Communicator) -> str:
        return tracker.axes.get(id(communicator), "shard")

    stand_ins: dict[str, Callable[..., Any]] = {
        "gather": said("gather", lambda fulls, shards: fulls),
        "exchange": said("exchange", lambda sends: [sent for _, sent, _, _ in sends]),
        "scatter_sum": said("scatter_sum", lambda outs, inputs: inputs),
        "sum": said("sum", lambda tensors: tensors),
    }
    if not stream_ordered:  # gloo's ranks, which send each other what is large
        stand_ins |= {"__init__": _made_to_send, "send_each": _sends}
    with ExitStack() as stack:
        arena = {"__init__": _on(_rests_on(run), Arena.__init__, tracker)}
        for owner, named in ((Communicator, stand_ins), (Arena, arena), (Slot, {"take": _slot_itself})):
            for name, stand_in in named.items():
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, stand_in)
        yield


def _slot_itself(slot: Slot) -> Tensor:
    """Nobody holds the gradient of the step before; fake slots of one arena share a storage, whose holders say nothing."""
    return slot._rest.detach()


def _rests_on(run: TrainingSetup) -> str:
    """Memory of the host is the card's own where the CPU is the card."""
    return HOST if run.device == "cuda" else COMPUTE


def _on(stream: str, make: Callable[..., None], tracker: Tracker) -> Callable[..., None]:
    def made(arena: Any, *args: Any, **kwargs: Any) -> None:
        with tracker.on(stream), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the arena asks for its address, which a fake tensor has not
            make(arena, *args, **kwargs)

    return made
