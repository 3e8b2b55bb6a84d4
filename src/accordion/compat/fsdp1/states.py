"""Convert state dicts of optimizers between parameter numbers and qualified names, and between full and sharded tensors."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from accordion import _torch
from accordion.compat.fsdp1.nesting import engines_of
from accordion.engine.context import gathered, own_rows
from accordion.engine.engine import Engine
from accordion.engine.params import Param
from accordion.errors import DivergenceError, UsageError
from accordion.safety.divergence import monitor_of
from accordion.safety.same_on_ranks import same_given
from accordion.state import is_first_rank, settle

OPTIM = "an optimizer's state dict"
CONFIGS: Mapping[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def settings_for(
    kind: StateDictType, config: StateDictConfig | None, optim_config: OptimStateDictConfig | None
) -> StateDictSettings:
    """Return the checked settings for state dicts; None for a config means torch's default. Raises `UsageError`."""
    if kind is StateDictType.LOCAL_STATE_DICT:
        raise UsageError(
            "LOCAL_STATE_DICT is not supported: it has flat parameters, which do not exist here. Use SHARDED_STATE_DICT, which "
            "gathers nothing either."
        )
    if kind not in CONFIGS:
        raise UsageError(f"state_dict_type is {kind!r}; valid: {', '.join(str(k) for k in CONFIGS)}.")
    configs = []
    for passed, cls in zip((config, optim_config), CONFIGS[kind], strict=True):
        if passed is not None and type(passed) is not cls:
            raise UsageError(f"{kind.name} takes a {cls.__name__}, not a {type(passed).__name__}.")
        configs.append(cls() if passed is None else passed)
    return StateDictSettings(kind, *configs)  # type: ignore[arg-type]


def params_of(engines: Iterable[Engine]) -> dict[int, Param]:
    """Return a dict from the id of each sharded parameter to the engine's entry for it."""
    return {id(p.sharded): p for engine in engines for unit in engine.units for p in unit.params}


def full_rows(value: Tensor, param: Param) -> Tensor:
    """Gather `value`, a DTensor that is sharded like its parameter, to a full tensor. Collective."""
    return gathered(_torch.local_of(value), param.cut, param.context)


def own_dtensor(full: Tensor, param: Param) -> Any:
    """Return this rank's rows of a full tensor as a DTensor that is sharded like its parameter."""
    rows = own_rows(full, param.cut, param.context).to(_torch.local_of(param.sharded).device)
    return _torch.as_dtensor(rows.contiguous(), param.sharded)


def cut_like(value: Tensor, param: Param) -> Tensor:
    """Return a state of `param` as a DTensor that is sharded like `param` if it has its shape, else as a full tensor."""
    like = param.sharded
    if isinstance(value, DTensor):
        if value.placements == like.placements and value.device_mesh == like.device_mesh:  # type: ignore[attr-defined]
            return value
        value = value.full_tensor()
    if value.dim() == 0 or value.shape != like.shape:
        return value
    return own_dtensor(value, param)  # type: ignore[no-any-return]


def names_of(model: nn.Module, optim: Optimizer) -> list[list[str]]:
    """Return the qualified names of the parameters of each group. Raises `UsageError` if one is not in the model."""
    names = {id(p): name for name, p in model.named_parameters()}
    for p in (p for group in optim.param_groups for p in group["params"]):
        if id(p) not in names:
            raise UsageError(
                f"the optimizer has a parameter of shape {tuple(p.shape)} that is not in the model; create the optimizer from "
                "model.parameters() after wrapping."
            )
    return [[names[id(p)] for p in group["params"]] for group in optim.param_groups]


def named_state(
    model: nn.Module, optim: Optimizer, state: Mapping[str, Any], settings: StateDictSettings
) -> dict[str, Any]:
    """Return the optimizer's state dict `state` by qualified name, full (a collective) or sharded by `settings`."""
    engines = engines_of(model, OPTIM)
    full = settings.state_dict_type is StateDictType.FULL_STATE_DICT
    cpu = settings.optim_state_dict_config.offload_to_cpu
    params = params_of(engines)
    names = names_of(model, optim)
    result: dict[str, Any] = {}
    for group, saved, fqns in zip(optim.param_groups, state["param_groups"], names, strict=True):
        for p, key, name in zip(group["params"], saved["params"], fqns, strict=True):
            if key not in state["state"]:
                continue
            entry = {}
            for word, value in state["state"][key].items():
                if full and isinstance(value, DTensor):
                    value = full_rows(value, params[id(p)])
                elif full and isinstance(value, Tensor):
                    value = value.clone()  # the step count; two optimizers must not share it
                entry[word] = value.cpu() if cpu and isinstance(value, Tensor) else value
            result[name] = entry
    if full and getattr(settings.optim_state_dict_config, "rank0_only", False) and not is_first_rank(engines[0]):
        return {}
    groups = [
        {**{k: v for k, v in saved.items() if k != "params"}, "params": fqns}
        for saved, fqns in zip(state["param_groups"], names, strict=True)
    ]
    return {"state": result, "param_groups": groups}


def state_by_id(
    model: nn.Module, optim: Optimizer, state: Mapping[str, Any], *, full: bool, from_first_rank: bool = False
) -> dict[str, Any]:
    """Convert a state dict by qualified name to a dict for `optim.load_state_dict`. Raises `UsageError` if groups differ.

    `full`: `state` has full tensors. Collective; raises `DivergenceError` on every rank if ranks have different states.
    `from_first_rank`: only the first rank has `state`. Collective.
    """
    engines = engines_of(model, OPTIM)
    from_first = engines[0] if from_first_rank else None
    if full and from_first is None:
        _agree_on(state, engines[0])
    params = params_of(engines)
    groups = _shared(state["param_groups"] if state else None, from_first)
    if groups is None:
        raise UsageError(
            "the optimizer's state dict is empty on this rank. If only the first rank has it, first set the state_dict_type of "
            "this model with FullOptimStateDictConfig(rank0_only=True)."
        )
    names = names_of(model, optim)
    if [sorted(g["params"]) for g in groups] != [sorted(fqns) for fqns in names]:
        raise UsageError(
            f"the state dict has parameter groups of {[len(g['params']) for g in groups]} names, the optimizer has groups of "
            f"{[len(fqns) for fqns in names]}, or their names differ; create the optimizer with the groups that were saved."
        )
    entries: dict[int, Any] = {}
    numbered, at = [], 0
    for group, saved, fqns in zip(optim.param_groups, groups, names, strict=True):
        ids = list(range(at, at + len(fqns)))
        at += len(fqns)
        for i, p, name in zip(ids, group["params"], fqns, strict=True):
            entry = _shared(state["state"].get(name) if state else None, from_first)
            if entry is not None:
                entries[i] = {
                    k: cut_like(v, params[id(p)]) if isinstance(v, Tensor) and id(p) in params else v
                    for k, v in entry.items()
                }
        numbered.append({**{k: v for k, v in saved.items() if k != "params"}, "params": ids})
    return {"state": entries, "param_groups": numbered}


def _agree_on(state: Mapping[str, Any], engine: Engine) -> None:
    """Raise `DivergenceError` on every rank if ranks load different states: each keeps rows of its own copy. Collective."""
    settle(engine, "loads a full state dict of an optimizer")
    tensors: dict[str, Tensor] = {}
    others: dict[str, str] = {}
    for name, entry in state.get("state", {}).items():
        for word, value in entry.items():
            if isinstance(value, Tensor):
                tensors[f"{word!r} of {name!r}"] = value
            else:
                others[f"{word!r} of {name!r}"] = str(value)
    for i, group in enumerate(state.get("param_groups", ())):
        for word, value in group.items():
            if isinstance(value, list):  # the names of parameters
                value = f"{len(value)} names with checksum {zlib.crc32(repr(value).encode()):08x}"
            others[f"{word!r} of group {i}"] = str(value)
    unlike = same_given(tensors, monitor_of(engine.context), "an optimizer", others)
    if unlike:
        raise DivergenceError(
            f"the optimizer's state differs between ranks: {unlike}; nothing was loaded. Load the same file on every rank, or "
            "set the state_dict_type with FullOptimStateDictConfig(rank0_only=True), which sends the first rank's to all."
        )


def _shared(value: Any, from_first: Engine | None) -> Any:
    """Return the `value` that the first rank of the engine has. Without an engine, return this rank's `value`."""
    if from_first is None:
        return value
    values = [value]
    for axis in (from_first.context.shard, from_first.context.replicate):  # along the first row, then along each column
        if axis.num_ranks > 1:
            dist.broadcast_object_list(values, group=axis.gather.group, group_src=0)
    return values[0]
