"""State dicts of `FullyShardedDataParallel` and of its optimizers: full or sharded tensors, by qualified names."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, NoReturn

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
from accordion.compat.fsdp1.nesting import Wrapper, clean, some_wrappers
from accordion.engine.context import gathered, own_rows
from accordion.engine.engine import Engine
from accordion.engine.params import Param
from accordion.errors import DivergenceError, UsageError
from accordion.safety.divergence import monitor_of
from accordion.safety.same_on_ranks import same_given
from accordion.state import full_values, is_first_rank, settle

OPTIM = "an optimizer's state dict"
CONFIGS: Mapping[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


class StateDicts(Wrapper):
    """Base class of `FullyShardedDataParallel` with the methods for state dicts of models and optimizers, full or sharded."""

    def state_dict(  # type: ignore[override]
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return the state dict with the names of the unwrapped module. Tensors are full (a collective), or shards if
        `state_dict_type` chose them. With full tensors and `rank0_only`, ranks other than the first get {}. With `keep_vars`,
        the values are the sharded parameters. If `destination` is passed, the entries are added to it, and it is returned."""
        self._ready()
        raw = super().state_dict(prefix=prefix, keep_vars=True)
        tensors = OrderedDict((clean(name), value) for name, value in raw.items())
        if not keep_vars:
            tensors = OrderedDict(self._converted(tensors, prefix))
        if destination is None:
            destination = OrderedDict()
            destination._metadata = OrderedDict()
        destination.update(tensors)
        if hasattr(destination, "_metadata"):
            destination._metadata.update({clean(f"{k}.")[:-1]: v for k, v in raw._metadata.items()})  # type: ignore[attr-defined]
        return destination  # type: ignore[no-any-return]

    def _converted(self, tensors: dict[str, Any], prefix: str) -> dict[str, Any]:
        """Return `tensors` as full tensors (a collective) or shards, as `state_dict_type` chose. With full tensors and
        `rank0_only`, ranks other than the first get {}. Buffers get back the dtype from before mixed precision. Changes the
        dict `tensors`. `prefix`: the beginning of all names in `tensors`."""
        engine = self._engine("state_dict()")
        config = self._settings.state_dict_config
        for name, value in tensors.items():
            dtype = self._outermost()._own_dtypes.get(name.removeprefix(prefix))
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and dtype is not None:
                tensors[name] = value.to(dtype)
        if self._settings.state_dict_type is StateDictType.FULL_STATE_DICT:
            rank0_only = bool(getattr(config, "rank0_only", False))
            return full_values(engine, tensors, rank0_only=rank0_only, cpu=config.offload_to_cpu)
        for name, value in tensors.items():
            if isinstance(value, Tensor):
                tensors[name] = value.detach().cpu() if config.offload_to_cpu else value.detach()
        return tensors

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._ready()
        super()._load_from_state_dict(*args, **kwargs)

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Set the type and configs (None: defaults) of later state dicts, for all wrappers in `module`. Return the previous
        settings of the first wrapper. Raises `UsageError` if there is no wrapper, or if type and configs do not fit."""
        settings = settings_for(state_dict_type, state_dict_config, optim_state_dict_config)
        wrappers = some_wrappers(module, "set_state_dict_type")
        before = wrappers[0]._settings
        for wrapper in wrappers:
            wrapper._settings = settings
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        return some_wrappers(module, "get_state_dict_type")[0]._settings

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Generator[None]:
        """Context manager that calls `set_state_dict_type`; the exit gives all wrappers the first one's earlier settings."""
        before = StateDicts.set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
        try:
            yield
        finally:
            for wrapper in some_wrappers(module, "state_dict_type"):
                wrapper._settings = before

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return the state dict of `optim` by qualified names. It is full (a collective) or sharded, as `state_dict_type`
        chose; with full tensors and `rank0_only`, ranks other than the first get {}. `optim_state_dict`: the result of
        `optim.state_dict()`, if it was called already. `group` is ignored."""
        numbered = optim.state_dict() if optim_state_dict is None else optim_state_dict
        settings = StateDicts.get_state_dict_type(model)
        return named_state(model, optim, numbered, settings)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Convert a result of `optim_state_dict`, from any number of ranks, to a dict for `optim.load_state_dict`, and return
        it. With `load_directly`, also load it into `optim`. `group` is ignored. Raises `UsageError` if `is_named_optimizer`.

        Collective if `state_dict_type` chose full tensors: with `rank0_only` the first rank's dict is sent to all; otherwise
        raises `DivergenceError` if the ranks' dicts differ. Collective also for tensors that are sharded unlike the parameters.
        """
        if is_named_optimizer:
            raise UsageError(
                "is_named_optimizer=True is not supported: optimizers of torch.optim number their parameters."
            )
        settings = StateDicts.get_state_dict_type(model)
        first = bool(getattr(settings.optim_state_dict_config, "rank0_only", False))
        full = settings.state_dict_type is StateDictType.FULL_STATE_DICT
        result = state_by_id(model, optim, optim_state_dict, full=full, from_first_rank=first)
        if load_directly:
            optim.load_state_dict(result)
        return result

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module, optim: Optimizer, optim_input: Any = None, rank0_only: bool = True, group: Any = None
    ) -> dict[str, Any]:
        """Return the full state dict of `optim`, by qualified names and on CPU; with `rank0_only`, ranks other than the first
        get {}. Collective. `optim_input` and `group` are ignored."""
        settings = settings_for(
            StateDictType.FULL_STATE_DICT, None, FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only)
        )
        return named_state(model, optim, optim.state_dict(), settings)

    @staticmethod
    def sharded_optim_state_dict(model: nn.Module, optim: Optimizer, group: Any = None) -> dict[str, Any]:
        """Return the state dict of `optim` by qualified names, with this rank's shards as DTensors. `group` is ignored."""
        settings = settings_for(StateDictType.SHARDED_STATE_DICT, None, None)
        return named_state(model, optim, optim.state_dict(), settings)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any], model: nn.Module, optim_input: Any = None, optim: Optimizer | None = None
    ) -> dict[str, Any]:
        """Convert a full state dict by qualified names, equal on all ranks, to a dict for `optim.load_state_dict`. Collective.
        `optim_input` is ignored. Raises `UsageError` without `optim`, and `DivergenceError` if the ranks' dicts differ."""
        return state_by_id(model, _required(optim), full_optim_state_dict, full=True)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: Optimizer
    ) -> dict[str, Any]:
        """Convert a sharded state dict by qualified names to a dict for `optim.load_state_dict`. Collective if its tensors are
        sharded in another way than the parameters."""
        return state_by_id(model, optim, sharded_optim_state_dict, full=False)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """Convert the first rank's full state dict by qualified names to a dict for `optim.load_state_dict` on every rank.
        Collective. `optim_input` and `group` are ignored. Raises `UsageError` without `optim`."""
        return state_by_id(model, _required(optim), full_optim_state_dict, full=True, from_first_rank=True)

    @staticmethod
    def rekey_optim_state_dict(*args: Any, **kwargs: Any) -> NoReturn:
        """Raise `UsageError`: state dicts of optimizers always use qualified names."""
        raise UsageError("rekey_optim_state_dict is not supported: use optim_state_dict, which has qualified names.")


def _required(optimizer: Optimizer | None) -> Optimizer:
    if optimizer is None:
        raise UsageError(
            "optim_input is not supported, because it numbers flat parameters; pass the optimizer as optim=."
        )
    return optimizer


def settings_for(
    kind: StateDictType, config: StateDictConfig | None, optim_config: OptimStateDictConfig | None
) -> StateDictSettings:
    """Return torch's `StateDictSettings` with `kind` and both configs; a config of None becomes the default one of `kind`.
    Raises `UsageError` if `kind` is LOCAL_STATE_DICT or unknown, or if a config belongs to another kind."""
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


def _engines_of(model: nn.Module) -> list[Engine]:
    """Return the engine of each outermost wrapper that contains `model` or is in it. Builds missing engines, which is
    collective. Raises `UsageError` if `model` contains no wrapper."""
    return [top._engine(OPTIM) for top in dict.fromkeys(m._outermost() for m in some_wrappers(model, OPTIM))]


def params_of(engines: Iterable[Engine]) -> dict[int, Param]:
    """Return a dict from the id of each sharded parameter to the `Param` with which the engine manages it."""
    return {id(p.sharded): p for engine in engines for unit in engine.units for p in unit.params}


def full_rows(value: Tensor, param: Param) -> Tensor:
    """Return the full tensor of `value`, a DTensor (gradient or optimizer state) that is sharded like `param`. Collective."""
    return gathered(_torch.local_of(value), param.cut, param.context)


def own_dtensor(full: Tensor, param: Param) -> Any:
    """Return this rank's rows of the tensor `full` as a DTensor, sharded like `param` and on the device of `param`'s shard."""
    rows = own_rows(full, param.cut, param.context).to(_torch.local_of(param.sharded).device)
    return _torch.as_dtensor(rows.contiguous(), param.sharded)


def cut_like(value: Tensor, param: Param) -> Tensor:
    """Return the optimizer state `value` as a DTensor that is sharded like `param`. If `value` is a scalar or has another shape
    than `param`, return it as a full tensor. Collective if `value` is a DTensor with another mesh or placement than `param`."""
    like = param.sharded
    if isinstance(value, DTensor):
        if value.placements == like.placements and value.device_mesh == like.device_mesh:  # type: ignore[attr-defined]
            return value
        value = value.full_tensor()
    return value if value.dim() == 0 or value.shape != like.shape else own_dtensor(value, param)


def named_groups(model: nn.Module, optim: Optimizer) -> list[dict[str, nn.Parameter]]:
    """Return {qualified name: parameter} for each group of `optim`. Raises `UsageError` if `model` lacks a parameter."""
    names = {id(p): clean(name) for name, p in model.named_parameters()}
    for p in (p for group in optim.param_groups for p in group["params"]):
        if id(p) not in names:
            raise UsageError(
                f"the optimizer has a parameter of shape {tuple(p.shape)} that is not in the model; create the optimizer from "
                "model.parameters() after wrapping."
            )
    return [{names[id(p)]: p for p in group["params"]} for group in optim.param_groups]


def named_state(
    model: nn.Module, optim: Optimizer, state: Mapping[str, Any], settings: StateDictSettings
) -> dict[str, Any]:
    """Convert `state`, a result of `optim.state_dict()`, to a state dict by qualified names, and return it. Entries that belong
    to no parameter are copied. Tensors of parameters are full (a collective) or shards, as `settings` say. If they are full with
    `rank0_only`, ranks other than the first get {}. Without "param_groups" in `state`, the result has none either."""
    engines = _engines_of(model)
    full = settings.state_dict_type is StateDictType.FULL_STATE_DICT
    cpu = settings.optim_state_dict_config.offload_to_cpu
    params = params_of(engines)
    named = named_groups(model, optim)
    left = dict(state["state"])
    result: dict[Any, Any] = {}
    for i, (name, p) in enumerate(item for group in named for item in group.items()):
        entry = {}
        for word, value in left.pop(i, {}).items():
            if full and isinstance(value, DTensor):
                value = full_rows(value, params[id(p)])
            elif full and isinstance(value, Tensor):
                value = value.clone()  # the step count; two optimizers must not share it
            entry[word] = value.cpu() if cpu and isinstance(value, Tensor) else value
        if entry:
            result[name] = entry
    if full and getattr(settings.optim_state_dict_config, "rank0_only", False) and not is_first_rank(engines[0]):
        return {}
    return _with_groups({**result, **left}, state.get("param_groups"), named)


def state_by_id(
    model: nn.Module, optim: Optimizer, state: Mapping[str, Any] | None, *, full: bool, from_first_rank: bool = False
) -> dict[str, Any]:
    """Convert a state dict by qualified names to one for `optim.load_state_dict`, and return it. Entries of names that are not
    in `optim` are copied. `full`: `state` has full tensors, equal on all ranks; if they differ, every rank raises
    `DivergenceError`. `from_first_rank`: send the first rank's `state` to all ranks, whose own may be None, without that check.
    Collective with either, and for DTensors that are sharded unlike their parameter. Raises `UsageError` if `state` lacks
    "state", or if it has param groups other than those of `optim`."""
    engines = _engines_of(model)
    from_first = engines[0] if from_first_rank else None
    state = state or {}
    if full and from_first is None:
        _agree_on(state, engines[0])
    params = params_of(engines)
    saved = state.get("state", {})
    keys, groups = _shared((dict.fromkeys(saved) if "state" in state else None, state.get("param_groups")), from_first)
    if keys is None:
        raise UsageError(
            "the optimizer's state dict is empty on this rank, or lacks 'state'. If only the first rank has it, first set the "
            "state_dict_type of this model with FullOptimStateDictConfig(rank0_only=True)."
        )
    named = named_groups(model, optim)
    if groups is not None and [sorted(g["params"]) for g in groups] != [sorted(group) for group in named]:
        raise UsageError(
            f"the state dict has parameter groups of {[len(g['params']) for g in groups]} names, the optimizer has groups of "
            f"{[len(group) for group in named]}, or their names differ; create the optimizer with the groups that were saved."
        )
    flat = (item for group in named for item in group.items())
    owners = {name: (i, params.get(id(p))) for i, (name, p) in enumerate(flat)}
    entries: dict[Any, Any] = {}
    in_order = [name for name in owners if name in keys]  # equal on all ranks, for collectives
    for key in dict.fromkeys([*in_order, *keys]):
        entry = _shared(saved.get(key), from_first)
        i, param = owners.get(key, (key, None))
        if param is not None:
            entry = {k: cut_like(v, param) if isinstance(v, Tensor) else v for k, v in entry.items()}
        entries[i] = entry
    return _with_groups(entries, groups, [[owners[name][0] for name in group] for group in named])


def _with_groups(entries: dict[Any, Any], groups: list[Any] | None, keys: Sequence[Iterable[Any]]) -> dict[str, Any]:
    """Return a state dict of `entries` and `groups`, whose "params" become `keys`. Without `groups` it has no "param_groups"."""
    if groups is None:
        return {"state": entries}
    return {"state": entries, "param_groups": [{**g, "params": [*k]} for g, k in zip(groups, keys, strict=True)]}


def _agree_on(state: Mapping[str, Any], engine: Engine) -> None:
    """Raise `DivergenceError` on every rank if the full optimizer state `state` differs between ranks. Collective."""
    settle(engine, "loads a full state dict of an optimizer")
    values = {
        f"{word!r} of {name!r}": value
        for name, entry in state.get("state", {}).items()
        for word, value in (entry.items() if isinstance(entry, Mapping) else [("value", entry)])
    }
    tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
    others = {key: str(value) for key, value in values.items() if key not in tensors}
    for i, group in enumerate(state.get("param_groups", ())):
        others |= {f"{word!r} of group {i}": str(value) for word, value in group.items() if word != "params"}
    unlike = same_given(tensors, monitor_of(engine.context), "an optimizer", others)
    if unlike:
        raise DivergenceError(
            f"the optimizer's state differs between ranks: {unlike}; nothing was loaded. Load the same file on every rank, or "
            "set the state_dict_type with FullOptimStateDictConfig(rank0_only=True), which sends the first rank's to all."
        )


def _shared(value: Any, from_first: Engine | None) -> Any:
    """Return the first rank's `value`, a collective of the ranks of `from_first`; if that is None, this rank's `value`."""
    if from_first is None:
        return value
    values = [value]
    for axis in (from_first.context.shard, from_first.context.replicate):  # along the first row, then along each column
        if axis.num_ranks > 1:
            dist.broadcast_object_list(values, group=axis.gather.group, group_src=0)
    return values[0]
