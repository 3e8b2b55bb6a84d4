"""Accordion's versions of `torch.distributed.fsdp.fully_shard` and its companions; docs/compat.md lists the differences.

A program that uses torch's `fully_shard` only changes its import: `from accordion.compat.fsdp2 import fully_shard, ...`.
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
from accordion.compat.fsdp2.arguments import PlacementRule, checked_arguments, modules_of
from accordion.compat.fsdp2.cutting import cut_parameters
from accordion.compat.fsdp2.lazy import Part, part_of
from accordion.compat.fsdp2.module import (
    FSDPModule,
    GradientReductionHandle,
    UnshardHandle,
    before_load,
    before_state_dict,
    fsdp_part,
    inputs_to_device,
    sharded_class,
)
from accordion.errors import UsageError

DataParallelMeshDims: Any = getattr(home, "DataParallelMeshDims", None)  # torch 2.11 lacks it

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
    """Shard the parameters of `module` that no earlier call has sharded, and return `module`. Call it bottom-up, the root last.

    Parameters become DTensors at once: (Shard(0),) on a 1-D mesh, (Replicate(), Shard(0)) on a 2-D one. Buffers move to the
    device. The first forward or `unshard` builds one engine for the whole model. The class X of a module becomes FSDPX, a
    subclass of X and `FSDPModule`.

    Args:
        module: a module, or a list of modules that are gathered together.
        mesh: the ranks; None: all, and the process group is created if there is none. A 1-D mesh shards, a 2-D one replicates
            on its first axis. Modules inside, such as experts, may be on a mesh of fewer ranks.
        reshard_after_forward: True frees full parameters after the forward, False keeps them until the backward, and None
            leaves this to the engine. An int n, which must divide the ranks, keeps them sharded over n ranks.
        shard_placement_fn: parameter -> Shard(dim), None for dim 0, or torch's ShardPlacementResult with a mesh of its own.
        mp_policy: dtypes of computation, reduction and output. The parameters that the optimizer steps keep their dtype.
        offload_policy: `CPUOffloadPolicy` keeps parameters, gradients and optimizer states on the host.
        ignored_params: parameters that are not sharded.
        dp_mesh_dims: refused; pass the data-parallel slice of the mesh as `mesh`.

    Raises `UsageError`, a ValueError, if an argument or a parameter is not supported.
    """
    modules = modules_of(module)
    arguments = checked_arguments(mesh, dp_mesh_dims, reshard_after_forward, mp_policy, offload_policy, ignored_params)
    part = Part(modules, arguments)
    cut_parameters(part, shard_placement_fn)
    for m in modules:
        kind: Any = type(m)
        m.__class__ = sharded_class(kind)
        _torch.mark_fully_sharded(m)
        m.register_state_dict_pre_hook(before_state_dict)
        m.register_load_state_dict_pre_hook(before_load)
        if arguments.mesh.device_type != "cpu":
            m.register_forward_pre_hook(inputs_to_device, with_kwargs=True)
    return module


fully_shard.state = part_of  # type: ignore[attr-defined]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Replace the method `method_name` of this `module` by one that gathers full parameters, calls the original and frees them,
    as `forward` does. Call this after `fully_shard`: nothing is done if `module` is no `FSDPModule`. Raises `UsageError` if
    there is no such method."""
    if not isinstance(module, FSDPModule):
        return
    if not callable(getattr(module, method_name, None)):
        raise UsageError(f"{type(module).__name__} has no method {method_name!r}; name one that it has.")
    reference, instance_method = weakref.ref(module), module.__dict__.get(method_name)
    class_method = getattr(type(module), method_name, None)

    @wraps(instance_method or cast(Any, class_method))
    def entered(*args: Any, **kwargs: Any) -> Any:
        owner: Any = reference()
        call = instance_method if instance_method is not None else partial(cast(Any, class_method), owner)
        return fsdp_part(owner).hooks().enter(owner, call, args, kwargs)

    module.__dict__[method_name] = entered


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Make root modules, such as pipeline stages, use the streams and communicators of the first one; modules on another mesh
    keep theirs. Call this before the first forward: it removes the engines of all but the first, which are then built anew."""
    parts = [fsdp_part(m) for m in modules]
    for part in parts[1:]:
        part.dissolve()
        part.shares = weakref.ref(parts[0])


class Installed(ExitStack):
    """Handle that `install` returns: `remove()`, or the end of its `with` block, restores torch's functions."""

    remove = ExitStack.close


def install() -> Installed:
    """Replace torch's `fully_shard` and its companions by those of this module, in the whole process, for programs that you do
    not want to edit. Return a handle that restores torch's functions. Call this before models are sharded. Modules that
    imported torch's names are changed too, except torch's and Accordion's own. A second call changes nothing."""
    installed, homes = Installed(), _torch.homes_of_fully_shard()

    def put_back(module: ModuleType, name: str, theirs: Any) -> None:
        if vars(module).get(name) is globals()[name]:
            setattr(module, name, theirs)

    for name in INSTALLED:
        ours, theirs = globals()[name], getattr(home, name, None)
        for module in list(sys.modules.values()) if theirs not in (None, ours) else ():
            if not isinstance(module, ModuleType) or vars(module).get(name) is not theirs:
                continue
            # torch's own files (pipelines) must treat our modules as ordinary ones, and our benchmarks compare with torch's.
            if module in homes or module.__name__.partition(".")[0] not in ("torch", "accordion"):
                setattr(module, name, ours)
                installed.callback(put_back, module, name, theirs)
    return installed
