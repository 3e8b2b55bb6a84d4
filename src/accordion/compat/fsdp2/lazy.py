"""Sharding module by module: each call cuts its parameters at once, and one engine for all is made at the first use."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from accordion import _torch
from accordion.compat.fsdp2.asked import PART, Asked
from accordion.engine.calls import transform_error
from accordion.engine.context import ShardingContext
from accordion.engine.engine import Engine
from accordion.engine.gather import FullBuffer
from accordion.engine.group import GroupPlan
from accordion.engine.hooks import Hooks, attached_to
from accordion.engine.layout import Cut
from accordion.engine.observer import Observer
from accordion.engine.order import Phase
from accordion.engine.params import Param
from accordion.engine.unit import Unit, UnitPolicy
from accordion.errors import UsageError
from accordion.safety.refusals import unguard
from accordion.same_on_ranks import same_structure
from accordion.shard.build import UnitSpec, build_engine, keep_parts, plan_groups, with_secondary, with_tiers
from accordion.shard.layouts import Layout
from accordion.shard.subclasses import check_tensor, is_extended, rows_mesh
from accordion.shard.topology import beside, wire
from accordion.units import Owned, owned_parameters


@dataclass(slots=True)
class PartSettings:
    """The values that the setters of `FSDPModule` have set on a part.

    Args:
        stays: the memory of full parameters stays when they are resharded.
        keeps_parts: full parameters stay sharded over the near ranks until the backward, if the call asked for it.
        finalizes: the caller says when backwards have ended.
        sync, all_reduce: of backwards; `UnitPolicy.reduces` follows from both.
        scale: of gradient sums, in place of one over the number of ranks.
    """

    stays: bool = False
    keeps_parts: bool = True
    finalizes: bool = False
    sync: bool = True
    all_reduce: bool = True
    scale: float | None = None
    after_reduce: Callable[[Tensor], None] | None = None


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call of a method that does nothing once its object is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = reference()
        return None if bound is None else bound(*args, **kwargs)

    return call


class Lease:
    """The full parameters that `unshard` shows, and the lease on them; ended by `reshard`, a forward or a backward."""

    def __init__(self, part: Part) -> None:
        self._part = weakref.ref(part)
        self.shown: list[nn.Parameter] | None = None
        self._hooks: list[Any] = []

    def begin(self) -> Unit:
        """Start to gather; `take` waits."""
        part = self._part()
        assert part is not None, "a part owns its lease"
        unit = part.ensure()
        engine = part.engine()
        if self.shown is None and engine.depth == 0 and not _torch.is_in_backward():
            engine.context.waiter.check()
            engine.recover()
            unit.drop_stale()
        with torch.inference_mode(False):
            engine.unshard(unit)
        return unit

    def take(self) -> None:
        """Show full parameters as plain leaves of the registry; gather them unless `begin` has."""
        part, unit = self._part(), self.begin()
        if part is None or self.shown is not None:
            return
        with torch.inference_mode(False), torch.no_grad():
            part.engine().acquire(unit)
            self.shown = [
                nn.Parameter(full, requires_grad=p.sharded.requires_grad)
                for full, p in zip(
                    unit.module_params.around([view.data for view in unit.views]), unit.params, strict=True
                )
            ]
        for i, (leaf, param) in enumerate(zip(self.shown, unit.params, strict=True)):
            vars(leaf).update(_torch.marks_of(param.sharded))
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(
                    partial(_collect, weakref.ref(part.engine()), weakref.ref(unit), i)
                )
        unit.module_params.show(self.shown)
        ended = torch.compiler.disable(weakly(self.forward_ended))
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
        part.unit.module_params.hide(shown)
        part.unit.release()

    def forward_ended(self, *_: Any) -> None:
        part = self._part()
        keep = part is None or part.unit_policy.keep
        if part is not None and not (part.is_outermost() if keep is None else keep):
            self.end()

    def backward_ended(self) -> None:
        part = self._part()
        if part is not None and not part.unit_policy.keep_on:
            self.end()


def _collect(by: weakref.ref[Engine], of: weakref.ref[Unit], i: int, leaf: Tensor) -> None:
    """Have the end of the backward reduce the gradient of a full parameter that was used outside of any forward."""
    engine, unit, grad = by(), of(), leaf.grad
    leaf.grad = None
    if engine is not None and unit is not None and grad is not None:
        engine.add_outside(unit, i, _torch.local_of(grad) if isinstance(grad, DTensor) else grad)


class UnshardLeases(Observer):
    """Ends the leases of one engine with its backwards."""

    def __init__(self, leases: Iterable[Lease]) -> None:
        self._ends = [weakly(lease.backward_ended) for lease in leases]

    def backward_ended(self, reduced: bool) -> None:
        for end in self._ends:
            end()


class Part:
    """What one call asked for: modules that are gathered together, how, and their unit while there is an engine.

    Owns the registration with its modules, the lease that `unshard` takes, and what its unit may do unlike others.
    """

    def __init__(self, modules: Sequence[nn.Module], asked: Asked) -> None:
        self.modules = [weakref.ref(m) for m in modules]
        self.asked, self.settings = asked, PartSettings()
        self.layouts: dict[tuple[int, str], Layout] = {}  # of what was cut, by id of the module and name in it
        self.borrowed: list[tuple[str, weakref.ref[Part]]] = []  # parameters tied to one that another part has cut
        self.unit_policy = UnitPolicy(keep=asked.keep, on_convert=weakly(self.dissolve))
        self.ahead: dict[Phase, list[weakref.ref[Part]]] = {}
        self.handle: object = None  # of a `finalize_backward` that nobody has waited for
        self.context: ShardingContext | None = None
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
            below.dissolve()  # if it was used before it had a part around it
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

    def is_outermost(self) -> bool:
        return self.outermost() is self

    def engine(self) -> Engine:
        """The one of the tree in which the part has its unit."""
        assert self.tree is not None, "a part with a unit lies in a tree"
        return self.tree.engine

    def ensure(self) -> Unit:
        """The unit, with the engine of the whole tree made where there is none. Collective then."""
        if self.unit is None:
            Tree(self.outermost())
        assert self.unit is not None, "a part lies in the tree of its outermost part"
        return self.unit

    def wired(self) -> ShardingContext:
        """Streams and communicators, made once and kept from engine to engine. Collective the first time."""
        source = None if self.shares is None else self.shares()
        mesh, strategy = self.asked.mesh, self.asked.sharding.strategy
        if source is not None and source.asked.mesh == mesh:
            return source.wired()
        if self.context is None:
            self.context = wire(mesh, strategy, 1.0 / mesh.size(), late=False)
        return self.context

    # -- the first use

    def arm(self) -> None:
        """Make the engine at the next call of any of the modules."""
        trigger = torch.compiler.disable(weakly(self._first_call))
        self._triggers = [m.register_forward_pre_hook(trigger, with_kwargs=True, prepend=True) for m in self.alive()]

    def _first_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return self.hooks().before(module, args, kwargs)

    def disarm(self) -> None:
        for handle in self._triggers:
            handle.remove()
        self._triggers = []

    def dissolve(self) -> None:
        """Take the engine off, if there is one; the next use makes another."""
        if self.tree is not None:
            self.tree.dissolve()

    def push(self) -> None:
        """Tell the unit what was asked of the part since it was made."""
        if self.unit is None:
            return
        settings = self.settings
        for group in self.unit.groups:
            group.after_reduce = settings.after_reduce
            if isinstance(group.full_buffer, FullBuffer):
                group.full_buffer.stay(settings.stays)
            keep_parts(group, settings.keeps_parts)
            group.rescale(group.context.scale if settings.scale is None else settings.scale)
        here = self.tree
        for phase, parts in self.ahead.items():
            others = [part for part in (ref() for ref in parts) if part is not None]
            units = [(part.ensure(), part.tree) for part in others]
            self.unit_policy.ahead[phase] = [unit.index for unit, tree in units if tree is here]

    def settle(self) -> None:
        """Show shards, as the last optimizer step has left them: with offload it may be under way."""
        self.lease.end()
        if self.unit is not None:
            self.engine().synchronize()

    def hooks(self) -> Hooks:
        self.ensure()
        hooks = attached_to(self.alive()[0])
        assert hooks is not None, "the modules of a unit name its hooks"
        return hooks

    def reshard(self) -> None:
        """Let full parameters go that no call under way needs; a backward gathers them again."""
        self.lease.end()
        if self.unit is not None and self.tree is not None:
            unit = self.unit
            self.tree.engine.drop_kept(lambda kept: kept.unit is unit)
            unit.keep_until_stale = False
            unit.reshard()


class Tree:
    """The engine of all parts in and below an outermost one. Dissolved where shards change their dtype, device or memory:
    then each parameter keeps what it has, and the next use makes another."""

    def __init__(self, top: Part) -> None:
        if _torch.transforms_active():
            raise transform_error()
        modules = top.alive()
        root = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        parts = list(parts_below([root]))
        self._parts = [weakref.ref(part) for part in parts]  # a model's memory goes with it, not with the collector
        with torch.no_grad(), torch.inference_mode(False):
            _check_meshes(root, top, parts)
            index = {id(m): i for i, part in enumerate(parts) for m in part.alive()}
            owned = list(_sharded(root, index, parts))
            for o, _ in owned:  # torch looks for the hooks of a local tensor here too, and not in `fully_shard`
                check_tensor(
                    o.names[0], _torch.local_of(o.original), offloads=parts[o.owner].asked.sharding.offload.offloads
                )
            names = {id(m): name for name, m in root.named_modules()}
            chosen = [(names.get(id(part.alive()[0]), "?"), part.alive()[0]) for part in parts]
            context = top.wired()
            strategy = top.asked.sharding.strategy
            same_structure([o for o, _ in owned], chosen, strategy, context)
            by_unit = [[(o, layout) for o, layout in owned if o.owner == i] for i in range(len(parts))]
            own = {
                mesh: replace(beside(context, mesh), scale=1.0 / mesh.size())  # as torch's
                for mesh in _other_meshes(top, [layout for _, layout in owned])
            }
            planned = [_planned(mine, part, context, own) for mine, part in zip(by_unit, parts, strict=True)]
            context = with_tiers(context, [part.asked.sharding.offload for part in parts], planned)
            by_name = {o.names[0]: (o, layout) for o, layout in owned}

            def fill(i: int, param: Param, local: Tensor) -> None:
                o, layout = by_name[param.name]
                param.sharded, param.around = o.original, layout.around
                local.copy_(_torch.local_of(param.sharded))
                _torch.set_local(param.sharded, local)

            specs = [
                UnitSpec(
                    name=name,
                    modules=part.alive(),
                    precision=part.asked.precision,
                    planned=planned[i],
                    extended=[(o, layout.cut) for o, layout in by_unit[i] if is_extended(o.original)],
                    mesh=rows_mesh(part.asked.mesh),
                    context=own.get(part.asked.mesh),
                    extension_policy=part.asked.policy,
                    unit_policy=part.unit_policy,
                )
                for i, ((name, _), part) in enumerate(zip(chosen, parts, strict=True))
            ]
            every = [o for o, _ in owned]
            prefetch = top.asked.sharding.prefetch
            self.engine = build_engine(context, strategy, top.asked.precision, prefetch, specs, every, fill)
            for unit, part in zip(self.engine.units, parts, strict=True):
                for param in unit.params:
                    param.around = by_name[param.name][1].around
                part.tree, part.unit = self, unit
                part.disarm()
        for part in parts:
            part.push()
        self.engine.observers.attach(UnshardLeases([part.lease for part in parts]))
        self._finalizer = weakref.finalize(modules[0], self.engine.dismantle)

    def dissolve(self) -> None:
        """Take the engine off; shards stay where they are."""
        engine = self.engine
        if engine.depth or _torch.is_in_backward():
            raise UsageError(
                "shards cannot change their dtype, device or memory in a forward or backward; do it between steps."
            )
        if any(unit.local_sums.any_held() for unit in engine.units):
            raise UsageError(
                "gradients have been added up without communication, and would be lost; run a backward that synchronises, or "
                "zero_grad(), before the parameters change their dtype, device or memory."
            )
        parts = [part for part in (ref() for ref in self._parts) if part is not None]
        engine.synchronize()
        for part in parts:
            part.lease.end()
        engine.reset()
        for part in parts:
            hooks = part.hooks()
            unguard(hooks, part.alive())
            hooks.detach(part.alive())
            part.tree = part.unit = None
            part.arm()
        self._finalizer.detach()
        engine.dismantle()


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
        part.dissolve()
        for name, lender in part.borrowed:
            if lender() not in parts:
                raise UsageError(
                    f"{name!r} of {_kind(part)} is tied to a parameter that was sharded with another module; shard a module that "
                    "holds both too, and call that one, so that one unit can own it."
                )
    on_meta = [name for name, p in root.named_parameters() if isinstance(p, DTensor) and p.is_meta]
    if on_meta:
        raise UsageError(
            f"{len(on_meta)} parameters are on the meta device still, the first is {on_meta[0]!r}; materialise them before the "
            "first use: model.to_empty(device=...) and initialise, or load_state_dict(..., assign=True)."
        )


def _other_meshes(top: Part, layouts: Iterable[Layout]) -> list[DeviceMesh]:
    """Those of parameters that do not lie over the ranks of the model, in the order of these."""
    found = [mesh for mesh in dict.fromkeys(layout.over for layout in layouts) if mesh != top.asked.mesh]
    everybody = set(_torch.ranks_of(top.asked.mesh))
    for mesh in found:
        beyond = sorted(set(_torch.ranks_of(mesh)) - everybody)
        if beyond or mesh.device_type != top.asked.mesh.device_type:
            raise UsageError(
                f"a parameter inside of {_kind(top)} is sharded on the mesh {mesh}, and {_kind(top)} on {top.asked.mesh}; a mesh "
                "of its own has ranks and devices of that around it: shard the outermost module on all of them."
            )
    return found


def _planned(
    mine: Sequence[tuple[Owned, Layout]],
    part: Part,
    context: ShardingContext,
    own: Mapping[DeviceMesh, ShardingContext],
) -> list[GroupPlan]:
    """The groups of a unit: by dtype, and by the ranks over which parameters lie. A collective where some stay sharded."""
    alike: dict[tuple[ShardingContext | None, bool], list[tuple[Owned, Cut]]] = {}
    for o, layout in mine:
        if not is_extended(o.original):
            alike.setdefault((own.get(layout.over), layout.keeps_dtype), []).append((o, layout.cut))
    planned: list[GroupPlan] = []
    for (over, keeps_dtype), pairs in alike.items():
        precision = replace(part.asked.precision, params=None) if keeps_dtype else part.asked.precision
        groups = [group._replace(context=over) for group in plan_groups(pairs, precision)]
        groups = with_secondary(groups, context, part.asked.sharding)
        for group in groups:
            # In torch 2.15 the sum, if nobody names its dtype, has that to which those of the gradients are promoted. A gradient
            # of any dtype (`grad_dtype` None) comes in that of the computation.
            dtypes = [param.grad_dtype or group.dtype for param in group.params if param.requires_grad]
            if dtypes and precision.reduce is None and _torch.reduces_in_own_dtype():
                group = group._replace(reduce_dtype=reduce(torch.promote_types, dtypes))
            planned.append(group)
    return planned


def _kind(part: Part) -> str:
    return " and ".join(type(m).__name__ for m in part.alive())


def _sharded(root: nn.Module, index: dict[int, int], parts: list[Part]) -> Iterator[tuple[Owned, Layout]]:
    """Yield each parameter that was cut, and how, which is as it is placed. Others are left to the caller.

    Raises `UsageError` if another tensor was assigned since.
    """
    layouts = {place: layout for part in parts for place, layout in part.layouts.items()}
    ignored = {id(p) for part in parts for p in part.asked.ignored}
    for o in owned_parameters(root, index):
        param: Any = o.original
        places = ((id(ref()), attr) for ref, attr in o.places)
        layout = next((layouts[place] for place in places if place in layouts), None)
        if not isinstance(param, DTensor) or id(param) in ignored:
            if layout is not None:
                raise UsageError(
                    f"parameter {o.names[0]!r} was sharded and is a plain tensor now; assign DTensors, as distribute_tensor "
                    "makes them, or load without assign=True."
                )
            continue
        if layout is None:
            raise UsageError(
                f"parameter {o.names[0]!r} is a DTensor that fully_shard did not cut: it came later, or in the place of an "
                "ignored one; leave such parameters plain, or build and shard the model again."
            )
        same = param.device_mesh == layout.mesh and tuple(param.placements) == layout.placements
        if not same or tuple(_torch.local_of(param).shape) != layout.local_shape:
            raise UsageError(
                f"parameter {o.names[0]!r} has the placements {param.placements} on {param.device_mesh}, and it was sharded as "
                f"{layout.placements} on {layout.mesh}; assign DTensors of the placements that it had."
            )
        yield o, layout
