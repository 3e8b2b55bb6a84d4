"""`shard`: check the arguments, cut the parameters, and attach the engine to the model."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from accordion import _torch
from accordion.config import Offload, Place, Precision, Strategy, debug_modes
from accordion.engine.context import ShardingContext, own_rows
from accordion.engine.engine import Engine
from accordion.engine.hooks import attached_to, engine_of
from accordion.engine.layout import Cut, cut
from accordion.engine.params import Param
from accordion.engine.unit import is_layer
from accordion.errors import UsageError
from accordion.offload.arena import Arena, ArenaMaker
from accordion.offload.budget import check_activations
from accordion.offload.tiers import activation_offload_of
from accordion.safety.refusals import refuse_additions
from accordion.safety.same_on_ranks import arguments_of, place_buffers, same_structure, same_values, settings_of
from accordion.shard.activations import checkpoint_forward
from accordion.shard.build import UnitSpec, build_engine, plan_groups, with_secondary, with_tiers
from accordion.shard.layouts import Layout, layout_of, local_part
from accordion.shard.own_meshes import check_choice, mesh_settings, own_meshes
from accordion.shard.replaced_parameters import replace, replace_by_subclass
from accordion.shard.subclasses import check_extended, extended_rows, is_extended, rows_mesh
from accordion.shard.topology import CommunicatorMaker, beside, communicator_over, mesh_for, wire
from accordion.sharding import Sharding
from accordion.state import attach_state_dict_hooks
from accordion.units import Owned, by_unit, choose_units, gathered_dtype, owned_parameters

log = logging.getLogger("accordion")


def shard(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    sharding: Sharding | None = None,
    *,
    sync: bool = False,
    debug: str | Iterable[str] = (),
    **fields: Any,
) -> nn.Module:
    """Shard `model` in place over the ranks of `mesh` and return it; each parameter becomes a DTensor of this rank's rows.

    Collective: call it on every rank. Make the optimizer after it, because the parameters are new objects.

    Args:
        model: with real parameters, equal on all ranks (checksums are compared, also of persistent buffers), or on the meta
            device; then its shards are zeros until they are loaded.
        mesh: 1-D, by default of all ranks; a hybrid strategy needs a 2-D one, ("replicate", "shard").
        sharding: how to shard; None: by `fields`.
        sync: take the first rank's values on all ranks; models of the other ranks may be on the meta device.
        debug: one or several of "streams", "order" and "finite". "streams" fills freed memory with NaN and delays collectives
            until they are waited for, to reveal a use after free or a missing wait. "order" lets ranks agree on each collective
            before it, as they otherwise do in the first step. "finite" names the unit and the phase in which NaN or inf first
            occurred. With any of them, every forward is checked for writes into full parameters through `.data`, which would be
            lost. Without them, only the first step of each unit is checked.
        fields: fields of `Sharding`, in place of `sharding`: `shard(model, strategy="shard_optim", precision="bf16")`.

    Raises `UsageError` for arguments that cannot be combined and for a model that cannot be sharded. Raises `DivergenceError`,
    which names the difference, on every rank if arguments or models differ between ranks.
    """
    if sharding is None:
        sharding = Sharding.from_config(fields)
    elif fields or not isinstance(sharding, Sharding):
        raise UsageError(
            f"shard() was given sharding={sharding!r} and the fields {', '.join(fields) or 'none'}; pass an accordion.Sharding, "
            "or its fields, such as strategy='full_shard'."
        )
    return shard_over(communicator_over, model, mesh, sharding, sync=sync, debug=debug)


def shard_over(
    make: CommunicatorMaker,
    model: nn.Module,
    mesh: DeviceMesh | None,
    sharding: Sharding,
    *,
    sync: bool = False,
    debug: str | Iterable[str] = (),
    make_arena: ArenaMaker = Arena,
) -> nn.Module:
    """Shard `model` in place and return it, as `shard` does. `make`: function that makes the communicator of a process group.
    `make_arena`: function that allocates host memory for offloaded state. The planner passes simulated ones."""
    modes = debug_modes(debug)
    check_choice(sharding.meshes, sharding.strategy, sync=sync)
    _check_model(model)
    with torch.no_grad(), torch.inference_mode(False):
        plan = _agree(make, model, mesh_for(mesh, sharding.strategy), sharding, sync, modes)
        engine = _attach_engine(make, make_arena, model, plan)
    checkpointing = sharding.checkpointing
    deep = [i for i, (_, module) in enumerate(plan.chosen) if i and not is_layer(module)]
    for i in deep[:: checkpointing.every] if checkpointing.every else ():
        checkpoint_forward(plan.chosen[i][1], checkpointing, activation_offload_of(engine, i))
    attach_state_dict_hooks(model)
    weakref.finalize(model, engine.dismantle)
    refuse_additions(model, engine)
    if not any(plan.mesh.get_coordinate() or ()):
        name, units = sharding.strategy.name, ", ".join(name or "(root)" for name, _ in plan.chosen)
        log.info("%s over %d ranks: %d units (%s)", name, plan.mesh.size(), len(plan.chosen), units)
    return model


def _check_model(model: nn.Module) -> None:
    """Raise `UsageError` if `model` cannot be sharded with any settings: it has no parameters, or a part of it is sharded
    already; an embedding is sparse or renormalized; or a parameter requires gradients and is not floating-point."""
    if engine_of(model) is not None:
        raise UsageError("this model, or a part of it, is sharded already; call shard() once, on the whole model.")
    if next(model.parameters(), None) is None:
        raise UsageError(f"{type(model).__name__} has no parameters, so there is nothing to shard.")
    for name, module in model.named_modules():
        attributes = vars(module)  # not getattr, which some libraries' modules override and which may then fail
        if attributes.get("sparse") is True:
            raise UsageError(
                f"module {name!r} asks for sparse gradients, which are not sharded; build it with sparse=False."
            )
        if attributes.get("max_norm") is not None:
            raise UsageError(
                f"module {name!r} renormalises its weight in its forward, which shards would not follow; do not use max_norm."
            )
    for name, param in model.named_parameters():
        if not param.dtype.is_floating_point and param.requires_grad:
            raise UsageError(
                f"parameter {name!r} is {param.dtype} and requires gradients; only floating ones are trained."
            )


class _Plan(NamedTuple):
    """The decisions on which ranks agree before any parameter is cut."""

    sharding: Sharding
    sync: bool
    modes: frozenset[str]
    mesh: DeviceMesh
    context: ShardingContext
    chosen: list[tuple[str, nn.Module]]  # name and module of each unit
    owned: list[Owned]
    own_meshes: list[DeviceMesh | None]  # by parameter; None for the model's
    precision: Precision
    precisions: list[Precision]  # by unit
    offloads: list[Offload]  # by unit


def _agree(
    make: CommunicatorMaker, model: nn.Module, mesh: DeviceMesh, sharding: Sharding, sync: bool, modes: frozenset[str]
) -> _Plan:
    """Return the plan of a `shard` call: units, meshes, policies, communicators. A collective that leaves the model unchanged.
    `sync`: as in `shard`; `modes`: its debug modes. Raises `UsageError` for a bad choice, `DivergenceError` if ranks differ."""
    strategy, precision = sharding.strategy, sharding.precision or Precision()
    sharding.check_secondary(mesh.size(mesh.ndim - 1))
    scale = 1.0 / mesh.size() if sharding.reduce_op == "mean" else 1.0
    context = wire(mesh, strategy, scale, late="streams" in modes, make=make)
    chosen = choose_units(model, sharding.units)
    owned = owned_parameters(model, {id(m): i for i, (_, m) in enumerate(chosen)})
    over, refused = list[DeviceMesh | None]([None] * len(owned)), None
    try:
        over = own_meshes(model, owned, sharding.meshes or {}, mesh, strategy)
    except UsageError as error:  # ranks report it to each other when they compare their models
        refused = error
    precisions = by_unit(chosen, precision, "Precision")
    offloads = by_unit(chosen, sharding.offload, "Offload")
    spread = [o for o, m in zip(owned, over, strict=True) if m is None and refused is None]
    check_extended(spread, strategy, offloads=any(o.offloads or o.asks for o in offloads), sync=sync)
    settings = arguments_of(mesh, sharding, sync, modes)
    settings |= settings_of([name for name, _ in chosen], precisions, offloads) | mesh_settings(over, owned)
    same_structure(owned, chosen, strategy, context, settings, refused)
    return _Plan(sharding, sync, modes, mesh, context, chosen, owned, over, precision, precisions, offloads)


def _attach_engine(make: CommunicatorMaker, make_arena: ArenaMaker, model: nn.Module, plan: _Plan) -> Engine:
    """Replace the model's parameters by shards, place its buffers, attach an engine to it, and return the engine. A collective.
    Raises `DivergenceError` on every rank if values differ, and `UsageError` if state cannot be offloaded as asked."""
    sharding, strategy, context = plan.sharding, plan.sharding.strategy, plan.context
    mesh, owned = plan.mesh, plan.owned
    contexts = {m: beside(context, m, strategy, make) for m in dict.fromkeys(plan.own_meshes) if m is not None}
    own_contexts = {id(o): contexts[m] for o, m in zip(owned, plan.own_meshes, strict=True) if m is not None}
    value_of = same_values(model, owned, context, plan.sync, own_contexts)
    layouts: dict[str, tuple[Owned, Layout]] = {}  # by the parameter's first name
    for o, m in zip(owned, plan.own_meshes, strict=True):
        c = _cut(o, plan.precisions[o.owner], own_contexts.get(id(o), context), sharding.state_block)
        layouts[o.names[0]] = o, layout_of(o.original, c, m or mesh, _placements(c, m or mesh, strategy))
    cuts = [[(o, layout.cut) for o, layout in layouts.values() if o.owner == i] for i in range(len(plan.chosen))]
    extended = [[pair for pair in pairs if is_extended(pair[0].original)] for pairs in cuts]
    plain = [[pair for pair in pairs if not is_extended(pair[0].original)] for pairs in cuts]
    planned = [
        plan_groups(pairs, each, lambda o: own_contexts.get(id(o)))
        for pairs, each in zip(plain, plan.precisions, strict=True)
    ]
    check_activations(plan.offloads, sharding.checkpoint_activations)
    context = with_tiers(context, plan.offloads, planned, sharding.offload, make_arena)
    planned = [with_secondary(groups, context, sharding, make) for groups in planned]
    for o, c in [pair for pairs in extended for pair in pairs]:
        part = extended_rows(o.original.detach(), c, context.shard.rank, context.device)
        o.original = replace_by_subclass(o, part, mesh, _placements(c, mesh, strategy))
    specs = [
        UnitSpec(
            name=name,
            modules=[module],
            precision=each,
            planned=planned[i],
            extended=extended[i],
            mesh=rows_mesh(mesh),
            casts_outputs=i == 0 or each is not plan.precision,
        )
        for i, ((name, module), each) in enumerate(zip(plan.chosen, plan.precisions, strict=True))
    ]
    precision, prefetch, fill = plan.precision, sharding.prefetch, partial(_fill, value_of, layouts)
    engine = build_engine(context, strategy, precision, prefetch, specs, owned, fill, debug=plan.modes)
    place_buffers(model, {id(m): p for (_, m), p in zip(plan.chosen, plan.precisions, strict=True)}, context, plan.sync)
    return engine


def entry_point(module: nn.Module, name: str) -> None:
    """Replace the method `name` of `module`, such as "generate" or "encode", by that of its class with a gather of full
    parameters as in `forward`. They may be freed when the method returns, so it must be no generator and no coroutine.
    `module`: the sharded model, or a module that is a unit. Raises `UsageError` for any other."""
    hooks = attached_to(module)
    if hooks is None:
        raise UsageError(
            f"{type(module).__name__} is no unit; entry points are methods of the sharded model or of a unit's module."
        )
    hooks.attach_method(module, name)


def _fill(
    value_of: Callable[[Owned], Tensor | None], layouts: Mapping[str, tuple[Owned, Layout]], param: Param, local: Tensor
) -> None:
    """Copy the value of a parameter into `local`, this rank's rows, and replace the parameter, in all modules, by a DTensor of
    these rows. Sets `sharded`, `around` and `is_filled` of `param`. `value_of`: returns the full value; None for a parameter on
    the meta device, whose rows stay as they are. `layouts`: name -> (parameter before sharding, its layout)."""
    o, layout = layouts[param.name]
    value = value_of(o)
    param.is_filled = value is not None
    if value is not None:
        local.copy_(own_rows(value, param.cut, param.context))
    param.sharded, param.around = replace(o, local, layout.mesh, layout.placements), layout.around


def _cut(o: Owned, precision: Precision, context: ShardingContext, state_block: int) -> Cut:
    shape = local_part(o.original).shape
    if is_extended(o.original):  # rows are what subclasses know how to cut
        return Cut(tuple(shape), 0, context.shard.num_ranks)
    itemsize, replicas = gathered_dtype(o, precision).itemsize, context.replicate.num_ranks if context.cut_twice else 1
    return cut(shape, context.shard.num_ranks, itemsize, state_block, replicas)


def _placements(c: Cut, mesh: DeviceMesh, strategy: Strategy) -> list[Placement]:
    if c.dim is None or strategy.optim is Place.REPLICATE:
        return [Replicate()] * mesh.ndim
    if strategy.optim_over_replicas:
        return [_torch.StridedShard(c.dim, split_factor=mesh.size(1)), Shard(c.dim)]
    return [Replicate(), Shard(c.dim)] if mesh.ndim == 2 else [Shard(c.dim)]
