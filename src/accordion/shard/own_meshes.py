"""Choose and check meshes of some of the model's ranks for parameters such as experts, if other ranks have other experts."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from accordion import _torch
from accordion.config import Place, Strategy
from accordion.errors import UsageError
from accordion.shard.layouts import local_part
from accordion.sharding import MeshChoice
from accordion.units import Owned


def check_choice(meshes: MeshChoice | None, strategy: Strategy, *, sync: bool) -> None:
    """Raise `UsageError` if there are `meshes`, and `sync` is True or the strategy divides rows over replicas too."""
    if meshes and (sync or strategy.optim_over_replicas):
        cuts_twice = f"{strategy.name}, which cuts rows twice"
        what = "sync=True: the first rank lacks other ranks' parts" if sync else cuts_twice
        raise UsageError(
            f"meshes cannot be combined with {what}; use HYBRID_SHARD or FULL_SHARD, and build the model with its values on "
            "every rank, or load it after shard()."
        )


def own_meshes(
    model: nn.Module, owned: Sequence[Owned], meshes: MeshChoice, mesh: DeviceMesh, strategy: Strategy
) -> list[DeviceMesh | None]:
    """Return for each of `owned` the mesh in `meshes` whose key matches the parameter, the last one if several do; None for a
    parameter on the model's `mesh`. Raises `UsageError` for a key that matches no parameter, for a mesh with ranks outside of
    `mesh`, without this rank or with too many axes, and for a parameter that cannot be sharded over its mesh."""
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
    """Return True if `key` matches a name of the parameter `o`, or the name or class of a module in `model` that contains `o`;
    the class of `model` itself matches nothing."""
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
    all_replicate = strategy.optim is Place.REPLICATE
    most, wanted = (1, "one axis") if all_replicate else (2, "one axis, or two that replicate and shard")
    is_inside = asked.device_type == mesh.device_type and {*_torch.ranks_of(asked)} <= {*_torch.ranks_of(mesh)}
    if asked.ndim > most or not is_inside or asked.get_coordinate() is None:
        raise UsageError(
            f"meshes[{_shown(key)}] is {asked} with axes {asked.mesh_dim_names}, and the model's mesh is {mesh}; "
            f"{strategy.name} takes a slice of the model's mesh that includes this rank, of {wanted}."
        )


def _check_parameter(o: Owned, own_mesh: DeviceMesh | None, mesh: DeviceMesh) -> None:
    """Raise `UsageError` if `o` cannot be sharded over `own_mesh` (None: over the model's `mesh`). On the model's mesh, DTensors
    are refused. On a mesh of its own, a plain tensor needs all ranks of `mesh`, a DTensor must be `Shard` over a second mesh that
    adds the missing ranks, and other subclasses are refused."""
    # If ranks were missing, the full value would be unknown, and each of several replicas would sum only some of its gradients.
    param, problem = o.original, None
    everybody = sorted(_torch.ranks_of(mesh))
    if own_mesh is None:
        if isinstance(param, DTensor):
            problem = "a DTensor already; shard() takes DTensors only with a mesh of their own in meshes="
    elif not _torch.is_plain(local_part(param)):
        problem = (
            f"a {type(local_part(param)).__name__}, a tensor subclass, and only plain tensors have a mesh of their own"
        )
    elif isinstance(param, DTensor):
        if not _complete(param, own_mesh, everybody):
            problem = (
                f"a DTensor with {param.placements} on {param.device_mesh}, and meshes names {own_mesh} for it; it must be "
                "Shard(dim) on every axis of one slice of a mesh with named axes, and meshes must name another slice, which "
                "completes the ranks of the model: distribute_tensor(param, mesh['ep'], [Shard(0)]) and mesh['edp']"
            )
    elif sorted(_torch.ranks_of(own_mesh)) != everybody:
        problem = (
            f"a plain tensor on the mesh {own_mesh} of its own, so its values on other ranks are unknown; make it a DTensor over "
            "these ranks first, with distribute_tensor(param, mesh['ep'], [Shard(0)])"
        )
    if problem is not None:
        raise UsageError(f"parameter {o.names[0]!r} is {problem}.")


def _complete(param: DTensor, own_mesh: DeviceMesh, everybody: list[int]) -> bool:
    """Return True if `param` is sharded on every axis of its mesh, and its mesh and `own_mesh` have named axes, none of them in
    common, are slices of one mesh, and together span exactly the ranks `everybody`."""
    inner = param.device_mesh
    names, others = own_mesh.mesh_dim_names, inner.mesh_dim_names
    if (
        names is None
        or others is None
        or set(names) & set(others)
        or not all(type(p) is Shard for p in param.placements)
    ):
        return False
    try:
        joined = _torch.joined_mesh(own_mesh, inner)
    except RuntimeError:  # the meshes overlap, or are slices of different meshes
        return False
    return sorted(_torch.ranks_of(joined)) == everybody


def mesh_settings(own_meshes: Sequence[DeviceMesh | None], owned: Sequence[Owned]) -> dict[str, str]:
    """Return name -> text for ranks to compare: shape and axis names of each parameter's own mesh, but not the mesh's ranks."""
    return {
        f"mesh of parameter {o.names[0]!r}": f"{tuple(mesh.shape)}, named {mesh.mesh_dim_names}"
        for o, mesh in zip(owned, own_meshes, strict=True)
        if mesh is not None
    }


def _shown(key: type[nn.Module] | str) -> str:
    return key.__name__ if isinstance(key, type) else repr(key)
