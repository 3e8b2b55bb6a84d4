"""Check the arguments of one `fully_shard` call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard

from accordion import _torch
from accordion.config import FULL_SHARD, HOST, HYBRID_SHARD, Offload, Precision
from accordion.engine.hooks import attached_to
from accordion.errors import AssertedUsageError, UsageError
from accordion.shard.topology import default_mesh, device_of
from accordion.sharding import Sharding

PlacementRule = Callable[[nn.Parameter], Any]
"""Parameter -> None, Shard(dim), or torch's ShardPlacementResult."""
PART = "_accordion_part"  # the attribute of a module that refers to its `Part`


@dataclass(frozen=True, slots=True, kw_only=True)
class FullyShardArguments:
    """The checked arguments of one call of `fully_shard`.

    Args:
        mesh: the data-parallel mesh.
        sharding: strategy, precision, offload; `secondary` is the number of ranks to reshard over after the forward, or None.
        keep: True keeps full parameters from forward to backward, False frees them; None: the engine decides.
        policy: the caller's `MixedPrecisionPolicy`, which is passed to tensor subclasses.
        ignored: parameters that are not sharded.
    """

    mesh: DeviceMesh
    sharding: Sharding
    keep: bool | None
    policy: MixedPrecisionPolicy
    ignored: frozenset[nn.Parameter]

    @property
    def precision(self) -> Precision:
        assert self.sharding.precision is not None, "checked_arguments sets one"
        return self.sharding.precision


def checked_arguments(
    mesh: Any, dims: Any, reshard: Any, mp_policy: Any, offload: Any, ignored: Any
) -> FullyShardArguments:
    """Return the checked arguments of one `fully_shard` call. Creates the process group if there is none and `mesh` is None.
    Raises `UsageError` if an argument has a wrong type or a value that is not supported."""
    if dims is not None:
        raise UsageError(
            "dp_mesh_dims is not supported. Pass the data-parallel slice of the mesh, such as mesh=mesh['dp'], and let "
            "parameters be DTensors on the other axes only."
        )
    mesh = _mesh_of(mesh)
    if mp_policy is not None and not isinstance(mp_policy, MixedPrecisionPolicy):
        raise UsageError(f"mp_policy is a {type(mp_policy).__name__}; pass a MixedPrecisionPolicy.")
    if offload is not None and not isinstance(offload, OffloadPolicy):
        raise UsageError(f"offload_policy is a {type(offload).__name__}; pass an OffloadPolicy.")
    if ignored is not None and not all(isinstance(p, nn.Parameter) for p in ignored):
        raise UsageError("ignored_params contains something that is not an nn.Parameter; pass a set of parameters.")
    policy = mp_policy or MixedPrecisionPolicy()
    if getattr(policy, "param_dtype_override_fn", None) is not None:  # torch 2.15
        raise UsageError(
            "MixedPrecisionPolicy(param_dtype_override_fn=) is not supported; call fully_shard on the modules that compute in "
            "another dtype, each with a mp_policy of its own."
        )
    precision = Precision(
        params=policy.param_dtype,
        reduce=policy.reduce_dtype,
        output=policy.output_dtype,
        master=None,
        cast_inputs=policy.cast_forward_inputs,
    )
    keep, near = _keep_of(reshard, mesh)
    strategy = HYBRID_SHARD if mesh.ndim == 2 else FULL_SHARD
    tiers = Offload(params=HOST, optimizer=HOST) if isinstance(offload, CPUOffloadPolicy) else Offload()
    sharding = Sharding(strategy=strategy, precision=precision, offload=tiers, secondary=near)
    return FullyShardArguments(mesh=mesh, sharding=sharding, keep=keep, policy=policy, ignored=frozenset(ignored or ()))


def modules_of(module_or_list: Any) -> list[nn.Module]:
    modules = list(module_or_list) if isinstance(module_or_list, (list, tuple)) else [module_or_list]
    if not modules:
        raise UsageError("fully_shard got an empty list; pass a module, or a list of modules to gather together.")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise UsageError(f"fully_shard takes a module or a list of modules, not {type(module).__name__}.")
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
            raise UsageError(
                f"fully_shard does not support containers that do not implement forward, such as this {type(module).__name__}: "
                "it is never called. Shard each module in it, or pass a list of them: fully_shard([...])."
            )
        if PART in module.__dict__:
            raise AssertedUsageError(
                "Each distinct composable distributed API can only be applied to a module once: fully_shard has been applied to "
                f"this {type(module).__name__} already. Remove the second call."
            )
        if attached_to(module) is not None:
            raise UsageError(f"this {type(module).__name__} is sharded by accordion.shard already; use one of the two.")
    below = {id(m) for module in modules for m in module.modules() if m is not module}
    # A list may contain a module and one of its submodules; keep the outer one.
    return [module for module in modules if id(module) not in below]


def _mesh_of(mesh: Any) -> DeviceMesh:
    """Return `mesh`. If it is None, return a mesh of all ranks, for which the process group is created if there is none. Raises
    `UsageError` unless `mesh` has one or two axes, this rank, and devices that this machine has."""
    if mesh is None:
        if not dist.is_initialized():
            dist.init_process_group()
        return default_mesh()
    if not isinstance(mesh, DeviceMesh):
        raise UsageError(f"mesh is a {type(mesh).__name__}; pass a DeviceMesh, for example from init_device_mesh.")
    if mesh.ndim not in (1, 2):
        raise UsageError(
            f"the mesh has {mesh.ndim} axes, named {mesh.mesh_dim_names}; pass a mesh of one axis that shards, or of two, "
            "('replicate', 'shard'). Of a larger mesh, pass its data-parallel slice."
        )
    if mesh.get_coordinate() is None:
        raise UsageError(f"rank {dist.get_rank()} is not in the mesh {mesh}; call fully_shard on its ranks only.")
    device_of(mesh)
    return mesh


def _keep_of(reshard: Any, mesh: DeviceMesh) -> tuple[bool | None, int | None]:
    """Return (keep, number of ranks) for `reshard`, the argument `reshard_after_forward`. keep: True keeps full parameters
    until the backward, False frees them, None leaves it to the engine. number of ranks: to reshard over after the forward;
    None: all. Raises `UsageError` unless `reshard` is None, a bool, or an int above 0 that divides the ranks that shard."""
    if reshard is None or isinstance(reshard, bool):
        return None if reshard is None else not reshard, None
    ranks = mesh.size(mesh.ndim - 1)
    if not isinstance(reshard, int) or reshard < 1 or ranks % reshard:
        raise UsageError(
            f"reshard_after_forward is {reshard!r}; pass True, False, or an int that divides the {ranks} ranks that shard."
        )
    return reshard == 1, reshard if 1 < reshard < ranks else None


def placed_by(rule: PlacementRule | None, mesh: DeviceMesh, param: nn.Parameter) -> tuple[int | None, DeviceMesh]:
    """Return (dim on which to shard `param`, data-parallel mesh): dim 0 and `mesh`, unless `rule` chooses another dim or mesh.
    The dim is None for a 0-d parameter. Raises `UsageError` if `rule` returns a dim or mesh that cannot be used."""
    placement: Any = None if rule is None else rule(param)
    if _torch.is_shard_placement_result(placement):
        placement, info = placement.placement, placement.mesh_info
        shards = getattr(info, "shard_mesh_dim", None)
        if getattr(info, "dp_mesh_dims", None) is not None or shards != info.mesh.ndim - 1:
            raise UsageError(
                f"shard_placement_fn returned a mesh_info of the mesh {info.mesh} that shards over axis {shards}; return an "
                "FSDPMeshInfo of one axis, or an HSDPMeshInfo of ('replicate', 'shard') in this order, without dp_mesh_dims."
            )
        mesh = _mesh_of(info.mesh)
    if placement is not None and not isinstance(placement, Shard):
        raise UsageError(
            f"shard_placement_fn returned {placement!r}; return None, Shard(dim), or a ShardPlacementResult with its own mesh."
        )
    if param.dim() == 0:
        return None, mesh
    dim = 0 if placement is None else int(placement.dim)
    if not -param.dim() <= dim < param.dim():
        raise UsageError(f"shard_placement_fn returned Shard({dim}) for a parameter of shape {tuple(param.shape)}.")
    return dim % param.dim(), mesh
