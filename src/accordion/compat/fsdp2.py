"""`torch.distributed.fsdp.fully_shard` and its companions on Accordion's engine; docs/compat.md says what differs.

A program written for torch's runs with its import changed: `from accordion.compat.fsdp2 import fully_shard, ...`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial, wraps
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from accordion import _torch
from accordion.compat.lazy import Part, cut_parameters, part_of, parts_below, rows_of
from accordion.config import Precision
from accordion.engine.layout import Cut
from accordion.engine.schedule import Phase
from accordion.engine.tree import map_tensors
from accordion.errors import UsageError
from accordion.shard import default_mesh, device_of

log = logging.getLogger("accordion")
DataParallelMeshDims: Any = _torch.data_parallel_mesh_dims()
Module = TypeVar("Module", bound=nn.Module)
PlacementRule = Callable[[nn.Parameter], Shard | None]

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementRule | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """Shard the parameters of `module` that no earlier call has, over the ranks of `mesh`; call it bottom-up, the root last.

    The parameters become DTensors at once, (Shard(0),) on a 1-D mesh and (Replicate(), Shard(0)) on a 2-D one; the engine of
    the whole model is made at the first forward or `unshard`. `module`: one, or a list that is gathered together. Returns it,
    its class X replaced by FSDPX, which is an `FSDPModule` too.
    `reshard_after_forward`: True lets full parameters go after the forward, False keeps them for the backward, None leaves it
    to the engine; an int must divide the ranks, and means True. `shard_placement_fn`: parameter -> Shard(dim) to cut another
    dim, evenly or not. `mp_policy`: dtypes to compute, reduce and output in; the optimizer's parameters keep their own.
    `ignored_params`: left as they are.

    Raises `UsageError` (a ValueError) for what cannot be done: offload, and DTensors of other parallelisms, among them.
    """
    modules = _modules(module)
    mesh = _mesh(mesh, dp_mesh_dims)
    _check_policies(mp_policy, offload_policy, ignored_params)
    policy = mp_policy or MixedPrecisionPolicy()
    precision = Precision(
        params=policy.param_dtype,
        reduce=policy.reduce_dtype,
        output=policy.output_dtype,
        master=None,
        cast_inputs=policy.cast_forward_inputs,
    )
    keep = _keep(reshard_after_forward, mesh)
    part = Part(modules, mesh, precision)
    part.ignored = set(ignored_params or ())
    part.habits.keep = keep
    cut_parameters(part, partial(_dim, shard_placement_fn))
    for m in modules:
        kind: Any = type(m)
        m.__class__ = _sharded_class(kind)
        m.register_state_dict_pre_hook(_before_state_dict)
        m.register_load_state_dict_pre_hook(_before_load)
        if mesh.device_type != "cpu":
            m.register_forward_pre_hook(_inputs_to_device, with_kwargs=True)
    return module


class UnshardHandle:
    """What `FSDPModule.unshard(async_op=True)` returns."""

    def __init__(self, part: Part | None = None) -> None:
        self._part = part

    def wait(self) -> None:
        """Wait for the gather; the module's registered parameters are the full ones then."""
        part, self._part = self._part, None
        if part is not None:
            part.lease.take()


class FSDPModule:
    """The class that `fully_shard` mixes into a module's own. Settings act from the next forward or backward on."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Of the original class: `nn.Sequential` makes a new one of its own class for a slice."""
        original: Any = cls.__mro__[2]
        made = original.__new__(original)
        made.__init__(*args, **kwargs)
        return made

    # -- full parameters

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the full parameters of this module, not of those below; they are plain tensors in `parameters()` until
        `reshard`, the end of a forward that reshards or of a backward. With `async_op` they are shown by the handle's `wait`.
        """
        part = _part(self)
        if async_op:
            part.lease.begin()
            return UnshardHandle(part)
        part.lease.take()
        return None

    def reshard(self) -> None:
        """Let the full parameters of this module go, not of those below."""
        _part(self).reshard()

    def reset_iter_state(self) -> None:
        """After an exception in a forward or backward: end what it left behind, sums of gradients included. Root only."""
        part = _part(self)
        if part.outermost() is not part:
            raise RuntimeError(
                f"reset_iter_state was called on {type(self).__name__}, which lies in another FSDP module; call it on the root."
            )
        if part.unit is not None:
            part.unit.engine.reset()
            for unit in part.unit.engine.units:
                unit.drop_sums()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """True lets full parameters go after the forward, False keeps them for the backward."""
        if not isinstance(reshard_after_forward, bool):
            raise UsageError(f"reshard_after_forward is {reshard_after_forward!r}; pass True or False.")
        for part in _parts(self, recurse):
            part.habits.keep = not reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """False keeps full parameters from a backward to the next forward, unless the shards have changed meanwhile."""
        for part in _parts(self, recurse):
            part.habits.keep_on = not reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Accepted: full parameters are gathered for the backward all the same."""
        if not unshard_in_backward:
            _say_once("set_unshard_in_backward(False): parameters are gathered for the backward all the same.")

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these modules while this one's forward runs, in place of the one that was seen to follow."""
        self._prefetch(Phase.FORWARD, modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these modules while this one's backward runs, in place of the one that was seen to follow."""
        self._prefetch(Phase.BACKWARD, modules)

    def _prefetch(self, phase: Phase, modules: Iterable[Any]) -> None:
        part = _part(self)
        part.ahead[phase] = [_part(m) for m in modules]
        part.push()

    # -- gradients

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False lets backwards add up full gradients on each rank; the next one with True reduces the sum."""
        for part in _parts(self, recurse):
            part.sync = part.all_reduce = requires_gradient_sync
            _settle_sync(part)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """On a 2-D mesh False lets backwards add up full gradients without any communication, on a 1-D one nothing changes."""
        for part in _parts(self, recurse):
            part.all_reduce = requires_all_reduce
            _settle_sync(part)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted, without effect: each backward waits for its own reduces, which is right for every micro-batch."""

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients by `factor`, in place of the number of ranks."""
        if not factor > 0:
            raise UsageError(f"the gradient divide factor is {factor!r}; pass a positive number.")
        part = _part(self)
        part.scale = 1.0 / factor
        part.push()

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Call `hook` with each 1-D buffer of reduced gradients, divided already, on the stream of the reduce.

        It may write into the buffer, which holds this rank's rows, and a few elements beside them that mean nothing.
        """
        part = _part(self)
        if stream is not None and part.strategy.hybrid:
            raise UsageError(
                "a stream for the all-reduce hook was passed on a 2-D mesh, which all-reduces by itself; leave it out."
            )
        if stream is not None:
            _say_once("set_all_reduce_hook(stream=...): the hook runs on the stream of the reduce.")
        part.after_reduce = hook
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
            _say_once("set_allocate_memory_from_process_group_for_comm: parameters travel in place, nothing is staged.")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Accepted: there are no staging buffers that could lie in symmetric memory."""
        if backend != "NCCL":
            raise UsageError(f"the symmetric memory backend is {backend!r}; only 'NCCL' is known.")
        _say_once("set_symm_mem_for_comm: parameters travel in place, nothing is staged in symmetric memory.")

    def set_post_optim_event(self, event: Any) -> None:
        """Have the next forward of this module wait for `event`, recorded after the optimizer's step on a stream of its own."""
        part = _part(self)
        if part.mesh.device_type == "cpu":
            return
        handles: list[Any] = []

        def wait(*_: Any) -> None:
            handles.pop().remove()
            torch.accelerator.current_stream().wait_event(event)

        handles.append(part.alive()[0].register_forward_pre_hook(torch.compiler.disable(wait), prepend=True))


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let `module.method_name(...)` use full parameters as its forward does; nothing happens where it is no `FSDPModule`."""
    if not isinstance(module, FSDPModule):
        return
    if not callable(getattr(module, method_name, None)):
        raise UsageError(f"{type(module).__name__} has no method {method_name!r}; name one that it has.")
    reference, own = weakref.ref(module), module.__dict__.get(method_name)
    method = getattr(type(module), method_name, None)

    @wraps(own or cast(Any, method))
    def entered(*args: Any, **kwargs: Any) -> Any:
        owner: Any = reference()
        call = own if own is not None else partial(cast(Any, method), owner)
        return _part(owner).hooks().enter(owner, call, args, kwargs)

    module.__dict__[method_name] = entered


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several roots, the stages of a pipeline say, use the streams and communicators of the first; before their first use."""
    parts = [_part(m) for m in modules]
    for part in parts[1:]:
        if part.tree is not None:
            part.tree.dissolve()
        part.shares = parts[0]


# -- what was asked


def _modules(given: Any) -> list[nn.Module]:
    modules = list(given) if isinstance(given, (list, tuple)) else [given]
    if not modules:
        raise UsageError("fully_shard was given an empty list; pass a module, or a list of modules to gather together.")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise UsageError(f"fully_shard takes a module or a list of modules, not {type(module).__name__}.")
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
            raise UsageError(
                f"fully_shard was given a {type(module).__name__}, which nobody calls; shard each module in it, or pass "
                "fully_shard([...]) a list of them."
            )
        if part_of(module) is not None:
            raise UsageError(
                f"fully_shard was applied to this {type(module).__name__} before; apply it once to each module."
            )
        if "_accordion" in module.__dict__:
            raise UsageError(f"this {type(module).__name__} is sharded by accordion.shard already; use one of both.")
    below = {id(m) for module in modules for m in module.modules() if m is not module}
    return [module for module in modules if id(module) not in below]  # a list names a module below another one too


def _mesh(mesh: Any, dims: Any) -> DeviceMesh:
    if dims is not None:
        raise UsageError(
            "dp_mesh_dims is for parameters that are DTensors on a mesh of several parallelisms, which are not composed with "
            "sharding yet; pass the data-parallel slice as mesh, e.g. mesh=mesh['fsdp']."
        )
    if mesh is None:
        if not dist.is_initialized():
            dist.init_process_group()
        return default_mesh()
    if not isinstance(mesh, DeviceMesh):
        raise UsageError(f"mesh is a {type(mesh).__name__}; pass a DeviceMesh, as init_device_mesh makes it.")
    if mesh.ndim not in (1, 2):
        raise UsageError(
            f"the mesh has {mesh.ndim} axes, named {mesh.mesh_dim_names}; pass one that shards, or two, ('replicate', 'shard'), "
            "or the slice of this one that is data-parallel."
        )
    if mesh.get_coordinate() is None:
        raise UsageError(f"rank {dist.get_rank()} is not in the mesh {mesh}; call fully_shard on its ranks only.")
    return mesh


def _check_policies(mp_policy: Any, offload: Any, ignored: Any) -> None:
    if mp_policy is not None and not isinstance(mp_policy, MixedPrecisionPolicy):
        raise UsageError(f"mp_policy is a {type(mp_policy).__name__}; pass a MixedPrecisionPolicy.")
    if offload is not None and not isinstance(offload, OffloadPolicy):
        raise UsageError(f"offload_policy is a {type(offload).__name__}; pass an OffloadPolicy.")
    if isinstance(offload, CPUOffloadPolicy):
        raise UsageError(
            "CPUOffloadPolicy: shards live on the device that computes; there is no memory tier in the engine yet."
        )
    if ignored is not None and not all(isinstance(p, nn.Parameter) for p in ignored):
        raise UsageError("ignored_params holds what is no nn.Parameter; pass a set of parameters, not of names.")


def _keep(reshard: Any, mesh: DeviceMesh) -> bool | None:
    """What `Habits.keep` becomes."""
    if reshard is None or isinstance(reshard, bool):
        return None if reshard is None else not reshard
    ranks = mesh.size(mesh.ndim - 1)
    if not isinstance(reshard, int) or reshard < 1 or ranks % reshard:
        raise UsageError(
            f"reshard_after_forward is {reshard!r}; pass True, False, or an int that divides the {ranks} ranks that shard."
        )
    if reshard == 1:
        return True
    if reshard != ranks:
        _say_once(
            f"reshard_after_forward={reshard}: full parameters are let go after the forward, as for True, and gathered over all "
            "ranks for the backward."
        )
    return False


def _dim(rule: PlacementRule | None, param: nn.Parameter) -> int | None:
    """The dim on which a parameter is cut: 0, unless the caller's rule says another; a 0-d one is kept whole."""
    asked: Any = None if rule is None else rule(param)
    if asked is not None and not isinstance(asked, Shard):
        raise UsageError(
            f"shard_placement_fn returned {asked!r}; return None or Shard(dim): all parameters of a model share one mesh here."
        )
    if param.dim() == 0:
        return None
    dim = 0 if asked is None else int(asked.dim)
    if not -param.dim() <= dim < param.dim():
        raise UsageError(f"shard_placement_fn returned Shard({dim}) for a parameter of shape {tuple(param.shape)}.")
    return dim % param.dim()


# -- the modules


@cache
def _sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def _part(module: Any) -> Part:
    part = part_of(module) if isinstance(module, nn.Module) else None
    if part is None:
        raise UsageError(f"{type(module).__name__} is no FSDPModule; pass what fully_shard returned.")
    return part


def _parts(module: Any, recurse: bool) -> Sequence[Part]:
    own = _part(module)
    return list(parts_below([module])) if recurse else [own]


def _settle_sync(part: Part) -> None:
    part.habits.reduces = part.sync and (part.all_reduce or not part.strategy.hybrid)
    if part.sync and not part.habits.reduces:
        _say_once(
            "set_requires_all_reduce(False): gradients add up whole on each rank until the all-reduce, and are not "
            "reduce-scattered before; the sums are the same, and take the memory of full gradients."
        )


@cache
def _say_once(text: str) -> None:
    log.info("compat.fsdp2: %s", text)


def _inputs_to_device(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The outermost module takes inputs from anywhere."""
    part = _part(module)
    if part.outermost() is not part:
        return None
    device = device_of(part.mesh)
    return map_tensors(lambda t: t.to(device), args), {
        key: map_tensors(lambda t: t.to(device), value) for key, value in kwargs.items()
    }


def _before_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    _part(module).lease.end()


def _before_load(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
    """Take plain full tensors too, of which each rank keeps its rows; what is assigned becomes the shard itself."""
    part = _part(module)
    part.lease.end()
    if metadata.get("assign_to_params_buffers") and part.tree is not None:
        part.tree.dissolve()
    for name, param in _own_parameters(module, prefix):
        given = state.get(name)
        if isinstance(given, Tensor) and not isinstance(given, DTensor) and given.shape == param.shape:
            inner: Any = param.placements[-1]
            num_ranks = part.mesh.size(part.mesh.ndim - 1)
            c = Cut(tuple(param.shape), getattr(inner, "dim", None), num_ranks)
            rows = rows_of(given.detach(), c, part.mesh.get_local_rank(part.mesh.ndim - 1))
            local = _torch.local_of(param)
            rows = rows.contiguous() if param.is_meta else rows.to(local.device, copy=True)
            state[name] = _torch.as_dtensor(rows.contiguous(), param)


def _own_parameters(module: nn.Module, prefix: str) -> Iterator[tuple[str, DTensor]]:
    places = _part(module).places
    for path, child in module.named_modules(prefix=prefix.rstrip("."), remove_duplicate=False):
        for attr, param in child._parameters.items():
            if isinstance(param, DTensor) and (id(child), attr) in places:
                yield f"{path}.{attr}" if path else attr, param
