"""Parameters on a mesh of their own, of some ranks of the model's: experts, which other ranks have others of."""

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
    """What `shard` was given as `meshes`, {} for None. Raises `UsageError` for what it cannot be, whatever the model."""
    if meshes is None:
        return {}
    if not isinstance(meshes, Mapping):
        raise UsageError(
            f"meshes is a {type(meshes).__name__}; pass a mapping from classes of modules or patterns of names to meshes, "
            'as in {"*.experts": mesh["edp"]}.'
        )
    for key, mesh in meshes.items():
        if not (isinstance(key, str) or (isinstance(key, type) and issubclass(key, nn.Module))):
            raise UsageError(f"meshes has the key {key!r}; pass a class of modules, or a pattern of names as a string.")
        if not isinstance(mesh, DeviceMesh):
            raise UsageError(
                f"meshes[{_shown(key)}] is a {type(mesh).__name__}; pass a DeviceMesh, a slice of one say."
            )
    if meshes and strategy.optim_over_replicas:
        raise UsageError(
            f"meshes is given, and {strategy.name} cuts rows over two axes, which parameters on a mesh of their own need not "
            "have; take HYBRID_SHARD or FULL_SHARD."
        )
    if meshes and sync:
        raise UsageError(
            "meshes is given with sync=True, and the first rank has only its own part of what lies on a mesh of its own; build "
            "the model with the same values on every rank, or load it after shard()."
        )
    return meshes


def own_meshes(
    model: nn.Module, owned: Sequence[Owned], meshes: MeshChoice, mesh: DeviceMesh, strategy: Strategy
) -> list[DeviceMesh | None]:
    """The mesh of its own of each parameter, None where it lies over the model's `mesh`; of several that name it the last.

    Raises `UsageError` for a mesh or a parameter that does not fit, and for a key that names nothing.
    """
    chosen: list[DeviceMesh | None] = [None] * len(owned)
    for key, asked in meshes.items():
        named = [i for i, o in enumerate(owned) if _names(model, key, o)]
        if not named:
            raise UsageError(
                f"meshes names {_shown(key)}, and no module with parameters and no parameter of the model is one; pass a class "
                "of its modules, or a pattern of names as model.named_parameters() gives them."
            )
        _check_mesh(key, asked, mesh, strategy)
        for i in named:
            chosen[i] = asked if asked != mesh else None
    for o, asked_of_it in zip(owned, chosen, strict=True):
        _check_parameter(o, asked_of_it, mesh)
    return chosen


def _names(model: nn.Module, key: type[nn.Module] | str, o: Owned) -> bool:
    """Whether a key means a parameter: by one of its names, or as one of the modules around it."""
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
    which = f"meshes[{_shown(key)}]"
    one_axis = strategy.optim is Place.REPLICATE
    if asked.ndim not in (1, 2) or (asked.ndim == 2 and one_axis):
        wanted = "one" if one_axis else "one axis that shards, or two, the second of which shards"
        raise UsageError(
            f"{which} has {asked.ndim} axes, named {asked.mesh_dim_names}; {strategy.name} takes {wanted}."
        )
    if asked.device_type != mesh.device_type:
        raise UsageError(
            f"{which} is one of {asked.device_type!r} devices, and the model's of {mesh.device_type!r}; pass a slice of the "
            "model's mesh."
        )
    if asked.get_coordinate() is None:
        raise UsageError(f"{which} is {asked}, without this rank; each rank passes the one that it is in.")
    beyond = sorted(set(_torch.ranks_of(asked)) - set(_torch.ranks_of(mesh)))
    if beyond:
        raise UsageError(
            f"{which} has the ranks {beyond}, which the model's mesh has not; a mesh of its own has some of that one's."
        )


def _check_parameter(o: Owned, own: DeviceMesh | None, mesh: DeviceMesh) -> None:
    """A parameter lies on all ranks of the model, its own mesh and that of its DTensor taken together: nobody could
    tell what it is in whole otherwise, and ranks that hold the same would add up some of its gradients each."""
    name, param = o.names[0], o.original
    is_spread = isinstance(param, DTensor)
    if own is None:
        if is_spread:
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
    everybody, ranks = sorted(_torch.ranks_of(mesh)), sorted(_torch.ranks_of(own))
    if not is_spread:
        if ranks != everybody:
            raise UsageError(
                f"parameter {name!r} lies on the mesh {own} of its own and is a plain tensor: nobody could tell what the "
                f"other {len(everybody) - len(ranks)} ranks hold; make it a DTensor over these first, with distribute_tensor("
                "param, mesh['ep'], [Shard(0)])."
            )
        return
    inner: DeviceMesh = param.device_mesh  # type: ignore[attr-defined]
    names, others = own.mesh_dim_names, inner.mesh_dim_names
    if names is None or others is None or set(names) & set(others):
        raise UsageError(
            f"parameter {name!r} is a DTensor on {inner} and lies on the mesh {own} of its own; pass slices of one mesh with "
            "named axes, each axis to one of both: mesh['ep'] to distribute_tensor and mesh['edp'] here."
        )
    placements = param.placements  # type: ignore[attr-defined]
    if not all(type(p) is Shard for p in placements):
        raise UsageError(
            f"parameter {name!r} is placed {placements} on {inner}, whose ranks do not add up its gradients; a parameter on a "
            "mesh of its own is Shard(dim) on the axes beside it."
        )
    if sorted(_torch.ranks_of(_torch.joined_mesh(own, inner))) != everybody:
        raise UsageError(
            f"parameter {name!r} is a DTensor on {inner} and lies on the mesh {own} of its own, which together are not the ranks "
            f"{everybody} of the model; pass slices of one mesh of all of them."
        )


def told(own: Sequence[DeviceMesh | None], owned: Sequence[Owned]) -> dict[str, str]:
    """What ranks must agree on of these meshes; which ranks one has is another on each of them."""
    return {
        f"mesh of parameter {o.names[0]!r}": f"{tuple(mesh.shape)}, named {mesh.mesh_dim_names}"
        for o, mesh in zip(owned, own, strict=True)
        if mesh is not None
    }


def _shown(key: type[nn.Module] | str) -> str:
    return key.__name__ if isinstance(key, type) else repr(key)
