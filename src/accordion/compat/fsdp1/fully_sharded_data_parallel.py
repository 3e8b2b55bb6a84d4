"""The wrapper `FullyShardedDataParallel`: torch's constructor and methods, on this engine."""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from accordion import _torch, optim, state
from accordion.compat.fsdp1 import states
from accordion.compat.fsdp1.api import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from accordion.compat.fsdp1.arguments import Arguments, ignored_parameters, of_children
from accordion.compat.fsdp1.building import build
from accordion.compat.fsdp1.policies import auto_wrap
from accordion.engine.engine import Engine
from accordion.engine.group import own_rows
from accordion.errors import UsageError

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]
INNER = "_fsdp_wrapped_module."
PREFIXES = (INNER, "_checkpoint_wrapped_module.")


def clean(name: str) -> str:
    """A qualified name without what wrappers put into it."""
    for prefix in PREFIXES:
        name = name.replace(prefix, "")
    return name


class FullyShardedDataParallel(nn.Module):
    """A module whose parameters are sharded over ranks; nested ones are its units.

    Arguments are those of torch's class. The engine is made for the outermost wrapper and all below it: at once where an
    `auto_wrap_policy` is given, else when parameters, state or a forward are first asked for, since a wrapper around it may
    still come. Until then parameters are whole. Afterwards each is a DTensor under its own name.

    Raises `UsageError` for what cannot be done, by name.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        given: object = module
        if not isinstance(given, nn.Module):
            raise UsageError(f"FullyShardedDataParallel takes a torch.nn.Module, not {type(given).__name__}.")
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            raise UsageError(
                f"FullyShardedDataParallel was given a {type(module).__name__}, which nobody calls, so nothing would gather its "
                "parameters; wrap its items, or the module that holds it."
            )
        self._arguments = Arguments(
            process_group=process_group,
            sharding_strategy=sharding_strategy,
            cpu_offload=cpu_offload,
            backward_prefetch=backward_prefetch,
            mixed_precision=mixed_precision,
            param_init_fn=param_init_fn,
            device_id=device_id,
            sync_module_states=sync_module_states,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
            use_orig_params=use_orig_params,
            ignored=ignored_parameters(module, ignored_modules, ignored_states),
            device_mesh=device_mesh,
        )
        self._outer: weakref.ref[FullyShardedDataParallel] | None = None
        self._built = False
        self._settings = states.settings_for(StateDictType.FULL_STATE_DICT, None, None)
        self._own_dtypes: dict[str, torch.dtype] = {}
        inside = [m for m in _walk(module) if isinstance(m, FullyShardedDataParallel)]
        _check_inside(inside, auto_wrap_policy)
        if auto_wrap_policy is not None:
            ignored = {id(p) for p in self._arguments.ignored}
            auto_wrap(module, auto_wrap_policy, ignored, of_children(self._arguments), _wrapped)
        self._fsdp_wrapped_module = module
        for wrapper in _walk(module):
            if isinstance(wrapper, FullyShardedDataParallel) and wrapper._outer is None:
                wrapper._outer = weakref.ref(self)
        if auto_wrap_policy is not None:
            self._ready()

    # -- the engine

    def _outermost(self) -> FullyShardedDataParallel:
        top = self
        while top._outer is not None and (above := top._outer()) is not None:
            top = above
        return top

    def _ready(self) -> None:
        """Build the engine of the outermost wrapper, once."""
        if self._built:
            return
        top = self._outermost()
        wrappers = [(n, m) for n, m in _named(top, "", set()) if isinstance(m, FullyShardedDataParallel)]
        for _, wrapper in wrappers:
            wrapper._built = True  # asking for modules, as the engine does, must not begin again
        try:
            top._own_dtypes = {n: b.dtype for n, b in top.named_buffers()}
            build([(name, wrapper, wrapper._arguments) for name, wrapper in wrappers])
        except BaseException:
            for _, wrapper in wrappers:
                wrapper._built = False
            raise
        for _, wrapper in wrappers:
            wrapper.register_load_state_dict_pre_hook(_put_prefix)  # type: ignore[no-untyped-call]

    def _engine(self, what: str) -> Engine:
        self._ready()
        return state.sharded_engine(self, what)

    def _root_engine(self, what: str) -> Engine:
        if not self.check_is_root():
            raise UsageError(f"{what} is for the outermost FullyShardedDataParallel, and this one is inside another.")
        return self._engine(what)

    # -- as a module

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without a wrapper that recomputes activations."""
        inner = self._fsdp_wrapped_module
        below = inner._modules.get("_checkpoint_wrapped_module")
        return inner if below is None else below

    def __getattr__(self, name: str) -> Any:
        if name in ("_flat_param", "_handle"):
            raise AttributeError(
                f"{name} does not exist: there are no flat parameters, each is a DTensor under its own name."
            )
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_fsdp_wrapped_module":
                raise
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: Any) -> Any:
        return self._fsdp_wrapped_module[key]  # type: ignore[index]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._ready()
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module; the engine's hooks on this one gather around it."""
        return self._fsdp_wrapped_module(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """As torch's; a plain module around asks here for parameters too, so the engine is made."""
        self._ready()
        found: Iterator[tuple[str, nn.Module]] = super().named_modules(*args, **kwargs)
        return found

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As torch's, under the names that the unwrapped module gives them."""
        self._ready()
        for name, param in super().named_parameters(*args, **kwargs):
            yield clean(name), param

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """As torch's, under the names that the unwrapped module gives them."""
        self._ready()
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield clean(name), buffer

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Call `fn` with every module, full parameters standing in them; each rank keeps its rows of what `fn` writes."""
        if not self._built or state.sharded_engine(self, "apply").suspended:
            return super().apply(fn)
        with self.summon_full_params(self):
            return super().apply(fn)

    def check_is_root(self) -> bool:
        """Whether no other wrapper is around this one."""
        return self._outer is None or self._outer() is None

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """All wrappers in `module`, itself included; only the outermost ones with `root_only`."""
        found = [m for m in _walk(module) if isinstance(m, FullyShardedDataParallel)]
        return [m for m in found if m.check_is_root()] if root_only else found

    # -- training

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None]:
        """Accumulate full gradients without communicating; the next backward outside reduces the sum."""
        self._root_engine("no_sync()")
        with state.no_sync(self):
            yield

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients so that their norm over all ranks is at most `max_norm`; returns the norm before, 0-d float32."""
        self._root_engine("clip_grad_norm_()")
        return optim.clip_grad_norm_(self, float(max_norm), float(norm_type))

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Generator[None]:
        """Full parameters in the registry of the whole model around `module`, on every rank.

        With `writeback` each rank keeps its rows of what is written. `recurse` and `rank0_only` are accepted: more is full
        than asked for. Raises `UsageError` for `rank0_only` with `writeback`, and for `offload_to_cpu` on an accelerator.
        """
        if rank0_only and writeback:
            raise UsageError("summon_full_params(rank0_only=True, writeback=True) cannot be: pass writeback=False.")
        tops = list(
            {id(w): w for w in (m._outermost() for m in FullyShardedDataParallel.fsdp_modules(module))}.values()
        )
        with contextlib.ExitStack() as stack:
            for top in tops:
                engine = top._engine("summon_full_params()")
                if offload_to_cpu and engine.wiring.device.type != "cpu":
                    raise UsageError(
                        "summon_full_params(offload_to_cpu=True) is not supported: parameters are shown on the device that "
                        "computes; take a full state dict with offload_to_cpu=True."
                    )
                stack.enter_context(_full(top, engine, writeback, with_grads))
            yield

    # -- state dicts

    def state_dict(  # type: ignore[override]
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """The state under the names of the unwrapped module; full or sharded as `state_dict_type` says, full by default.

        A full one is collective. With `keep_vars` it is the sharded parameters themselves.
        """
        self._ready()
        raw = super().state_dict(prefix=prefix, keep_vars=True)
        found = OrderedDict((clean(name), value) for name, value in raw.items())
        if not keep_vars:
            found = OrderedDict(self._as_asked(found, prefix))
        if destination is None:
            destination = OrderedDict()
            destination._metadata = OrderedDict()
        destination.update(found)
        if hasattr(destination, "_metadata"):
            destination._metadata.update({clean(f"{k}.")[:-1]: v for k, v in raw._metadata.items()})  # type: ignore[attr-defined]
        return destination  # type: ignore[no-any-return]

    def _as_asked(self, found: dict[str, Any], prefix: str) -> dict[str, Any]:
        engine = self._engine("state_dict()")
        config = self._settings.state_dict_config
        for name, value in found.items():
            dtype = self._outermost()._own_dtypes.get(name.removeprefix(prefix))
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and dtype is not None:
                found[name] = value.to(dtype)  # buffers that mixed precision cast are saved as they were
        if self._settings.state_dict_type is StateDictType.FULL_STATE_DICT:
            rank0_only = bool(getattr(config, "rank0_only", False))
            return state.full_values(engine, found, rank0_only=rank0_only, cpu=config.offload_to_cpu)
        return {
            name: (value.detach().cpu() if config.offload_to_cpu else value.detach())
            if isinstance(value, Tensor)
            else value
            for name, value in found.items()
        }

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
        """Say what state dicts of `module` are from now on; returns what was said before."""
        settings = states.settings_for(state_dict_type, state_dict_config, optim_state_dict_config)
        wrappers = _some_wrappers(module, "set_state_dict_type")
        before = wrappers[0]._settings
        for wrapper in wrappers:
            wrapper._settings = settings
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """What was said last about state dicts of `module`."""
        return _some_wrappers(module, "get_state_dict_type")[0]._settings

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Generator[None]:
        """`set_state_dict_type` for the time of a block."""
        before = FullyShardedDataParallel.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            for wrapper in _some_wrappers(module, "state_dict_type"):
                wrapper._settings = before

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """The optimizer's state by qualified name, full or sharded as `state_dict_type` says; a full one is collective."""
        given = optim.state_dict() if optim_state_dict is None else optim_state_dict
        settings = FullyShardedDataParallel.get_state_dict_type(model)
        return states.named_state(model, optim, given, _engines(model), settings)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """What `optim.load_state_dict` takes, from what `optim_state_dict` gave on any number of ranks."""
        if is_named_optimizer:
            raise UsageError(
                "is_named_optimizer=True is not supported: an optimizer of torch.optim has numbered parameters."
            )
        settings = FullyShardedDataParallel.get_state_dict_type(model)
        engines = _engines(model)
        from_first = engines[0] if getattr(settings.optim_state_dict_config, "rank0_only", False) else None
        result = states.state_by_id(model, optim, optim_state_dict, engines, from_first)
        if load_directly:
            optim.load_state_dict(result)
        return result

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module, optim: Optimizer, optim_input: Any = None, rank0_only: bool = True, group: Any = None
    ) -> dict[str, Any]:
        """The older name of a full `optim_state_dict`, on CPU."""
        settings = states.settings_for(
            StateDictType.FULL_STATE_DICT, None, FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only)
        )
        return states.named_state(model, optim, optim.state_dict(), _engines(model), settings)

    @staticmethod
    def sharded_optim_state_dict(model: nn.Module, optim: Optimizer, group: Any = None) -> dict[str, Any]:
        """The older name of a sharded `optim_state_dict`."""
        settings = states.settings_for(StateDictType.SHARDED_STATE_DICT, None, None)
        return states.named_state(model, optim, optim.state_dict(), _engines(model), settings)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any], model: nn.Module, optim_input: Any = None, optim: Optimizer | None = None
    ) -> dict[str, Any]:
        """The older name of `optim_state_dict_to_load` for a full one that every rank has."""
        return states.state_by_id(model, _given(optim), full_optim_state_dict, _engines(model), None)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: Optimizer
    ) -> dict[str, Any]:
        """The older name of `optim_state_dict_to_load` for a sharded one."""
        return states.state_by_id(model, optim, sharded_optim_state_dict, _engines(model), None)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """The older name of `optim_state_dict_to_load` for a full one that the first rank has."""
        engines = _engines(model)
        return states.state_by_id(model, _given(optim), full_optim_state_dict or {}, engines, engines[0])

    @staticmethod
    def rekey_optim_state_dict(*args: Any, **kwargs: Any) -> NoReturn:
        """Refused: state dicts are by qualified name."""
        raise UsageError("rekey_optim_state_dict is not supported: take optim_state_dict, which is by qualified name.")

    def register_comm_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: there is no flat gradient that a hook could send."""
        raise UsageError(
            "register_comm_hook is not supported: gradients are sent from where they lie, there is no flat one to give a hook; "
            "MixedPrecision(reduce_dtype=) chooses the dtype of the sum."
        )


def _walk(module: nn.Module) -> Iterator[nn.Module]:
    """`module` and all below it, without asking a wrapper for its modules, which would make an engine."""
    return (found for _, found in _named(module, "", set()))


def _named(module: nn.Module, prefix: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _named(child, f"{prefix}.{name}" if prefix else name, seen)


def _wrapped(module: nn.Module, arguments: dict[str, Any]) -> nn.Module:
    """What an auto wrap policy makes."""
    return FullyShardedDataParallel(module, **arguments)


def _check_inside(inside: list[FullyShardedDataParallel], policy: Any) -> None:
    if inside and policy is not None:
        raise UsageError(
            f"auto_wrap_policy was given for a module with {len(inside)} wrappers in it; give the policy, or wrap by hand."
        )
    if any(wrapper._built for wrapper in inside):
        raise UsageError(
            "a FullyShardedDataParallel inside this module has been used already (its policy, parameters, state or forward), so "
            "it cannot become a unit of another; wrap the outermost before that, or leave the policy to the outermost."
        )


def _some_wrappers(module: nn.Module, what: str) -> list[FullyShardedDataParallel]:
    found = FullyShardedDataParallel.fsdp_modules(module)
    if not found:
        raise UsageError(
            f"{what} takes a model with FullyShardedDataParallel in it; this {type(module).__name__} has none."
        )
    return found


def _engines(model: nn.Module) -> list[Engine]:
    tops = {id(w): w for w in (m._outermost() for m in _some_wrappers(model, "an optimizer's state dict"))}
    return [top._engine("an optimizer's state dict") for top in tops.values()]


def _given(optimizer: Optimizer | None) -> Optimizer:
    if optimizer is None:
        raise UsageError("optim_input is not supported, it numbers flat parameters; pass optim=, the optimizer itself.")
    return optimizer


def _put_prefix(module: nn.Module, found: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Before loading: names as the modules below a wrapper look for them."""
    for name in [name for name in found if name.startswith(prefix)]:
        found[f"{prefix}{INNER}{name.removeprefix(prefix)}"] = found.pop(name)


@contextlib.contextmanager
def _full(top: FullyShardedDataParallel, engine: Engine, writeback: bool, with_grads: bool) -> Generator[None]:
    """Full parameters of one engine, and their gradients if asked for."""
    sharded = dict(nn.Module.named_parameters(top))
    entries = states.params_of([engine])
    with state.full_params(top, write=writeback):
        full = dict(nn.Module.named_parameters(top))
        pairs = [(full[n], p, *entries[id(p)]) for n, p in sharded.items() if with_grads and id(p) in entries]
        for shown, p, param, _ in pairs:
            if p.grad is not None:
                shown.grad = states.full_rows(p.grad, param, engine)
        try:
            yield
        finally:
            for shown, p, param, _ in pairs if writeback else ():
                if shown.grad is None:
                    p.grad = None
                else:
                    rows = own_rows(shown.grad, param.cut, engine.wiring).contiguous()
                    p.grad = _torch.as_dtensor(rows, p)
