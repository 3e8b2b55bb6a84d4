"""The state dict methods of `FullyShardedDataParallel`."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Generator
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    OptimStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.optim import Optimizer

from accordion import state
from accordion.compat.fsdp1 import states
from accordion.compat.fsdp1.nesting import Wrapper, clean, some_wrappers
from accordion.errors import UsageError


class StateDicts(Wrapper):
    """Base class of `FullyShardedDataParallel` with the methods for state dicts of models and optimizers, full or sharded."""

    def state_dict(  # type: ignore[override]
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return the state dict under the names of the unwrapped module, full (a collective) unless `state_dict_type` differs.

        With `keep_vars` it has the sharded parameters themselves.
        """
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
        """Return `tensors` full or sharded, and on the host or the device, as the last `set_state_dict_type` chose."""
        engine = self._engine("state_dict()")
        config = self._settings.state_dict_config
        for name, value in tensors.items():
            dtype = self._outermost()._own_dtypes.get(name.removeprefix(prefix))
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and dtype is not None:
                tensors[name] = value.to(dtype)  # buffers are saved in the dtype that they had before mixed precision
        if self._settings.state_dict_type is StateDictType.FULL_STATE_DICT:
            rank0_only = bool(getattr(config, "rank0_only", False))
            return state.full_values(engine, tensors, rank0_only=rank0_only, cpu=config.offload_to_cpu)
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
        """Set the kind of state dicts of `module` from now on, and return the previous settings."""
        settings = states.settings_for(state_dict_type, state_dict_config, optim_state_dict_config)
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
        """Context manager that calls `set_state_dict_type`, and restores the previous settings at its end."""
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
        """Return the optimizer's state dict by qualified name, full (a collective) or sharded by the `state_dict_type`."""
        numbered = optim.state_dict() if optim_state_dict is None else optim_state_dict
        settings = StateDicts.get_state_dict_type(model)
        return states.named_state(model, optim, numbered, settings)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Convert a result of `optim_state_dict`, from any number of ranks, to a dict for `optim.load_state_dict`."""
        if is_named_optimizer:
            raise UsageError(
                "is_named_optimizer=True is not supported: optimizers of torch.optim number their parameters."
            )
        settings = StateDicts.get_state_dict_type(model)
        first = bool(getattr(settings.optim_state_dict_config, "rank0_only", False))
        full = settings.state_dict_type is StateDictType.FULL_STATE_DICT
        result = states.state_by_id(model, optim, optim_state_dict, full=full, from_first_rank=first)
        if load_directly:
            optim.load_state_dict(result)
        return result

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module, optim: Optimizer, optim_input: Any = None, rank0_only: bool = True, group: Any = None
    ) -> dict[str, Any]:
        """Older name of `optim_state_dict`, for a full one on CPU."""
        settings = states.settings_for(
            StateDictType.FULL_STATE_DICT, None, FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only)
        )
        return states.named_state(model, optim, optim.state_dict(), settings)

    @staticmethod
    def sharded_optim_state_dict(model: nn.Module, optim: Optimizer, group: Any = None) -> dict[str, Any]:
        """Older name of `optim_state_dict`, for a sharded one."""
        settings = states.settings_for(StateDictType.SHARDED_STATE_DICT, None, None)
        return states.named_state(model, optim, optim.state_dict(), settings)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any], model: nn.Module, optim_input: Any = None, optim: Optimizer | None = None
    ) -> dict[str, Any]:
        """Older name of `optim_state_dict_to_load`, for a full one that every rank has."""
        return states.state_by_id(model, _required(optim), full_optim_state_dict, full=True)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: Optimizer
    ) -> dict[str, Any]:
        """Older name of `optim_state_dict_to_load`, for a sharded one."""
        return states.state_by_id(model, optim, sharded_optim_state_dict, full=False)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """Older name of `optim_state_dict_to_load`, for a full one that only the first rank has."""
        full = full_optim_state_dict or {}
        return states.state_by_id(model, _required(optim), full, full=True, from_first_rank=True)

    @staticmethod
    def rekey_optim_state_dict(*args: Any, **kwargs: Any) -> NoReturn:
        """Refused: state dicts of optimizers always use qualified names."""
        raise UsageError("rekey_optim_state_dict is not supported: use optim_state_dict, which has qualified names.")


def _required(optimizer: Optimizer | None) -> Optimizer:
    if optimizer is None:
        raise UsageError(
            "optim_input is not supported, because it numbers flat parameters; pass the optimizer as optim=."
        )
    return optimizer
