"""The optimizer step of offloaded parameters: unit by unit on a thread, in the order in which the next forward needs units."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from accordion import _torch
from accordion._torch import local_or_same
from accordion.config import DEVICE
from accordion.engine.engine import Engine
from accordion.engine.unit import Unit
from accordion.errors import UsageError
from accordion.offload.host_shards import OffDeviceShards
from accordion.offload.step.chunks import ParamStep, chunks_of, step_chunk
from accordion.offload.step.optimizer_copy import Entry, OptimizerCopy, step_entries, write_back
from accordion.offload.step.state_store import StateRequest, States
from accordion.offload.tiers import Tiers

OWNER = "_accordion_owner"  # attribute of an offloaded parameter, an `Owner`


class Owner:
    """Weak references from an offloaded parameter to its engine and unit. A copied or unpickled `Owner` refers to neither."""

    __slots__ = ("engine", "unit")

    def __init__(self, engine: Engine | None = None, unit: Unit | None = None) -> None:
        self.engine: Callable[[], Engine | None] = (lambda: None) if engine is None else weakref.ref(engine)
        self.unit: Callable[[], Unit | None] = (lambda: None) if unit is None else weakref.ref(unit)

    def __reduce__(self) -> Any:
        return Owner, ()


def own_parameters(engine: Engine, unit: Unit) -> None:
    """Register `unit` with the tiers of `engine`. If anything of the unit is offloaded, set an `Owner` as an attribute of its
    sharded parameters, except tensor subclasses. Do nothing if `engine` has no tiers."""
    tiers = engine.context.shard_buffers
    if not isinstance(tiers, Tiers):
        return
    tiers.follow(unit, engine.order)
    if tiers.offloads[unit.index].asks:
        for param in unit.params:
            if param.extension is None:
                vars(param.sharded)[OWNER] = Owner(engine, unit)


def refuse_unwrapped(optimizer: Optimizer) -> None:
    """Raise `UsageError` if an offloaded parameter of `optimizer`, which is not wrapped, must be stepped chunk by chunk."""
    for _, _, engine, unit in owned_by(optimizer):
        if tiers_of(engine).offloads[unit.index].streams:
            raise UsageError(
                f"{type(optimizer).__name__} steps parameters of unit {unit.name or 'root'!r}, whose Offload needs a step that "
                "reads from disk or copies to the device; pass the optimizer to wrap_optimizer, or leave out that Offload."
            )


def owner_of(param: Tensor) -> tuple[Engine, Unit] | None:
    """Return (engine, unit) of an offloaded parameter. Return None for any other tensor, or if the model was deleted."""
    owner = vars(param).get(OWNER) if isinstance(param, DTensor) else None
    if not isinstance(owner, Owner):
        return None
    engine, unit = owner.engine(), owner.unit()
    return None if engine is None or unit is None else (engine, unit)


def owners_of(params: Iterable[Tensor]) -> list[tuple[Engine, Unit]]:
    """Return (engine, unit) of each tensor of `params` that is an offloaded parameter; other tensors are left out."""
    return [owner for owner in map(owner_of, params) if owner is not None]


def owned_by(optimizer: Optimizer) -> list[tuple[int, Tensor, Engine, Unit]]:
    """Return (index of its param group, parameter, engine, unit) of each offloaded parameter of `optimizer`."""
    params = [(i, p) for i, group in enumerate(optimizer.param_groups) for p in group["params"]]
    return [(i, p, *owner) for i, p in params if (owner := owner_of(p)) is not None]


def engines_of(optimizer: Optimizer) -> list[Engine]:
    """Return the engines of the offloaded parameters of `optimizer`, each once."""
    return list({id(engine): engine for _, _, engine, _ in owned_by(optimizer)}.values())


@dataclass(eq=False)
class UnitStep:
    """The step on the host of one unit's parameters, `entries`, whose gradients it keeps alive until it has ended. Call
    `begin`, and `wait` before the next gather. `todos`: the steps of those entries that are stepped chunk by chunk. `states`:
    the optimizer's store for them; None if it has none, and then there are no `todos`."""

    optimizer_copy: OptimizerCopy
    entries: Sequence[Entry]
    shard_buffers: Sequence[OffDeviceShards]
    todos: Sequence[ParamStep]
    states: States | None
    _running: Future[None] | None = None
    _values: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (parameter, value) until a late step begins
    _chunk_steps: list[Future[None]] = field(default_factory=list)

    def begin(self, tiers: Tiers) -> None:
        """Start the step on a thread. With `shard(debug="streams")`, only set parameters to NaN: `wait` then runs the step."""
        if not tiers.late:
            self._running = tiers.stepper.submit(self.run)
            return
        self._values = [(entry.local, entry.local.clone()) for entry in self.entries]
        for local, _ in self._values:
            if local.is_floating_point():
                local.fill_(float("nan"))

    def wait(self, engine: Engine) -> None:
        """Wait until all parameters are stepped and written, and write the new states of `todos` into `optimizer.state`. With
        `debug="streams"`, run the step here. Report an error to other ranks and raise it. Add the time to `Tiers.waited_s`."""
        start = time.perf_counter()
        with reported(engine):
            if self._running is not None:
                self._running.result()
            elif self._values:
                with torch.no_grad():
                    for local, value in self._values:
                        local.copy_(value)
                self._values = []
                for shard_buffer in self.shard_buffers:
                    shard_buffer.flush()
                self.run()
            for future in self._chunk_steps:
                future.result()
            for todo in self.todos:
                write_back(todo.entry.state, todo.states, todo.entry.param)
        self._chunk_steps, self.todos = [], ()
        tiers_of(engine).waited_s += time.perf_counter() - start

    def run(self) -> None:
        """Step the parameters that are not stepped chunk by chunk, and write their states and their copies in the gathered
        dtype. Then start the steps of all chunks of the others on threads; `wait` waits for these."""
        todos = {id(todo.entry) for todo in self.todos}
        in_memory = [entry for entry in self.entries if id(entry) not in todos]
        with torch.no_grad():
            step_entries(self.optimizer_copy, in_memory)
            for shard_buffer in self.shard_buffers if in_memory else ():
                shard_buffer.write_rows()  # of all parameters; chunks write their rows afterwards
        if self.states is not None:
            step = partial(step_chunk, self.optimizer_copy)
            self._chunk_steps = [self.states.host_pipeline.start(chunk, step) for chunk in chunks_of(self.todos)]
        self.entries = ()


def prepare(optimizer: Optimizer, kind: type[Optimizer]) -> OptimizerCopy | None:
    """Allocate the states of those parameters of `optimizer` that are stepped chunk by chunk and have none yet, and take over
    states that a load has put into `optimizer.state`.

    Returns a copy of `optimizer`; None if no parameter is stepped chunk by chunk. `kind`: the optimizer's class before
    wrapping. Raises `OffloadError` or `UsageError` if memory or disk space is lacking.
    """
    owned, optimizer_copy = owned_by(optimizer), None
    for engine in engines_of(optimizer):
        tiers = tiers_of(engine)
        wanted = [
            StateRequest(
                unit.index, tiers.offloads[unit.index], group, p, local_or_same(p), tiers.shard_buffer_of(unit, p)
            )
            for group, p, owner, unit in owned
            if owner is engine and tiers.offloads[unit.index].streams
        ]
        if wanted:
            optimizer_copy, states = optimizer_copy or OptimizerCopy(optimizer, kind), tiers.states_of(optimizer)
            with reported(engine):
                states.cover(wanted, optimizer_copy)
            states.adopt(optimizer.state)
    return optimizer_copy


def tiers_of(engine: Engine) -> Tiers:
    tiers = engine.context.shard_buffers
    assert isinstance(tiers, Tiers), "only a model with offloaded states has them"
    return tiers


@contextmanager
def reported(engine: Engine) -> Iterator[None]:
    """Context manager that reports an exception to the other ranks, which may wait for this rank, and raises it again."""
    try:
        yield
    except Exception as error:
        engine.context.waiter.tell(f"failed: {type(error).__name__}: {error}")
        raise


def expose(optimizer: Optimizer) -> None:
    """Record that a caller gets access to `optimizer.state` and may write states. The next step first takes over changes."""
    for engine in engines_of(optimizer):
        states = tiers_of(engine).states.get(optimizer)
        if states is not None:
            states.is_exposed = True


def defer(optimizer: Optimizer, kind: type[Optimizer]) -> None:
    """Wait for earlier steps. Then step every parameter of `optimizer` that has a gradient, and call the step hooks.

    Steps on the device run in this call. Steps on the host run on a thread during the next forward, with the present gradients
    and hyperparameters; the gather of a unit waits for its step, but step post-hooks do not. `kind`: the optimizer's class
    before wrapping.
    """
    for hook in optimizer._optimizer_step_pre_hooks.values():
        hook(optimizer, (), {})
    for engine in engines_of(optimizer):
        engine.synchronize()
    optimizer_copy, not_offloaded = prepare(optimizer, kind) or OptimizerCopy(optimizer, kind), []
    optimizer_copy.write_after(optimizer)
    by_unit: dict[int, tuple[Engine, Unit, list[Entry]]] = {}
    for i, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if p.grad is None:
                continue
            local, owner = local_or_same(p), owner_of(p)
            torch.autograd.graph.increment_version(local)  # not by the thread, whose own increment comes at any time
            entry = Entry(i, p, local, local_or_same(p.grad), optimizer.state[p])
            if owner is None:
                not_offloaded.append(entry)
            else:
                by_unit.setdefault(id(owner[1]), (*owner, []))[2].append(entry)
    if not_offloaded:
        step_entries(optimizer_copy, not_offloaded)
    for engine in {id(engine): engine for engine, _, _ in by_unit.values()}.values():
        units = [(unit, entries) for of, unit, entries in by_unit.values() if of is engine]
        _start(engine, units, optimizer_copy, optimizer)
    for hook in [*optimizer._optimizer_step_post_hooks.values(), *_torch.hooks_after_any_step()]:
        hook(optimizer, (), {})


def _start(
    engine: Engine, units: list[tuple[Unit, list[Entry]]], optimizer_copy: OptimizerCopy, optimizer: Optimizer
) -> None:
    """Step the units that are stepped on the device. Start the steps of the others on a thread, in the order in which the next
    forward is expected to need them. `units`: pairs (unit, its entries to step)."""
    tiers, place = tiers_of(engine), {index: i for i, index in enumerate(engine.order.sequence())}
    states = tiers.states.get(optimizer)
    if states is not None and states.is_exposed:
        states.adopt(optimizer.state)
        states.flush()
    on_device: list[ParamStep] = []
    in_memory: list[Entry] = []  # on the device, with their states
    jobs: list[UnitStep] = []
    for unit, entries in sorted(units, key=lambda pair: place.get(pair[0].index, len(place))):
        todos = [] if states is None else states.todo(entries)
        stepped = {id(entry.param) for entry in entries}
        groups = [g for g in unit.groups if not stepped.isdisjoint(map(id, g.sharded))]
        shard_buffers = [g.shard_buffer for g in groups if isinstance(g.shard_buffer, OffDeviceShards)]
        if tiers.offloads[unit.index].stepped_on == DEVICE:
            on_device += todos
            streamed_ids = {id(todo.entry) for todo in todos}
            in_memory += [entry for entry in entries if id(entry) not in streamed_ids]
            for shard_buffer in shard_buffers:
                shard_buffer.defer(lambda: None)  # nothing to wait for: the step ends in this call
            continue
        jobs.append(UnitStep(optimizer_copy, entries, shard_buffers, todos, states))
    if in_memory:
        with torch.no_grad():
            step_entries(optimizer_copy, in_memory)
    if states is not None and on_device:
        with reported(engine):
            states.step_on_device(on_device, partial(step_chunk, optimizer_copy))
    for job in jobs:
        job.begin(tiers)
        for shard_buffer in job.shard_buffers:
            shard_buffer.defer(partial(job.wait, engine))
