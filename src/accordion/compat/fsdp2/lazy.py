"""Engine of `fully_shard`: each call shards its parameters at once, and the first use builds one engine for all calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from accordion import _torch
from accordion.compat.fsdp2.arguments import PART, FullyShardArguments
from accordion.engine.calls import transform_error
from accordion.engine.context import ShardingContext
from accordion.engine.engine import Engine
from accordion.engine.full_buffer import FullBuffer
from accordion.engine.group import GroupPlan
from accordion.engine.hooks import Hooks, attached_to
from accordion.engine.layout import Cut
from accordion.engine.observer import GATHERED, Observer
from accordion.engine.order import Phase
from accordion.engine.params import Param
from accordion.engine.unit import Unit, UnitPolicy
from accordion.errors import UsageError
from accordion.safety.refusals import unguard
from accordion.safety.same_on_ranks import same_structure
from accordion.shard.build import UnitSpec, build_engine, plan_groups, with_secondary, with_tiers
from accordion.shard.layouts import Layout
from accordion.shard.subclasses import check_tensor, is_extended, rows_mesh
from accordion.shard.topology import beside, wire
from accordion.units import Owned, owned_parameters

T = TypeVar("T")


@dataclass(slots=True)
class PartSettings:
    """Settings of the modules of one `fully_shard` call. Setters of `FSDPModule` change and apply them.

    Args:
        stays: do not free the memory of full parameters when they are resharded.
        keeps_parts: allow resharding over fewer ranks after the forward, if `reshard_after_forward` is an int.
        sync, all_reduce: reduce gradients in a backward: on a 1-D mesh if `sync` is True, on a 2-D mesh if both are.
        scale: factor for gradient sums; None: one over the number of ranks.
        after_reduce: hook that gets each reduced buffer of gradients.
    """

    stays: bool = False
    keeps_parts: bool = True
    sync: bool = True
    all_reduce: bool = True
    scale: float | None = None
    after_reduce: Callable[[Tensor], None] | None = None


def living(references: Iterable[weakref.ref[T]]) -> list[T]:
    return [each for each in (reference() for reference in references) if each is not None]


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method through a weak reference; after its object is deleted, it returns None."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = reference()
        return None if bound is None else bound(*args, **kwargs)

    return call


def _collect(by: weakref.ref[Engine], of: weakref.ref[Unit], i: int, leaf: Tensor) -> None:
    """Hook of `leaf`, the full parameter with index `i` of the unit `of`: move the accumulated `leaf.grad` to the engine `by`,
    which reduces it like one from outside of the unit's forward. Drop it if the engine or the unit is deleted."""
    engine, unit, grad = by(), of(), leaf.grad
    leaf.grad = None
    if engine is not None and unit is not None and grad is not None:
        engine.add_outside(unit, i, _torch.local_of(grad) if isinstance(grad, DTensor) else grad)


class UnshardEnds(Observer):
    """Observer, attached by `Tree`, that ends explicit unshards of `parts` after a backward unless `unit_policy.keep_on`."""

    def __init__(self, parts: Sequence[weakref.ref[Part]]) -> None:
        self._parts = parts

    def backward_ended(self, reduced: bool) -> None:
        for part in living(self._parts):
            if not part.unit_policy.keep_on:
                part.end_unshard()


class Part:
    """One call of `fully_shard`: modules that are gathered together, arguments, and the unit, which `ensure` builds and
    returns. The constructor stores the part in its modules, removes the engines of parts inside them, and registers hooks with
    which the next forward builds an engine. After changes of `settings` or `ahead` (parts to prefetch), call `push`."""

    def __init__(self, modules: Sequence[nn.Module], arguments: FullyShardArguments) -> None:
        self.modules = [weakref.ref(m) for m in modules]
        self.arguments, self.settings = arguments, PartSettings()
        self.layouts: dict[tuple[int, str], Layout] = {}  # of each sharded parameter, by (id of the module, attribute)
        self.unit_policy = UnitPolicy(keep=arguments.keep, on_convert=weakly(self.dissolve))
        self.ahead: dict[Phase, list[weakref.ref[Part]]] = {}  # parts to prefetch in each phase
        self.context: ShardingContext | None = None
        self.shares: weakref.ref[Part] | None = None  # the part whose streams and communicators are used
        self.tree: Tree | None = None
        self.unit: Unit | None = None
        self.outer: weakref.ref[Part] | None = None
        self._triggers: list[Any] = []
        self._shown: list[nn.Parameter] | None = None  # full parameters that `unshard` has put into the modules
        self._unshard_hooks: list[Any] = []
        for module in modules:
            module.__dict__[PART] = self
        for below in parts_below(modules):
            if below is not self and below.outer is None:
                below.outer = weakref.ref(self)
            below.dissolve()  # the inner part has an engine already if it was used before this call
        self.arm()

    def withdraw(self) -> None:
        """Remove this part and its hooks from the modules, because `fully_shard` raises an error."""
        self.disarm()
        for module in self.alive():
            del module.__dict__[PART]

    def alive(self) -> list[nn.Module]:
        return living(self.modules)

    def outermost(self) -> Part:
        outer = None if self.outer is None else self.outer()
        return self if outer is None else outer.outermost()

    def is_outermost(self) -> bool:
        return self.outermost() is self

    def engine(self) -> Engine:
        assert self.tree is not None, "a part with a unit belongs to a tree"
        return self.tree.engine

    def ensure(self) -> Unit:
        """Return the unit of this part. Builds a missing engine, for the outermost part and all inside it (collective)."""
        if self.unit is None:
            Tree(self.outermost())
        assert self.unit is not None, "a part belongs to the tree of its outermost part"
        return self.unit

    def wired(self) -> ShardingContext:
        """Return the context (streams, communicators) for engines of this part: that of the part `shares` if both meshes are
        equal, else this part's own. Collective the first time, because communicators are created."""
        source = None if self.shares is None else self.shares()
        mesh = self.arguments.mesh
        if source is not None and source.arguments.mesh == mesh:
            return source.wired()
        if self.context is None:
            self.context = wire(mesh, self.arguments.sharding.strategy, 1.0 / mesh.size(), late=False)
        return self.context

    # -- the first use

    def arm(self) -> None:
        """Register hooks that build the engine at the next forward of any of the modules."""
        trigger = torch.compiler.disable(weakly(self._first_call))
        self._triggers = [m.register_forward_pre_hook(trigger, with_kwargs=True, prepend=True) for m in self.alive()]

    def _first_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return self.hooks().before(module, args, kwargs)

    def disarm(self) -> None:
        for handle in self._triggers:
            handle.remove()
        self._triggers = []

    def dissolve(self) -> None:
        """Remove the engine, if there is one, from this part and all that share the engine: parameters stay sharded, and the
        next use builds another engine. Raises `UsageError` in a forward or backward, or if there are unreduced gradients."""
        if self.tree is not None:
            self.tree.dissolve()

    def push(self) -> None:
        """Apply `settings` and the parts to prefetch (`ahead`) to the unit. Do nothing if there is no unit yet."""
        if self.unit is None:
            return
        settings = self.settings
        for group in self.unit.groups:
            group.after_reduce = settings.after_reduce
            if isinstance(group.full_buffer, FullBuffer):
                group.full_buffer.stay(settings.stays)
            group.keep_slices(settings.keeps_parts)
            group.rescale(group.context.scale if settings.scale is None else settings.scale)
        for phase, parts in self.ahead.items():
            units = [(part.ensure(), part.tree) for part in living(parts)]
            self.unit_policy.ahead[phase] = [unit.index for unit, tree in units if tree is self.tree]

    def hooks(self) -> Hooks:
        self.ensure()
        hooks = attached_to(self.alive()[0])
        assert hooks is not None, "the modules of a unit name its hooks"
        return hooks

    # -- explicit unshards

    def begin_unshard(self) -> Unit:
        """Start the all-gather of the unit, and return the unit without waiting. Collective. Builds a missing engine. Outside
        of a forward or backward, first drops outdated full parameters and recovers from an earlier exception."""
        unit = self.ensure()
        engine = self.engine()
        if self._shown is None and engine.depth == 0 and not _torch.is_in_backward():
            engine.context.waiter.check()
            engine.recover()
            unit.drop_stale()
        with torch.inference_mode(False):
            engine.allocate(GATHERED, unit.unshard)
        return unit

    def unshard(self) -> None:
        """Gather parameters, wait, and register them in the modules as plain leaf tensors, until `reshard` or the end of a
        forward or backward that frees them. Their gradients go to the engine. Collective. Builds a missing engine."""
        unit, engine = self.begin_unshard(), self.engine()
        if self._shown is not None:
            return
        with torch.inference_mode(False), torch.no_grad():
            engine.acquire(unit)
            fulls = unit.module_params.around([view.data for view in unit.views])
            self._shown = [
                nn.Parameter(full, requires_grad=param.sharded.requires_grad)
                for full, param in zip(fulls, unit.params, strict=True)
            ]
        for i, (leaf, param) in enumerate(zip(self._shown, unit.params, strict=True)):
            vars(leaf).update(_torch.marks_of(param.sharded))
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(partial(_collect, weakref.ref(engine), weakref.ref(unit), i))
        unit.module_params.show(self._shown)
        ended = torch.compiler.disable(weakly(self._forward_ended))
        self._unshard_hooks = [m.register_forward_hook(ended, always_call=True) for m in self.alive()]

    def _forward_ended(self, *_: Any) -> None:
        keep = self.unit_policy.keep
        if not (self.is_outermost() if keep is None else keep):
            self.end_unshard()

    def end_unshard(self) -> None:
        """Register the shards in the modules again, and free the full parameters. Do nothing unless `unshard` was called."""
        shown = self._shown
        if shown is None or self.unit is None:
            return
        self._shown = None
        for handle in self._unshard_hooks:
            handle.remove()
        # Their memory is freed below. A graph that saved one must fail by its version counter, and not read freed memory.
        for leaf in shown:
            torch.autograd.graph.increment_version(leaf)
        self.unit.module_params.hide(shown)
        self.unit.release()

    def settle(self) -> None:
        """End an explicit unshard, and wait for an optimizer step in progress, which exists only with offload."""
        self.end_unshard()
        if self.unit is not None:
            self.engine().synchronize()

    def reshard(self) -> None:
        """Free the full parameters, unless a call in progress needs them. A backward that needs them gathers again."""
        self.end_unshard()
        if self.unit is not None and self.tree is not None:
            unit = self.unit
            self.tree.engine.drop_kept(lambda lease: lease.unit is unit)
            unit.keep_until_stale = False
            unit.reshard()


class Tree:
    """The engine of an outermost part (a `fully_shard` call) and all parts inside it. The constructor builds the engine, a
    collective. `dissolve` removes it before shards change dtype, device or memory."""

    def __init__(self, top: Part) -> None:
        if _torch.transforms_active():
            raise transform_error()
        modules = top.alive()
        root = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        parts = parts_below([root])
        self._parts = [weakref.ref(part) for part in parts]  # weak, so that a deleted model is freed at once
        with torch.no_grad(), torch.inference_mode(False):
            owned = _checked_parameters(root, parts)
            self.engine = _engine_of(root, top, parts, owned)
            arounds = {o.names[0]: layout.around for o, layout in owned}
            for unit, part in zip(self.engine.units, parts, strict=True):
                for param in unit.params:
                    param.around = arounds[param.name]
                part.tree, part.unit = self, unit
                part.disarm()
        for part in parts:
            part.push()
        self.engine.observers.attach(UnshardEnds(self._parts))
        self._finalizer = weakref.finalize(modules[0], self.engine.dismantle)

    def dissolve(self) -> None:
        """Wait for work in progress and remove the engine. Parameters stay sharded, and the next use builds another tree.
        Raises `UsageError` in a forward or backward, or if there are unreduced gradients."""
        engine = self.engine
        if engine.depth or _torch.is_in_backward():
            raise UsageError(
                "shards cannot change dtype, device or memory in a forward or backward, only between steps."
            )
        if any(unit.local_sums.any_held() for unit in engine.units):
            raise UsageError(
                "this would lose gradients that were accumulated and not reduced. Run a backward that synchronises, or "
                "zero_grad(), before the parameters change their dtype, device or memory."
            )
        parts = living(self._parts)
        engine.synchronize()
        for part in parts:
            part.end_unshard()
        engine.reset()
        for part in parts:
            hooks = part.hooks()
            unguard(hooks, part.alive())
            hooks.detach(part.alive())
            part.tree = part.unit = None
            part.arm()
        self._finalizer.detach()
        engine.dismantle()


def parts_below(modules: Iterable[nn.Module]) -> list[Part]:
    """Return the parts (`fully_shard` calls) of `modules` and of their submodules, each once, outer parts first."""
    parts = (part_of(module) for root in modules for module in root.modules())
    return list(dict.fromkeys(part for part in parts if part is not None))


def part_of(module: nn.Module) -> Part | None:
    return module.__dict__.get(PART)


# -- building


def _checked_parameters(root: nn.Module, parts: list[Part]) -> list[tuple[Owned, Layout]]:
    """Remove the engines of `parts`, before one engine is built for all of them. Return (parameter, layout) for each sharded
    parameter of `parts`. Raises `UsageError` in a forward or backward, if there are unreduced gradients, and if a parameter is
    on the meta device, or was replaced since `fully_shard` by a tensor of another kind or placement."""
    for part in parts:
        part.dissolve()
    on_meta = [name for name, p in root.named_parameters() if isinstance(p, DTensor) and p.is_meta]
    if on_meta:
        raise UsageError(
            f"{len(on_meta)} parameters are still on the meta device, the first is {on_meta[0]!r}. Materialise them before the "
            "first use: model.to_empty(device=...) and initialise, or load_state_dict(..., assign=True)."
        )
    index = {id(m): i for i, part in enumerate(parts) for m in part.alive()}
    owned = list(_sharded(root, index, parts))
    for o, _ in owned:  # again, because `load_state_dict(assign=True)` may have brought other tensors
        offloads = parts[o.owner].arguments.sharding.offload.offloads
        check_tensor(o.names[0], _torch.local_of(o.original), offloads=offloads)
    return owned


def _engine_of(root: nn.Module, top: Part, parts: list[Part], owned: list[tuple[Owned, Layout]]) -> Engine:
    """Build the engine of `parts`, one unit for each, and return it. The shards in `owned` move into its memory. Collective."""
    names = {id(m): name for name, m in root.named_modules()}
    chosen = [(names.get(id(part.alive()[0]), "?"), part.alive()[0]) for part in parts]
    context, strategy = top.wired(), top.arguments.sharding.strategy
    every = [o for o, _ in owned]
    same_structure(every, chosen, strategy, context)
    by_unit = [[(o, layout) for o, layout in owned if o.owner == i] for i in range(len(parts))]
    # Gradients of parameters on a mesh of fewer ranks are divided by its size, as in torch.
    contexts = {
        mesh: replace(beside(context, mesh), scale=1.0 / mesh.size())
        for mesh in _other_meshes(top, [layout for _, layout in owned])
    }
    planned = [_planned(pairs, part, context, contexts) for pairs, part in zip(by_unit, parts, strict=True)]
    context = with_tiers(context, [part.arguments.sharding.offload for part in parts], planned)
    by_name = {o.names[0]: (o, layout) for o, layout in owned}

    def fill(param: Param, local: Tensor) -> None:
        o, layout = by_name[param.name]
        param.sharded, param.around = o.original, layout.around
        local.copy_(_torch.local_of(param.sharded))
        _torch.set_local(param.sharded, local)

    specs = [
        UnitSpec(
            name=name,
            modules=part.alive(),
            precision=part.arguments.precision,
            planned=planned[i],
            extended=[(o, layout.cut) for o, layout in by_unit[i] if is_extended(o.original)],
            mesh=rows_mesh(part.arguments.mesh),
            context=contexts.get(part.arguments.mesh),
            extension_policy=part.arguments.policy,
            unit_policy=part.unit_policy,
        )
        for i, ((name, _), part) in enumerate(zip(chosen, parts, strict=True))
    ]
    return build_engine(context, strategy, top.arguments.precision, top.arguments.sharding.prefetch, specs, every, fill)


def _other_meshes(top: Part, layouts: Iterable[Layout]) -> list[DeviceMesh]:
    """Return the data-parallel meshes of `layouts` that are not the mesh of `top`, the outermost part. Raises `UsageError` if one
    has ranks or devices that the mesh of `top` lacks."""
    whole = top.arguments.mesh
    meshes = [mesh for mesh in dict.fromkeys(layout.over for layout in layouts) if mesh != whole]
    for mesh in meshes:
        if set(_torch.ranks_of(mesh)) - set(_torch.ranks_of(whole)) or mesh.device_type != whole.device_type:
            kind = " and ".join(type(m).__name__ for m in top.alive())
            raise UsageError(
                f"a parameter inside {kind} is sharded on the mesh {mesh}, which has ranks or devices that the mesh of {kind}, "
                f"{whole}, lacks. Shard the outermost module on the ranks of all meshes inside it."
            )
    return meshes


def _planned(
    parameters: Sequence[tuple[Owned, Layout]],
    part: Part,
    context: ShardingContext,
    contexts: Mapping[DeviceMesh, ShardingContext],
) -> list[GroupPlan]:
    """Return the groups of the parameters of one unit, one for each dtype and mesh; tensor subclasses are left out. `context`:
    that of the model's mesh. `contexts`: mesh -> context for other meshes. Collective if `reshard_after_forward` is an int."""
    by_context: dict[ShardingContext | None, list[tuple[Owned, Cut]]] = {}
    precision = part.arguments.precision
    for o, layout in parameters:
        if not is_extended(o.original):
            by_context.setdefault(contexts.get(layout.over), []).append((o, layout.cut))
    planned: list[GroupPlan] = []
    for over, pairs in by_context.items():
        groups = [group._replace(context=over) for group in plan_groups(pairs, precision)]
        for group in with_secondary(groups, context, part.arguments.sharding):
            # Since torch 2.15, without a reduce_dtype, gradients are summed in the dtype that their dtypes promote to. A
            # parameter whose `grad_dtype` is None has gradients in the dtype of the computation.
            dtypes = [param.grad_dtype or group.dtype for param in group.params if param.requires_grad]
            if dtypes and precision.reduce is None and _torch.reduces_in_own_dtype():
                group = group._replace(reduce_dtype=reduce(torch.promote_types, dtypes))
            planned.append(group)
    return planned


def _sharded(root: nn.Module, index: dict[int, int], parts: list[Part]) -> Iterator[tuple[Owned, Layout]]:
    """Yield (parameter, layout) for each sharded parameter; plain parameters that were never sharded, and ignored ones, are
    left out. `index`: id of a module -> index of its part. Raises `UsageError` if since `fully_shard` a sharded parameter was
    replaced by a tensor of another kind or placement, or a DTensor was added."""
    layouts = {place: layout for part in parts for place, layout in part.layouts.items()}
    ignored = {id(p) for part in parts for p in part.arguments.ignored}
    for o in owned_parameters(root, index):
        param: Any = o.original
        places = ((id(ref()), attr) for ref, attr in o.places)
        layout = next((layouts[place] for place in places if place in layouts), None)
        is_sharded = isinstance(param, DTensor) and id(param) not in ignored
        if layout is None and not is_sharded:
            continue
        if layout is None:
            raise UsageError(
                f"parameter {o.names[0]!r} is a DTensor that fully_shard did not create: it was added later, or replaces an "
                "ignored parameter. Use plain tensors for such parameters, or build and shard the model again."
            )
        same = is_sharded and param.device_mesh == layout.mesh and tuple(param.placements) == layout.placements
        if not same or tuple(_torch.local_of(param).shape) != layout.cut.local_shape(layout.rank):
            placed = "a plain tensor"
            if isinstance(param, DTensor):
                placed = f"placed as {param.placements} on {param.device_mesh}"
            raise UsageError(
                f"parameter {o.names[0]!r} was sharded as {layout.placements} on {layout.mesh}, but it is {placed} now. Assign a "
                "DTensor with those placements, for example from distribute_tensor."
            )
        yield o, layout
