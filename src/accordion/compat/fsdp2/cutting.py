"""Cutting the parameters of one call at once: rows on this rank, placements, and what is refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace as replace_field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from accordion import _torch
from accordion.compat.fsdp2.asked import PART, keeps_dtype
from accordion.compat.fsdp2.layouts import layout_beside
from accordion.compat.fsdp2.lazy import Part, parts_below
from accordion.engine.layout import Cut
from accordion.shard.layouts import Layout, local_part
from accordion.shard.replaced_parameters import replace, replace_by_subclass
from accordion.shard.subclasses import check_tensor, extended_rows
from accordion.shard.topology import device_of
from accordion.units import Owned, owned_parameters

CutRule = Callable[[nn.Parameter], tuple[int | None, DeviceMesh]]
"""Which dim of a parameter is cut, None if it is kept whole; and the data-parallel mesh over which it lies."""


def cut_parameters(part: Part, cut_dim: CutRule) -> None:
    """Replace what `part`'s modules own, and no part below them does, by sharded parameters; those on the meta device too.

    Either all of them, or none where one is refused: then the part is withdrawn.
    """
    modules = part.alive()
    root = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    others = [top for p in parts_below(modules) if p is not part for top in p.alive()]
    others += [m for m in root.modules() if "replicate" in _torch.composed_with(m)]
    below = {id(m) for top in others for m in top.modules()}
    device = device_of(part.asked.mesh)
    with torch.no_grad(), torch.inference_mode(False):
        try:
            owned = list(_uncut(part, root, below))
            layouts = [_layout(part, o, cut_dim) for o in owned]
        except BaseException:
            part.withdraw()
            raise
        for o, layout in zip(owned, layouts, strict=True):
            given = local_part(o.original)
            place = (
                given.device
                if given.is_meta
                else torch.device("cpu")
                if part.asked.sharding.offload.offloads
                else device
            )
            if not _torch.is_plain(given):
                own = extended_rows(given, layout.cut, layout.rank, place)
                replace_by_subclass(o, own, layout.mesh, layout.placements)
            else:
                rows = rows_of(given, layout.cut, layout.rank)
                local = rows.to(place, copy=True, memory_format=torch.contiguous_format)
                replace(o, local, layout.mesh, layout.placements)
            part.layouts.update({(id(ref()), attr): layout for ref, attr in o.places})
            vars(o.original)[PART] = weakref.ref(part), layout
        for module in root.modules():
            if id(module) not in below:
                for key, buffer in module._buffers.items():
                    if buffer is not None and not buffer.is_meta:
                        module._buffers[key] = buffer.to(device)


def _uncut(part: Part, root: nn.Module, below: set[int]) -> Iterator[Owned]:
    """The parameters of a part that are ordinary ones yet; one tied to what another part has cut becomes that one here."""
    inside = {place: layout for p in parts_below(part.alive()) for place, layout in p.layouts.items()}
    for o in owned_parameters(root, {}):
        cut = next((inside[id(ref()), attr] for ref, attr in o.places if (id(ref()), attr) in inside), None)
        o.places = [(ref, attr) for ref, attr in o.places if id(ref()) not in below]
        if not o.places or o.original in part.asked.ignored:
            continue
        moved_to = vars(o.original).get("moved_to")
        if moved_to is not None:
            lender, cut = vars(o.original)[PART]
            part.borrowed.append((o.names[0], lender))
            for ref, attr in o.places:
                module = ref()
                assert module is not None, "a module lives while its parameters are cut"
                module._parameters[attr] = moved_to
        if cut is None:
            yield o
        else:  # tied to what another part has cut
            part.layouts.update({(id(ref()), attr): cut for ref, attr in o.places})


def _layout(part: Part, o: Owned, cut_dim: CutRule) -> Layout:
    tensor, (dim, mesh) = local_part(o.original), cut_dim(o.original)
    check_tensor(o.names[0], tensor, offloads=part.asked.sharding.offload.offloads, may_follow=True)
    if part.asked.spmd is not None and not part.asked.spmd.shard:
        dim = None
    c = Cut(tuple(tensor.shape), dim, mesh.size(mesh.ndim - 1))
    layout = layout_beside(o.names[0], o.original, c, mesh, part.asked.spmd)
    return replace_field(layout, keeps_dtype=True) if keeps_dtype(o.names[0], o.original, part.asked.policy) else layout


def rows_of(full: Tensor, c: Cut, rank: int) -> Tensor:
    """The rows of one rank, a view."""
    if c.dim is None:
        return full
    return full.narrow(c.dim, min(rank * c.chunk, c.rows), c.rows_of(rank))
