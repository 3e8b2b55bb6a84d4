"""The step of offloaded parameters: unit by unit, on a thread of its own, in the order in which the next forward needs them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from accordion.engine.engine import Engine
from accordion.engine.group import Group
from accordion.engine.unit import Unit
from accordion.memory.entries import Entry, Recipe, local_of, step_here
from accordion.memory.host import HostHome
from accordion.memory.states import Stream, Todo, finish, pieces_of, step_piece
from accordion.memory.tiers import Tiers

OWNER = "_accordion_owner"  # the attribute by which an offloaded parameter names its unit


class Owner:
    """Names the unit of an offloaded parameter to its optimizer; a copy or a pickle of a parameter names none."""

    __slots__ = ("unit",)

    def __init__(self, unit: Unit | None = None) -> None:
        self.unit: Callable[[], Unit | None] = (lambda: None) if unit is None else weakref.ref(unit)

    def __deepcopy__(self, memo: object) -> Owner:
        return Owner()

    def __reduce__(self) -> Any:
        return Owner, ()


def own_parameters(unit: Unit) -> None:
    """Let optimizers find the unit of its parameters, where these rest off the device."""
    for group in unit.groups:
        if isinstance(group.home, HostHome):
            for param in group.params:
                vars(param.sharded)[OWNER] = Owner(unit)


def unit_of(param: Tensor) -> Unit | None:
    """The unit of an offloaded parameter, None of any other tensor."""
    owner = vars(param).get(OWNER) if isinstance(param, DTensor) else None
    return owner.unit() if isinstance(owner, Owner) else None


def engines_of(optimizer: Optimizer) -> list[Engine]:
    """The engines whose offloaded parameters an optimizer steps."""
    units = {id(u): u for group in optimizer.param_groups for p in group["params"] if (u := unit_of(p)) is not None}
    return list({id(u.engine): u.engine for u in units.values()}.values())


class Job:
    """The step of the parameters of one unit; owns their gradients until it has run.

    `disk`: those of them whose states rest there, as pieces that come through a stream of the whole step.
    """

    def __init__(
        self, recipe: Recipe, entries: Sequence[Entry], homes: Sequence[HostHome], disk: DiskJob | None
    ) -> None:
        self._recipe, self.entries, self._homes, self._disk = recipe, entries, homes, disk

    def run(self) -> None:
        with torch.no_grad():
            on_disk = set() if self._disk is None else {id(todo.entry) for todo in self._disk.todos}
            step_here(self._recipe, [entry for entry in self.entries if id(entry) not in on_disk])
            if self._disk is not None:
                self._disk.run(self._recipe)
            for home in self._homes:
                home.write_rows()
        self.entries, self._disk = (), None


class DiskJob:
    """The part of a unit's step whose states come from disk and go back there."""

    def __init__(self, todos: Sequence[Todo]) -> None:
        self.todos = todos
        self.pieces = list(pieces_of(todos))
        self.shared: Stream | None = None  # of all units of a step, in their order
        self.begin: Callable[[], Stream] = _no_stream  # one of its own, where it has none of those

    def run(self, recipe: Recipe) -> None:
        stream = self.shared or self.begin()
        with stream.unbroken():
            for _ in self.pieces:
                piece, blocks = stream.take()
                step_piece(recipe, piece, blocks)
                stream.give()
            if self.shared is None:
                stream.finish()
        for todo in self.todos:
            finish(todo)


def _no_stream() -> Stream:
    raise AssertionError("a job has a stream before it runs")


class Waiting:
    """A job that runs when it is waited for, for debug="streams": until then its parameters read as NaN."""

    def __init__(self, job: Job) -> None:
        self._job: Job | None = job
        self._values = [(e.own, e.own.clone()) for e in job.entries]
        for own, _ in self._values:
            if own.is_floating_point():
                own.fill_(float("nan"))

    def result(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            with torch.no_grad():
                for own, value in self._values:
                    own.copy_(value)
            self._values.clear()
            job.run()


def prepare(optimizer: Optimizer, kind: type[Optimizer]) -> None:
    """Find room for the states of offloaded parameters that rest on disk. Raises `OffloadError` where there is none."""
    recipe = None
    for engine in engines_of(optimizer):
        tiers = tiers_of(engine)
        wanted: dict[Path, list[tuple[int, int, Tensor, Tensor]]] = {}
        for i, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                unit = unit_of(p)
                folder = None if unit is None or unit.engine is not engine else tiers.folder_of(unit.index)
                if unit is not None and folder is not None:
                    wanted.setdefault(folder, []).append((unit.index, i, p, local_of(p)))
        for folder, params in wanted.items():
            recipe = recipe or Recipe(optimizer, kind)
            with telling(engine):
                tiers.states_of(optimizer).cover(params, recipe, folder)
        if wanted:
            tiers.states_of(optimizer).adopt(optimizer.state)


def tiers_of(engine: Engine) -> Tiers:
    tiers = engine.wiring.home
    assert isinstance(tiers, Tiers), "who makes host homes is the maker of the engine's"
    return tiers


@contextmanager
def telling(engine: Engine) -> Iterator[None]:
    """Let other ranks hear of an error of this one, which they would wait for."""
    try:
        yield
    except Exception as error:
        engine.wiring.watch.tell(f"{type(error).__name__}: {error}")
        raise


def expose(optimizer: Optimizer) -> None:
    """The outside gets states in its hands: what it writes into those on disk counts from the next step on."""
    for engine in engines_of(optimizer):
        states = tiers_of(engine).states.get(optimizer)
        if states is not None:
            states.is_exposed = True


def defer(optimizer: Optimizer, kind: type[Optimizer]) -> None:
    """Step every parameter that has a gradient: those on the device now, those off it on a thread, behind the caller's back.

    Takes hold of the gradients and of the hyperparameters as they are. Each home that is stepped waits for its own unit.
    """
    for hook in optimizer._optimizer_step_pre_hooks.values():
        hook(optimizer, (), {})
    for engine in engines_of(optimizer):
        engine.synchronize()
    prepare(optimizer, kind)
    recipe, here = Recipe(optimizer, kind), []
    by_unit: dict[int, tuple[Unit, list[Entry]]] = {}
    for i, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if p.grad is None:
                continue
            entry = Entry(i, p, local_of(p), local_of(p.grad), optimizer.state[p])
            unit = unit_of(p)
            torch.autograd.graph.increment_version(entry.own)  # now: what the thread counts comes at any time
            if unit is None:
                here.append(entry)
            else:
                by_unit.setdefault(id(unit), (unit, []))[1].append(entry)
    if here:
        step_here(recipe, here)
    engines = {id(unit.engine): unit.engine for unit, _ in by_unit.values()}
    for engine in engines.values():
        _start(engine, [pair for pair in by_unit.values() if pair[0].engine is engine], recipe, optimizer)
    for hook in optimizer._optimizer_step_post_hooks.values():
        hook(optimizer, (), {})


def _start(engine: Engine, units: list[tuple[Unit, list[Entry]]], recipe: Recipe, optimizer: Optimizer) -> None:
    """Let the units of one engine be stepped in the order in which the next forward is expected to need them."""
    tiers, place = tiers_of(engine), {index: i for i, index in enumerate(engine.order.sequence())}
    states = tiers.states.get(optimizer)
    if states is not None and states.is_exposed:
        states.adopt(optimizer.state)
        states.flush()
    jobs: list[tuple[Job, list[HostHome]]] = []
    disks: list[DiskJob] = []
    for unit, entries in sorted(units, key=lambda pair: place.get(pair[0].index, len(place))):
        homes = [group.home for group in unit.groups if isinstance(group.home, HostHome) and _has_any(group, entries)]
        todos = [] if states is None else states.todo(entries)
        disk = DiskJob(todos) if todos else None
        jobs.append((Job(recipe, entries, homes, disk), homes))
        disks += [disk] if disk is not None else []
    stream = None
    if states is not None and disks:
        if tiers.late:  # jobs run in the order in which they are waited for, each with a stream of its own
            for disk in disks:
                disk.begin = partial(states.stream, disk.pieces, tiers.pool)
        else:
            stream = states.stream([piece for disk in disks for piece in disk.pieces], tiers.pool)
            for disk in disks:
                disk.shared = stream
    for job, homes in jobs:
        running: Future[None] | Waiting = Waiting(job) if tiers.late else tiers.stepper.submit(job.run)
        for home in homes:
            home.defer(partial(_wait, engine, running.result))
    if stream is not None:
        written = tiers.stepper.submit(stream.finish)
        jobs[-1][1][-1].defer(partial(_wait, engine, written.result))  # of the last unit, which waits longest anyway


def _wait(engine: Engine, wait: Callable[[], None]) -> None:
    with telling(engine):
        wait()


def _has_any(group: Group, entries: Sequence[Entry]) -> bool:
    mine = {id(p.sharded) for p in group.params}
    return any(id(entry.param) in mine for entry in entries)
