"""Build an engine from chosen units, for `shard` and `compat.fsdp2`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from accordion import _torch
from accordion.config import Offload, Precision, Prefetch, Strategy
from accordion.engine.communicator import group_of_job
from accordion.engine.context import ShardingContext
from accordion.engine.engine import Engine
from accordion.engine.group import CutGroup, Group, GroupPlan, messages
from accordion.engine.hooks import Hooks
from accordion.engine.layout import Cut
from accordion.engine.params import Param
from accordion.engine.secondary import SecondaryGroup
from accordion.engine.unit import Unit, UnitPolicy
from accordion.errors import UsageError
from accordion.offload.arena import Arena, ArenaMaker
from accordion.offload.budget import Shape, within
from accordion.offload.step.deferred_step import own_parameters
from accordion.offload.tiers import Tiers
from accordion.optimizers.wrap import mark_sharded
from accordion.row_marks import mark_meshes
from accordion.safety.attach import attach_safety
from accordion.safety.dtensor_calls import answer_for_shards
from accordion.safety.same_on_ranks import on_every_rank
from accordion.shard.subclasses import extended_groups
from accordion.shard.topology import CommunicatorMaker, communicator_over
from accordion.sharding import Sharding
from accordion.units import Owned, gathered_dtype, other_units_read


@dataclass(frozen=True, kw_only=True)
class UnitSpec:
    """Arguments to build a unit. A call of any of `modules` is a call of the unit.

    `planned`: groups of plain parameters, each gathered together. `extended`: (parameter, its cut) of tensor subclasses with
    their own all-gather. `mesh`, `context`: the mesh of the `extended` parameters, and the ranks over which they are sharded
    (None: the model's). `extension_policy`: passed to their all-gather methods as `mp_policy`; None: made from `precision`.
    `casts_outputs`: cast results to `precision.output`.
    """

    name: str
    modules: Sequence[nn.Module]
    precision: Precision
    planned: Sequence[GroupPlan]
    extended: Sequence[tuple[Owned, Cut]]
    mesh: DeviceMesh
    casts_outputs: bool = True
    context: ShardingContext | None = None
    extension_policy: Any = None
    unit_policy: UnitPolicy = field(default_factory=UnitPolicy)


Fill = Callable[[Param, Tensor], None]
"""(parameter, this rank's rows) -> None: fills the rows and sets `Param.sharded`. May be a collective."""


def build_engine(
    context: ShardingContext,
    strategy: Strategy,
    precision: Precision,
    prefetch: Prefetch,
    specs: Sequence[UnitSpec],
    owned: Sequence[Owned],
    fill: Fill,
    *,
    debug: Collection[str] = (),
) -> Engine:
    """Make an engine with one unit for each of `specs`, attach hooks and safety checks to the modules, and return the engine.
    `owned`: all parameters of the model. `fill`: called for each plain parameter, to replace it by a sharded one. `debug`: the
    debug modes of `shard`. A collective if `fill` is one."""
    engine = Engine(context, strategy, precision, prefetch)
    hooks = [_attached(engine, i, spec, fill) for i, spec in enumerate(specs)]
    for unit, reads in zip(engine.units, other_units_read([spec.modules for spec in specs], owned), strict=True):
        unit.reads = reads
    attach_safety(engine, hooks, debug)
    answer_for_shards(engine)
    mark_meshes(param.sharded for param in engine.params)
    mark_sharded(engine)
    return engine


def _attached(engine: Engine, i: int, spec: UnitSpec, fill: Fill) -> Hooks:
    context, precision, place = engine.context, spec.precision, (i, spec.name)
    groups: list[Group] = []
    for plan in spec.planned:
        over = context
        if plan.context is not None:  # ranks of its own, but the tiers of the model
            over = dataclasses.replace(plan.context, shard_buffers=context.shard_buffers)
        groups.append((CutGroup if plan.secondary is None else SecondaryGroup)(over, plan, place))
    for group in groups:
        for param, local in zip(group.params, group.shard_buffer.locals, strict=True):
            fill(param, local)
    over = spec.context or context
    groups += extended_groups(spec.extended, precision, over, place, spec.mesh, spec.extension_policy)
    unit = Unit(
        context,
        place,
        spec.modules[0],
        groups,
        inputs=precision.params if precision.cast_inputs else None,
        outputs=precision.output if spec.casts_outputs else None,
        unit_policy=spec.unit_policy,
    )
    hooks = Hooks(engine, unit)
    own_parameters(engine, unit)
    for module in spec.modules:
        hooks.attach(module)
    return hooks


def with_tiers(
    context: ShardingContext,
    offloads: Sequence[Offload],
    planned: Sequence[Sequence[GroupPlan]],
    policy: Offload | None = None,
    make_arena: ArenaMaker = Arena,
) -> ShardingContext:
    """Return a copy of `context` whose shard buffers store each unit's state on the device, host or disk, as its entry of
    `offloads` says; return `context` itself if nothing is offloaded. Allocates the host memory and files. A collective.

    `planned`: the groups of each unit. `policy`: the model's `Offload`, whose budgets hold for units without an override; None:
    each unit has budgets of its own. Raises `UsageError` on every rank if one lacks memory or disk space, or if the
    `grad_dtype` of an offloaded parameter is not its dtype.
    """
    if not any(each.asks for each in offloads):
        return context
    for each, groups in zip(offloads, planned, strict=True):
        for param in [param for group in groups for param in group.params if each.asks]:
            if param.requires_grad and param.grad_dtype is not param.dtype:
                raise UsageError(
                    f"parameter {param.name!r} of {param.dtype} has grad_dtype {param.grad_dtype}, and an offloaded gradient "
                    "is stored in its parameter's dtype; do not set grad_dtype, or do not offload this unit."
                )

    def shape_of(group: GroupPlan) -> Shape:
        params = group.params
        layout = messages(group.context or context, [p.cut for p in params], group.dtype)[1]
        return Shape(layout, [p.dtype for p in params], [p.requires_grad for p in params], group.dtype)

    shapes = [list(map(shape_of, groups)) for groups in planned]

    def make() -> Tiers:
        return Tiers(offloads if policy is None else within(policy, offloads, shapes), shapes, context, make_arena)

    return dataclasses.replace(context, shard_buffers=on_every_rank(make, context))


def plan_groups(
    params_of_unit: Sequence[tuple[Owned, Cut]],
    precision: Precision,
    context_of: Callable[[Owned], ShardingContext | None] = lambda o: None,
) -> list[GroupPlan]:
    """Divide a unit's parameters, pairs of parameter and cut, into groups, and return these. Parameters of one group are
    sharded over the same ranks and gathered in one dtype. `context_of`: function that returns the sharding context of a
    parameter with ranks of its own; None for the model's ranks."""
    groups: dict[tuple[ShardingContext | None, torch.dtype], list[Param]] = {}
    for o, c in params_of_unit:
        dtype, trained = o.original.dtype, o.original.requires_grad
        shard_dtype = precision.master_dtype(dtype, trained)
        was_set, asked = _torch.asked_grad_dtype(o.original)
        param = Param(o.names[0], o.places, c, shard_dtype, trained, asked if was_set else shard_dtype)
        groups.setdefault((context_of(o), gathered_dtype(o, precision)), []).append(param)
    return [GroupPlan(params, d, precision.reduce_dtype(d), over) for (over, d), params in groups.items()]


def with_secondary(
    groups: Sequence[GroupPlan],
    context: ShardingContext,
    sharding: Sharding,
    make: CommunicatorMaker = communicator_over,
) -> list[GroupPlan]:
    """Return `groups`, each with a communicator of `sharding.secondary` neighboring ranks of its shard axis, which keep slices of
    full parameters from a forward to its backward. A group stays unchanged if `secondary` is None, or does not divide the size
    of its shard axis, or equals or exceeds it. A collective. Models over the same ranks share the process group."""

    def with_ranks(group: GroupPlan) -> GroupPlan:
        whole, num = (group.context or context).shard.gather, sharding.secondary
        if num is None or num >= whole.num_ranks or whole.num_ranks % num:
            return group
        first = whole.rank - whole.rank % num
        ranks = group_of_job([whole], whole.ranks[first : first + num], context.device)
        return group._replace(secondary=make(ranks, context.device))

    return list(map(with_ranks, groups))
