"""PyTorch's FSDP2 with its own streams, traced in place of the engine, to compare plans with published FSDP2 runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from accordion import _torch
from accordion.config import Place, Precision, Strategy
from accordion.engine.unit import is_layer
from accordion.errors import UsageError
from accordion.plan.events import Mark, StepPhase, Streams, Wait
from accordion.plan.trace.optimizers import OPTIMIZERS
from accordion.plan.trace.setup import ShardedTraining, TrainingSetup
from accordion.plan.trace.tracker import Tracker, storages_of
from accordion.shard.activations import checkpoint_forward
from accordion.sharding import Sharding
from accordion.units import choose_units

STREAMS = ("copy in", "gather", "reduce", "all-reduce")  # of FSDP2, in the order in which it creates them
FIELDS = ("units", "strategy", "precision", "checkpoint_activations")  # fields of `Sharding` that FSDP2 supports


def build(model: nn.Module, mesh: DeviceMesh, run: TrainingSetup, tracker: Tracker) -> ShardedTraining:
    """Apply FSDP2 to `model` in place, and return its new optimizer with the functions that a trace calls to run steps. Called
    inside `silenced` and `tracker`. Moves parameters and buffers to the CPU, uninitialized. Registers hooks that log units in
    `tracker`. Raises `UsageError` for a setting that FSDP2 does not have."""
    chosen = choose_units(model, run.sharding.units)
    tracker.sum_axis = "replicate" if run.strategy.hybrid else "shard"
    for i, (_, module) in enumerate(chosen):
        _track_unit(module, i, tracker)  # before FSDP2 registers its own hooks
    apply(model, mesh, run.sharding, run.reshard_root, run.reshard_last)
    model.to_empty(device="cpu")
    optimizer = OPTIMIZERS[run.optimizer].make(model.parameters())
    return ShardedTraining(
        optimizer=optimizer,
        units=[name for name, _ in chosen],
        clip=lambda max_norm: nn.utils.clip_grad_norm_(model.parameters(), max_norm),
        no_sync=partial(_no_sync, model),
        owners=partial(_owners, [module for _, module in chosen], optimizer),
    )


def apply(
    model: nn.Module, mesh: DeviceMesh, sharding: Sharding, reshard_root: bool | None = None, reshard_last: bool = True
) -> None:
    """Apply FSDP2 to `model` in place with the units, strategy, precision and checkpointing of `sharding`; for plans and tests.
    `reshard_root`, `reshard_last`: `reshard_after_forward` of the root (None: FSDP2's default) and of the last unit; both are
    False if the strategy keeps parameters until the backward. Raises `UsageError` if FSDP2 does not support `sharding`."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    check_sharding(sharding)
    strategy, p, checkpointing = sharding.strategy, sharding.precision or Precision(), sharding.checkpointing
    policy = MixedPrecisionPolicy(
        param_dtype=p.params, reduce_dtype=p.reduce, output_dtype=p.output, cast_forward_inputs=p.cast_inputs
    )
    chosen = choose_units(model, sharding.units)
    deep = [module for _, module in chosen[1:] if not is_layer(module)]
    recomputed = {id(module) for module in deep[:: checkpointing.every]} if checkpointing.every else ()
    for i, (_, module) in reversed(list(enumerate(chosen[1:]))):  # inner units before those that contain them
        if id(module) in recomputed:
            checkpoint_forward(module, checkpointing)
        reshard = not strategy.keep_until_backward and (reshard_last or i + 2 < len(chosen))
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    root = False if strategy.keep_until_backward else reshard_root
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=root)


def has(strategy: Strategy) -> bool:
    """Return True if FSDP2 supports `strategy`."""
    return Place.REPLICATE not in (strategy.params, strategy.optim) and not strategy.optim_over_replicas


def check_sharding(sharding: Sharding) -> None:
    """Raise `UsageError` if FSDP2 does not support the strategy of `sharding`, or a field that differs from its default."""
    config = sharding.as_config()
    if others := [f"{name}={value}" for name, value in config.items() if name not in FIELDS]:
        raise UsageError(
            f"fsdp2 with {', '.join(others)} cannot be planned; leave that out (fsdp2 takes {', '.join(FIELDS)}), or use the "
            "engine accordion."
        )
    check(sharding.strategy)


def check(strategy: Strategy) -> None:
    """Raise `UsageError` if FSDP2 does not support `strategy`."""
    if not has(strategy):
        raise UsageError(
            f"fsdp2 has no strategy {strategy.name!r}; use full_shard, shard_grad_op or hybrid_shard, or the engine accordion."
        )


@contextmanager
def _no_sync(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


# -- the current unit


def _track_unit(module: nn.Module, unit: int, tracker: Tracker) -> None:
    """Register hooks on `module`, the unit with index `unit`, that log each start of its forward and backward in `tracker`.
    They log nothing for a forward that is recomputed in the backward. Call this before `fully_shard`."""

    def backward(grad: Tensor) -> None:
        place = (StepPhase.BACKWARD, unit)
        if tracker.place != place:
            tracker.enter(*place)

    def before(module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and tracker.place.phase is StepPhase.FORWARD:
            tracker.enter(StepPhase.FORWARD, unit)

    def after(module: nn.Module, args: Any, out: Any) -> None:
        for leaf in tree_leaves(list(out.values()) if isinstance(out, dict) else out):
            if isinstance(leaf, Tensor) and leaf.requires_grad and tracker.place.phase is StepPhase.FORWARD:
                leaf.register_hook(backward)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def _owners(modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Return storage key -> index of the unit, for the storages of parameters and of their optimizer states. `modules`: the
    units, by index. A parameter inside several of them belongs to the last one."""
    owners: dict[int, int] = {}
    for unit, module in enumerate(modules):  # the root first, so that inner units overwrite its entries
        for parameter in module.parameters():
            for storage in storages_of((parameter.detach(), optimizer.state.get(parameter, {}))):
                owners[_torch.storage_key(storage)] = unit
    return owners


# -- FSDP2's streams and collectives


@contextmanager
def silenced(tracker: Tracker, run: TrainingSetup) -> Iterator[None]:
    """Context manager in which collectives of fake tensors send nothing (also afterwards, in the whole process), and operators
    by which DTensor infers shapes are not logged. If `run` is for CUDA, it replaces streams and events of `torch.cpu` by ones
    that `tracker` logs, since a trace runs on fake CPU tensors."""
    _torch.fake_collectives()
    streams = _named_streams(tracker) if run.device == "cuda" else nullcontext()
    with _torch.around_propagation(tracker.paused), streams:
        yield


@contextmanager
def _named_streams(tracker: Tracker) -> Iterator[None]:
    """Context manager in which `torch.cpu` creates streams, named as in `STREAMS`, and events that `tracker` logs."""
    names = iter(STREAMS)
    streams = {Streams.COMPUTE: _Stream(Streams.COMPUTE, tracker)}

    def stream(priority: int = 0) -> _Stream:
        name = next(names)
        return streams.setdefault(name, _Stream(name, tracker))

    @contextmanager
    def on(stream: _Stream | None) -> Iterator[None]:
        with tracker.on(tracker.stream if stream is None else stream.name):
            yield

    stand_ins: Mapping[str, Any] = {
        "Stream": stream,
        "Event": partial(_Event, tracker),
        "stream": on,
        "current_stream": lambda device=None: streams[tracker.stream],
    }
    with mock.patch.multiple(torch.cpu, **stand_ins):
        yield


class _Event:
    """Stand-in for a device event, whose `record` and `wait` are logged in `tracker`. `wait` before `record` does nothing."""

    def __init__(self, tracker: Tracker, *options: object, **named: object) -> None:
        self._tracker = tracker
        self.number: int | None = None

    def record(self, stream: _Stream | None = None) -> _Event:
        self.number = next(self._tracker.transfers)
        self._tracker.events.append(Mark(self.number, self._tracker.stream if stream is None else stream.name))
        return self

    def wait(self, stream: _Stream | None = None) -> None:
        if self.number is not None:
            self._tracker.events.append(Wait(self.number, self._tracker.stream if stream is None else stream.name))


class _Stream:
    """Stand-in for a device stream; `name` is its name in logged events."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name, self._tracker = name, tracker

    def record_event(self, event: _Event | None = None) -> _Event:
        return (event or _Event(self._tracker)).record(self)

    def wait_event(self, event: _Event) -> None:
        event.wait(self)

    def wait_stream(self, other: _Stream) -> None:
        self.wait_event(other.record_event())
