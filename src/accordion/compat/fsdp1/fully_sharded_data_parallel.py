"""The wrapper `FullyShardedDataParallel`, with the constructor and methods of torch's class."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed.fsdp as theirs
from torch import Tensor, nn

from accordion import _torch, state
from accordion.compat.fsdp1 import api, state_dicts
from accordion.compat.fsdp1.api import *  # noqa: F403
from accordion.compat.fsdp1.arguments import Arguments, ignored_parameters
from accordion.compat.fsdp1.nesting import CONTAINERS, clean, walk, wrappers_in
from accordion.compat.fsdp1.state_dicts import StateDicts
from accordion.engine.engine import Engine
from accordion.errors import UsageError
from accordion.optimizers.wrap import clip_grad_norm_

__all__ = ["FullyShardedDataParallel"]
__all__ += api.__all__

SIGNATURE = inspect.signature(theirs.FullyShardedDataParallel.__init__)


class FullyShardedDataParallel(StateDicts):
    """Wrapper that shards a module's parameters, and gathers and frees them together. Takes the arguments of torch's class.

    One engine serves the outermost wrapper and all wrappers inside it. With an `auto_wrap_policy`, the constructor wraps
    submodules in place and builds the engine. Otherwise the first use of parameters, state or forward builds it, because an
    outer wrapper may follow. Building is collective. Until then parameters are full; afterwards each is a DTensor under its own
    name. The constructor raises `UsageError` for options that are not supported.
    """

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        arguments = SIGNATURE.bind(self, module, *args, **kwargs).arguments
        if not isinstance(module, nn.Module):
            raise UsageError(f"FullyShardedDataParallel takes a torch.nn.Module, not {type(module).__name__}.")
        policy = arguments.pop("auto_wrap_policy", None)
        ignored = ignored_parameters(arguments.pop("ignored_modules", None), arguments.pop("ignored_states", None))
        shared = {name: value for name, value in arguments.items() if name not in ("self", "module")}
        self._arguments = Arguments(**shared, ignored=ignored)
        self._outer = None
        self._built = False
        self._settings = state_dicts.settings_for(api.StateDictType.FULL_STATE_DICT, None, None)
        self._own_dtypes = {}
        _check(module, policy)
        if policy is not None:
            _auto_wrap(module, policy, {**shared, "ignored_states": ignored})
        self._fsdp_wrapped_module = module
        for wrapper in wrappers_in(module):
            if wrapper._outer is None:
                wrapper._outer = weakref.ref(self)
        if policy is not None:
            self._ready()

    __init__.__signature__ = SIGNATURE  # type: ignore[attr-defined]

    # -- as a module

    @property
    def module(self) -> nn.Module:
        """The wrapped module; if that is a wrapper for activation checkpointing, the module inside it."""
        inner = self._fsdp_wrapped_module
        below = inner._modules.get("_checkpoint_wrapped_module")
        return inner if below is None else below

    def __getattr__(self, name: str) -> Any:
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
        # Hooks of the engine on this wrapper unshard before and reshard after.
        return self._fsdp_wrapped_module(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        # An outer plain module lists parameters through this method, so the engine must exist.
        self._ready()
        modules: Iterator[tuple[str, nn.Module]] = super().named_modules(*args, **kwargs)
        return modules

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, parameter) with the names of the unwrapped module. Builds a missing engine, which is collective."""
        self._ready()
        for name, param in super().named_parameters(*args, **kwargs):
            yield clean(name), param

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, buffer) with the names of the unwrapped module. Builds a missing engine, which is collective."""
        self._ready()
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield clean(name), buffer

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Call `fn` with every module, children first, while all parameters are full, and return this wrapper. Changes that
        `fn` makes are kept in the shards. Collective if the engine has been built."""
        if not self._built or state.sharded_engine(self, "apply").suspended:
            return super().apply(fn)
        with self.summon_full_params(self):
            return super().apply(fn)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Return all wrappers in `module`, itself included; with `root_only` only those that are in no other wrapper."""
        wrappers = [m for _, m in walk(module) if isinstance(m, FullyShardedDataParallel)]
        return [m for m in wrappers if m.check_is_root()] if root_only else wrappers

    # -- training

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Context manager: the backward of a forward inside it reduces no gradients, but sums full ones on each rank. The next
        backward of a forward outside reduces these sums too. Raises `UsageError` on a wrapper inside another wrapper."""
        self._require_root("no_sync()")
        return state.no_sync(self)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of the model so that their norm over all ranks is at most `max_norm`. Returns the norm before
        that, a 0-d float32 tensor. Collective. Raises `UsageError` on a wrapper inside another wrapper."""
        self._require_root("clip_grad_norm_()")
        return clip_grad_norm_(self, float(max_norm), float(norm_type))

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
        """Context manager in which all parameters of each outermost wrapper around or in `module` are full, on every rank.
        Collective. With `with_grads`, gradients are full too. With `writeback`, the exit writes changes of parameters and
        gradients into the shards; all ranks must make equal changes. Without it, changes are lost. `recurse` and `rank0_only`
        change nothing. Raises `UsageError` for `rank0_only` with `writeback`, and for `offload_to_cpu` on an accelerator."""
        if rank0_only and writeback:
            raise UsageError("summon_full_params(rank0_only=True) cannot write back: pass writeback=False.")
        with contextlib.ExitStack() as stack:
            for top in dict.fromkeys(m._outermost() for m in wrappers_in(module)):
                engine = top._engine("summon_full_params()")
                if offload_to_cpu and engine.context.device.type != "cpu":
                    raise UsageError(
                        "summon_full_params(offload_to_cpu=True) is not supported: full parameters are on the device that "
                        "computes. Take a full state dict with offload_to_cpu=True."
                    )
                stack.enter_context(_full(top, engine, writeback, with_grads))
            yield

    def register_comm_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `UsageError`: there is no flat gradient that a hook could communicate."""
        raise UsageError(
            "register_comm_hook is not supported: there is no flat gradient for a hook to communicate. "
            "MixedPrecision(reduce_dtype=) sets the dtype of the reduction."
        )


def _check(module: nn.Module, policy: Any) -> None:
    """Raise `UsageError` if `module` cannot be wrapped: it contains wrappers and a `policy` was passed; a wrapper in it has an
    engine already; or it is a ModuleList or ModuleDict (no forward gathers) with a policy or parameters outside of wrappers."""
    inside = wrappers_in(module)
    if inside and policy is not None:
        raise UsageError(
            f"auto_wrap_policy was passed for a module that contains {len(inside)} wrappers; pass a policy, or wrap by hand."
        )
    if any(wrapper._built for wrapper in inside):
        raise UsageError(
            "a FullyShardedDataParallel inside this module has an engine already (by its policy, or a use of its parameters, "
            "state or forward). Wrap the outermost module before the first use, and pass the policy to the outermost only."
        )
    wrapped = {id(m) for wrapper in inside for _, m in walk(wrapper)}
    loose = [m for _, m in walk(module) if id(m) not in wrapped and any(p is not None for p in m._parameters.values())]
    if isinstance(module, CONTAINERS) and (loose or policy is not None):
        raise UsageError(
            f"FullyShardedDataParallel cannot wrap a {type(module).__name__}: it has no forward, so nothing would gather its "
            "parameters. Wrap its items, or the module that contains it."
        )


@contextlib.contextmanager
def _full(top: nn.Module, engine: Engine, writeback: bool, with_grads: bool) -> Generator[None]:
    """Context manager in which the parameters of `top`, and with `with_grads` their gradients, are full. With `writeback`, the
    exit writes changes of full parameters and gradients into the shards; otherwise they are lost. Collective."""
    sharded = dict(nn.Module.named_parameters(top))
    entries = state_dicts.params_of([engine])
    with state.full_params(top, write=writeback):
        full = dict(nn.Module.named_parameters(top))
        pairs = [(full[n], p, entries[id(p)]) for n, p in sharded.items() if with_grads and id(p) in entries]
        for shown, p, param in pairs:
            if p.grad is not None:
                shown.grad = state_dicts.full_rows(p.grad, param)
        try:
            yield
        finally:
            for shown, p, param in pairs if writeback else ():
                p.grad = None if shown.grad is None else state_dicts.own_dtensor(shown.grad, param)


def _auto_wrap(root: nn.Module, policy: Any, arguments: dict[str, Any]) -> None:
    """Replace the submodules of `root` that `policy` chooses by wrappers with `arguments`, children before parents. `policy`: a
    policy object of torch, or a function (module=, recurse=, nonwrapped_numel=) -> bool: with recurse=True if modules inside
    `module` may be wrapped, else if `module` is. If `arguments` ask for mixed precision, batch norms are wrapped too, without
    mixed precision, as in torch. Raises `UsageError` for another `policy`."""
    mixed = arguments.get("mixed_precision")
    exempt = () if mixed is None else tuple(_torch.classes_without_mixed_precision(mixed))
    if _torch.is_wrap_policy(policy):
        targets = _torch.run_wrap_policy(policy, root, arguments)
    elif callable(policy):
        targets = _by_function(root, policy, arguments)
    else:
        raise UsageError(
            f"auto_wrap_policy is {policy!r}; it takes a policy of accordion.compat.fsdp1.wrap or a function."
        )
    for module in root.modules():
        if exempt and isinstance(module, exempt):
            targets[module] = {**arguments, "mixed_precision": None}
    targets.pop(root, None)
    wrapped: dict[int, nn.Module] = {}
    for parent in list(root.modules())[::-1]:
        for name, child in list(parent._modules.items()):
            if child is not None and child in targets:
                if id(child) not in wrapped:
                    wrapped[id(child)] = FullyShardedDataParallel(child, **targets[child])
                parent._modules[name] = wrapped[id(child)]


def _by_function(
    root: nn.Module, policy: Callable[..., bool], arguments: dict[str, Any]
) -> dict[nn.Module, dict[str, Any]]:
    ignored = {id(p) for p in arguments["ignored_states"]}
    targets: dict[nn.Module, dict[str, Any]] = {}

    def visit(module: nn.Module) -> int:
        """Add those of `module` and the modules inside it that `policy` chooses, but not `root`, to `targets`, children first.
        Return the number of parameter elements in the chosen modules."""
        num_elements = sum(p.numel() for p in module.parameters() if id(p) not in ignored)
        if not policy(module=module, recurse=True, nonwrapped_numel=num_elements):
            return 0
        inside = sum(visit(child) for child in module.children())
        if module is not root and policy(module=module, recurse=False, nonwrapped_numel=num_elements - inside):
            targets[module] = arguments
            return num_elements
        return inside

    visit(root)
    return targets
