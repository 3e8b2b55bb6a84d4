"""Shard the parameters of one `fully_shard` call: choose placements, check what can be combined, and keep this rank's rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from accordion import _torch
from accordion.compat.fsdp2.arguments import PlacementRule, placed_by
from accordion.compat.fsdp2.lazy import Part, parts_below
from accordion.engine.layout import Cut
from accordion.errors import UsageError
from accordion.shard.layouts import Layout, layout_of, local_part
from accordion.shard.replaced_parameters import replace, replace_by_subclass
from accordion.shard.subclasses import check_tensor, extended_rows
from accordion.shard.topology import device_of
from accordion.units import Owned, owned_parameters


def cut_parameters(part: Part, rule: PlacementRule | None) -> None:
    """Shard the parameters of `part`, one `fully_shard` call, in place, and move its buffers to the device. Parameters on the
    meta device stay there. Modules of inner calls and of torch's `replicate` are left out. `rule`: the argument
    `shard_placement_fn`. Raises `UsageError` if a parameter cannot be sharded; then none is, and modules lose `part`."""
    modules = part.alive()
    root = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    others = [top for p in parts_below(modules) if p is not part for top in p.alive()]
    others += [m for m in root.modules() if "replicate" in _torch.composed_with(m)]
    below = {id(m) for top in others for m in top.modules()}
    device = device_of(part.arguments.mesh)
    stored_on = torch.device("cpu") if part.arguments.sharding.offload.offloads else device
    with torch.no_grad(), torch.inference_mode(False):
        try:
            owned = list(_uncut(part, root, below))
            layouts = [_layout(part, o, rule) for o in owned]
        except BaseException:
            part.withdraw()
            raise
        for o, layout in zip(owned, layouts, strict=True):
            tensor, c = local_part(o.original), layout.cut
            place = tensor.device if tensor.is_meta else stored_on
            if not _torch.is_plain(tensor):
                extended = extended_rows(tensor, c, layout.rank, place)
                replace_by_subclass(o, extended, layout.mesh, layout.placements)
            else:
                if c.dim is not None:
                    tensor = tensor.narrow(c.dim, min(layout.rank * c.chunk, c.rows), c.rows_of(layout.rank))
                local = tensor.to(place, copy=True, memory_format=torch.contiguous_format)
                replace(o, local, layout.mesh, layout.placements)
            part.layouts.update({(id(ref()), attr): layout for ref, attr in o.places})
        for module in root.modules():
            if id(module) not in below:
                for key, buffer in module._buffers.items():
                    if buffer is not None and not buffer.is_meta:
                        module._buffers[key] = buffer.to(device)


def _uncut(part: Part, root: nn.Module, below: set[int]) -> Iterator[Owned]:
    """Yield the parameters in `root` that `part`, a `fully_shard` call, is to shard: all except ignored ones and those of
    modules with ids in `below` (of inner calls or `replicate`). Raises `UsageError` if one is tied to one of another call."""
    for o in owned_parameters(root, {}):
        places = [(ref, attr) for ref, attr in o.places if id(ref()) not in below]
        if not places or o.original in part.arguments.ignored:
            continue
        if len(places) < len(o.places) or "moved_to" in vars(o.original):
            raise UsageError(
                f"parameter {o.names[0]!r} is tied to one that another call of fully_shard has sharded. Shard both modules in "
                "one call, fully_shard([a, b]), or leave both to the call of a module that contains them."
            )
        yield o


def _layout(part: Part, o: Owned, rule: PlacementRule | None) -> Layout:
    """Return the `Layout` (placements and rows) of the parameter `o`, on the dim and mesh that `rule` chooses. Raises
    `UsageError` for a kind of tensor that cannot be sharded. A DTensor is accepted only if its mesh and the chosen one have
    named axes, and no name in common; otherwise raises `UsageError` too."""
    name = o.names[0]
    param: Any = o.original
    tensor, (dim, mesh) = local_part(param), placed_by(rule, part.arguments.mesh, param)
    check_tensor(name, tensor, offloads=part.arguments.sharding.offload.offloads)
    if isinstance(param, DTensor):
        inner, names, outer = param.device_mesh, param.device_mesh.mesh_dim_names, mesh.mesh_dim_names
        if inner == mesh or (names is not None and outer is not None and set(names) & set(outer)):
            raise UsageError(
                f"parameter {name!r} is sharded on the mesh {inner} already, by a call on an outer module. Shard inner modules "
                "first, then outer ones. If tensor or expert parallelism sharded it, use other axes for that."
            )
        if names is None or outer is None:
            raise UsageError(
                f"parameter {name!r} is a DTensor on the mesh {inner}. To combine this with other parallelism, use slices of one "
                "mesh with named axes: mesh['tp'] for parallelize_module, and mesh['dp'] here."
            )
    c = Cut(tuple(tensor.shape), dim, mesh.size(mesh.ndim - 1))
    placements: list[Placement] = [Replicate() if c.dim is None else Shard(c.dim)]
    return layout_of(param, c, mesh, [Replicate(), *placements] if mesh.ndim == 2 else placements)
