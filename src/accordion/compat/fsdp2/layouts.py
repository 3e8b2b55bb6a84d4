"""How one parameter lies after a call has cut it: what it may lie beside, and a mesh of all axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from accordion import _torch
from accordion.engine.layout import Cut
from accordion.errors import UsageError
from accordion.shard.layouts import Layout, TensorParallelView, cut_on, layout_of
from accordion.shard.topology import device_of


@dataclass(frozen=True, slots=True, eq=False)
class Spmd:
    """A mesh of all axes on which parameters are DTensors already; `shard`, `replicate`: those that are data-parallel."""

    mesh: DeviceMesh
    shard: tuple[str, ...]
    replicate: tuple[str, ...]

    def data_parallel(self) -> DeviceMesh:
        """The axes over which this library shards and sums, several of a kind as one."""
        meshes = [
            self.mesh[names[0]] if len(names) == 1 else _torch.flattened_mesh(self.mesh[names], "_".join(names))
            for names in (self.replicate, self.shard)
            if names
        ]
        return meshes[0] if len(meshes) == 1 else _torch.joined_mesh(*meshes)

    def axes(self, names: Sequence[str]) -> list[int]:
        all_names = self.mesh.mesh_dim_names
        assert all_names is not None, "checked when it was made"
        return [all_names.index(name) for name in names]


def layout_beside(name: str, param: Any, c: Cut, mesh: DeviceMesh, spmd: Spmd | None) -> Layout:
    """Where the sharded parameter lies. Raises `UsageError` where it is a DTensor that cannot be composed with `mesh`."""
    if spmd is not None:
        return _on_all_axes(name, param, c, mesh, spmd)
    if isinstance(param, DTensor):
        _check_beside(name, param, mesh)
    own: list[Placement] = [Replicate() if c.dim is None else Shard(c.dim)]
    return layout_of(param, c, mesh, [Replicate(), *own] if mesh.ndim == 2 else own)


def _on_all_axes(name: str, param: Any, c: Cut, mesh: DeviceMesh, spmd: Spmd) -> Layout:
    rank = mesh.get_local_rank(mesh.ndim - 1)
    if not isinstance(param, DTensor) or param.device_mesh != spmd.mesh:
        found = f"a DTensor on {param.device_mesh}" if isinstance(param, DTensor) else "a plain tensor"
        raise UsageError(
            f"parameter {name!r} is {found}, and dp_mesh_dims was given with the mesh {spmd.mesh}; make every parameter a "
            "DTensor on that mesh first, with distribute_module, or leave dp_mesh_dims out."
        )
    dp = spmd.axes([*spmd.replicate, *spmd.shard])
    if any(not isinstance(param.placements[i], Replicate) for i in dp):
        raise UsageError(
            f"parameter {name!r} is placed {param.placements} on the axes {spmd.mesh.mesh_dim_names}; on those of dp_mesh_dims "
            "it must be Replicate()."
        )
    sharding, sizes = spmd.axes(spmd.shard), [spmd.mesh.size(i) for i in range(spmd.mesh.ndim)]
    placements = list(param.placements)
    for i in sharding:
        placements[i] = cut_on(c, param.placements[i + 1 :], sizes[i + 1 :])
    around = TensorParallelView(spmd.mesh, param.placements, param.shape, device_of(mesh), dp)
    if len(sharding) < 2:
        return Layout(spmd.mesh, tuple(placements), c, rank, mesh, around)
    # Several axes that shard are one: that of the flattened mesh, with the axis that replicates before it.
    meshes: list[DeviceMesh] = []
    spread: list[Placement] = []
    for i, axis in enumerate(spmd.mesh.mesh_dim_names or ()):
        if i == sharding[0]:
            meshes.append(mesh)
            spread += [Replicate()] * (mesh.ndim - 1) + [placements[i]]
        elif i not in dp:
            meshes.append(spmd.mesh[axis])
            spread.append(placements[i])
    return Layout(_torch.joined_mesh(*meshes), tuple(spread), c, rank, mesh, around)


def _check_beside(name: str, param: DTensor, mesh: DeviceMesh) -> None:
    """A DTensor must be one of other parallelism: on axes beside those of `mesh`, all of one mesh with names."""
    inner, names = param.device_mesh, param.device_mesh.mesh_dim_names
    outer = mesh.mesh_dim_names
    if inner == mesh or (names is not None and outer is not None and set(names) & set(outer)):
        raise UsageError(
            f"parameter {name!r} is sharded on the mesh {inner} already, by a call on a module around this one; shard the inner "
            "modules first, then those around them. Where other parallelism did it, give that axes of its own, or say "
            "dp_mesh_dims=."
        )
    if names is None or outer is None:
        raise UsageError(
            f"parameter {name!r} is a DTensor on the mesh {inner}; other parallelism is composed on slices of one mesh with "
            "named axes: mesh['tp'] for parallelize_module and mesh['dp'] here."
        )
    if not all(isinstance(p, (Shard, Replicate)) for p in param.placements):
        raise UsageError(
            f"parameter {name!r} is a DTensor placed as {param.placements}; Shard and Replicate are composed."
        )
