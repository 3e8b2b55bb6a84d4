"""The step of offloaded parameters: unit by unit, on a thread of its own, in the order in which the next forward needs them."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from accordion import _torch
from accordion.config import DEVICE, HOST
from accordion.engine.engine import Engine
from accordion.engine.unit import Unit
from accordion.errors import UsageError
from accordion.offload.host_shards import OffDeviceShards
from accordion.offload.step.chunks import ParamStep, chunks_of, finish, step_chunk
from accordion.offload.step.optimizer_copy import SCALER_ATTRIBUTES, Entry, OptimizerCopy, local_of, step_here
from accordion.offload.step.state_store import States, Wanted
from accordion.offload.step.step_in_backward import InBackward, refuse_in_backward
from accordion.offload.tiers import Tiers

OWNER = "_accordion_owner"  # the attribute by which an offloaded parameter names its unit


class Owner:
    """Names the unit of an offloaded parameter to its optimizer; a copy or a pickle of a parameter names none."""

    __slots__ = ("engine", "unit")

    def __init__(self, engine: Engine | None = None, unit: Unit | None = None) -> None:
        self.engine: Callable[[], Engine | None] = (lambda: None) if engine is None else weakref.ref(engine)
        self.unit: Callable[[], Unit | None] = (lambda: None) if unit is None else weakref.ref(unit)

    def __deepcopy__(self, memo: object) -> Owner:
        return Owner()

    def __reduce__(self) -> Any:
        return Owner, ()


def own_parameters(engine: Engine, unit: Unit) -> None:
    """Let optimizers find the unit of its parameters, where these are not stepped as others are."""
    tiers = engine.context.shard_buffers
    if not isinstance(tiers, Tiers):
        return
    tiers.follow(unit, engine.order)
    if tiers.offloads[unit.index].step_in_backward:
        tiers.in_backward = tiers.in_backward or InBackward(step_unit)
        tiers.in_backward.attach(engine)
    if tiers.offloads[unit.index].asks:
        for param in unit.params:
            if param.extension is None:
                vars(param.sharded)[OWNER] = Owner(engine, unit)


def refuse_unwrapped(optimizer: Optimizer) -> None:
    """Raise `UsageError` if an optimizer that is not wrapped is about to step parameters that are stepped chunk by chunk.

    It would keep their states in memory.
    """
    for group in optimizer.param_groups:
        for engine, unit in owners_of(group["params"]):
            offload = tiers_of(engine).offloads[unit.index]
            if offload.streams or offload.step_in_backward:
                raise UsageError(
                    f"{type(optimizer).__name__} steps parameters of unit {unit.name or 'root'!r}, whose Offload has the step "
                    "bring what it needs from disk or to the device, or step in backward; pass the optimizer to wrap_optimizer."
                )


def owner_of(param: Tensor) -> tuple[Engine, Unit] | None:
    """The engine and the unit of an offloaded parameter, None of any other tensor."""
    owner = vars(param).get(OWNER) if isinstance(param, DTensor) else None
    if not isinstance(owner, Owner):
        return None
    engine, unit = owner.engine(), owner.unit()
    return None if engine is None or unit is None else (engine, unit)


def owners_of(params: Iterable[Tensor]) -> list[tuple[Engine, Unit]]:
    """Those of the parameters that are offloaded."""
    return [owner for owner in map(owner_of, params) if owner is not None]


def engines_of(optimizer: Optimizer) -> list[Engine]:
    """The engines whose offloaded parameters an optimizer steps."""
    owners = [owner for group in optimizer.param_groups for owner in owners_of(group["params"])]
    return list({id(engine): engine for engine, _ in owners}.values())


class UnitStep:
    """The step of the parameters of one unit; owns their gradients until it has ended.

    `todos`: those of them that come chunk by chunk, by way of `states`, and go back.
    """

    def __init__(
        self,
        optimizer_copy: OptimizerCopy,
        entries: Sequence[Entry],
        shard_buffers: Sequence[OffDeviceShards],
        todos: Sequence[ParamStep],
        states: States | None,
    ) -> None:
        self._optimizer_copy, self._todos, self._states = optimizer_copy, todos, states
        self.entries, self.shard_buffers = entries, shard_buffers
        self._passing: list[Future[None]] = []

    def run(self) -> None:
        """Step what is at hand, and begin to step all chunks."""
        todos = {id(todo.entry) for todo in self._todos}
        here = [entry for entry in self.entries if id(entry) not in todos]
        with torch.no_grad():
            step_here(self._optimizer_copy, here)
            for shard_buffer in self.shard_buffers if here else ():
                shard_buffer.write_rows()  # of all parameters; chunks write theirs afterwards
        if self._states is not None:
            step = partial(step_chunk, self._optimizer_copy)
            self._passing = [self._states.host_pipeline.start(chunk, step) for chunk in chunks_of(self._todos)]
        self.entries = ()

    def finish(self) -> None:
        """Return when all chunks are where they rest, and the outside sees their states."""
        for future in self._passing:
            future.result()
        for todo in self._todos:
            finish(todo)
        self._passing, self._todos = [], ()


class Waiting:
    """A job that runs when it is waited for, for debug="streams": until then its parameters read as NaN."""

    def __init__(self, job: UnitStep) -> None:
        self._job: UnitStep | None = job
        self._values = [(e.own, e.own.clone()) for e in job.entries]
        for own, _ in self._values:
            if own.is_floating_point():
                own.fill_(float("nan"))

    def result(self) -> None:
        job, self._job = self._job, None
        if job is None:
            return
        with torch.no_grad():
            for own, value in self._values:
                own.copy_(value)
        self._values.clear()
        for shard_buffer in job.shard_buffers:
            shard_buffer.flush()
        job.run()


def prepare(optimizer: Optimizer, kind: type[Optimizer]) -> OptimizerCopy | None:
    """Find room for the states of parameters whose step is streamed, with a copy of the optimizer, which it returns.

    Raises `OffloadError`, `UsageError` if there is no room.
    """
    for group in optimizer.param_groups:
        for engine, unit in owners_of(group["params"] if group.get("capturable") else ()):
            if tiers_of(engine).offloads[unit.index].stepped_on == HOST:
                raise UsageError(
                    f"{type(optimizer).__name__}(capturable=True) steps on an accelerator alone, and the Offload of unit "
                    f"{unit.name or 'root'!r} steps on the host; leave out capturable, or pass step='device'."
                )
    optimizer_copy = None
    for engine in engines_of(optimizer):
        tiers = tiers_of(engine)
        if tiers.in_backward is not None:
            tiers.in_backward.steps_with(optimizer, kind)
        owned = [(i, p, owner_of(p)) for i, group in enumerate(optimizer.param_groups) for p in group["params"]]
        mine = [(i, p, owner[1]) for i, p, owner in owned if owner is not None and owner[0] is engine]
        wanted = [
            Wanted(unit.index, tiers.offloads[unit.index], i, p, local_of(p), tiers.shard_buffer_of(unit, p))
            for i, p, unit in mine
            if tiers.offloads[unit.index].streams
        ]
        if wanted:
            optimizer_copy, states = optimizer_copy or OptimizerCopy(optimizer, kind), tiers.states_of(optimizer)
            with telling(engine):
                states.cover(wanted, optimizer_copy)
            states.adopt(optimizer.state)
    return optimizer_copy


def tiers_of(engine: Engine) -> Tiers:
    tiers = engine.context.shard_buffers
    assert isinstance(tiers, Tiers), "only a model with offloaded states has them"
    return tiers


@contextmanager
def telling(engine: Engine) -> Iterator[None]:
    """Let other ranks hear of an error of this one, which they would wait for."""
    try:
        yield
    except Exception as error:
        engine.context.waiter.tell(f"failed: {type(error).__name__}: {error}")
        raise


def expose(optimizer: Optimizer) -> None:
    """The outside gets states in its hands: what it writes into those on disk counts from the next step on."""
    for engine in engines_of(optimizer):
        states = tiers_of(engine).states.get(optimizer)
        if states is not None:
            states.is_exposed = True


def defer(optimizer: Optimizer, kind: type[Optimizer]) -> None:
    """Step every parameter that has a gradient: those stepped on the device now, others on a thread, behind the caller's back.

    Takes hold of the gradients and of the hyperparameters as they are. Each shard buffer that is stepped waits for its own unit.
    """
    for hook in optimizer._optimizer_step_pre_hooks.values():
        hook(optimizer, (), {})
    for engine in engines_of(optimizer):
        engine.synchronize()
        in_backward = tiers_of(engine).in_backward
        if in_backward is not None:
            if any(getattr(optimizer, name, None) is not None for name in SCALER_ATTRIBUTES):
                refuse_in_backward(engine, "a gradient scaler")
            in_backward.stepped()
    optimizer_copy, here = prepare(optimizer, kind) or OptimizerCopy(optimizer, kind), []
    optimizer_copy.write_after(optimizer)
    by_unit: dict[int, tuple[Engine, Unit, list[Entry]]] = {}
    for i, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if p.grad is None:
                continue
            entry, owner = _entry(optimizer, i, p, p.grad), owner_of(p)
            if owner is None:
                here.append(entry)
            else:
                by_unit.setdefault(id(owner[1]), (*owner, []))[2].append(entry)
    if here:
        step_here(optimizer_copy, here)
    for engine in {id(engine): engine for engine, _, _ in by_unit.values()}.values():
        units = [(unit, entries) for of, unit, entries in by_unit.values() if of is engine]
        _start(engine, units, optimizer_copy, optimizer)
    for hook in [*optimizer._optimizer_step_post_hooks.values(), *_torch.hooks_after_any_step()]:
        hook(optimizer, (), {})


def _entry(optimizer: Optimizer, group: int, p: Tensor, grad: Tensor) -> Entry:
    own = local_of(p)
    torch.autograd.graph.increment_version(own)  # now: what the thread counts comes at any time
    return Entry(group, p, own, local_of(grad), optimizer.state[p])


def step_unit(engine: Engine, unit: Unit, optimizer: Optimizer, optimizer_copy: OptimizerCopy) -> None:
    """In a backward: step the parameters of one unit, whose gradients are there and are taken."""
    if not tiers_of(engine).offloads[unit.index].step_in_backward:
        return
    mine, entries = {id(p.sharded) for p in unit.params}, []
    for i, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if id(p) in mine and p.grad is not None:
                entries.append(_entry(optimizer, i, p, p.grad))
                p.grad = None
    if entries:
        _start(engine, [(unit, entries)], optimizer_copy, optimizer)


def _start(
    engine: Engine, units: list[tuple[Unit, list[Entry]]], optimizer_copy: OptimizerCopy, optimizer: Optimizer
) -> None:
    """Let the units of one engine be stepped in the order in which the next forward is expected to need them."""
    tiers, place = tiers_of(engine), {index: i for i, index in enumerate(engine.order.sequence())}
    states = tiers.states.get(optimizer)
    if states is not None and states.is_exposed:
        states.adopt(optimizer.state)
        states.flush()
    on_device: list[ParamStep] = []
    here: list[Entry] = []
    jobs: list[UnitStep] = []
    for unit, entries in sorted(units, key=lambda pair: place.get(pair[0].index, len(place))):
        todos = [] if states is None else states.todo(entries)
        stepped = {id(entry.param) for entry in entries}
        groups = [g for g in unit.groups if not stepped.isdisjoint(map(id, g.sharded))]
        shard_buffers = [g.shard_buffer for g in groups if isinstance(g.shard_buffer, OffDeviceShards)]
        if tiers.offloads[unit.index].stepped_on == DEVICE:
            on_device += todos
            streamed_ids = {id(todo.entry) for todo in todos}
            here += [entry for entry in entries if id(entry) not in streamed_ids]
            for shard_buffer in shard_buffers:
                shard_buffer.defer(lambda: None)  # the step has ended
            continue
        jobs.append(UnitStep(optimizer_copy, entries, shard_buffers, todos, states))
    if here:
        with torch.no_grad():
            step_here(optimizer_copy, here)
    if states is not None and on_device:
        if tiers.in_backward is not None and not tiers.late:  # the thread may be at another unit, with the same buffers
            tiers.stepper.submit(lambda: None).result()  # and `over_device` waits for the chunks that it has begun
        with telling(engine):
            step_on_device(optimizer_copy, on_device, states)
    for job in jobs:
        running: Future[None] | Waiting = Waiting(job) if tiers.late else tiers.stepper.submit(job.run)
        for shard_buffer in job.shard_buffers:
            shard_buffer.defer(partial(_wait, engine, running, job))


def step_on_device(optimizer_copy: OptimizerCopy, todos: Sequence[ParamStep], states: States) -> None:
    """Step what comes to the device for it, all of it now; its end is waited for, since the next gathers read what it wrote."""
    chunks = list(chunks_of(todos))
    stream = states.over_device(chunks)
    count = len(chunks)
    chunks.clear()
    try:
        with torch.no_grad():
            for which in range(count):
                chunk, views = stream.take(which)
                step_chunk(optimizer_copy, chunk, views)
                stream.give(which)
        stream.finish()
    except BaseException:
        stream.abandon()
        raise
    for todo in todos:
        finish(todo)


def _wait(engine: Engine, running: Future[None] | Waiting, job: UnitStep) -> None:
    start = time.perf_counter()
    with telling(engine):
        running.result()
        job.finish()
    tiers_of(engine).waited_s += time.perf_counter() - start
