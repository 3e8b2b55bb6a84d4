"""What a model takes in each tier, said before anything is allocated: of real models, on the meta device, or of fake tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from accordion.config import DEVICE, HOST, Offload, Precision, folder_of
from accordion.engine.layout import Cut, cut, message
from accordion.offload.arena import page_aligned
from accordion.offload.budget import NUM_STATES, Shape, Shapes, device_bytes, host_needs, on_disk, within
from accordion.offload.step.chunks import chunk_numel
from accordion.offload.step.pipelines import NUM_BUFFERS, NUM_DEVICE_BUFFERS
from accordion.units import Owned, UnitChoice, by_unit, choose_units, gathered_dtype, owned_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one rank between uses; full parameters, activations and what the kernels take come beside that.

    `device`: shards or rows kept of them, gradients and states there. `device_buffers`: through which a step on the device has
    the rest come. `arena`: host memory that `shard` allocates, pinned beside an accelerator. `host_states`,
    `host_buffers`: allocated by `wrap_optimizer` or the first step. `disk`: in files, all kinds. `places`: of each unit, the
    root first, budgets kept.
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
    """Say what `shard(model, offload=...)` over `num_ranks` ranks takes in each tier, budgets kept; changes nothing.

    `model`: not sharded; only names, shapes and dtypes are read. `num_ranks`: those over which the optimizer's rows are cut.
    `units`, `precision`: as of `shard`. `num_states`: of each trained element, in the dtype of its shard; budgets count two.
    Raises `UsageError` where a budget is below what must be somewhere.
    """
    chosen = choose_units(model, units)
    owned = owned_parameters(model, {id(m): i for i, (_, m) in enumerate(chosen)})
    precisions, offloads = by_unit(chosen, precision or Precision(), "Precision"), by_unit(chosen, offload, "Offload")
    shapes = [shapes_of([o for o in owned if o.owner == i], own, num_ranks) for i, own in enumerate(precisions)]
    return estimate_of_units(shapes, within(offload, offloads, shapes), num_states)


def shapes_of(owned: Sequence[Owned], precision: Precision, num_ranks: int) -> list[Shape]:
    """How the parameters of one unit lie, group by group."""
    by_dtype: dict[torch.dtype, list[tuple[Cut, torch.dtype, bool]]] = {}
    for o in owned:
        p, gathered = o.original, gathered_dtype(o, precision)
        own = precision.master_dtype(p.dtype, p.requires_grad)
        by_dtype.setdefault(gathered, []).append((cut(p.shape, num_ranks, gathered.itemsize), own, p.requires_grad))
    shapes = []
    for gathered, mine in by_dtype.items():
        cuts, dtypes, trained = zip(*mine, strict=True)
        shapes.append(Shape(message(cuts, gathered.itemsize, num_flags=1), dtypes, trained, gathered))
    return shapes


def estimate_of_units(shapes: Shapes, offloads: Sequence[Offload], num_states: int = NUM_STATES) -> MemoryEstimate:
    """`estimate_memory`, of units whose places are known. Pages and chunks are rounded up, so that no rank takes more."""
    pairs = list(zip(offloads, shapes, strict=True))
    resting = {DEVICE: 0, HOST: 0}
    files: dict[Path, int] = dict(on_disk(offloads, shapes))
    streamed = [s for offload, mine in pairs for s in mine if offload.streams]
    total = sum(c.shard_numel for s in streamed for c, trains in zip(s.msg.cuts, s.trained, strict=True) if trains)
    host_buffer = device_buffer = 0
    for offload, mine in pairs:
        folder = folder_of(offload.optimizer)
        for s in mine:
            num_bytes = num_states * s.state_bytes(offload.streams)
            if folder is not None:
                files[folder] = files.get(folder, 0) + num_bytes
            else:
                resting[offload.optimizer] += num_bytes
            if offload.streams and s.trained_bytes:
                on_host, on_device = _buffer_bytes(s, offload, num_states, total)
                host_buffer, device_buffer = max(host_buffer, on_host), max(device_buffer, on_device)
    on_device = sum(device_bytes(offload, mine, num_states=0) for offload, mine in pairs)
    return MemoryEstimate(
        device=on_device + resting[DEVICE],
        device_buffers=NUM_DEVICE_BUFFERS * device_buffer,
        arena=host_needs(offloads, shapes).total,
        host_states=resting[HOST],
        host_buffers=NUM_BUFFERS * page_aligned(host_buffer),
        disk=sum(files.values()),
        places=tuple(offloads),
    )


def _buffer_bytes(s: Shape, offload: Offload, num_states: int, total: int) -> tuple[int, int]:
    """The largest chunk of a group, in a buffer of the host and in one of the device (0 where it is not stepped there).

    `total`: elements whose step is streamed.
    """
    own = max(dtype.itemsize for dtype, trains in zip(s.dtypes, s.trained, strict=True) if trains)
    numel = min(chunk_numel(s.gathered.itemsize, total), s.laid_out_bytes // own)
    row = s.gathered.itemsize if own != s.gathered.itemsize and offload.offloads else 0
    from_disk = [
        num_states * own if folder_of(offload.optimizer) else 0,
        own + row if folder_of(offload.params) else 0,
        own if folder_of(offload.rest_of_grads) else 0,
    ]
    over = (num_states + 2) * own + row if offload.stepped_on == DEVICE else 0
    return sum(from_disk) * numel, over * numel
