"""`shard`: validate what was asked, cut the parameters, and attach the engine to the model."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import socket
import weakref
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from accordion import _torch
from accordion.config import (
    FULL_SHARD,
    Offload,
    Place,
    Precision,
    Prefetch,
    Strategy,
    check_kinds,
    checkpointing_named,
    debug_modes,
)
from accordion.engine.autograd import engine_of
from accordion.engine.communicator import Communicator, alone, device_type_of_job, gathered_rows, own_communicator
from accordion.engine.engine import Engine
from accordion.engine.gather import Axis
from accordion.engine.group import Group, GroupPlan, Param, ShardingContext, messages, own_rows
from accordion.engine.hooks import Hooks
from accordion.engine.layout import Cut, cut
from accordion.engine.shards import on_device
from accordion.engine.streams import SideStream
from accordion.engine.unit import Unit, is_layer
from accordion.engine.watch import DivergenceMonitor
from accordion.errors import UsageError
from accordion.offload.budget import Shape, check_activations, within
from accordion.offload.step.deferred_step import own_parameters
from accordion.offload.tiers import Tiers, parking_of
from accordion.safety.dtensor_calls import answer_for_dtensors
from accordion.safety.late_parameters import refuse_additions
from accordion.same_on_ranks import arguments_of, on_every_rank, place_buffers, same_structure, same_values, settings_of
from accordion.shard.activations import checkpoint_forward
from accordion.shard.entry_points import check_entry_point
from accordion.shard.keep_freed_memory import keep_what_is_freed
from accordion.shard.replaced_parameters import replace, replace_by_subclass
from accordion.shard.same_mesh import same_mesh
from accordion.shard.subclasses import check_extended, extended_groups, extended_rows, is_extended, rows_mesh
from accordion.state import attach_state_dict_hooks
from accordion.units import (
    Owned,
    UnitChoice,
    by_unit,
    check_hooks,
    choose_units,
    gathered_dtype,
    other_units_read,
    owned_parameters,
)

log = logging.getLogger("accordion")


def shard(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    units: UnitChoice = None,
    strategy: Strategy = FULL_SHARD,
    precision: Precision | None = None,
    prefetch: Prefetch | None = None,
    offload: Offload | None = None,
    checkpoint_activations: str = "none",
    reduce_op: Literal["mean", "sum"] = "mean",
    sync: bool = False,
    debug: str | Iterable[str] = (),
) -> nn.Module:
    """Shard `model` in place over the ranks of `mesh` and return it; call it on every rank, before making an optimizer.

    `model`: real, equal on all ranks (a checksum tells, of buffers in the state dict too), or on the meta device, then its
    shards are zeros until they are loaded. `sync=True` takes the first rank's values; the others may be on meta.
    `mesh`: 1-D, or 2-D ("replicate", "shard") for a hybrid strategy; by default all ranks. `units`: what is gathered together:
    module classes or their names, `min_params(n)`, a callable (name, module) -> bool, `only_blocks()`; by default the
    repeated blocks, and embeddings and heads about as large as one.
    `checkpoint_activations`: none, full, selective or every:K, of units that are more than one layer.
    `offload`: what rests off the device, and where the optimizer steps; by default nothing.
    `reduce_op`: over all data-parallel ranks; "sum" for losses weighted by tokens. `debug`, any of: "streams" fills what is let
    go with NaN and lets nothing arrive before it is waited for, so that a use after free or a missing wait shows; "order" has
    ranks agree on each collective before it, as they do in the first step without; "finite" names the unit and the phase
    in which NaN or inf came up first.
    Afterwards each parameter is a DTensor at its optimizer's placement.

    Raises `UsageError` for what cannot be done, `DivergenceError` on every rank where arguments or models differ, naming both.
    """
    precision, prefetch, offload = precision or Precision(), prefetch or Prefetch(), offload or Offload()
    check_kinds(mesh=mesh, strategy=strategy, precision=precision, prefetch=prefetch, offload=offload)
    checkpointing = checkpointing_named(checkpoint_activations)
    modes = debug_modes(debug)
    _check(model, reduce_op)
    with torch.no_grad(), torch.inference_mode(False):
        mesh = _mesh(model, mesh, strategy)
        scale = 1.0 / mesh.size() if reduce_op == "mean" else 1.0
        context = wire(mesh, strategy, scale, late="streams" in modes)
        chosen = choose_units(model, units)
        owned = owned_parameters(model, {id(m): i for i, (_, m) in enumerate(chosen)})
        check_hooks(owned)
        precisions = by_unit(chosen, precision, "Precision")
        offloads = by_unit(chosen, offload, "Offload")
        check_extended(owned, strategy, offloads=any(o.offloads or o.asks for o in offloads), sync=sync)
        given = arguments_of(mesh, reduce_op, sync, modes, prefetch, checkpointing)
        given |= settings_of([name for name, _ in chosen], precisions, offloads)
        same_structure(owned, chosen, strategy, context, given)
        value_of = same_values(model, owned, context, sync)
        cuts = [[(o, _cut(o, own, context)) for o in owned if o.owner == i] for i, own in enumerate(precisions)]
        extended = [[pair for pair in mine if is_extended(pair[0].original)] for mine in cuts]
        plain = [[pair for pair in mine if not is_extended(pair[0].original)] for mine in cuts]
        planned = [plan_groups(mine, own) for mine, own in zip(plain, precisions, strict=True)]
        check_activations(offloads, checkpoint_activations)
        context = with_tiers(context, offloads, planned, offload)
        engine = Engine(context, strategy, precision, prefetch, announce="order" in modes)
        if "finite" in modes:
            engine.finite = engine.finder()
        for i, (name, module) in enumerate(chosen):
            own, by_name = precisions[i], {o.names[0]: o for o, _ in cuts[i]}
            groups = [Group(context, group, (i, name)) for group in planned[i]]
            for group in groups:
                for param, local in zip(group.params, group.home.locals, strict=True):
                    o = by_name[param.name]
                    value = value_of(o)
                    if value is not None:
                        local.copy_(own_rows(value, param.cut, context))
                    param.sharded = replace(o, local, mesh, _placements(param.cut, mesh, strategy))
                    if value is None:
                        engine.unfilled.add(id(param.sharded))
            for o, c in extended[i]:
                rows = extended_rows(o.original.detach(), c, context.shard.rank, context.device)
                o.original = replace_by_subclass(o, rows, mesh, _placements(c, mesh, strategy))
            groups += extended_groups(extended[i], own, context, (i, name), rows_mesh(mesh))
            inputs = own.params if own.cast_inputs else None
            outputs = own.output if i == 0 or own is not precision else None
            unit = Unit(engine, name, module, groups, inputs=inputs, outputs=outputs)
            Hooks(unit).attach(module)
            own_parameters(unit)
        for unit, reads in zip(engine.units, other_units_read([[m] for _, m in chosen], owned), strict=True):
            unit.reads = reads
        place_buffers(model, {id(m): p for (_, m), p in zip(chosen, precisions, strict=True)}, context, sync)
    deep = [i for i, (_, module) in enumerate(chosen) if i and not is_layer(module)]
    for i in deep[:: checkpointing.every] if checkpointing.every else ():
        checkpoint_forward(chosen[i][1], checkpointing, parking_of(engine, i))
    attach_state_dict_hooks(model)
    _torch.answer_anomaly_checks()
    answer_for_dtensors()
    weakref.finalize(model, engine.dismantle)
    refuse_additions(model, engine)
    _announce(engine, owned, chosen, mesh)
    return model


def entry_point(module: nn.Module, name: str) -> None:
    """Let the method `name` of a unit's module use full parameters as `forward` does: `generate`, `encode` and the like.

    `module`: the sharded model, or a module that is a unit. Raises `UsageError` where it is no unit or has no such method.
    """
    unit = module.__dict__.get("_accordion")
    if not isinstance(unit, Unit):
        raise UsageError(
            f"{type(module).__name__} is no unit; entry points are methods of the sharded model or of a unit's module."
        )
    check_entry_point(module, name)
    unit.engine.hooks_by_unit[unit.index].attach_method(module, name)


def _check(model: nn.Module, reduce_op: str) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"shard() takes a torch.nn.Module, not {type(model).__name__}.")
    if engine_of(model) is not None:
        raise UsageError("this model, or a part of it, is sharded already; call shard() once, on the whole model.")
    if reduce_op not in ("mean", "sum"):
        raise UsageError(f"reduce_op={reduce_op!r} is not known; pass 'mean' or 'sum'.")
    if next(model.parameters(), None) is None:
        raise UsageError(f"{type(model).__name__} has no parameters, so there is nothing to shard.")
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise UsageError(
                f"module {name!r} asks for sparse gradients, which are not sharded; build it with sparse=False."
            )
        if getattr(module, "max_norm", None) is not None:
            raise UsageError(
                f"module {name!r} renormalises its weight in its forward (max_norm), which shards would not follow."
            )
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            raise UsageError(f"parameter {name!r} is a DTensor already; shard() takes plain parameters.")
        if not param.dtype.is_floating_point and param.requires_grad:
            raise UsageError(
                f"parameter {name!r} is {param.dtype} and requires gradients; only floating ones are trained."
            )


def _mesh(model: nn.Module, mesh: DeviceMesh | None, strategy: Strategy) -> DeviceMesh:
    if mesh is None:
        if strategy.hybrid:
            raise UsageError(
                f"{strategy.name} needs a mesh with two axes; pass init_device_mesh(device, (nodes, gpus), "
                "mesh_dim_names=('replicate', 'shard'))."
            )
        return default_mesh()
    names, wanted = mesh.mesh_dim_names, ("replicate", "shard")
    if strategy.hybrid and (mesh.ndim != 2 or names not in (None, wanted)):
        raise UsageError(
            f"the mesh has {mesh.ndim} axes, named {names}, but {strategy.name} needs two, {wanted}; pass "
            f"init_device_mesh(device, (nodes, gpus), mesh_dim_names={wanted})."
        )
    if not strategy.hybrid and mesh.ndim != 1:
        raise UsageError(
            f"the mesh has {mesh.ndim} axes, named {names}, but {strategy.name} shards over one; pass a 1-D mesh or a slice "
            "of this one, or strategy=HYBRID_SHARD."
        )
    return mesh


def default_mesh() -> DeviceMesh:
    """One axis over all ranks, of accelerators where the job has them."""
    if not dist.is_initialized():
        raise UsageError("torch.distributed is not initialised; start with torchrun, or call init_process_group first.")
    return init_device_mesh(device_type_of_job(), (dist.get_world_size(),))


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device of a mesh. Raises `UsageError` where the machine has none of that kind."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != mesh.device_type:
        here = "no accelerator" if accelerator is None else f"accelerators of type {accelerator.type!r}"
        raise UsageError(
            f"the mesh is one of {mesh.device_type!r} devices, and this machine has {here}; make it with "
            f"init_device_mesh({(accelerator or torch.device('cpu')).type!r}, ...)."
        )
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def wire(mesh: DeviceMesh, strategy: Strategy, scale: float, late: bool) -> ShardingContext:
    """Streams, communicators and rules for a mesh of as many axes as the strategy asks for. Collective.

    Raises `DivergenceError` on every rank where ranks give meshes that do not fit each other.
    """
    device = device_of(mesh)
    same_mesh(mesh)
    if device.type == "cpu":
        keep_what_is_freed()
    links = [Communicator(mesh.get_group(i), device) for i in range(mesh.ndim)]
    nobody = alone(device)
    if strategy.hybrid:
        replicate, sharding = links
    elif strategy.optim is Place.REPLICATE:
        replicate, sharding = links[0], nobody
    else:
        replicate, sharding = nobody, links[0]
    axes = [
        Axis(link, own_communicator(link, device), one_node=_one_node(link, device), algorithm=strategy.reduce)
        for link in (sharding, replicate)
    ]
    watch = DivergenceMonitor([axis.gather for axis in axes], _torch.ranks_of(mesh))
    return ShardingContext(
        shard=axes[0],
        replicate=axes[1],
        relay=strategy.optim_over_replicas,
        resident=strategy.params is Place.REPLICATE,
        keep_until_backward=strategy.keep_until_backward,
        scale=scale,
        gather_stream=SideStream(device, watch, late),
        reduce_stream=(reduce_stream := SideStream(device, watch, late)),
        replicate_stream=SideStream(device, watch, late) if strategy.hybrid else reduce_stream,
        fetch_stream=SideStream(device, watch, late).for_threads(),
        watch=watch,
        device=device,
        home=on_device(device),
    )


def _one_node(link: Communicator, device: torch.device) -> bool:
    """Whether all ranks of a link run on one host, by name."""
    if link.num_ranks == 1 or link.is_fake:
        return True
    digest = int.from_bytes(hashlib.sha256(socket.gethostname().encode()).digest()[:7], "big")
    rows = gathered_rows(torch.tensor([digest], device=device), link)
    return bool((rows == digest).all())


def _cut(o: Owned, precision: Precision, context: ShardingContext) -> Cut:
    if is_extended(o.original):  # rows are what subclasses know how to cut
        return Cut(tuple(o.original.shape), 0, context.shard.num_ranks)
    return cut(o.original.shape, context.shard.num_ranks, gathered_dtype(o, precision).itemsize)


def with_tiers(
    context: ShardingContext,
    offloads: Sequence[Offload],
    planned: Sequence[Sequence[GroupPlan]],
    policy: Offload | None = None,
) -> ShardingContext:
    """The context whose groups rest where the `offloads` of their units say; the same one where nothing is offloaded.

    `policy`: the model's, whose budgets are kept by the units that have no override. Allocates host memory. Raises
    `UsageError` on every rank where one has not enough.
    """
    if not any(own.asks for own in offloads):
        return context
    shapes = [[_shape(group, context) for group in groups] for groups in planned]

    def make() -> Tiers:
        return Tiers(offloads if policy is None else within(policy, offloads, shapes), shapes, context)

    return dataclasses.replace(context, home=on_every_rank(make, context))


def plan_groups(mine: list[tuple[Owned, Cut]], precision: Precision) -> list[GroupPlan]:
    """The parameters of one unit by the dtype in which they are gathered, that dtype, and the one of their gradients' sum."""
    by_dtype: dict[torch.dtype, list[Param]] = {}
    for o, c in mine:
        dtype, trained = o.original.dtype, o.original.requires_grad
        param = Param(o.names[0], o.places, c, precision.master_dtype(dtype, trained), trained)
        by_dtype.setdefault(gathered_dtype(o, precision), []).append(param)
    return [GroupPlan(params, dtype, precision.reduce_dtype(dtype)) for dtype, params in by_dtype.items()]


def _shape(group: GroupPlan, context: ShardingContext) -> Shape:
    params, gathered, _ = group
    lies = messages(context, [p.cut for p in params], gathered)[1]
    return Shape(lies, [p.dtype for p in params], [p.requires_grad for p in params], gathered)


def _placements(c: Cut, mesh: DeviceMesh, strategy: Strategy) -> list[Placement]:
    if c.dim is None or strategy.optim is Place.REPLICATE:
        return [Replicate()] * mesh.ndim
    if strategy.optim_over_replicas:
        return [_torch.StridedShard(c.dim, split_factor=mesh.size(1)), Shard(c.dim)]
    return [Replicate(), Shard(c.dim)] if strategy.hybrid else [Shard(c.dim)]


def _announce(engine: Engine, owned: list[Owned], chosen: list[tuple[str, nn.Module]], mesh: DeviceMesh) -> None:
    """Say once, on the first rank, what was decided."""
    if mesh.get_local_rank(0) or (mesh.ndim > 1 and mesh.get_local_rank(1)):
        return
    padding = sum((p.cut.padded_numel - p.cut.numel) * p.dtype.itemsize for u in engine.units for p in u.params)
    log.info(
        "%s over %d ranks: %d parameters in %d units (%s), %d bytes of padding",
        engine.strategy.name, mesh.size(), len(owned), len(chosen), ", ".join(n or "(root)" for n, _ in chosen), padding,
    )  # fmt: skip
    axes = engine.context.shard, engine.context.replicate
    links = {id(link.group) for axis in axes for link in (axis.gather, axis.reduce) if link.num_ranks > 1}
    if len(links) > 1:
        log.info("%d communicators; what each takes of a device's memory is not in torch's count", len(links))
    for o in owned:
        if len(o.names) > 1:
            log.info("tied: %s are one parameter, owned by unit %s", ", ".join(o.names), chosen[o.owner][0] or "(root)")
    if engine.precision.params is not None:
        log.info("precision: %s", engine.precision)
