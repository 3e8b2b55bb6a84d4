"""Sharding module by module: each call cuts its parameters at once, and one engine for all is made at the first use."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from accordion import _torch
from accordion.agreement import same_structure
from accordion.config import FULL_SHARD, HYBRID_SHARD, Precision, Prefetch, Strategy
from accordion.engine.engine import Engine
from accordion.engine.group import Wiring
from accordion.engine.hooks import Hooks
from accordion.engine.layout import Cut
from accordion.engine.schedule import Phase
from accordion.engine.unit import Habits, Unit
from accordion.errors import UsageError
from accordion.shard import make_groups, wire
from accordion.units import Owned, owned_parameters

PART = "_accordion_part"  # where a module keeps its part


class Part:
    """What one call asked for: modules that are gathered together, how, and their unit while there is an engine.

    Owns the registration with its modules, the lease that `unshard` takes, and what its unit may do unlike others.
    """

    def __init__(self, modules: Sequence[nn.Module], mesh: DeviceMesh, precision: Precision) -> None:
        self.modules = [weakref.ref(m) for m in modules]
        self.mesh, self.precision = mesh, precision
        self.strategy: Strategy = HYBRID_SHARD if mesh.ndim == 2 else FULL_SHARD
        self.ignored: set[nn.Parameter] = set()
        self.places: set[tuple[int, str]] = set()  # of the parameters that were cut: id of the module, name in it
        self.borrowed: list[tuple[str, weakref.ref[Part]]] = []  # parameters tied to one that another part has cut
        self.habits = Habits(on_convert=partial(_dissolve, weakref.ref(self)))
        self.ahead: dict[Phase, list[weakref.ref[Part]]] = {}
        self.sync = self.all_reduce = True  # what the caller said of backwards; `habits.reduces` follows from both
        self.scale: float | None = None  # of gradient sums, in place of one over the number of ranks
        self.after_reduce: Callable[[Tensor], None] | None = None
        self.wiring: Wiring | None = None
        self.shares: weakref.ref[Part] | None = None  # the part whose streams and communicators are used
        self.tree: Tree | None = None
        self.unit: Unit | None = None
        self.lease = Lease(self)
        self.outer: weakref.ref[Part] | None = None
        self._triggers: list[Any] = []
        for module in modules:
            module.__dict__[PART] = self
        for below in parts_below(modules):
            if below is not self and below.outer is None:
                below.outer = weakref.ref(self)
            if below.tree is not None:  # it was used before it had a part around it
                below.tree.dissolve()
        self.arm()

    def withdraw(self) -> None:
        """Forget the call: what it asked for was refused."""
        self.disarm()
        for module in self.alive():
            del module.__dict__[PART]

    def alive(self) -> list[nn.Module]:
        return [m for m in (ref() for ref in self.modules) if m is not None]

    def outermost(self) -> Part:
        outer = None if self.outer is None else self.outer()
        return self if outer is None else outer.outermost()

    def ensure(self) -> Unit:
        """The unit, with the engine of the whole tree made where there is none. Collective then."""
        if self.unit is None:
            Tree(self.outermost())
        assert self.unit is not None, "a part lies in the tree of its outermost part"
        return self.unit

    def wired(self) -> Wiring:
        """Streams and communicators, made once and kept from engine to engine. Collective the first time."""
        source = None if self.shares is None else self.shares()
        if source is not None and source.mesh == self.mesh:
            return source.wired()
        if self.wiring is None:
            self.wiring = wire(self.mesh, self.strategy, 1.0 / self.mesh.size(), late=False)
        return self.wiring

    # -- the first use

    def arm(self) -> None:
        """Make the engine at the next call of any of the modules."""
        trigger = torch.compiler.disable(partial(_first_call, weakref.ref(self)))
        self._triggers = [m.register_forward_pre_hook(trigger, with_kwargs=True, prepend=True) for m in self.alive()]

    def disarm(self) -> None:
        for handle in self._triggers:
            handle.remove()
        self._triggers = []

    def attach(self, tree: Tree, unit: Unit) -> None:
        self.tree, self.unit = tree, unit
        self.disarm()
        for group in unit.groups:
            group.after_reduce = self.after_reduce
            if self.scale is not None:
                group.rescale(self.scale)

    def detach(self) -> None:
        self.lease.end()
        self.tree = self.unit = None
        self.arm()

    def push(self) -> None:
        """Tell the unit what was asked of the part since it was made."""
        if self.unit is None:
            return
        for group in self.unit.groups:
            group.after_reduce = self.after_reduce
            group.rescale(group.wiring.scale if self.scale is None else self.scale)
        here = self.unit.engine
        for phase, parts in self.ahead.items():
            units = [part.ensure() for part in (ref() for ref in parts) if part is not None]
            self.habits.ahead[phase] = [unit.index for unit in units if unit.engine is here]

    def hooks(self) -> Hooks:
        unit = self.ensure()
        return unit.engine.siblings[unit.index]

    def reshard(self) -> None:
        """Let full parameters go that no call under way needs; a backward gathers them again."""
        self.lease.end()
        if self.unit is not None:
            unit = self.unit
            unit.engine.drop_kept(lambda kept: kept.unit is unit)
            unit.stays = False
            unit.let_go()


class Lease:
    """Owns the full parameters that `unshard` shows, and the lease on them; ended by `reshard`, a forward or a backward."""

    def __init__(self, part: Part) -> None:
        self._part = weakref.ref(part)
        self.shown: list[nn.Parameter] | None = None
        self._hooks: list[Any] = []

    def begin(self) -> Unit:
        """Start to gather; `take` waits."""
        part = self._part()
        assert part is not None, "a lease lives in its part"
        unit = part.ensure()
        if self.shown is None and unit.engine.depth == 0 and _torch.current_graph_task() == -1:
            unit.engine.wiring.watch.check()
            unit.engine.recover()
            unit.drop_stale()
        with torch.inference_mode(False):
            unit.launch()
        return unit

    def take(self) -> None:
        """Show full parameters as plain leaves of the registry, gathered where nobody has begun to."""
        part, unit = self._part(), self.begin()
        assert part is not None, "a lease lives in its part"
        if self.shown is not None:
            return
        with torch.inference_mode(False), torch.no_grad():
            unit.acquire()
            self.shown = [
                nn.Parameter(full, requires_grad=p.sharded.requires_grad)
                for full, p in zip(unit.around([view.data for view in unit.views]), unit.params, strict=True)
            ]
        for i, (leaf, param) in enumerate(zip(self.shown, unit.params, strict=True)):
            vars(leaf).update(_torch.marks_of(param.sharded))
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(partial(_collect, weakref.ref(unit), i))
        unit.show(self.shown)
        ended = torch.compiler.disable(partial(_forward_ended, weakref.ref(self)))
        self._hooks = [m.register_forward_hook(ended, always_call=True) for m in part.alive()]

    def end(self) -> None:
        part, shown = self._part(), self.shown
        if shown is None or part is None or part.unit is None:
            return
        self.shown = None
        for handle in self._hooks:
            handle.remove()
        for leaf in shown:  # a graph that saved one finds its memory gone: autograd says so by the version counter
            torch.autograd.graph.increment_version(leaf)
        part.unit.hide(shown)
        part.unit.release()

    def forward_ended(self) -> None:
        part = self._part()
        if part is None:
            return
        keep = part.habits.keep
        if not (part.outermost() is part if keep is None else keep):
            self.end()

    def backward_ended(self) -> None:
        part = self._part()
        if part is not None and not part.habits.keep_on:
            self.end()


def _collect(of: weakref.ref[Unit], i: int, leaf: Tensor) -> None:
    """A gradient of a full parameter that was used outside of any forward: the end of the backward reduces it."""
    unit, grad = of(), leaf.grad
    leaf.grad = None
    if unit is not None and grad is not None:
        unit.engine.add_outside(unit, i, _torch.local_of(grad) if isinstance(grad, DTensor) else grad)


def _forward_ended(of: weakref.ref[Lease], *_: Any) -> None:
    lease = of()
    if lease is not None:
        lease.forward_ended()


def _first_call(of: weakref.ref[Part], module: nn.Module, args: Any, kwargs: Any) -> Any:
    part = of()
    assert part is not None, "a module's hook runs while the module holds its part"
    return part.hooks().before(module, args, kwargs)


def _dissolve(of: weakref.ref[Part]) -> None:
    part = of()
    if part is not None and part.tree is not None:
        part.tree.dissolve()


class Tree:
    """The engine of all parts in and below an outermost one. Dissolved where shards change their dtype, device or memory:
    then each parameter keeps what it has, and the next use makes another."""

    def __init__(self, top: Part) -> None:
        modules = top.alive()
        root = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        parts = list(parts_below([root]))
        self._parts = [weakref.ref(part) for part in parts]  # a model's memory goes with it, not with the collector
        with torch.no_grad(), torch.inference_mode(False):
            _check_meshes(root, top, parts)
            index = {id(m): i for i, part in enumerate(parts) for m in part.alive()}
            owned = [(o, _cut_of(o, top)) for o in _sharded(root, index, parts)]
            names = {id(m): name for name, m in root.named_modules()}
            chosen = [(names.get(id(part.alive()[0]), "?"), part.alive()[0]) for part in parts]
            wiring = top.wired()
            same_structure([o for o, _ in owned], chosen, top.strategy, wiring)
            self.engine = Engine(wiring, top.strategy, top.precision, Prefetch())
            for i, ((name, _), part) in enumerate(zip(chosen, parts, strict=True)):
                self._make_unit(part, [(o, c) for o, c in owned if o.owner == i], (i, name))
        for part in parts:
            part.push()
        leases = [weakref.ref(part.lease) for part in parts]
        self.engine.after_backward = partial(_backward_ended, leases)
        _torch.answer_anomaly_checks()
        self._finalizer = weakref.finalize(modules[0], self.engine.dismantle)

    def _make_unit(self, part: Part, mine: list[tuple[Owned, Cut]], place: tuple[int, str]) -> None:
        precision = part.precision
        groups, by_name = make_groups(mine, precision, self.engine.wiring, place), {o.names[0]: o for o, _ in mine}
        for group in groups:
            for param, local in zip(group.params, group.home.locals, strict=True):
                param.sharded = by_name[param.name].original
                param.around = _around(param.sharded, part.mesh.ndim)
                local.copy_(_torch.local_of(param.sharded))
                _torch.set_local(param.sharded, local)
        modules, inputs = part.alive(), precision.params if precision.cast_inputs else None
        unit = Unit(
            self.engine, place[1], modules[0], groups, inputs=inputs, outputs=precision.output, habits=part.habits
        )
        hooks = Hooks(unit)
        for module in modules:
            hooks.attach(module)
        part.attach(self, unit)

    def dissolve(self) -> None:
        """Take the engine off; shards stay where they are."""
        engine = self.engine
        if engine.depth or _torch.current_graph_task() != -1:
            raise UsageError(
                "shards cannot change their dtype, device or memory in a forward or backward; do it between steps."
            )
        if any(unit.holds_sums() for unit in engine.units):
            raise UsageError(
                "gradients have been added up without communication, and would be lost; run a backward that synchronises, or "
                "zero_grad(), before the parameters change their dtype, device or memory."
            )
        parts = [part for part in (ref() for ref in self._parts) if part is not None]
        for part in parts:
            part.lease.end()
        engine.reset()
        for part in parts:
            assert part.unit is not None, "a part of a tree has a unit"
            engine.siblings[part.unit.index].detach(part.alive())
            part.detach()
        self._finalizer.detach()
        engine.dismantle()


def _backward_ended(leases: Iterable[weakref.ref[Lease]]) -> None:
    for reference in leases:
        lease = reference()
        if lease is not None:
            lease.backward_ended()


def parts_below(modules: Iterable[nn.Module]) -> Iterator[Part]:
    """The parts of `modules` and of what lies below them, each once, outer ones first."""
    seen: set[int] = set()
    for root in modules:
        for module in root.modules():
            part = part_of(module)
            if part is not None and id(part) not in seen:
                seen.add(id(part))
                yield part


def part_of(module: nn.Module) -> Part | None:
    return module.__dict__.get(PART)


# -- building


def _check_meshes(root: nn.Module, top: Part, parts: list[Part]) -> None:
    for part in parts:
        if part.tree is not None:
            part.tree.dissolve()
        for name, lender in part.borrowed:
            if lender() not in parts:
                raise UsageError(
                    f"{name!r} of {_kind(part)} is tied to a parameter that was sharded with another module; shard a module that "
                    "holds both too, and call that one, so that one unit can own it."
                )
        if part.mesh != top.mesh:
            raise UsageError(
                f"{_kind(part)} is sharded on the mesh {part.mesh} and {_kind(top)} around it on {top.mesh}; one model has "
                "one mesh here: pass the same one in each call."
            )
    on_meta = [name for name, p in root.named_parameters() if isinstance(p, DTensor) and p.is_meta]
    if on_meta:
        raise UsageError(
            f"{len(on_meta)} parameters are on the meta device still, the first is {on_meta[0]!r}; materialise them before the "
            "first use: model.to_empty(device=...) and initialise, or load_state_dict(..., assign=True)."
        )


def _kind(part: Part) -> str:
    return " and ".join(type(m).__name__ for m in part.alive())


def _sharded(root: nn.Module, index: dict[int, int], parts: list[Part]) -> Iterator[Owned]:
    """The parameters that were cut. Others are left to the caller; a cut one must not have become an ordinary one."""
    ignored = {id(p) for part in parts for p in part.ignored}
    places = {place for part in parts for place in part.places}
    for o in owned_parameters(root, index):
        if isinstance(o.original, DTensor) and id(o.original) not in ignored:
            yield o
        elif any((id(ref()), attr) in places for ref, attr in o.places):
            raise UsageError(
                f"parameter {o.names[0]!r} was sharded and is a plain tensor now; assign DTensors, as distribute_tensor makes "
                "them, or load without assign=True."
            )


def _cut_of(o: Owned, top: Part) -> Cut:
    """How a DTensor is cut, from its placements: over its part's mesh, what an axis of tensor parallelism left of it."""
    param: Any = o.original
    mesh, placements, ndim = param.device_mesh, list(param.placements), top.mesh.ndim
    shape, own = tuple(param.shape), placements[ndim - 1] if len(placements) >= ndim else None
    is_ours = mesh == top.mesh
    if mesh.ndim == ndim + 1 and mesh.mesh_dim_names is not None:
        is_ours = mesh.mesh_dim_names[:ndim] == top.mesh.mesh_dim_names
        shape = Cut(shape, getattr(placements[ndim], "dim", None), mesh.size(ndim)).local_shape(
            mesh.get_local_rank(ndim)
        )
    c = Cut(shape, getattr(own, "dim", None), top.mesh.size(ndim - 1))
    if not is_ours or tuple(_torch.local_of(param).shape) != c.local_shape(top.mesh.get_local_rank(ndim - 1)):
        raise UsageError(
            f"parameter {o.names[0]!r} has the placements {param.placements} on {mesh}, and its model is sharded on {top.mesh}; "
            "assign DTensors of the placements that it had."
        )
    return c


def _around(param: Any, ndim: int) -> Callable[[Tensor], Tensor] | None:
    """Under tensor parallelism modules see a DTensor on that axis, around what is gathered over the others."""
    mesh = param.device_mesh
    if mesh.ndim == ndim:
        return None
    inner, placements = mesh[mesh.mesh_dim_names[ndim]], [param.placements[ndim]]
    shape, stride = param.shape, torch.empty(param.shape, device="meta").stride()

    def around(full: Tensor) -> Tensor:
        return DTensor.from_local(full, inner, placements, run_check=False, shape=shape, stride=stride)

    return around


def placements_of(c: Cut, mesh: DeviceMesh) -> list[Placement]:
    inner: Placement = Replicate() if c.dim is None else Shard(c.dim)
    return [Replicate(), inner] if mesh.ndim == 2 else [inner]
