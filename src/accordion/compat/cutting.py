"""Cutting the parameters of one call at once: rows on this rank, placements, and what is refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accordion.compat.lazy import PART, Part, parts_below, placements_of
from accordion.engine.layout import Cut
from accordion.errors import UsageError
from accordion.shard import Moved, device_of, replace
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
            cuts = [Cut(tuple(o.original.shape), cut_dim(o.original), num_ranks) for o in owned]
        except BaseException:
            part.withdraw()
            raise
        for o, c in zip(owned, cuts, strict=True):
            rows = rows_of(o.original.detach(), c, part.mesh.get_local_rank(part.mesh.ndim - 1))
            place = rows.device if rows.is_meta else device
            local = rows.to(place, copy=True, memory_format=torch.contiguous_format)
            replace(o, local, part.mesh, placements_of(c, part.mesh))
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
        if isinstance(o.original, Moved):
            part.borrowed.append((o.names[0], vars(o.original)[PART]))
            for ref, attr in o.places:
                module = ref()
                assert module is not None, "a module lives while its parameters are cut"
                module._parameters[attr] = o.original.moved_to
        elif type(o.original.data) is torch.Tensor:
            yield o
        elif not isinstance(o.original, DTensor):
            raise UsageError(
                f"parameter {o.names[0]!r} is a {type(o.original.data).__name__}, a tensor subclass, of which rows cannot be cut "
                "yet; pass it in ignored_params, or make it an ordinary tensor."
            )
        elif len(o.places) == num_places:
            _refuse_sharded(o, part)


def _refuse_sharded(o: Owned, part: Part) -> None:
    mesh = o.original.device_mesh  # type: ignore[attr-defined]
    if mesh == part.mesh:
        raise UsageError(
            f"parameter {o.names[0]!r} is sharded on this mesh already, by a call on a module around this one; shard the inner "
            "modules first, then those around them."
        )
    raise UsageError(
        f"parameter {o.names[0]!r} is a DTensor on the mesh {mesh}, as tensor parallelism makes it, which is not composed with "
        "sharding yet; see docs/compat.md."
    )


def rows_of(full: Tensor, c: Cut, rank: int) -> Tensor:
    """The rows of one rank, a view."""
    if c.dim is None:
        return full
    return full.narrow(c.dim, min(rank * c.chunk, c.rows), c.rows_of(rank))
