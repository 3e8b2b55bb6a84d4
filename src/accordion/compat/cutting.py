"""Cutting the parameters of one call at once: rows on this rank, placements, and what is refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from accordion import _torch
from accordion.compat.lazy import PART, Part, parts_below, placements_of
from accordion.engine.layout import Cut
from accordion.errors import UsageError
from accordion.shard import device_of, replace
from accordion.units import Owned, owned_parameters

CutRule = Callable[[nn.Parameter], int | None]
"""Which dim of a parameter is cut; None: kept whole."""


def cut_parameters(part: Part, cut_dim: CutRule) -> None:
    """Replace what `part`'s modules own, and no part below them does, by sharded parameters; those on the meta device too.

    Either all of them, or none where one is refused: then the part is withdrawn.
    """
    modules = part.alive()
    root = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    below = {id(m) for p in parts_below(modules) if p is not part for top in p.alive() for m in top.modules()}
    device, num_ranks = device_of(part.mesh), part.mesh.size(part.mesh.ndim - 1)
    with torch.no_grad(), torch.inference_mode(False):
        try:
            owned = list(_uncut(part, root, below))
            cuts = [Cut(tuple(local_part(o.original).shape), cut_dim(o.original), num_ranks) for o in owned]
        except BaseException:
            part.withdraw()
            raise
        for o, c in zip(owned, cuts, strict=True):
            rows = rows_of(local_part(o.original), c, part.mesh.get_local_rank(part.mesh.ndim - 1))
            place = rows.device if rows.is_meta else device
            local = rows.to(place, copy=True, memory_format=torch.contiguous_format)
            replace(o, local, *_layout(o.original, c, part.mesh))
            vars(o.original)[PART] = weakref.ref(part)
        for module in root.modules():
            if id(module) not in below:
                for key, buffer in module._buffers.items():
                    if buffer is not None and not buffer.is_meta:
                        module._buffers[key] = buffer.to(device)


def _uncut(part: Part, root: nn.Module, below: set[int]) -> Iterator[Owned]:
    """The parameters of a part that are ordinary ones yet; one tied to what another part has cut becomes that one here."""
    for o in owned_parameters(root, {}):
        num_places = len(o.places)
        o.places = [(ref, attr) for ref, attr in o.places if id(ref()) not in below]
        if not o.places or o.original in part.ignored:
            continue
        part.places.update((id(ref()), attr) for ref, attr in o.places)
        moved_to = vars(o.original).get("moved_to")
        if moved_to is not None:
            part.borrowed.append((o.names[0], vars(o.original)[PART]))
            for ref, attr in o.places:
                module = ref()
                assert module is not None, "a module lives while its parameters are cut"
                module._parameters[attr] = moved_to
        elif isinstance(o.original, DTensor):
            if len(o.places) < num_places:  # the cut one itself, tied after its own module was sharded
                continue
            _check_parallel(o, part)
            yield o
        elif type(o.original.data) is torch.Tensor:
            yield o
        else:
            raise UsageError(
                f"parameter {o.names[0]!r} is a {type(o.original.data).__name__}, a tensor subclass, of which rows cannot be cut "
                "yet; pass it in ignored_params, or make it an ordinary tensor."
            )


def local_part(param: nn.Parameter) -> Tensor:
    """What data parallelism cuts: the parameter, or this rank's part of it under tensor parallelism."""
    return _torch.local_of(param).detach() if isinstance(param, DTensor) else param.detach()


def _layout(param: nn.Parameter, c: Cut, mesh: DeviceMesh) -> tuple[DeviceMesh, list[Placement]]:
    """Mesh and placements of the sharded parameter; data parallelism cuts what tensor parallelism left, so rows are strided."""
    own = placements_of(c, mesh)
    if not isinstance(param, DTensor):
        return mesh, own
    inner = param.placements[0]
    if isinstance(inner, Shard) and inner.dim == c.dim and param.device_mesh.size() > 1:
        own[-1] = _torch.StridedShard(c.dim, split_factor=param.device_mesh.size())
    return _torch.joined_mesh(mesh, param.device_mesh), [*own, inner]


def _check_parallel(o: Owned, part: Part) -> None:
    """A DTensor must be one of tensor parallelism: on one axis beside those of the part, all of one mesh."""
    param: Any = o.original
    mesh, names = param.device_mesh, param.device_mesh.mesh_dim_names
    if mesh == part.mesh or mesh.ndim > part.mesh.ndim:
        raise UsageError(
            f"parameter {o.names[0]!r} is sharded on the mesh {mesh} already, by a call on a module around this one; shard the "
            "inner modules first, then those around them."
        )
    if mesh.ndim != 1 or names is None or part.mesh.mesh_dim_names is None:
        raise UsageError(
            f"parameter {o.names[0]!r} is a DTensor on the mesh {mesh}; tensor parallelism is composed on one axis: slices "
            "of one mesh with named axes, mesh['tp'] for parallelize_module and mesh['dp'] here."
        )
    if not isinstance(param.placements[0], (Shard, Replicate)):
        raise UsageError(
            f"parameter {o.names[0]!r} is a DTensor placed as {param.placements}; Shard and Replicate are composed."
        )


def rows_of(full: Tensor, c: Cut, rank: int) -> Tensor:
    """The rows of one rank, a view."""
    if c.dim is None:
        return full
    return full.narrow(c.dim, min(rank * c.chunk, c.rows), c.rows_of(rank))
