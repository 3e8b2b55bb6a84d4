"""The step of offloaded parameters: unit by unit, on a thread of its own, in the order in which the next forward needs them."""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from accordion import _torch
from accordion.engine.engine import Engine
from accordion.engine.group import Group
from accordion.engine.unit import Unit
from accordion.memory.host import HostHome
from accordion.memory.tiers import Tiers

OWNER = "_accordion_owner"  # the attribute by which an offloaded parameter names its unit
SCALER_ATTRIBUTES = ("grad_scale", "found_inf")  # set by `torch.amp.GradScaler` for the time of a fused step


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


@dataclass(frozen=True, slots=True)
class Entry:
    """A parameter with a gradient: `own` is its local tensor, `grad` what it is stepped with, `state` the optimizer's of it."""

    group: int  # index among the optimizer's param_groups
    param: Tensor
    own: Tensor
    grad: Tensor
    state: dict[str, Any]


class Recipe:
    """What a step does to any parameters, as it was when the caller asked for it: hyperparameters change afterwards."""

    def __init__(self, optimizer: Optimizer, kind: type[Optimizer]) -> None:
        self.kind = kind
        self._options = [
            {key: _frozen(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
        self._attributes = {
            key: value for key, value in vars(optimizer).items() if key not in ("step", "state", "param_groups")
        }
        for name in SCALER_ATTRIBUTES:
            if isinstance(self._attributes.get(name), Tensor):
                self._attributes[name] = self._attributes[name].detach().to("cpu", copy=True)

    def step(self, todo: Sequence[tuple[int, Tensor, dict[str, Any]]]) -> dict[Tensor, dict[str, Any]]:
        """Step (index of the param group, plain tensor with its `grad`, state) each; gives the states as they are then."""
        clone: Any = object.__new__(self.kind)
        vars(clone).update(self._attributes)
        for hooks in (
            "_optimizer_step_pre_hooks",
            "_optimizer_step_post_hooks",
        ):  # the caller's own, run once by `defer`
            vars(clone)[hooks] = OrderedDict()
        clone.state = defaultdict(dict, {tensor: state for _, tensor, state in todo if state})
        clone.param_groups = []
        for i, options in enumerate(self._options):
            mine = [tensor for at, tensor, _ in todo if at == i]
            if mine:
                clone.param_groups.append({**options, "params": mine})
        if clone.param_groups:
            clone.step()
        return dict(clone.state)


def _frozen(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


class Job:
    """The step of the parameters of one unit; owns their gradients until it has run."""

    def __init__(self, recipe: Recipe, entries: Sequence[Entry], homes: Sequence[HostHome]) -> None:
        self._recipe, self.entries, self._homes = recipe, entries, homes

    def run(self) -> None:
        with torch.no_grad():
            step_here(self._recipe, self.entries)
            for home in self._homes:
                home.write_rows()
        self.entries = ()


def step_here(recipe: Recipe, entries: Sequence[Entry]) -> None:
    """Step parameters whose state is at hand, and leave what the step made of it in `state`, with DTensors in it."""
    for entry in entries:
        entry.own.grad = entry.grad
    try:
        states = recipe.step([(e.group, e.own, local_state(e.state)) for e in entries])
    finally:
        for entry in entries:
            entry.own.grad = None
    for entry in entries:
        write_back(entry.state, states.get(entry.own, {}), entry.param, entry.own)


def local_state(entry: dict[str, Any]) -> dict[str, Any]:
    return {k: _torch.local_of(v) if isinstance(v, DTensor) else v for k, v in entry.items()}


def write_back(outer: dict[str, Any], inner: dict[str, Any], p: Tensor, own: Tensor) -> None:
    """Take over what the step made or replaced; a tensor of the shard's shape becomes a DTensor beside its parameter."""
    for key, value in inner.items():
        held = outer.get(key)
        if held is value or (isinstance(held, DTensor) and _torch.local_of(held) is value):
            continue
        is_shard = isinstance(value, Tensor) and isinstance(p, DTensor) and own.dim() > 0 and value.shape == own.shape
        outer[key] = _torch.as_dtensor(value, p) if is_shard and isinstance(p, DTensor) else value


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


def defer(optimizer: Optimizer, kind: type[Optimizer]) -> None:
    """Step every parameter that has a gradient: those on the device now, those off it on a thread, behind the caller's back.

    Takes hold of the gradients and of the hyperparameters as they are. Each home that is stepped waits for its own unit.
    """
    for hook in optimizer._optimizer_step_pre_hooks.values():
        hook(optimizer, (), {})
    for engine in engines_of(optimizer):
        engine.synchronize()
    recipe, here = Recipe(optimizer, kind), []
    by_unit: dict[int, tuple[Unit, list[Entry]]] = {}
    for i, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if p.grad is None:
                continue
            own, grad = (_torch.local_of(t) if isinstance(t, DTensor) else t for t in (p, p.grad))
            entry = Entry(i, p, own, grad, optimizer.state[p])
            unit = unit_of(p)
            torch.autograd.graph.increment_version(own)  # now: what the thread counts comes at any time
            if unit is None:
                here.append(entry)
            else:
                by_unit.setdefault(id(unit), (unit, []))[1].append(entry)
    if here:
        step_here(recipe, here)
    for unit, entries in _in_order(by_unit.values()):
        _start(unit, entries, recipe)
    for hook in optimizer._optimizer_step_post_hooks.values():
        hook(optimizer, (), {})


def _in_order(units: Iterable[tuple[Unit, list[Entry]]]) -> list[tuple[Unit, list[Entry]]]:
    units = list(units)
    if not units:
        return []
    order = units[0][0].engine.order.sequence()
    place = {index: i for i, index in enumerate(order)}
    return sorted(units, key=lambda pair: place.get(pair[0].index, len(place)))


def _start(unit: Unit, entries: Sequence[Entry], recipe: Recipe) -> None:
    homes = [group.home for group in unit.groups if isinstance(group.home, HostHome) and _has_any(group, entries)]
    job, tiers = Job(recipe, entries, homes), unit.engine.wiring.home
    assert isinstance(tiers, Tiers), "who makes host homes is the maker of the engine's"
    running: Future[None] | Waiting = Waiting(job) if tiers.late else tiers.stepper.submit(job.run)
    for home in homes:
        home.defer(running.result)


def _has_any(group: Group, entries: Sequence[Entry]) -> bool:
    mine = {id(p.sharded) for p in group.params}
    return any(id(entry.param) in mine for entry in entries)
