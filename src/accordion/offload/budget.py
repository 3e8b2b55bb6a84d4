"""Count the bytes of a model in each tier, and choose tiers so that budgets are not exceeded: arithmetic on shard sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from accordion.config import DEVICE, HOST, Offload, Precision, folder_of
from accordion.engine.layout import Cut, Message, cut, message
from accordion.errors import UsageError
from accordion.offload.arena import ALIGN_BYTES, page_aligned
from accordion.offload.host_shards import allocated_bytes, paged_bytes, some_of
from accordion.offload.step.chunks import chunk_numel
from accordion.offload.step.pipelines import NUM_BUFFERS, NUM_DEVICE_BUFFERS
from accordion.units import Owned, UnitChoice, by_unit, choose_units, gathered_dtype, owned_parameters

NUM_STATES = 2  # optimizer states of each trained element, as Adam has
# Shards on disk are gathered through host memory: while one buffer is copied to the device, the other is filled.
NUM_STAGING_BUFFERS = 2


class Shape:
    """Bytes of one group (parameters of a unit that are gathered in one dtype) on any rank. Shards are counted with padding.

    Args: `msg`: layout of the shards; `dtypes`: dtype in which the optimizer steps each; `trained`: True for parameters that
    require a gradient; `gathered`: dtype in which all shards are gathered.
    """

    def __init__(
        self, msg: Message, dtypes: Sequence[torch.dtype], trained: Sequence[bool], gathered: torch.dtype
    ) -> None:
        self.msg, self.dtypes, self.trained, self.gathered = msg, dtypes, trained, gathered
        counted = [(c.shard_numel, d.itemsize, trains) for c, d, trains in zip(msg.cuts, dtypes, trained, strict=True)]
        self.shard_bytes = sum(numel * itemsize for numel, itemsize, _ in counted)
        self.trained_bytes = sum(numel * itemsize for numel, itemsize, trains in counted if trains)
        # Of one optimizer state if each parameter begins at a page, as a step that goes chunk by chunk needs.
        least = min([gathered.itemsize, *(dtype.itemsize for dtype in dtypes)])
        self.laid_out_bytes = sum(page_aligned(n * least) // least * size for n, size, trains in counted if trains)
        # Of the shards in host memory. Those that are stepped in another dtype than gathered have a copy in the gathered dtype.
        rows, wide = [gathered] * len(dtypes), [i for i, dtype in enumerate(dtypes) if dtype != gathered]
        masters = (some_of(msg, wide), [dtypes[i] for i in wide]) if wide else None
        self.shard_buffer_bytes = allocated_bytes(msg, rows) + (allocated_bytes(*masters) if masters else 0)
        # Of the gradients: in host memory; and on disk or in the landing buffer, each from the beginning of a page on.
        self.slots_bytes = allocated_bytes(some_of(msg, range(len(msg.cuts))), dtypes)
        self.landing_bytes = paged_bytes(msg, dtypes)
        # Of the shards from the beginning of a page on: in the gathered dtype, as staged for a gather; and all that is on disk.
        self.row_bytes = paged_bytes(msg, rows)
        self.paged_bytes = self.row_bytes + (paged_bytes(*masters) if masters else 0)


Shapes = Sequence[Sequence[Shape]]  # by unit and group


@dataclass(frozen=True, slots=True)
class HostNeeds:
    """Bytes of host memory that `shard` allocates on a rank, by purpose."""

    shard_buffers: int  # for shards and gradients
    landing: int  # for the buffer through which gradients are copied
    staging_buffers: tuple[int, ...]  # for each buffer through which shards on disk are gathered

    @property
    def total(self) -> int:
        return self.shard_buffers + self.landing + sum(self.staging_buffers)


def host_needs(offloads: Sequence[Offload], shapes: Shapes) -> HostNeeds:
    """Return the host memory that `shard` allocates on each rank, by purpose. `offloads`, `shapes`: one entry per unit."""
    chosen = [(i, o, s) for i, (o, unit) in enumerate(zip(offloads, shapes, strict=True)) if o.offloads for s in unit]
    shard_buffers = 0
    landing: dict[int, int] = {}
    staged: dict[int, int] = {}
    for i, offload, s in chosen:
        shard_buffers += ALIGN_BYTES if folder_of(offload.params) else s.shard_buffer_bytes  # a tag
        shard_buffers += s.slots_bytes if offload.rest_of_grads == HOST else 0
        landing[i] = landing.get(i, 0) + s.landing_bytes
        staged[i] = staged.get(i, 0) + (s.row_bytes if folder_of(offload.params) else 0)
    staging_buffers = [
        max((b for i, b in staged.items() if i % NUM_STAGING_BUFFERS == which), default=0)
        for which in range(NUM_STAGING_BUFFERS)
    ]
    is_staged = any(staging_buffers)
    return HostNeeds(shard_buffers, max(landing.values(), default=0), tuple(staging_buffers) if is_staged else ())


def on_disk(offloads: Sequence[Offload], shapes: Shapes) -> dict[Path, int]:
    """Return folder -> bytes of one rank's file in it, for shards and gradients. `offloads`, `shapes`: one entry per unit."""
    num_bytes_in: dict[Path, int] = {}
    for offload, groups in zip(offloads, shapes, strict=True):
        for s in groups if offload.offloads else ():
            for place, num_bytes in ((offload.params, s.paged_bytes), (offload.rest_of_grads, s.landing_bytes)):
                folder = folder_of(place)
                if folder is not None:
                    num_bytes_in[folder] = num_bytes_in.get(folder, 0) + num_bytes
    return num_bytes_in


def device_bytes(offload: Offload, shapes: Sequence[Shape], num_states: int = NUM_STATES) -> int:
    """Return the bytes that one unit with the groups `shapes` takes on the device while it is not gathered: shards (or copies
    of them in the gathered dtype), gradients and `num_states` optimizer states, as far as `offload` keeps them there."""
    num_bytes = 0
    if not offload.offloads:
        num_bytes = sum(s.shard_bytes + s.trained_bytes for s in shapes)
    elif offload.params == DEVICE:  # copies in the gathered dtype stay there
        num_bytes = sum(s.msg.shard_numel * s.gathered.itemsize for s in shapes)
    return num_bytes + (num_states * state_bytes(offload, shapes) if offload.optimizer == DEVICE else 0)


def state_bytes(offload: Offload, shapes: Sequence[Shape]) -> int:
    """Return the bytes of one optimizer state (as `exp_avg`) of a unit with tiers `offload` and groups `shapes`."""
    return sum(s.laid_out_bytes if offload.streams else s.trained_bytes for s in shapes)


def within(policy: Offload, offloads: Sequence[Offload], shapes: Shapes) -> list[Offload]:
    """Return the tiers of each unit, such that one rank stays within `policy.device_bytes` and `policy.host_bytes`.

    `offloads`: the tiers of each unit. Entries that are not `policy` itself stay as they are. Entries that are `policy` move
    nearer to the device while the budgets allow it: first parameters, which are used at each gather, then gradients and states,
    which are used once a step. The first units move first, because offloaded units are stepped in the next forward, which needs
    these first. If `policy` has `host_bytes`, but neither disk nor `device_bytes`, units that do not fit on the host stay on
    the device. Raises `UsageError` if a budget is less than the bytes that cannot be elsewhere.
    """
    result = list(offloads)
    movable = [i for i, offload in enumerate(offloads) if offload is policy]
    whole = Offload(activations=policy.activations)

    def on_device() -> int:
        return sum(map(device_bytes, result, shapes))

    def on_host() -> int:
        states = [state_bytes(o, groups) for o, groups in zip(result, shapes, strict=True) if o.optimizer == HOST]
        return host_needs(result, shapes).total + NUM_STATES * sum(states)

    if policy.device_bytes is not None:
        if on_device() > policy.device_bytes:
            raise UsageError(
                f"device_bytes={policy.device_bytes} is less than the {on_device()} bytes that stay on the device "
                "of a rank between uses whatever is offloaded; raise it, pass params='host', or use more ranks."
            )
        nearer: list[Callable[[Offload], Offload]] = [partial(_without_budgets, params=DEVICE), lambda _: whole]
        _promote(result, movable, nearer, on_device, policy.device_bytes)
    if policy.host_bytes is None:
        return result
    for i in movable if policy.device_bytes is None and not policy.uses_disk else ():
        if on_host() > policy.host_bytes:
            result[i] = whole
    if on_host() > policy.host_bytes:
        raise UsageError(
            f"host_bytes={policy.host_bytes} is less than the {on_host()} bytes of a rank that must be on the "
            "host; raise it, pass optimizer='disk:/path' or device_bytes, or use more ranks."
        )
    nearer = [partial(_to_host, kind) for kind in ("params", "grads", "optimizer")]
    _promote(result, movable, nearer, on_host, policy.host_bytes)
    return result


def _to_host(kind: str, offload: Offload) -> Offload:
    """Return `offload` with its field `kind` changed from disk to host; `offload` itself if that kind is not on disk."""
    is_on_disk = folder_of(getattr(offload, kind) or HOST) is not None
    return _without_budgets(offload, **{kind: HOST}) if is_on_disk else offload


def _without_budgets(offload: Offload, **places: str) -> Offload:
    return replace(offload, **places, device_bytes=None, host_bytes=None)  # type: ignore[arg-type]


def _promote(
    result: list[Offload],
    movable: Sequence[int],
    nearer: Sequence[Callable[[Offload], Offload]],
    used: Callable[[], int],
    budget: int,
) -> None:
    """Replace entries of `result` by tiers nearer to the device, in place. Each function in `nearer` is applied to all entries
    with an index in `movable`. A change after which `used()`, in bytes, exceeds `budget` is undone."""
    for step in nearer:
        for i in movable:
            before, result[i] = result[i], step(result[i])
            if used() > budget:
                result[i] = before


def check_activations(offloads: Sequence[Offload], checkpointing: str) -> None:
    """Raise `UsageError` if a unit offloads activations, but `checkpointing` is "none", so that no unit is recomputed."""
    if checkpointing == "none" and any(offload.activations != DEVICE for offload in offloads):
        raise UsageError(
            "Offload(activations=...) takes the inputs of recomputed units off the device, and checkpoint_activations is 'none'; "
            "pass 'full', 'selective' or 'every:K' too."
        )


# -- estimates, for real, meta and fake parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one rank while no unit is gathered, without activations and the workspace of kernels.

    `device`: gradients, states and shards; of offloaded shards, the copies in the gathered dtype that stay on the device.
    `device_buffers`: buffers on the device through which a step copies offloaded state. `arena`: host memory that `shard`
    allocates, pinned for an accelerator. `host_states`, `host_buffers`: host memory that `wrap_optimizer` or the first step
    allocates. `disk`: all files. `places`: the tiers of each unit with budgets applied, the root first.
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
    """Return the bytes that `shard(model, offload=offload)` will take in each tier on one rank. Changes nothing.

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
    """Return the `Shape` of each group of the unit that owns the parameters `owned`. A group is gathered in one dtype."""
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
    """Return the `MemoryEstimate` of units with `shapes` and tiers `offloads`. Pages are rounded up: no rank takes more."""
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
    """Return the bytes of the largest chunk of group `s` in (a host buffer, a device buffer); the latter is 0 if the host
    steps. `total`: number of elements on this rank, of all groups, that are stepped chunk by chunk."""
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
