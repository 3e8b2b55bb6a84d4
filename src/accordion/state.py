"""Access to a sharded model's parameters: full parameters in its modules, full state dicts, and hooks of `load_state_dict`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accordion import _torch
from accordion.engine.context import gathered, own_rows
from accordion.engine.engine import Engine
from accordion.engine.hooks import attached_to, engine_of
from accordion.engine.params import Param, own_part
from accordion.errors import DivergenceError, UsageError
from accordion.offload.step.deferred_step import owners_of
from accordion.row_marks import refuse_rows_of_others
from accordion.safety.agreement import agreement_of
from accordion.safety.divergence import monitor_of
from accordion.safety.same_on_ranks import same_given


def sharded_engine(model: nn.Module, what: str) -> Engine:
    """Return the engine of a sharded model. Raises `UsageError`, which names the caller `what`, if `model` is not sharded."""
    engine = engine_of(model) if isinstance(model, nn.Module) else None
    if engine is None:
        raise UsageError(f"{what} takes a model that shard() returned; this {type(model).__name__} is not sharded.")
    return engine


def settle(engine: Engine, what: str) -> None:
    """Wait for optimizer steps and copies in progress, and check that all ranks do `what` next, such as "saves a checkpoint".
    Also drop the gradients of a backward that raised. Collective; do not call it during a forward or backward. Raises
    `DivergenceError` on every rank if `what` differs. If this rank knows that ranks have diverged before, it checks nothing."""
    for notify in engine.observers.settles:
        notify()
    engine.recover()
    engine.synchronize()
    monitor = monitor_of(engine.context)
    if monitor.broken is None:
        monitor.forget()
        agreement_of(engine).must(what)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Context manager that postpones reduces: the backward of a forward inside it only adds up full gradients on each rank. The
    next backward of a forward outside reduces these sums too, even for modules that this backward does not reach."""
    engine = sharded_engine(model, "no_sync")
    before, engine.sync = engine.sync, False
    try:
        yield
    finally:
        engine.sync = before


@contextmanager
def full_params(model: nn.Module, *, write: bool = False) -> Iterator[None]:
    """Context manager in which modules have full parameters, as before `shard`, for evaluation, EMA, generation, export.

    The parameters have the dtype of the shards, and the model runs as before `shard`. They are copies: changes are lost, unless
    `write=True`, with which each rank copies its rows into its shards at the end, also after an exception; all ranks must write
    equal values. Takes memory for the whole model. Collective. Raises `UsageError` if nested, if `model` is not sharded, and for
    a parameter that is a tensor subclass with an all-gather of its own.
    """
    engine = sharded_engine(model, "full_params")
    if engine.suspended:
        raise UsageError("full_params is open already on this model; leave it first.")
    settle(engine, "shows full parameters")
    fulls: dict[int, nn.Parameter] = {}
    with torch.inference_mode(False), torch.no_grad():
        for param in engine.params:
            full = full_of(param) if param.around is None else param.around(full_of(param))
            fulls[id(param)] = nn.Parameter(full, requires_grad=param.sharded.requires_grad)
            vars(fulls[id(param)]).update(_torch.marks_of(param.sharded))
    try:
        with shown(engine, fulls):
            yield
    finally:
        for param in engine.params if write else ():
            with torch.no_grad():
                written = fulls[id(param)]
                data = written.data if param.around is None else _torch.local_of(written).data
                _torch.local_of(param.sharded).copy_(own_rows(data, param.cut, param.context))


@contextmanager
def shown(engine: Engine, fulls: Mapping[int, nn.Parameter]) -> Iterator[None]:
    """Context manager in which modules have the full parameters `fulls` (id of a `Param` -> tensor), and the engine's hooks do
    nothing. Parameters that are not in `fulls` stay sharded. At the end modules have their sharded parameters again."""
    units = [unit for unit in engine.units if any(id(param) in fulls for param in unit.params)]
    by_unit = [(unit, [fulls.get(id(param), param.sharded) for param in unit.params]) for unit in units]
    for unit, tensors in by_unit:
        unit.module_params.show(tensors)
    engine.suspended = True
    try:
        yield
    finally:
        engine.suspended = False
        for unit, tensors in by_unit:
            unit.module_params.hide(tensors)


def full_of(param: Param) -> Tensor:
    """Return the full parameter, gathered from the shards of all ranks; with tensor parallelism, its full local tensor on this
    rank. Collective. Raises `UsageError` for a tensor subclass that has an all-gather of its own."""
    refuse_own_gather(param)
    return gathered(_torch.local_of(param.sharded), param.cut, param.context)


def refuse_own_gather(param: Param) -> None:
    """Raise `UsageError` if `param` is a tensor subclass that has an all-gather of its own (`fsdp_pre_all_gather`)."""
    if param.extension is not None:
        raise UsageError(
            f"parameter {param.name!r} is a tensor subclass with its own all-gather, whose result is not what is stored; read "
            "its stored rows from model.state_dict()."
        )


Only = Literal["trained"] | str | Callable[[str, Tensor], bool] | tuple[()] | None
"""A choice of a model's tensors: "trained", the parameters that require a gradient; a shell pattern of names, such as
"*.lora_*"; a function (name, tensor) -> bool, the same on all ranks; () for none; None for all."""


def chosen(values: Mapping[str, Any], only: Only) -> dict[str, Any]:
    """Return the entries of `values` (name -> tensor) that `only` chooses. Raises `UsageError` if `only` is of another type, or
    if it chooses no entry and is not ()."""
    if only is None:
        return dict(values)
    if only == ():
        return {}
    if not (isinstance(only, str) or callable(only)):
        raise UsageError(f'only={only!r} is no choice of tensors; pass "trained", a pattern of names, or a function.')
    if only == "trained":
        result = {name: v for name, v in values.items() if isinstance(v, nn.Parameter) and v.requires_grad}
    elif isinstance(only, str):
        result = {name: v for name, v in values.items() if fnmatchcase(name, only)}
    else:
        result = {name: v for name, v in values.items() if only(name, v)}
    if not result:
        raise UsageError(
            f"only={only!r} chooses none of the model's {len(values)} tensors; its names are those of state_dict()."
        )
    return result


def full_state_dict(
    model: nn.Module, *, rank0_only: bool = True, cpu: bool = True, only: Only = None
) -> dict[str, Tensor]:
    """Return the unsharded model's state dict, gathered one tensor at a time; with `rank0_only`, {} on all but its first rank.

    Collective: call it on every rank. Tied parameters are one tensor under each of their names. `cpu`: copy tensors to the
    host. `only`: the tensors to gather: None, all; "trained", the parameters that require a gradient; a shell pattern of names
    ("*.lora_*"); or a function (name, tensor) -> bool, the same on all ranks; (), none. Raises `UsageError` if another `only`
    chooses none, and for a parameter that is a tensor subclass with an all-gather of its own.
    """
    engine = sharded_engine(model, "full_state_dict")
    values = chosen(model.state_dict(keep_vars=True), only)
    return full_values(engine, values, rank0_only=rank0_only, cpu=cpu)


def full_values(engine: Engine, values: Mapping[str, Any], *, rank0_only: bool, cpu: bool) -> dict[str, Any]:
    """Return `values`, entries of `model.state_dict(keep_vars=True)`, with full tensors instead of shards. Collective.
    `rank0_only`: return {} on all but the model's first rank. `cpu`: copy tensors to the host."""
    settle(engine, "takes the full state dict")
    first = is_first_rank(engine)
    params = {id(p.sharded): p for p in engine.params}
    result: dict[str, Any] = {}
    done: dict[int, Tensor] = {}
    with torch.no_grad():
        for name, value in values.items():
            if not isinstance(value, Tensor):  # from a module's `get_extra_state`
                result[name] = value
                continue
            if id(value) not in done:
                param = params.get(id(value))
                full = value.detach() if param is None else full_of(param)
                if param is not None and param.around is not None:
                    full = param.around.whole(full)
                if rank0_only and not first:
                    full = full.new_empty(0)
                done[id(value)] = full.cpu() if cpu else full
            result[name] = done[id(value)]
    return {} if rank0_only and not first else result


def is_first_rank(engine: Engine) -> bool:
    """Return True on exactly one rank of the model: the first on each mesh axis, those of tensor parallelism included."""
    outer = [param.around for param in engine.params if param.around is not None]
    return engine.context.shard.rank == engine.context.replicate.rank == 0 and all(each.is_first for each in outer)


def attach_state_dict_hooks(model: nn.Module) -> None:
    """Register hooks on `model` and its modules. `load_state_dict` then also accepts full tensors, of which each rank keeps its
    rows (`_cut_full_tensors`), and DTensors from files (`take_own_rows`). `load_state_dict` and `state_dict`, also of a module
    inside, first wait for optimizer steps in progress."""
    for module in model.modules():
        module.register_load_state_dict_pre_hook(take_own_rows)
        if attached_to(module) is not None or owners_of(module.parameters(recurse=False)):
            module.register_state_dict_pre_hook(_wait_for_shards)
            module.register_load_state_dict_pre_hook(_wait_for_shards)
    model.register_load_state_dict_pre_hook(_cut_full_tensors)


def _wait_for_shards(module: nn.Module, *rest: Any) -> None:
    """Pre-hook of `state_dict` and `load_state_dict`: wait for running optimizer steps of the whole model if `module` is a
    unit, otherwise of the units that own its parameters."""
    hooks = attached_to(module)
    if hooks is not None:
        hooks.engine.synchronize()
        return
    units = {id(unit): unit for _, unit in owners_of(module.parameters(recurse=False))}
    for group in [group for unit in units.values() for group in unit.groups]:
        group.shard_buffer.synchronize()


def take_own_rows(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """`load_state_dict` hook: replace DTensors from a file in `state`, in place, by DTensors with the same rows on the model's
    mesh. Collective if there are any. Raises `UsageError` on every rank if one of them has the rows of another rank."""
    named = module.named_parameters(remove_duplicate=False)
    wanted = {prefix + name: param for name, param in named if isinstance(param, DTensor)}
    refuse_rows_of_others(((state.get(key), param) for key, param in wanted.items()), "the model's tensors")
    for key, param in wanted.items():
        value: Any = state.get(key)
        if is_sharded_alike(value, param) and value.device_mesh is not param.device_mesh:
            state[key] = _torch.as_dtensor(_torch.local_of(value), param)


def synchronize(model: nn.Module) -> None:
    """Wait until the last optimizer step of a sharded model has been applied to its shards.

    With `Offload`, `step` of a wrapped optimizer returns while worker threads still step. Call this before you read a parameter
    or `optimizer.state` directly between a step and the next forward. The next forward, the state dicts of model and optimizer
    and this library's functions wait by themselves. Without `Offload` there is nothing to wait for.
    """
    sharded_engine(model, "synchronize").synchronize()


def _cut_full_tensors(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """`load_state_dict` hook of the model: replace full tensors in `state`, in place, by DTensors with this rank's rows. If
    `state` has such a DTensor for each parameter already, change nothing. Otherwise this is collective: all ranks compare the
    names, shapes and checksums in `state`. If these differ, all raise `DivergenceError`, and nothing is loaded."""
    engine = sharded_engine(module, "load_state_dict")
    engine.synchronize()
    params = {id(p.sharded): p for p in engine.params}
    named = [(prefix + name, param) for name, param in module.named_parameters(remove_duplicate=False)]
    wanted = {name: param for name, param in named if id(param) in params and isinstance(param, DTensor)}
    if not all(is_sharded_alike(state.get(key), sharded) for key, sharded in wanted.items()):
        settle(engine, "loads full tensors (load_state_dict)")
        given = {repr(key): value for key, value in state.items() if key.startswith(prefix)}
        unlike = same_given(given, monitor_of(engine.context), "load_state_dict")
        if unlike:
            raise DivergenceError(
                f"load_state_dict was given full tensors that differ between ranks: {unlike}; nothing was loaded. Load the same "
                "file on every rank, or broadcast the first rank's state dict before."
            )
    for key, sharded in wanted.items():
        value, param = state.get(key), params[id(sharded)]
        if not isinstance(value, Tensor) or value.shape != sharded.shape or is_sharded_alike(value, sharded):
            continue  # torch's own error names missing and misshapen tensors
        if isinstance(value, DTensor):
            value = value.full_tensor()
        local = _torch.local_of(sharded)
        rows = own_part(value, param).to(device=local.device, dtype=local.dtype)
        state[key] = _torch.as_dtensor(rows.contiguous(), sharded)


def is_sharded_alike(value: object, sharded: DTensor) -> bool:
    """Return True if `value` is a DTensor with the shape, placements and mesh of `sharded`; dtype and values may differ."""
    return (
        isinstance(value, DTensor)
        and value.shape == sharded.shape
        and value.placements == sharded.placements
        and value.device_mesh == sharded.device_mesh
    )
