"""Estimates the bytes of a model in each tier before anything is allocated, for real, meta and fake parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from accordion.config import DEVICE, HOST, Offload, Precision, folder_of
from accordion.engine.layout import Cut, cut, message
from accordion.offload.arena import page_aligned
from accordion.offload.budget import NUM_STATES, Shape, Shapes, device_bytes, host_needs, on_disk, state_bytes, within
from accordion.offload.step.chunks import chunk_numel
from accordion.offload.step.pipelines import NUM_BUFFERS, NUM_DEVICE_BUFFERS
from accordion.units import Owned, UnitChoice, by_unit, choose_units, gathered_dtype, owned_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one rank while no unit is gathered, without activations and the workspace of kernels.

    `device`: shards, or copies of offloaded ones from which units are gathered, gradients and states. `device_buffers`: buffers
    on the device through which a step copies offloaded state. `arena`: host memory that `shard` allocates, pinned for an
    accelerator. `host_states`, `host_buffers`: host memory that `wrap_optimizer` or the first step allocates. `disk`: all
    files. `places`: the tiers of each unit with budgets applied, the root first.
    """

    device: int
    device_buffers: int
    arena: int
    host_states: int
    host_buffers: int
    disk: int
    places: tuple[Offload, ...]

    @property
    def host(self) -> int:
        return self.arena + self.host_states + self.host_buffers


def estimate_memory(
    model: nn.Module,
    offload: Offload,
    num_ranks: int,
    *,
    units: UnitChoice = None,
    precision: Precision | None = None,
    num_states: int = NUM_STATES,
) -> MemoryEstimate:
    """Return the bytes that `shard(model, offload=offload)` will take in each tier on one rank; changes nothing.

    Args: `model`: not sharded, may be on the meta device; `num_ranks`: number of ranks over which optimizer states are sharded;
    `units`, `precision`: arguments of `shard`; `num_states`: optimizer states of each trained element, in the dtype of its
    shard (budgets count two). Raises `UsageError` if a budget is less than the bytes that cannot be elsewhere.
    """
    chosen = choose_units(model, units)
    owned = owned_parameters(model, {id(m): i for i, (_, m) in enumerate(chosen)})
    precisions, offloads = by_unit(chosen, precision or Precision(), "Precision"), by_unit(chosen, offload, "Offload")
    shapes = [shapes_of([o for o in owned if o.owner == i], p, num_ranks) for i, p in enumerate(precisions)]
    return estimate_of_units(shapes, within(offload, offloads, shapes), num_states)


def shapes_of(owned: Sequence[Owned], precision: Precision, num_ranks: int) -> list[Shape]:
    """Return the shape of each group of the unit that owns the parameters `owned`; a group is gathered in one dtype."""
    by_dtype: dict[torch.dtype, list[tuple[Cut, torch.dtype, bool]]] = {}
    for o in owned:
        p, gathered = o.original, gathered_dtype(o, precision)
        stepped = precision.master_dtype(p.dtype, p.requires_grad)
        by_dtype.setdefault(gathered, []).append((cut(p.shape, num_ranks, gathered.itemsize), stepped, p.requires_grad))
    shapes = []
    for gathered, members in by_dtype.items():
        cuts, dtypes, trained = zip(*members, strict=True)
        shapes.append(Shape(message(cuts, gathered.itemsize, num_flags=1), dtypes, trained, gathered))
    return shapes


def estimate_of_units(shapes: Shapes, offloads: Sequence[Offload], num_states: int = NUM_STATES) -> MemoryEstimate:
    """Return the `MemoryEstimate` for units with these `shapes` (by unit and group) and tiers `offloads`. Pages and chunks are
    rounded up: no rank takes more."""
    pairs = list(zip(offloads, shapes, strict=True))
    states = {DEVICE: 0, HOST: 0}
    files: dict[Path, int] = dict(on_disk(offloads, shapes))
    streamed = [s for offload, groups in pairs for s in groups if offload.streams]
    total = sum(c.shard_numel for s in streamed for c, trains in zip(s.msg.cuts, s.trained, strict=True) if trains)
    host_buffer = device_buffer = 0
    for offload, groups in pairs:
        folder = folder_of(offload.optimizer)
        num_bytes = num_states * state_bytes(offload, groups)
        if folder is not None:
            files[folder] = files.get(folder, 0) + num_bytes
        else:
            states[offload.optimizer] += num_bytes
        for s in groups:
            if offload.streams and s.trained_bytes:
                on_host, on_device = _buffer_bytes(s, offload, num_states, total)
                host_buffer, device_buffer = max(host_buffer, on_host), max(device_buffer, on_device)
    on_device = sum(device_bytes(offload, groups, num_states=0) for offload, groups in pairs)
    return MemoryEstimate(
        device=on_device + states[DEVICE],
        device_buffers=NUM_DEVICE_BUFFERS * device_buffer,
        arena=host_needs(offloads, shapes).total,
        host_states=states[HOST],
        host_buffers=NUM_BUFFERS * page_aligned(host_buffer),
        disk=sum(files.values()),
        places=tuple(offloads),
    )


def _buffer_bytes(s: Shape, offload: Offload, num_states: int, total: int) -> tuple[int, int]:
    """Return the bytes of the largest chunk of group `s` in a host buffer and in a device buffer (0 if stepped on the host).

    Args: `total`: number of elements on this rank that are stepped chunk by chunk.
    """
    itemsize = max(dtype.itemsize for dtype, trains in zip(s.dtypes, s.trained, strict=True) if trains)
    numel = min(chunk_numel(s.gathered.itemsize, total), s.laid_out_bytes // itemsize)
    row = s.gathered.itemsize if itemsize != s.gathered.itemsize and offload.offloads else 0
    from_disk = [
        num_states * itemsize if folder_of(offload.optimizer) else 0,
        itemsize + row if folder_of(offload.params) else 0,
        itemsize if folder_of(offload.rest_of_grads) else 0,
    ]
    to_device = (num_states + 2) * itemsize + row if offload.stepped_on == DEVICE else 0
    return sum(from_disk) * numel, to_device * numel
