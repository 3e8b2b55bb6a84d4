"""The model's parameters for the outside: full ones in the registry, full and sharded state dicts."""

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
from accordion.offload.step.step_in_backward import refuse_in_backward
from accordion.row_marks import refuse_rows_of_others
from accordion.safety.agreement import agreement_of
from accordion.safety.divergence import DivergenceMonitor, monitor_of
from accordion.same_on_ranks import same_given


def sharded_engine(model: nn.Module, what: str) -> Engine:
    """The engine of `model`; raises `UsageError` where it is not sharded."""
    engine = engine_of(model) if isinstance(model, nn.Module) else None
    if engine is None:
        raise UsageError(f"{what} takes a model that shard() returned; this {type(model).__name__} is not sharded.")
    return engine


def settle(engine: Engine, what: str) -> None:
    """Before what all ranks of a model do together outside of a pass: end what is under way, and come to the same place.

    `what`: "saves a checkpoint", for messages. Raises `DivergenceError` on every rank where others do something else; without a
    word each would wait for the other, in collectives that do not pair up.
    """
    engine.recover()
    engine.synchronize()
    monitor = monitor_of(engine.context)
    if monitor.broken is None:
        monitor.forget()
        agreement_of(engine).must(what)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients without communicating: forward and backward inside add up full gradients on each rank.

    The first backward of a forward made outside reduces the sum, also of units that it does not visit.
    """
    engine = sharded_engine(model, "no_sync")
    refuse_in_backward(engine, "no_sync")
    before, engine.sync = engine.sync, False
    try:
        yield
    finally:
        engine.sync = before


@contextmanager
def full_params(model: nn.Module, *, write: bool = False) -> Iterator[None]:
    """Full parameters in the registry, as before `shard` and in the dtype of the shards: evaluation, EMA, generation, export.

    The model runs inside as the unsharded one. With `write` each rank takes its rows of what the parameters are
    at the end; every rank must write the same. Memory: the whole model once.
    """
    engine = sharded_engine(model, "full_params")
    if engine.suspended:
        raise UsageError("full_params is open already on this model; leave it first.")
    settle(engine, "shows full parameters")
    shown: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
    fulls: dict[int, nn.Parameter] = {}
    with torch.inference_mode(False), torch.no_grad():
        for param in _all_params(engine):
            rows = full_of(param)
            shown_as = rows if param.around is None else param.around.seen(rows)
            full = fulls[id(param)] = nn.Parameter(shown_as, requires_grad=param.sharded.requires_grad)
            vars(full).update(_torch.marks_of(param.sharded))
            for ref, attr in param.places:
                module = ref()
                if module is not None:
                    shown.append((module, attr, param.sharded, full))
    _register([(module, attr, full) for module, attr, _, full in shown])
    engine.suspended = True
    try:
        yield
    finally:
        engine.suspended = False
        _register([(module, attr, sharded) for module, attr, sharded, _ in shown])
        if write:
            with torch.no_grad():
                for param in _all_params(engine):
                    full = fulls[id(param)]
                    data = full.data if param.around is None else _torch.local_of(full).data
                    _torch.local_of(param.sharded).copy_(own_rows(data, param.cut, param.context))


def _register(entries: list[tuple[nn.Module, str, nn.Parameter]]) -> None:
    for module, attr, param in entries:
        module._parameters[attr] = param
    for module in {id(m): m for m, _, _ in entries}.values():
        if isinstance(module, nn.RNNBase):  # it keeps its parameters in a list too
            module.__dict__["_flat_weights"] = [getattr(module, n, None) for n in module._flat_weights_names]


def _all_params(engine: Engine) -> Iterator[Param]:
    for unit in engine.units:
        yield from unit.params


def full_of(param: Param) -> Tensor:
    """The parameter as it was before it was sharded; under tensor parallelism this rank's part of it. Collective."""
    if param.extension is not None:
        raise UsageError(
            f"parameter {param.name!r} is a tensor subclass that says itself how it is gathered to compute; its rows as they are "
            "stored are in model.state_dict()."
        )
    return gathered(_torch.local_of(param.sharded), param.cut, param.context)


Only = Literal["trained"] | str | Callable[[str, Tensor], bool] | tuple[()] | None
"""Which tensors of a model: "trained", the parameters that require a gradient; a pattern of names, as in a shell,
"*.lora_*" say; a function (name, tensor) -> bool, the same on all ranks; () for none of them; None for all."""


def chosen(values: Mapping[str, Any], only: Only) -> dict[str, Any]:
    """Those of `values` that `only` names. Raises `UsageError` where these are none."""
    if only is None:
        return dict(values)
    if only == ():
        return {}
    if not (isinstance(only, str) or callable(only)):
        raise UsageError(f'only={only!r} is no choice of tensors; pass "trained", a pattern of names, or a function.')
    if only == "trained":
        found = {name: v for name, v in values.items() if isinstance(v, nn.Parameter) and v.requires_grad}
    elif isinstance(only, str):
        found = {name: v for name, v in values.items() if fnmatchcase(name, only)}
    else:
        found = {name: v for name, v in values.items() if only(name, v)}
    if not found:
        raise UsageError(
            f"only={only!r} chooses none of the model's {len(values)} tensors; its names are those of state_dict()."
        )
    return found


def full_state_dict(
    model: nn.Module, *, rank0_only: bool = True, cpu: bool = True, only: Only = None
) -> dict[str, Tensor]:
    """The state dict of the unsharded model, gathered one tensor at a time; empty on other ranks with `rank0_only`.

    Collective: call it on every rank. Tied parameters are one tensor under each of their names. `only`: which tensors are
    gathered: "trained", the parameters that require a gradient; a pattern of names, as in a shell ("*.lora_*"); or a function
    (name, tensor) -> bool, the same on all ranks. Raises `UsageError` where it chooses none.
    """
    engine = sharded_engine(model, "full_state_dict")
    values = chosen(model.state_dict(keep_vars=True), only)
    return full_values(engine, values, rank0_only=rank0_only, cpu=cpu)


def full_values(engine: Engine, values: Mapping[str, Any], *, rank0_only: bool, cpu: bool) -> dict[str, Any]:
    """Gather what `state_dict(keep_vars=True)` gave, in its order; empty on other ranks with `rank0_only`. Collective."""
    settle(engine, "takes the full state dict")
    first = is_first_rank(engine)
    params = {id(p.sharded): p for p in _all_params(engine)}
    result: dict[str, Any] = {}
    done: dict[int, Tensor] = {}
    with torch.no_grad():
        for name, value in values.items():
            if not isinstance(value, Tensor):  # the extra state of a module
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
    """Whether this is the first of all ranks of a model, those of tensor parallelism counted too."""
    arounds = [param.around for param in _all_params(engine) if param.around is not None]
    return engine.context.shard.rank == engine.context.replicate.rank == 0 and all(a.is_first for a in arounds)


def attach_state_dict_hooks(model: nn.Module) -> None:
    """Let `load_state_dict` take full tensors as well as sharded ones: each rank keeps its rows.

    Collective where it is given anything but this rank's rows of every parameter: ranks compare names, shapes and checksums
    first, and `DivergenceError` is raised on all of them, before anything changes, where these differ.
    It and `state_dict` wait for steps under way, also those of a part of the model, whatever part that is.
    """
    for module in model.modules():
        module.register_load_state_dict_pre_hook(_own_rows)
        if attached_to(module) is not None or owners_of(module.parameters(recurse=False)):
            module.register_state_dict_pre_hook(_wait_for_shards)
            module.register_load_state_dict_pre_hook(_wait_for_shards)
    model.register_load_state_dict_pre_hook(_cut_full_tensors)


def _wait_for_shards(module: nn.Module, *rest: Any) -> None:
    """Called for each module of a state dict: a unit's waits for all, another one's for the steps of its own parameters."""
    hooks = attached_to(module)
    if hooks is not None:
        hooks.engine.synchronize()
        return
    units = {id(unit): unit for _, unit in owners_of(module.parameters(recurse=False))}
    for group in [group for unit in units.values() for group in unit.groups]:
        group.shard_buffer.synchronize()


def _own_rows(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Called for each module of a state dict, the outermost first, whose call leaves nothing to do for the others."""
    named = module.named_parameters(remove_duplicate=False)
    take_own_rows(state, {prefix + name: param for name, param in named if isinstance(param, DTensor)})


def take_own_rows(state: dict[str, Any], wanted: Mapping[str, DTensor]) -> None:
    """Put the sharded tensors that `state` has from a file of this rank on the mesh of the parameters in `wanted`.

    Collective if there are any. Raises `UsageError` on every rank if those of one rank are another one's.
    """
    refuse_rows_of_others(((state.get(key), own) for key, own in wanted.items()), "the model's tensors")
    for key, own in wanted.items():
        given: Any = state.get(key)
        if is_sharded_alike(given, own) and given.device_mesh is not own.device_mesh:
            state[key] = _torch.as_dtensor(_torch.local_of(given), own)


def synchronize(model: nn.Module) -> None:
    """Wait until the shards of a sharded model are what the last optimizer step makes of them.

    Only with `Offload` is there anything to wait for: with a wrapped optimizer `step` returns while worker threads step. The
    library's own functions, the model's and the optimizer's state dicts and the next forward wait by themselves; a
    direct read of a parameter or of `optimizer.state` between a step and the next forward must call this first.
    """
    sharded_engine(model, "synchronize").synchronize()


def _cut_full_tensors(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Each rank's rows in place of full tensors, on which ranks agree first; a state dict of rows is each rank's own affair."""
    engine = sharded_engine(module, "load_state_dict")
    engine.synchronize()
    params = {id(p.sharded): p for p in _all_params(engine)}
    named = module.named_parameters(remove_duplicate=False)
    wanted = {
        prefix + name: sharded for name, sharded in named if id(sharded) in params and isinstance(sharded, DTensor)
    }
    if not all(is_sharded_alike(state.get(key), sharded) for key, sharded in wanted.items()):
        settle(engine, "loads full tensors (load_state_dict)")
        refuse_others({k: given for k, given in state.items() if k.startswith(prefix)}, monitor_of(engine.context))
    for key, sharded in wanted.items():
        given, param = state.get(key), params[id(sharded)]
        if not isinstance(given, Tensor) or given.shape != sharded.shape or is_sharded_alike(given, sharded):
            continue  # torch's own message names missing and misshapen tensors
        if isinstance(given, DTensor):
            given = given.full_tensor()
        local = _torch.local_of(sharded)
        rows = own_part(given, param).to(device=local.device, dtype=local.dtype)
        state[key] = _torch.as_dtensor(rows.contiguous(), sharded)


def is_sharded_alike(given: object, sharded: DTensor) -> bool:
    """Whether it is a tensor of which this rank's rows are those of a sharded parameter."""
    return (
        isinstance(given, DTensor)
        and given.shape == sharded.shape
        and given.placements == sharded.placements
        and given.device_mesh == sharded.device_mesh
    )


def refuse_others(state: Mapping[str, Any], watch: DivergenceMonitor) -> None:
    """Raise `DivergenceError` on every rank where ranks load other tensors: each would cut its rows of another model."""
    unlike = same_given({f"{key!r}": given for key, given in state.items()}, watch, "load_state_dict")
    if unlike:
        raise DivergenceError(
            f"load_state_dict was given full tensors that differ between ranks: {unlike}; nothing was loaded. Load the same file "
            "on every rank, or broadcast the first rank's before."
        )
