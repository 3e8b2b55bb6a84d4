"""Parameters with a mesh of their own, of some of the model's ranks: experts, for example, if other ranks have other experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from accordion import _torch
from accordion.config import Place, Strategy
from accordion.errors import UsageError
from accordion.shard.layouts import local_part
from accordion.sharding import MeshChoice
from accordion.units import Owned


def check_choice(meshes: Any, strategy: Strategy, *, sync: bool) -> MeshChoice:
    """Return the mapping `meshes` of a `Sharding`, {} for None. Raises `UsageError` for wrong types, and if there are meshes
    with `sync` or a strategy that divides rows over replicas too."""
    if meshes is None:
        return {}
    if not isinstance(meshes, Mapping):
        raise UsageError(
            f"meshes is a {type(meshes).__name__}; pass a mapping from classes of modules or patterns of names to meshes, "
            'as in {"*.experts": mesh["edp"]}.'
        )
    for key, mesh in meshes.items():
        is_key = isinstance(key, str) or (isinstance(key, type) and issubclass(key, nn.Module))
        if not is_key or not isinstance(mesh, DeviceMesh):
            raise UsageError(
                f"meshes has {key!r}: {mesh!r}; pass classes of modules or patterns of names, each with a DeviceMesh, such as a "
                "slice of another."
            )
    if meshes and strategy.optim_over_replicas:
        raise UsageError(
            f"meshes cannot be combined with {strategy.name}, which cuts rows over two axes of the model's mesh; use "
            "HYBRID_SHARD or FULL_SHARD."
        )
    if meshes and sync:
        raise UsageError(
            "meshes cannot be combined with sync=True, because the first rank lacks the other ranks' parts of such parameters; "
            "build the model with the same values on every rank, or load it after shard()."
        )
    return meshes


def own_meshes(
    model: nn.Module, owned: Sequence[Owned], meshes: MeshChoice, mesh: DeviceMesh, strategy: Strategy
) -> list[DeviceMesh | None]:
    """Return for each parameter the mesh that `meshes` names for it, the last one if several do; None for the model's `mesh`.
    Raises `UsageError` for a mesh or a parameter that does not fit, and for a key that names nothing."""
    chosen: list[DeviceMesh | None] = [None] * len(owned)
    for key, asked in meshes.items():
        named = [i for i, o in enumerate(owned) if _names(model, key, o)]
        if not named:
            raise UsageError(
                f"meshes names {_shown(key)}, but the model has no such parameter and no such module with parameters; pass a "
                "class of its modules, or a pattern of the names in model.named_parameters()."
            )
        _check_mesh(key, asked, mesh, strategy)
        for i in named:
            chosen[i] = asked if asked != mesh else None
    for o, own_mesh in zip(owned, chosen, strict=True):
        _check_parameter(o, own_mesh, mesh)
    return chosen


def _names(model: nn.Module, key: type[nn.Module] | str, o: Owned) -> bool:
    """Return True if `key` matches one of the parameter's names, or a module that contains it by name or class."""
    for name in o.names:
        parts = name.split(".")
        around = [".".join(parts[:i]) for i in range(1, len(parts))]
        if isinstance(key, str):
            if any(fnmatchcase(each, key) for each in (*around, name)):
                return True
        elif any(isinstance(model.get_submodule(each), key) for each in around):
            return True
    return False


def _check_mesh(key: type[nn.Module] | str, asked: DeviceMesh, mesh: DeviceMesh, strategy: Strategy) -> None:
    entry = f"meshes[{_shown(key)}]"
    one_axis = strategy.optim is Place.REPLICATE
    if asked.ndim not in (1, 2) or (asked.ndim == 2 and one_axis):
        wanted = "one" if one_axis else "one axis that shards, or two, the second of which shards"
        raise UsageError(
            f"{entry} has {asked.ndim} axes, named {asked.mesh_dim_names}; {strategy.name} takes {wanted}."
        )
    is_inside = asked.device_type == mesh.device_type and {*_torch.ranks_of(asked)} <= {*_torch.ranks_of(mesh)}
    if not is_inside or asked.get_coordinate() is None:
        raise UsageError(
            f"{entry} is {asked}, but the model's mesh is {mesh}; pass a slice of the model's mesh that includes this rank."
        )


def _check_parameter(o: Owned, own_mesh: DeviceMesh | None, mesh: DeviceMesh) -> None:
    """Raise `UsageError` if `o` cannot be sharded over `own_mesh` (None: over the model's `mesh`). On the model's mesh, DTensors
    are refused. On a mesh of its own, a plain tensor needs all ranks of `mesh`, a DTensor must be `Shard` over a second mesh that
    adds the missing ranks, and other subclasses are refused."""
    # If ranks were missing, the full value would be unknown, and each of several replicas would sum only some of its gradients.
    name, param = o.names[0], o.original
    if own_mesh is None:
        if isinstance(param, DTensor):
            raise UsageError(
                f"parameter {name!r} is a DTensor already; shard() takes plain parameters, and DTensors only with a mesh of "
                "their own in meshes=."
            )
        return
    if not _torch.is_plain(local_part(param)):
        raise UsageError(
            f"parameter {name!r} is a {type(local_part(param)).__name__}, a tensor subclass, on a mesh of its own, where "
            "only plain ones are sharded; leave it out of meshes."
        )
    everybody, ranks = sorted(_torch.ranks_of(mesh)), sorted(_torch.ranks_of(own_mesh))
    if isinstance(param, DTensor):
        _check_dtensor(name, param, own_mesh, everybody)
    elif ranks != everybody:
        raise UsageError(
            f"parameter {name!r} is a plain tensor on the mesh {own_mesh} of its own, so its values on the other "
            f"{len(everybody) - len(ranks)} ranks are unknown; make it a DTensor over these ranks first, with "
            "distribute_tensor(param, mesh['ep'], [Shard(0)])."
        )


def _check_dtensor(name: str, param: DTensor, own_mesh: DeviceMesh, everybody: list[int]) -> None:
    inner, placements = param.device_mesh, param.placements
    names, others = own_mesh.mesh_dim_names, inner.mesh_dim_names
    if names is None or others is None or set(names) & set(others):
        raise UsageError(
            f"parameter {name!r} is a DTensor on {inner}, and meshes names {own_mesh} for it; pass slices of one mesh with named "
            "axes and no axis in common, such as mesh['ep'] to distribute_tensor and mesh['edp'] here."
        )
    if not all(type(p) is Shard for p in placements):
        raise UsageError(
            f"parameter {name!r} has the placements {placements} on {inner}, whose ranks do not sum its gradients; with a mesh "
            "of its own it must be Shard(dim) on every axis of that mesh."
        )
    if sorted(_torch.ranks_of(_torch.joined_mesh(own_mesh, inner))) != everybody:
        raise UsageError(
            f"parameter {name!r} is a DTensor on {inner}, and meshes names {own_mesh} for it, but together they are not the "
            f"ranks {everybody} of the model; pass slices of one mesh of all these ranks."
        )


def mesh_settings(own_meshes: Sequence[DeviceMesh | None], owned: Sequence[Owned]) -> dict[str, str]:
    """Return setting -> value for ranks to compare: shape and axis names of each parameter's own mesh, but not its ranks."""
    return {
        f"mesh of parameter {o.names[0]!r}": f"{tuple(mesh.shape)}, named {mesh.mesh_dim_names}"
        for o, mesh in zip(owned, own_meshes, strict=True)
        if mesh is not None
    }


def _shown(key: type[nn.Module] | str) -> str:
    return key.__name__ if isinstance(key, type) else repr(key)
