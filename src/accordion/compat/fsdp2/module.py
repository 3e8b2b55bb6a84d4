"""`FSDPModule`, the class that `fully_shard` adds to a module's own class, and the hooks of such a module."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from accordion import _torch
from accordion.compat.fsdp2.lazy import Part, part_of, parts_below
from accordion.engine.order import BACKWARD, FORWARD, Phase
from accordion.engine.tree import map_tensors
from accordion.errors import AssertedUsageError, UsageError
from accordion.safety.refusals import NO_COPY
from accordion.shard.topology import device_of
from accordion.state import take_own_rows

_Base: Any = _torch.fsdp_module_base()
_Handle: Any = _torch.gradient_reduction_handle()


class GradientReductionHandle(_Handle):  # type: ignore[misc]
    """Handle that `FSDPModule.finalize_backward(async_op=True)` returns when gradients are complete; `wait` returns at once."""

    def __init__(self) -> None: ...

    def wait(self) -> None:
        """Return at once."""


class UnshardHandle:
    """Handle that `FSDPModule.unshard(async_op=True)` returns; call `wait` before using the parameters."""

    def __init__(self, part: Part | None = None) -> None:
        self._part = part

    def wait(self) -> None:
        """Wait for the all-gather, and register the full parameters in the module. A second call does nothing."""
        part, self._part = self._part, None
        if part is not None:
            part.unshard()


def no_effect(why: str) -> Callable[..., None]:
    """Return a method that accepts any arguments and does nothing. Its docstring gives `why` as the reason."""

    def setter(self: object, *args: Any, **kwargs: Any) -> None: ...

    setter.__doc__ = f"Accepted without effect: {why}."
    return setter


class FSDPModule(_Base):  # type: ignore[misc]
    """Methods of a module that `fully_shard` has sharded. The setters act from the next forward or backward on; with `recurse`
    they also set the FSDP modules inside this one."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Makes an unsharded module of the original class, because `nn.Sequential` calls its own class for a slice.
        original: Any = next(kind for kind in cls.__mro__ if kind is not _Base and not issubclass(kind, FSDPModule))
        module = original.__new__(original)
        module.__init__(*args, **kwargs)
        return module

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise AssertedUsageError(NO_COPY)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # The method of an ordinary module: the engine's parameter registry converts shards itself.
        last: Any = FSDPModule if _Base is object else _Base
        return super(last, self)._apply(fn, recurse)

    def _get_fsdp_state(self) -> Any:
        # torch's pipelines compare `_comm_ctx` of their stages, to see if `share_comm_ctx` was called.
        part = fsdp_part(self)
        return SimpleNamespace(_comm_ctx=part if part.shares is None else part.shares())

    # -- full parameters

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the full parameters of this module, but not those of FSDP modules inside it, and wait. Collective. They are
        plain tensors in `parameters()` until `reshard`, a forward that reshards, or the end of a backward. With `async_op`,
        return a handle at once; its `wait` waits for the parameters and registers them. The first call builds the engine."""
        part = fsdp_part(self)
        if async_op:
            part.begin_unshard()
            return UnshardHandle(part)
        part.unshard()
        return None

    def reshard(self) -> None:
        """Free the full parameters of this module, unless a running call needs them. FSDP modules inside it are not changed."""
        fsdp_part(self).reshard()

    def reset_iter_state(self) -> None:
        """Clean up after an exception in a forward or backward; gradients that were not reduced are dropped. Do nothing before
        the first forward. Raises `RuntimeError` on a module that is not the root."""
        part = _root_part(self, "reset_iter_state")
        if part.unit is not None:
            part.engine().reset()
            for unit in part.engine().units:
                unit.local_sums.drop()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Choose if full parameters are freed after the forward (True) or kept for the backward (False). An int that was passed
        to `fully_shard` no longer applies: parameters are resharded over all ranks. Raises `UsageError` without a bool."""
        if not isinstance(reshard_after_forward, bool):
            raise UsageError(f"reshard_after_forward is {reshard_after_forward!r}; pass True or False.")
        for part in _parts(self, recurse):
            part.unit_policy.keep, part.settings.keeps_parts = not reshard_after_forward, False
            part.push()

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Choose if the memory of full parameters is kept, at one address, when they are resharded (for CUDA graphs)."""
        for part in _parts(self, recurse):
            part.settings.stays = bool(keep)
            part.push()

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Choose if full parameters are freed after a backward (True), or kept for the next forward (False). That forward still
        gathers again if gradients were reduced, or shards written, in between."""
        for part in _parts(self, recurse):
            part.unit_policy.keep_on = not reshard_after_backward

    set_unshard_in_backward = no_effect("full parameters are always gathered for the backward")

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Prefetch parameters of `modules` ([]: of none) in this module's forward, not those of the modules expected next."""
        self._prefetch(FORWARD, modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Prefetch parameters of `modules` ([]: of none) in this module's backward, not those of the modules expected next."""
        self._prefetch(BACKWARD, modules)

    def _prefetch(self, phase: Phase, modules: Iterable[Any]) -> None:
        part = fsdp_part(self)
        part.ahead[phase] = [weakref.ref(fsdp_part(m)) for m in modules]
        part.push()

    # -- gradients

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Choose if backwards reduce gradients (True), or only sum full gradients on each rank for a later reduce (False).
        Replaces an earlier `set_requires_all_reduce`."""
        for part in _parts(self, recurse):
            part.settings.sync = part.settings.all_reduce = requires_gradient_sync
            _settle_sync(part)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Choose if backwards on a 2-D mesh reduce gradients (True), or only sum full gradients on each rank for a later reduce
        (False). Without effect on a 1-D mesh, and while `set_requires_gradient_sync(False)` applies."""
        for part in _parts(self, recurse):
            part.settings.all_reduce = requires_all_reduce
            _settle_sync(part)

    set_is_last_backward = no_effect("each backward waits for its own reduces, which is right for every micro-batch")
    set_manual_backward_finalization = no_effect("`finalize_backward` always reduces")
    set_force_sum_reduction_for_comms = no_effect("reductions are always sums")
    set_reduce_scatter_unused_params = no_effect("missing gradients are always reduced as zeros")

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce gradients that were only summed on each rank, and wait. Then free full parameters, unless
        `set_reshard_after_backward` keeps them. Do nothing before the first forward. Collective. With `async_op`, return a
        handle with nothing to wait for. Raises `RuntimeError` in a forward or backward, and on a module inside another."""
        part = _root_part(self, "finalize_backward")
        if part.unit is not None:
            engine = part.engine()
            if engine.depth or _torch.is_in_backward():
                raise RuntimeError("finalize_backward was called in a forward or backward; call it after that.")
            for each in parts_below([self]):
                if each.unit is not None and not each.unit_policy.keep_on:
                    each.unit.keep_until_stale = False
            with torch.no_grad():
                engine.reduce_sums()
            engine.reshard_unused()
        return GradientReductionHandle() if async_op else None

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of this module's own gradients by `factor` instead of the number of ranks. FSDP modules inside it are
        not changed. Raises `UsageError` unless `factor` is above 0."""
        if not factor > 0:
            raise UsageError(f"the gradient divide factor is {factor!r}; pass a positive number.")
        part = fsdp_part(self)
        part.settings.scale = 1.0 / factor
        part.push()

    set_reduce_scatter_divide_factor = set_gradient_divide_factor  # torch's older name

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Call `hook` with each 1-D buffer of this module's reduced and divided gradients (this rank's rows, padding and
        counters), on the stream of the reduce. The hook may write into the buffer, except the counters, which are restored.
        Raises `UsageError` for a `stream`."""
        if stream is not None:
            raise UsageError(
                "set_all_reduce_hook(stream=) is not supported: the hook runs on the stream of the reduce; leave it out."
            )
        part = fsdp_part(self)
        part.settings.after_reduce = hook
        part.push()

    # -- communication

    set_separate_reduce_scatter_group = no_effect("reduces have a communicator of their own if that helps")
    set_reduce_scatter_max_input_buffers = no_effect("a reduce never waits for the buffer of another")
    set_allocate_memory_from_process_group_for_comm = no_effect("there are no staging buffers")
    set_symm_mem_for_comm = no_effect("there are no staging buffers")

    def set_custom_all_gather(self, comm: Any) -> None:
        """Raise `UsageError`: parameters are gathered directly into their memory, without buffers that `comm` allocates."""
        raise UsageError(
            "set_custom_all_gather is not supported: parameters are gathered directly into their memory, without a staging "
            "buffer that a custom all-gather could allocate; leave it out."
        )

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Raise `UsageError`: gradients are often reduced by an all-to-all and a sum, which a reduce-scatter cannot replace."""
        raise UsageError(
            "set_custom_reduce_scatter is not supported: gradients are often reduced by an all-to-all and a local sum, which a "
            "custom reduce-scatter cannot replace; leave it out."
        )

    def set_post_optim_event(self, event: Any) -> None:
        """Let the next forward of this module first make the current stream wait for `event`, such as the end of an optimizer
        step on another stream. No effect on CPU."""
        part = fsdp_part(self)
        if part.arguments.mesh.device_type == "cpu":
            return

        def wait(*_: Any) -> None:
            handle.remove()
            torch.accelerator.current_stream().wait_event(event)

        handle = part.alive()[0].register_forward_pre_hook(torch.compiler.disable(wait), prepend=True)


@cache
def sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def fsdp_part(module: Any) -> Part:
    part = part_of(module) if isinstance(module, nn.Module) else None
    if part is None:
        raise UsageError(f"{type(module).__name__} is not an FSDPModule; pass a module that fully_shard returned.")
    return part


def _root_part(module: object, method: str) -> Part:
    part = fsdp_part(module)
    if not part.is_outermost():
        name = type(module).__name__
        raise RuntimeError(f"{method} was called on {name}, which is inside another FSDP module; call it on the root.")
    return part


def _parts(module: Any, recurse: bool) -> Sequence[Part]:
    part = fsdp_part(module)
    return parts_below([module]) if recurse else [part]


def _settle_sync(part: Part) -> None:
    part.unit_policy.reduces = part.settings.sync and (
        part.settings.all_reduce or not part.arguments.sharding.strategy.hybrid
    )


# -- hooks


def inputs_to_device(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Forward pre-hook of `module`. Return (args, kwargs) with tensors on the mesh's device if `module` is the outermost; else
    return None, which changes nothing."""
    part = fsdp_part(module)
    if not part.is_outermost():
        return None
    device = device_of(part.arguments.mesh)
    return map_tensors(lambda t: t.to(device), (args, kwargs))


def before_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    fsdp_part(module).settle()


def before_load(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
    """Pre-hook of `load_state_dict`: end explicit unshards, wait for steps in progress, and replace DTensors in `state` from a
    file by ones on the parameters' mesh, a collective. With assign=True also remove the engine, which has old parameters."""
    for part in parts_below([module]):
        part.settle()
    take_own_rows(module, state, prefix)
    if metadata.get("assign_to_params_buffers"):
        fsdp_part(module).dissolve()
