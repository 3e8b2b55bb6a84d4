"""`torch.distributed.fsdp.fully_shard` and its companions on Accordion's engine; docs/compat.md says what differs.

A program written for torch's runs with its import changed: `from accordion.compat.fsdp2 import fully_shard, ...`.
"""

from __future__ import annotations

import sys
import weakref
from contextlib import ExitStack
from functools import partial, wraps
from types import ModuleType
from typing import Any, cast

import torch.distributed.fsdp as home
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from accordion import _torch
from accordion.compat.fsdp2.asked import PlacementRule, asked_of, modules_of, placed_by
from accordion.compat.fsdp2.cutting import cut_parameters
from accordion.compat.fsdp2.lazy import Part, part_of
from accordion.compat.fsdp2.loading import before_load, before_state_dict, inputs_to_device
from accordion.compat.fsdp2.module import (
    FSDPModule,
    GradientReductionHandle,
    UnshardHandle,
    fsdp_part,
    sharded_class,
)
from accordion.errors import UsageError

DataParallelMeshDims: Any = _torch.data_parallel_mesh_dims()

INSTALLED = (
    *("FSDPModule", "GradientReductionHandle", "UnshardHandle", "fully_shard"),
    *("register_fsdp_forward_method", "share_comm_ctx"),
)
__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "install",
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
    `mesh`: one of fewer ranks for a module of a model on more: experts, over those that have the same ones.
    `reshard_after_forward`: True lets full parameters go after the forward, False keeps them for the backward, None leaves it
    to the engine; an int, which must divide the ranks, lets them stay sharded over that many. `shard_placement_fn`: parameter ->
    Shard(dim) to cut another dim, evenly or not, or torch's ShardPlacementResult for a mesh of its own. `mp_policy`: dtypes to
    compute, reduce and output in; the optimizer's parameters keep their own. `offload_policy`: `CPUOffloadPolicy` lets
    parameters, gradients and the optimizer rest on the host. `ignored_params`: left as they are.

    `dp_mesh_dims`: the axes of `mesh` that are data-parallel, where parameters are DTensors on all of them already.

    Raises `UsageError` (a ValueError) for what cannot be done.
    """
    modules = modules_of(module)
    asked = asked_of(mesh, dp_mesh_dims, reshard_after_forward, mp_policy, offload_policy, ignored_params)
    part = Part(modules, asked)
    cut_parameters(part, partial(placed_by, shard_placement_fn, asked.mesh))
    for m in modules:
        kind: Any = type(m)
        m.__class__ = sharded_class(kind)
        _torch.mark_fully_sharded(m)
        m.register_state_dict_pre_hook(before_state_dict)
        m.register_load_state_dict_pre_hook(before_load)
        if asked.mesh.device_type != "cpu":
            m.register_forward_pre_hook(inputs_to_device, with_kwargs=True)
    return module


fully_shard.state = part_of  # type: ignore[attr-defined]


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
        return fsdp_part(owner).hooks().enter(owner, call, args, kwargs)

    module.__dict__[method_name] = entered


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several roots, the stages of a pipeline say, use the streams and communicators of the first; before their first use."""
    parts = [fsdp_part(m) for m in modules]
    for part in parts[1:]:
        part.dissolve()
        part.shares = weakref.ref(parts[0])


class Installed(ExitStack):
    """Result of `install`. `remove`, or the end of a `with` block, puts torch's own back wherever ours still are."""

    remove = ExitStack.close


def install() -> Installed:
    """Let `torch.distributed.fsdp.fully_shard` and its companions be these, in this process, for programs that nobody edits.

    Call it before models are sharded. Modules that have imported torch's names already get these, except torch's own. What it
    returns undoes it, by `remove()` or as a context. If they are there already, nothing changes.
    """
    installed, homes = Installed(), _torch.homes_of_fully_shard()

    def put_back(module: ModuleType, name: str, theirs: Any) -> None:
        if vars(module).get(name) is globals()[name]:
            setattr(module, name, theirs)

    for name in INSTALLED:
        ours, theirs = globals()[name], getattr(home, name, None)
        for module in list(sys.modules.values()) if theirs not in (None, ours) else ():
            if not isinstance(module, ModuleType) or vars(module).get(name) is not theirs:
                continue
            # torch's own files, its pipelines say, treat our modules as ordinary ones; ours measure against torch's.
            if module in homes or module.__name__.partition(".")[0] not in ("torch", "accordion"):
                setattr(module, name, ours)
                installed.callback(put_back, module, name, theirs)
    return installed
