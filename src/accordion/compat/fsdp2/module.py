"""`FSDPModule`: what `fully_shard` mixes into a module's class, setters that act from the next pass on among it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from accordion import _torch
from accordion.compat.fsdp2.asked import say_once
from accordion.compat.fsdp2.lazy import Part, part_of, parts_below
from accordion.engine.order import BACKWARD, FORWARD, Phase
from accordion.errors import AssertedUsageError, UsageError
from accordion.safety.refusals import NO_COPY

_Base: Any = _torch.fsdp_module_base()
_Handle: Any = _torch.gradient_reduction_handle()


class GradientReductionHandle(_Handle):  # type: ignore[misc]
    """What `FSDPModule.finalize_backward(async_op=True)` returns."""

    def __init__(self, part: Part | None = None) -> None:
        self._part = None if part is None else weakref.ref(part)

    def wait(self) -> None:
        """The gradients are there. Raises `RuntimeError` where `reset_iter_state` has dropped them."""
        part = None if self._part is None else self._part()
        self._part = None
        if part is None:
            return
        if part.handle is not self:
            raise RuntimeError(
                "reset_iter_state was called between finalize_backward and wait, and dropped the gradients; call backward again."
            )
        part.handle = None


class UnshardHandle:
    """What `FSDPModule.unshard(async_op=True)` returns."""

    def __init__(self, part: Part | None = None) -> None:
        self._part = part

    def wait(self) -> None:
        """Wait for the gather; the module's registered parameters are the full ones then."""
        part, self._part = self._part, None
        if part is not None:
            part.lease.take()


class FSDPModule(_Base):  # type: ignore[misc]
    """The class that `fully_shard` mixes into a module's own. Settings act from the next forward or backward on."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Of the original class: `nn.Sequential` makes a new one of its own class for a slice."""
        original: Any = next(kind for kind in cls.__mro__ if kind is not _Base and not issubclass(kind, FSDPModule))
        made = original.__new__(original)
        made.__init__(*args, **kwargs)
        return made

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise AssertedUsageError(NO_COPY)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """As an ordinary module's: the registry converts shards itself."""
        last: Any = FSDPModule if _Base is object else _Base
        return super(last, self)._apply(fn, recurse)

    def _get_fsdp_state(self) -> Any:
        """For torch's pipelines, which ask whether stages share what `share_comm_ctx` shares."""
        part = fsdp_part(self)
        return SimpleNamespace(_comm_ctx=part if part.shares is None else part.shares())

    # -- full parameters

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the full parameters of this module, not of those below; they are plain tensors in `parameters()` until
        `reshard`, the end of a forward that reshards or of a backward. With `async_op` they are shown by the handle's `wait`.
        """
        part = fsdp_part(self)
        if async_op:
            part.lease.begin()
            return UnshardHandle(part)
        part.lease.take()
        return None

    def reshard(self) -> None:
        """Let the full parameters of this module go, not of those below."""
        fsdp_part(self).reshard()

    def reset_iter_state(self) -> None:
        """After an exception in a forward or backward: end what it left behind, sums of gradients included. Root only."""
        part = _root_part(self, "reset_iter_state")
        if part.unit is not None:
            part.handle = None
            part.engine().reset()
            for unit in part.engine().units:
                unit.local_sums.drop()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """True lets full parameters go after the forward, False keeps them for the backward."""
        if not isinstance(reshard_after_forward, bool):
            raise UsageError(f"reshard_after_forward is {reshard_after_forward!r}; pass True or False.")
        for part in _parts(self, recurse):
            part.unit_policy.keep, part.settings.keeps_parts = not reshard_after_forward, False
            part.push()

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """True keeps the memory of full parameters when they are let go, at one address, as graphs of a device want it."""
        for part in _parts(self, recurse):
            part.settings.stays = bool(keep)
            part.push()

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """False keeps full parameters from a backward to the next forward, unless the shards have changed meanwhile."""
        for part in _parts(self, recurse):
            part.unit_policy.keep_on = not reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Accepted: full parameters are gathered for the backward all the same."""
        if not unshard_in_backward:
            say_once("set_unshard_in_backward(False): parameters are gathered for the backward all the same.")

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these modules while this one's forward runs, in place of the one that was seen to follow."""
        self._prefetch(FORWARD, modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these modules while this one's backward runs, in place of the one that was seen to follow."""
        self._prefetch(BACKWARD, modules)

    def _prefetch(self, phase: Phase, modules: Iterable[Any]) -> None:
        part = fsdp_part(self)
        part.ahead[phase] = [weakref.ref(fsdp_part(m)) for m in modules]
        part.push()

    # -- gradients

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False lets backwards add up full gradients on each rank; the next one with True reduces the sum."""
        for part in _parts(self, recurse):
            part.settings.sync = part.settings.all_reduce = requires_gradient_sync
            _settle_sync(part)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """On a 2-D mesh False lets backwards add up full gradients without any communication, on a 1-D one nothing changes."""
        for part in _parts(self, recurse):
            part.settings.all_reduce = requires_all_reduce
            _settle_sync(part)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted, without effect: each backward waits for its own reduces, which is right for every micro-batch."""

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Root only: `finalize_backward` ends the backwards of a step. Those that communicate are reduced when they come all the
        same, those that do not when it is called."""
        part = _root_part(self, "set_manual_backward_finalization")
        if part.settings.finalizes != enabled and _torch.is_in_backward():
            raise RuntimeError("set_manual_backward_finalization cannot change in a backward; call it between steps.")
        part.settings.finalizes = enabled

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Root only: reduce what the backwards since the last one have added up, and let full parameters go as the settings say.

        With `async_op` a handle is returned, for whose `wait` the gradients are there. Collective.
        """
        part = _root_part(self, "finalize_backward")
        if part.handle is not None:
            raise RuntimeError(
                "the handle of the last finalize_backward has not been waited for; call its wait() first."
            )
        if part.unit is not None:
            engine = part.engine()
            if engine.depth or _torch.is_in_backward():
                raise RuntimeError(
                    "finalize_backward was called in a forward or backward; call it when these have ended."
                )
            for each in parts_below([self]):
                if each.unit is not None and not each.unit_policy.keep_on:
                    each.unit.keep_until_stale = False
            with torch.no_grad():
                engine.reduce_sums()
            engine.reshard_unused()
        if not async_op:
            return None
        handle = part.handle = GradientReductionHandle(part)
        return handle

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients by `factor`, in place of the number of ranks."""
        if not factor > 0:
            raise UsageError(f"the gradient divide factor is {factor!r}; pass a positive number.")
        part = fsdp_part(self)
        part.settings.scale = 1.0 / factor
        part.push()

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Call `hook` with each 1-D buffer of reduced gradients, divided already, on the stream of the reduce.

        It may write into the buffer, which holds this rank's rows, and a few elements beside them that mean nothing.
        """
        part = fsdp_part(self)
        if stream is not None and part.asked.sharding.strategy.hybrid:
            raise UsageError(
                "a stream for the all-reduce hook was passed on a 2-D mesh, which all-reduces by itself; leave it out."
            )
        if stream is not None:
            say_once("set_all_reduce_hook(stream=...): the hook runs on the stream of the reduce.")
        part.settings.after_reduce = hook
        part.push()

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted, without effect: reductions are sums here always."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Accepted, without effect: absent gradients travel as zeros always."""

    # -- communication

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Accepted, without effect: reduces have a communicator of their own wherever one helps."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Accepted: a reduce needs no buffer for large gradients, and never waits for that of another."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers is a {type(max_input_buffers).__name__}; pass an int.")
        if max_input_buffers < 1:
            raise UsageError(f"max_input_buffers is {max_input_buffers}; pass a positive number.")

    def set_custom_all_gather(self, comm: Any) -> None:
        """Refused: parameters are gathered straight into place, without the staging buffers that `comm` allocates."""
        raise UsageError(
            "set_custom_all_gather: parameters are gathered straight into place, and there is no staging buffer for a custom "
            "all-gather to allocate; leave it out."
        )

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Refused: a reduce may be an exchange and a local sum, which a custom reduce-scatter cannot stand for."""
        raise UsageError(
            "set_custom_reduce_scatter: gradients are reduced by an exchange and a local sum where that wins, which a custom "
            "reduce-scatter cannot stand for; leave it out."
        )

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Accepted: there are no staging buffers whose memory could come from a process group."""
        if enable:
            say_once("set_allocate_memory_from_process_group_for_comm: parameters travel in place, nothing is staged.")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Accepted: there are no staging buffers that could lie in symmetric memory."""
        if backend != "NCCL":
            raise UsageError(f"the symmetric memory backend is {backend!r}; only 'NCCL' is known.")
        say_once("set_symm_mem_for_comm: parameters travel in place, nothing is staged in symmetric memory.")

    def set_post_optim_event(self, event: Any) -> None:
        """Have the next forward of this module wait for `event`, recorded after the optimizer's step on a stream of its own."""
        part = fsdp_part(self)
        if part.asked.mesh.device_type == "cpu":
            return
        handles: list[Any] = []

        def wait(*_: Any) -> None:
            handles.pop().remove()
            torch.accelerator.current_stream().wait_event(event)

        handles.append(part.alive()[0].register_forward_pre_hook(torch.compiler.disable(wait), prepend=True))


@cache
def sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def fsdp_part(module: Any) -> Part:
    part = part_of(module) if isinstance(module, nn.Module) else None
    if part is None:
        raise UsageError(f"{type(module).__name__} is no FSDPModule; pass what fully_shard returned.")
    return part


def _root_part(module: object, method: str) -> Part:
    part = fsdp_part(module)
    if not part.is_outermost():
        name = type(module).__name__
        raise RuntimeError(f"{method} was called on {name}, which is inside another FSDP module; call it on the root.")
    return part


def _parts(module: Any, recurse: bool) -> Sequence[Part]:
    own = fsdp_part(module)
    return list(parts_below([module])) if recurse else [own]


def _settle_sync(part: Part) -> None:
    part.unit_policy.reduces = part.settings.sync and (
        part.settings.all_reduce or not part.asked.sharding.strategy.hybrid
    )
    if part.settings.sync and not part.unit_policy.reduces:
        say_once(
            "set_requires_all_reduce(False): gradients add up whole on each rank until the all-reduce, and are not "
            "reduce-scattered before; the sums are the same, and take the memory of full gradients."
        )
